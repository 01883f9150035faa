// export, import and the diff of files as their user runs them; and what other programs make of the
// files.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <map>

#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "formats/safetensors.h"
#include "replay/batch_source.h"
#include "replay/record.h"
#include "tests/places.h"
#include "tests/recorded_run.h"

namespace retrace {
namespace {

class ModelFiles : public RecordedRun {};

// ---- export and import
// ---------------------------------------------------------------------------

TEST_F(ModelFiles, ExportAndImportIsTheSameStateToTheBit) {
  Export(run_ + "@3", Path("whole"), {"--with", "p,m,v"});
  Export(run_ + "@3", Path("split"), {"--with", "p,m,v", "--file-size", "1e-5"});
  EXPECT_TRUE(std::filesystem::exists(Path("split/model.safetensors.index.json")));
  for (const char* name : {"whole", "split"}) {
    const std::string out = Path(std::string("from-") + name);
    const Finished done = RunProgram({"import", Path(name), "--out", out});
    ASSERT_EQ(0, done.code) << done.err;
    const Json diff = ParseJson(RunProgram({"diff", run_ + "@3", out + "@0", "--json"}));
    EXPECT_EQ(0, diff["tensors_differing"]) << name;
    ASSERT_EQ(1u, diff["counters_and_memories"].size()) << diff.dump();
    EXPECT_EQ("position", diff["counters_and_memories"][0]["name"]);
  }
}

TEST_F(ModelFiles, AnImportedRunGoesOnAsTheOneThatWasExported) {
  Export(run_ + "@3", Path("moments"), {"--with", "p,m,v"});
  ASSERT_EQ(0, RunProgram({"import", Path("moments"), "--out", Path("on"), "--quiet"}).code);
  const Finished trained =
      RunProgram({"train", "--resume", Path("on"), "--until", "2", "--threads", "1", "--quiet"});
  ASSERT_EQ(0, trained.code) << trained.err;
  const Json diff = ParseJson(RunProgram({"diff", run_ + "@5", Path("on") + "@2", "--json"}));
  EXPECT_EQ(0, diff["tensors_differing"]);
  EXPECT_EQ(0, RunProgram({"verify", Path("on")}).code);
  EXPECT_EQ(0, RunProgram({"replay", Path("on"), "--quiet", "--threads", "1"}).code);
  const RunReader reader = RunReader::Open(Path("on")).value();
  const Json origin = Json::parse(reader.history().Find(0)->record);
  EXPECT_TRUE(origin["imported"].contains("model")) << origin.dump();
}

// The run has 10 updates of 8 samples; at RUN@3 24 of the 80 are consumed.
TEST_F(ModelFiles, AnImportedRunSaysHowFarItsSamplesLast) {
  Export(run_ + "@3", Path("far"), {"--with", "p,m,v"});
  const Finished imported = RunProgram({"import", Path("far"), "--out", Path("goes")});
  EXPECT_TRUE(Contains(imported.out, "--resume " + Path("goes") + " --until 7\n")) << imported.out;
  const std::string message =
      Refused({"train", "--resume", Path("goes"), "--threads", "1", "--quiet"}, 2);
  EXPECT_TRUE(Contains(message, "last until update 7, not 10. End there with --until 7")) << message;
  EXPECT_EQ(0, RunReader::Open(Path("goes"))->history().last_position());
  ASSERT_EQ(0, RunProgram({"train", "--resume", Path("goes"), "--until", "7", "--threads", "1",
                           "--quiet"}).code);
  std::filesystem::copy(run_, Path("all"), std::filesystem::copy_options::recursive);
  ASSERT_EQ(0, RunProgram({"train", "--resume", Path("all"), "--threads", "1", "--quiet"}).code);
  const Json diff = ParseJson(RunProgram({"diff", Path("all@10"), Path("goes@7"), "--json"}));
  EXPECT_EQ(0, diff["tensors_differing"]);
  const Finished fresh = RunProgram({"import", Path("far"), "--out", Path("first"), "--fresh"});
  EXPECT_TRUE(Contains(fresh.out, "--resume " + Path("first") + "\n")) << fresh.out;
}

TEST_F(ModelFiles, AFreshImportHasTheParametersAlone) {
  Export(run_ + "@3", Path("f"), {"--with", "p,m,v"});
  ASSERT_EQ(0, RunProgram({"import", Path("f"), "--out", Path("fresh"), "--fresh"}).code);
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@3:*#p", Path("fresh") + "@0:*#p"}).code);
  const Json m = ParseJson(RunProgram({"show", Path("fresh") + "@0:*#m", "--json"}));
  for (const Json& tensor : m["tensors"]) EXPECT_EQ(0.0, tensor["norm"]) << tensor.dump();
}

TEST_F(ModelFiles, ImportNamesWhatDoesNotFit) {
  Export(run_ + "@3", Path("fit"));
  EXPECT_TRUE(
      Contains(Refused({"export", run_ + "@3", "--out", Path("fit")}, 2), "something already"));
  EXPECT_TRUE(Contains(Refused({"export", run_ + "@30", "--out", Path("x")}, 2), "0..6"));
  EXPECT_TRUE(Contains(Refused({"export", run_, "--out", Path("x")}, 2), "RUN@k"));
  EXPECT_TRUE(Contains(Refused({"export", run_ + "@3", "--out", Path("x"), "--with", "p,w"}, 2),
                       "got 'w'"));
  EXPECT_TRUE(Contains(Refused({"import", Path("fit"), "--out", run_}, 2), "something already"));
  EXPECT_TRUE(Contains(Refused({"import", Path("none"), "--out", Path("y")}, 2),
                       "/none: there is no such file"));
  EXPECT_TRUE(Contains(
      Refused({"import", Path("fit"), "--out", Path("y"), "--set", "model.intermediate_size=128"},
              2),
      "the recipe's model has shape [32, 128], the file [32, 64]"));
  EXPECT_TRUE(Contains(
      Refused({"import", Path("fit"), "--out", Path("y"), "--set", "model.qk_norm=false"}, 2),
      "is no part of the recipe's model"));
  EXPECT_TRUE(Contains(Refused({"import", Path("fit"), "--out", Path("y"), "--set",
                                "model.tie_word_embeddings=false"},
                               2),
                       "'lm_head.weight', the files have none"));
  std::filesystem::resize_file(Path("fit/model.safetensors"), 1000);
  EXPECT_TRUE(
      Contains(Refused({"import", Path("fit"), "--out", Path("y")}, 3), "model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(Path("y")));
}

TEST_F(ModelFiles, ExportAsHdf5IsReadByAnyReader) {
  std::string why;
  if (!HasPackages(TestPython(), "h5py numpy", &why)) GTEST_SKIP() << why;
  Export(run_ + "@3", Path("three.h5"), {"--with", "p,v"});
  Export(run_ + "@3", Path("three"), {"--with", "p,v"});
  const std::string script = R"(
import h5py, json, numpy, struct, sys
def load(path):
    raw = open(path, "rb").read()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    return {k: numpy.frombuffer(raw[8 + size + v["data_offsets"][0]:8 + size + v["data_offsets"][1]],
                                "<f4").reshape(v["shape"])
            for k, v in header.items() if k != "__metadata__"}
file, count = h5py.File(sys.argv[1]), 0
assert sorted(file.keys()) == ["p", "v"], list(file.keys())
assert json.loads(file.attrs["retrace.json"])["position"] == 3
for group, stem in (("p", "model"), ("v", "v")):
    for name, tensor in load(sys.argv[2] + "/" + stem + ".safetensors").items():
        if name.endswith("layer_scalar"): continue
        data = file[group][name]
        assert data.compression is None and data.chunks is None
        assert data.shape == tensor.shape and data[...].tobytes() == tensor.tobytes(), name
        count += 1
print(count))";
  const Finished done =
      RunPython(TestPython(), {"-c", script, Path("three.h5"), Path("three")});
  ASSERT_EQ(0, done.code) << done.err;
  EXPECT_GT(std::stoi(done.out), 80);
}

TEST_F(ModelFiles, MomentsOfAnotherProgramNeedTheirAdamT) {
  Export(run_ + "@3", Path("set"), {"--with", "p,m,v"});
  const std::vector<std::string> words = {"import",   Path("set/model.safetensors"),
                                          "--recipe", Path("set/recipe.toml"),
                                          "--m",      Path("set/m.safetensors"),
                                          "--v",      Path("set/v.safetensors"),
                                          "--out",    Path("given")};
  EXPECT_TRUE(Contains(Refused(words, 2), "--adam-t"));
  std::vector<std::string> with_t = words;
  with_t.insert(with_t.end(), {"--adam-t", "3"});
  ASSERT_EQ(0, RunProgram(with_t).code);
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@3:*#v", Path("given") + "@0:*#v"}).code);
  const RunReader reader = RunReader::Open(Path("given")).value();
  EXPECT_EQ(3, reader.history().Find(0)->counters.adam_t[0]);
  std::filesystem::remove(Path("set/v.safetensors"));
  EXPECT_TRUE(Contains(Refused({"import", Path("set"), "--out", Path("z")}, 2), "has m and no v"));
}

// ---- diff of files
// -------------------------------------------------------------------------------

TEST_F(ModelFiles, AStateIsTheFilesThatWereMadeOfItAndOneBitIsSeen) {
  Export(run_ + "@3", Path("d"), {"--with", "p,m,v"});
  Export(run_ + "@3", Path("d.h5"), {"--with", "p,m,v"});
  for (const std::string& other :
       {Path("d"), Path("d/model.safetensors"), Path("d.h5"), run_ + "/steps/000000003.a0001.h5"}) {
    EXPECT_EQ(0, RunProgram({"diff", run_ + "@3", other}).code) << other;
    EXPECT_EQ(0, RunProgram({"diff", other, run_ + "@3"}).code) << other;
    EXPECT_EQ(1, RunProgram({"diff", run_ + "@4", other}).code) << other;
  }
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@3:*#m", Path("d/m.safetensors")}).code);
  EXPECT_EQ(1, RunProgram({"diff", run_ + "@3:*#v", Path("d/m.safetensors")}).code);
  for (const char* name : {"d/model.safetensors", "d.h5"}) {
    std::string text = ReadFileText(Path(name));
    text[text.size() / 2] ^= 1;  // of some element
    std::ofstream(Path(name), std::ios::binary) << text;
    const Finished done = RunProgram({"diff", run_ + "@3", Path(name), "--json"});
    EXPECT_EQ(1, done.code) << name << done.err;
  }
}

// Tensors by name, written and read again by the formats layer.
using Tensors = std::map<std::string, std::pair<std::vector<int64_t>, std::vector<float>>>;

Tensors LoadTensors(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::Open(path).value();
  Tensors tensors;
  for (const auto& [name, tensor] : file.tensors()) {
    tensors[name] = {tensor.shape, file.ReadFloat(name).value()};
  }
  return tensors;
}

void SaveTensors(const std::string& path, const Tensors& tensors) {
  std::vector<TensorSource> sources;
  for (const auto& [name, tensor] : tensors) {
    sources.push_back({name, TensorType::kF32, tensor.first,
                       [&values = tensor.second](const TensorSource::Sink& sink) {
                         return sink(values.data(), values.size() * sizeof(float));
                       }});
  }
  ASSERT_TRUE(WriteSafetensors(path, sources, {}).ok());
}

// The same parameters as Megatron has them. As the sizes of examples/tiny.toml are: even layers
// have two KV heads of 8 rows, odd ones one of 16 whose v is unused.
Tensors AsMegatron(const Tensors& hf) {
  Tensors out;
  const auto rows = [&](const std::string& name, int64_t first, int64_t count) {
    const auto& [shape, values] = hf.at(name);
    return std::vector<float>(values.begin() + first * shape[1],
                              values.begin() + (first + count) * shape[1]);
  };
  const auto add = [](std::vector<float> part, std::vector<float>* all) {
    all->insert(all->end(), part.begin(), part.end());
  };
  out["embedding.word_embeddings.weight"] = hf.at("model.embed_tokens.weight");
  out["decoder.final_layernorm.weight"] = hf.at("model.norm.weight");
  for (int layer = 0; layer < 4; ++layer) {
    const std::string from = "model.layers." + std::to_string(layer) + ".";
    const std::string to = "decoder.layers." + std::to_string(layer) + ".";
    for (const auto& [theirs, ours] :
         {std::pair("input_layernorm.weight", "input_layernorm.weight"),
          {"post_self_attn_layernorm.weight", "post_attention_layernorm.weight"},
          {"pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"},
          {"post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"},
          {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
          {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
          {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
          {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
          {"layer_scalar", "layer_scalar"}}) {
      out[to + theirs] = hf.at(from + ours);
    }
    const bool full = layer % 2 == 1;
    const int64_t dim = full ? 16 : 8, kv_heads = full ? 1 : 2, queries = 8 / kv_heads * dim;
    std::vector<float> qkv;
    for (int64_t head = 0; head < kv_heads; ++head) {
      add(rows(from + "self_attn.q_proj.weight", head * queries, queries), &qkv);
      add(rows(from + "self_attn.k_proj.weight", head * dim, dim), &qkv);
      add(full ? std::vector<float>(dim * 32, 7.0f)
               : rows(from + "self_attn.v_proj.weight", head * dim, dim),
          &qkv);
    }
    const int64_t qkv_rows = std::ssize(qkv) / 32;
    out[to + "self_attention.linear_qkv.weight"] = {{qkv_rows, 32}, qkv};
    std::vector<float> fc1 = rows(from + "mlp.gate_proj.weight", 0, 64);
    add(rows(from + "mlp.up_proj.weight", 0, 64), &fc1);
    out[to + "mlp.linear_fc1.weight"] = {{128, 32}, fc1};
  }
  return out;
}

TEST_F(ModelFiles, MegatronsNamesAndFusedTensorsAreComparedOneByOne) {
  Export(run_ + "@3", Path("hf3"));
  Tensors megatron = AsMegatron(LoadTensors(Path("hf3/model.safetensors")));
  SaveTensors(Path("megatron.safetensors"), megatron);
  const Finished same = RunProgram({"diff", run_ + "@3", Path("megatron.safetensors")});
  EXPECT_EQ(0, same.code) << same.out << same.err;
  // Row 5 of KV head 1's k in layer 2: behind two query groups of 32 and one k and v of 8.
  float& x =
      megatron["decoder.layers.2.self_attention.linear_qkv.weight"].second[(48 + 32 + 5) * 32 + 3];
  x = std::nextafter(x, 9.0f);
  SaveTensors(Path("megatron.safetensors"), megatron);
  const Json json =
      ParseJson(RunProgram({"diff", run_ + "@3", Path("megatron.safetensors"), "--json"}));
  ASSERT_EQ(1, json["tensors_differing"]);
  EXPECT_EQ("model.layers.2.self_attn.k_proj.weight", json["tensors"][0]["name"]);
  EXPECT_EQ((8 + 5) * 32 + 3, json["tensors"][0]["first"]["index"]);
  EXPECT_EQ(1, json["tensors"][0]["max_ulp"]);
  megatron["decoder.layers.2.mlp.linear_fc1.weight"] = {{127, 32}, std::vector<float>(127 * 32)};
  SaveTensors(Path("megatron.safetensors"), megatron);
  EXPECT_TRUE(
      Contains(Refused({"diff", run_ + "@3", Path("megatron.safetensors")}, 3), "127 rows"));
}

TEST_F(ModelFiles, AMultimodalModelsTextPartIsComparedAndImported) {
  Export(run_ + "@3", Path("text"));
  Tensors wrapped;
  for (auto& [name, tensor] : LoadTensors(Path("text/model.safetensors"))) {
    wrapped["model.language_model." + name.substr(6)] = tensor;
  }
  SaveTensors(Path("wrapped.safetensors"), wrapped);
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@3", Path("wrapped.safetensors")}).code);
  wrapped["model.vision_tower.patch.weight"] = {{2}, {1, 2}};
  SaveTensors(Path("wrapped.safetensors"), wrapped);
  const Finished done = RunProgram({"import", Path("wrapped.safetensors"), "--recipe",
                                    Path("text/recipe.toml"), "--out", Path("unwrapped")});
  ASSERT_EQ(0, done.code) << done.err;
  EXPECT_TRUE(Contains(done.err, "vision_tower")) << done.err;
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@3:*#p", Path("unwrapped") + "@0:*#p"}).code);
}

TEST_F(ModelFiles, ADamagedHdf5FileIsRefusedNotCrashedOn) {
  Export(run_ + "@3", Path("whole.h5"));
  const std::string whole = ReadFileText(Path("whole.h5"));
  const auto code = [&](const std::string& text) {
    std::ofstream(Path("damaged.h5"), std::ios::binary) << text;
    const Finished done = RunProgram({"diff", run_ + "@3", Path("damaged.h5"), "--quiet"});
    EXPECT_EQ(0, done.signal);
    return done.code;
  };
  for (size_t size : {size_t{0}, size_t{7}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_EQ(3, code(whole.substr(0, size))) << size;
  }
  for (size_t at = 0; at < 4000; at += 131) {  // where the structure is
    std::string text = whole;
    text[at] ^= 0x5a;
    const int answer = code(text);
    EXPECT_TRUE(answer == 0 || answer == 1 || answer == 2 || answer == 3) << at << ": " << answer;
  }
}

// ---- transformers
// --------------------------------------------------------------------------------

class Transformers : public ModelFiles {
 protected:
  void SetUp() override {
    std::string why;
    if (!HasPackages(PeerPython(), "torch safetensors transformers", &why)) {
      GTEST_SKIP() << why;
    }
    if (!std::filesystem::exists(Path("hf"))) {
      Export(run_ + "@4", Path("hf"), {"--file-size", "1e-5"});
    }
  }
};

TEST_F(Transformers, AnExportedModelHasTheSameLossAndComesBackUnchanged) {
  const RunReader reader = RunReader::Open(run_).value();
  const UpdateRecord record = *ParseRecord(reader.history().Find(5)->record);
  const Recipe recipe = LoadRecipe(run_ + "/recipe.toml").value();
  const TokenBatch batch = ReadBatch(*OpenBatchSource(recipe).value(), false, record.first_sample,
                                     record.samples, recipe.data.sequence_length)
                               .value();
  const auto source = [&](const char* name, const std::vector<int32_t>& tokens) {
    return TensorSource{name,
                        TensorType::kI32,
                        {record.samples, recipe.data.sequence_length},
                        [&tokens](const TensorSource::Sink& sink) {
                          return sink(tokens.data(), tokens.size() * sizeof(int32_t));
                        }};
  };
  ASSERT_TRUE(WriteSafetensors(Path("batch.safetensors"),
                               {source("ids", batch.ids), source("labels", batch.labels)}, {})
                  .ok());
  const std::string script = R"(
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="eager")
assert model.dtype == torch.float32, model.dtype
batch = {name: x.long() for name, x in load_file(sys.argv[2]).items()}
with torch.no_grad():
    logits = model(input_ids=batch["ids"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(),
                                               reduction="none")
model.save_pretrained(sys.argv[3], max_shard_size="20KB")
print(losses.double().mean().item()))";
  const Finished done = RunPython(
      PeerPython(), {"-c", script, Path("hf"), Path("batch.safetensors"), Path("saved")});
  ASSERT_EQ(0, done.code) << done.err;
  // Both are means of FP32 losses near 6, each of a few dozen roundings of 2^-24 that mostly
  // cancel.
  EXPECT_NEAR(record.loss, std::stod(done.out), 32 * 0x1p-24 * record.loss);

  EXPECT_TRUE(std::filesystem::exists(Path("saved/model.safetensors.index.json")));
  const Finished imported = RunProgram(
      {"import", Path("saved"), "--recipe", Path("hf/recipe.toml"), "--out", Path("back")});
  ASSERT_EQ(0, imported.code) << imported.err;
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@4:*#p", Path("back") + "@0:*#p"}).code);
}

}  // namespace
}  // namespace retrace
