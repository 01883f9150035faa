// The norms and counts in an update's record, against the states themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/job.h"
#include "replay/record.h"
#include "replay/solo_comm.h"
#include "tests/places.h"
#include "tests/tensor_elements.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

Recipe Tiny(std::vector<std::string> overrides = {}) {
  overrides.push_back("data.path=" + TestData("dataset/tiny"));
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
}

TEST(UpdateNorms, AreThoseOfTheStatesToSixDigits) {
  SoloComm comm;
  const Recipe recipe = Tiny();
  const auto job = Job::Make(recipe, comm, {}).value();
  ASSERT_TRUE(job->StartFresh().ok());
  const Layout& layout = job->layout();
  for (int k = 1; k <= 3; ++k) {
    const State before = job->state().state;
    const UpdateRecord record = job->Advance().value().result.record;
    const State& after = job->state().state;
    ASSERT_TRUE(record.norms.has_value());
    for (int t = 0; t < std::ssize(layout.tensors()); ++t) {
      const std::vector<float> p = Elements(layout, before, t, Component::kParameter);
      const auto near = [&](double expected, double got, const char* what) {
        EXPECT_NEAR(expected, got, 1e-5 * expected) << what << " of " << layout.tensors()[t].name;
      };
      near(Norm(p), record.norms->p[t], "p");
      near(Norm(Difference(Elements(layout, after, t, Component::kParameter), p)),
           record.norms->change[t], "change");
      near(Norm(Elements(layout, after, t, Component::kM)), record.norms->m[t], "m");
      near(Norm(Elements(layout, after, t, Component::kV)), record.norms->v[t], "v");
    }
  }
}

// The pad token's row is zero until an update moves it; the first, at a rate of zero, does not.
TEST(UpdateNorms, CountTheZerosThatAreThere) {
  SoloComm comm;
  const Recipe recipe = Tiny({"schedule.indexing=step-minus-one", "schedule.initial=0"});
  const auto job = Job::Make(recipe, comm, {}).value();
  ASSERT_TRUE(job->StartFresh().ok());
  const UpdateRecord record = job->Advance().value().result.record;
  const Layout& layout = job->layout();
  for (const TensorNorms::Odd& odd : record.norms->odd) {
    int64_t zeros = 0;
    const Component c = odd.of == "m" ? Component::kM
                        : odd.of == "v" ? Component::kV : Component::kParameter;
    const std::vector<float> elements =
        odd.of == "g" ? Elements(layout, static_cast<int>(odd.tensor),
                                 [&](int shard) { return job->updater().gradient(shard).data(); })
                      : Elements(layout, job->state().state, static_cast<int>(odd.tensor), c);
    for (const float x : elements) zeros += x == 0;
    EXPECT_EQ(zeros, odd.zero) << odd.of << " of " << layout.tensors()[odd.tensor].name;
    EXPECT_EQ(0, odd.nan + odd.infinite);
  }
  EXPECT_FALSE(record.norms->odd.empty()) << "the embedding has a row of zeros";
}

TEST(UpdateNorms, ComeBackFromTheLedgerAndAreNotAskedOfOlderRecordings) {
  UpdateRecord record;
  record.update = 3;
  record.tensor_norms = {1, 2};
  record.norms = TensorNorms{{1, 2}, {0.5, std::nan("")}, {3, 4}, {5, INFINITY}, {}};
  record.norms->odd.push_back({1, "g", 7, 6, 5, 4});
  const UpdateRecord back = ParseRecord(RecordJson(record)).value();
  EXPECT_EQ(RecordJson(record), RecordJson(back));
  EXPECT_TRUE(record.Same(back));
  UpdateRecord older = record;
  older.norms.reset();
  EXPECT_TRUE(record.Same(older));
  EXPECT_TRUE(older.Same(record));
  UpdateRecord other = record;
  other.norms->m[1] = 4.5;
  EXPECT_FALSE(record.Same(other));
}

TEST(UpdateNorms, DamagedOnesAreNamed) {
  UpdateRecord record;
  record.tensor_norms = {1, 2};
  record.norms = TensorNorms{{1, 2}, {1, 2}, {1, 2}, {1, 2}, {{1, "g", 7, 6, 5, 4}}};
  const Json good = Json::parse(RecordJson(record));
  const auto says = [&](const std::string& field, const Json& value) {
    Json bad = good;
    if (field.empty()) bad["norms"] = value;
    else bad["norms"][field] = value;
    const Result<UpdateRecord> parsed = ParseRecord(bad.dump());
    return parsed.ok() ? "" : parsed.status().message();
  };
  ASSERT_TRUE(ParseRecord(good.dump()).ok());
  for (const char* field : {"p", "change", "m", "v", "odd"}) {
    for (const Json& value : {Json(3), Json(), Json::array({1}), Json::array({"x", 1}),
                              Json::array({1, 2, 3})}) {
      EXPECT_NE(std::string::npos, says(field, value).find(field)) << field << value;
    }
  }
  EXPECT_NE("", says("odd", Json::parse(R"([[2, "g", 1, 1, 1, 1]])"))) << "no such tensor";
  EXPECT_NE("", says("odd", Json::parse(R"([[0, "g", -1, 1, 1, 1]])")));
  EXPECT_NE("", says("", Json::array()));
}

}  // namespace
}  // namespace retrace
