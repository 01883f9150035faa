#include "core/precision.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace retrace {
namespace {

std::map<std::string, std::string> Described(const PrecisionPolicy& policy) {
  const auto rows = DescribePrecision(policy);
  return {rows.begin(), rows.end()};
}

TEST(Precision, DescriptionRebuildsEveryPreset) {
  for (const std::string& name : PrecisionPresets()) {
    const PrecisionPolicy policy = PrecisionPreset(name).value();
    for (const std::string& start : PrecisionPresets()) {
      PrecisionPolicy rebuilt = PrecisionPreset(start).value();
      for (const auto& [key, format] : DescribePrecision(policy)) {
        ASSERT_TRUE(SetPrecision(key, format, &rebuilt).ok()) << key;
      }
      EXPECT_TRUE(policy == rebuilt) << name << " from " << start;
    }
  }
}

TEST(Precision, PresetsDifferFromEachOther) {
  std::set<std::map<std::string, std::string>> seen;
  for (const std::string& name : PrecisionPresets()) {
    EXPECT_TRUE(seen.insert(Described(PrecisionPreset(name).value())).second) << name;
  }
}

TEST(Precision, UniformPresetsRoundEveryPointAlike) {
  for (const std::string name : {"fp32", "fp64"}) {
    const PrecisionPolicy policy = PrecisionPreset(name).value();
    for (const auto& [key, format] : DescribePrecision(policy)) EXPECT_EQ(name, format) << key;
    EXPECT_EQ(name == "fp64", policy.AnyFp64());
  }
}

TEST(Precision, Bf16KeepsOnlyTheLossAndThePartialsWide) {
  for (const auto& [key, format] : DescribePrecision(PrecisionPreset("bf16").value())) {
    const bool wide = key == "cross_entropy" || key == "partials";
    EXPECT_EQ(wide ? "fp32" : "bf16", format) << key;
  }
}

TEST(Precision, SensitivePresetIsBf16WithTheNamedOperationsInFp32) {
  const std::set<std::string> sensitive = {"input_norm",   "qk_norm",       "v_norm",
                                           "rope",         "scores",        "softmax",
                                           "residual",     "layer_scalar",  "post_attention_norm",
                                           "pre_mlp_norm", "post_mlp_norm", "final_norm",
                                           "logits",       "softcap",       "cross_entropy",
                                           "partials"};
  for (const auto& [key, format] :
       DescribePrecision(PrecisionPreset("bf16-sensitive-fp32").value())) {
    const std::string point = key.substr(0, key.find('.'));
    EXPECT_EQ(sensitive.contains(point) ? "fp32" : "bf16", format) << key;
  }
}

TEST(Precision, SettingOneKeyChangesThatKeyAlone) {
  const PrecisionPolicy before = PrecisionPreset("bf16").value();
  for (const auto& [key, format] : DescribePrecision(before)) {
    PrecisionPolicy after = before;
    const std::string other = format == "bf16" ? "fp32" : "bf16";
    ASSERT_TRUE(SetPrecision(key, other, &after).ok());
    auto expected = Described(before);
    expected[key] = other;
    EXPECT_EQ(expected, Described(after)) << key;
  }
}

TEST(Precision, UnknownNamesAreRefusedWithTheNearest) {
  PrecisionPolicy policy = PrecisionPreset("bf16").value();
  const PrecisionPolicy before = policy;
  const auto message = [&](const char* key, const char* format) {
    const Status status = SetPrecision(key, format, &policy);
    EXPECT_EQ(StatusCode::kUsage, status.code()) << key;
    return status.message();
  };
  EXPECT_NE(std::string::npos, message("sofmax", "fp32").find("nearest is softmax"));
  EXPECT_NE(std::string::npos, message("score.grad", "fp32").find("nearest is scores.grad"));
  EXPECT_NE(std::string::npos, message("softmax", "fp23").find("nearest is fp32"));
  EXPECT_NE(std::string::npos, message("cross_entropy.grad", "fp32").find("no rounding point"));
  EXPECT_NE(std::string::npos, message("", "fp32").find("no rounding point"));
  EXPECT_TRUE(before == policy);
  const Status preset = PrecisionPreset("bf61").status();
  EXPECT_EQ(StatusCode::kUsage, preset.code());
  EXPECT_NE(std::string::npos, preset.message().find("nearest is bf16"));
}

TEST(Precision, Fp64IsAllOrNothing) {
  for (const std::string& name : PrecisionPresets()) {
    const PrecisionPolicy preset = PrecisionPreset(name).value();
    EXPECT_TRUE(CheckPrecision(preset).ok()) << name;
    for (const auto& [key, format] : DescribePrecision(preset)) {
      PrecisionPolicy mixed = preset;
      ASSERT_TRUE(SetPrecision(key, format == "fp64" ? "fp32" : "fp64", &mixed).ok());
      const Status status = CheckPrecision(mixed);
      EXPECT_EQ(StatusCode::kUsage, status.code()) << key;
      EXPECT_NE(std::string::npos, status.message().find("precision." + key)) << status.message();
    }
  }
}

}  // namespace
}  // namespace retrace
