#include "replay/model_files.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/recipe_toml.h"
#include "core/version.h"
#include "formats/hdf5_image.h"
#include "formats/hf_config.h"
#include "formats/pending_file.h"
#include "formats/rank_writer.h"
#include "formats/run_dir.h"
#include "formats/safetensors.h"
#include "replay/state_diff.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kStems[kNumComponents] = {"model", "m", "v"};
constexpr char kWrapperPrefix[] = "model.language_model.";  // Gemma4ForConditionalGeneration
constexpr char kPrefix[] = "model.";
constexpr char kHeadName[] = "lm_head.weight";
constexpr char kEmbeddingName[] = "model.embed_tokens.weight";

std::string LayerScalarName(int64_t layer) { return LayerTensorName(layer, "layer_scalar"); }

// ------------------------------------------------------------------------------------------ export

// Whose state it is, and what a state has besides tensors.
std::string OriginText(const State& state, const Layout& layout, const ExportOptions& options) {
  StepIndex index;
  index.position = state.counters.position;
  index.counters = state.counters;
  index.memory = state.memory;
  Json components = Json::array();
  for (int c = 0; c < kNumComponents; ++c) {
    if (options.components[c]) components.push_back(ComponentName(static_cast<Component>(c)));
  }
  const Json json = {{"program", std::string("retrace ") + kVersion},
                     {"numerics", kNumericsId},
                     {"run", options.run},
                     {"position", state.counters.position},
                     {"state", StateDigest(layout, state).Hex()},
                     {"components", components},
                     {"index", Json::parse(StepIndexText(index))}};
  return json.dump(2) + "\n";
}

Selection OneComponent(int c) {
  Selection selection;
  selection.components = {};
  selection.components[c] = true;
  return selection;
}

Status MakeEmptyFolder(const std::string& dir) {
  std::error_code error;
  if (std::filesystem::exists(dir, error) && !std::filesystem::is_empty(dir, error)) {
    return UsageError(dir + ": there is something already; choose another name");
  }
  std::filesystem::create_directories(dir, error);
  return error ? FailedError(dir + ": " + error.message()) : Status();
}

std::vector<TensorSource> SourcesOf(const Recipe& recipe, const std::vector<NamedTensor>& tensors,
                                    bool parameters) {
  std::vector<TensorSource> sources;
  for (const NamedTensor& tensor : tensors) {
    sources.push_back(SourceOf(tensor.name, tensor.shape, tensor.view));
  }
  for (int64_t l = 0; parameters && l < recipe.model.layers; ++l) {
    const float scalar = static_cast<float>(recipe.model.layer_scalar[l]);
    sources.push_back(
        {LayerScalarName(l), TensorType::kF32, {1}, [scalar](const TensorSource::Sink& sink) {
           return sink(&scalar, 4);
         }});
  }
  return sources;
}

// ------------------------------------------------------------------------------------------ import

struct TensorNames {
  std::string prefix = kPrefix;            // of the file's names
  std::vector<std::string> other_modules;  // tensors that are no part of the text model

  std::string InFile(const std::string& name) const {
    return name.starts_with(kPrefix) ? prefix + name.substr(std::strlen(kPrefix)) : name;
  }
};

TensorNames NamesOf(const SafetensorsSet& set) {
  TensorNames names;
  for (const auto& [name, member] : set.tensors()) {
    if (name.starts_with(kWrapperPrefix)) names.prefix = kWrapperPrefix;
  }
  for (const auto& [name, member] : set.tensors()) {
    if (names.prefix == kWrapperPrefix && !name.starts_with(kWrapperPrefix) && name != kHeadName) {
      names.other_modules.push_back(name);
    }
  }
  return names;
}

std::vector<int64_t> ShapeOf(const TensorSpec& spec) {
  if (spec.vector) return {spec.cols};
  return {spec.rows, spec.cols};
}

// Every tensor of the layout is there with its shape. `where` names the set in messages.
Status CheckTensors(const Layout& layout, const SafetensorsSet& set, const TensorNames& names,
                    const std::string& where) {
  for (const TensorSpec& spec : layout.tensors()) {
    const std::string name = names.InFile(spec.name);
    const auto at = set.tensors().find(name);
    if (at == set.tensors().end()) {
      return UsageError(fmt::format("{}: the recipe's model has a tensor '{}', the files have none",
                                    where, name));
    }
    if (at->second.tensor->shape == ShapeOf(spec)) continue;
    return UsageError(fmt::format("{}: tensor '{}': the recipe's model has shape {}, the file {}",
                                  where, name, ShapeText(ShapeOf(spec)),
                                  ShapeText(at->second.tensor->shape)));
  }
  return {};
}

void PutTensor(const Layout& layout, int tensor, const std::vector<float>& whole, Component c,
               State* state) {
  const int64_t cols = layout.tensors()[tensor].cols;
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, tensor);
    if (piece == nullptr) continue;
    float* out = state->shards[s].slab(c).data() + piece->offset;
    for (int64_t row = piece->row_first; row < piece->row_last; ++row, out += piece->cols()) {
      std::copy_n(whole.data() + row * cols + piece->col_first, piece->cols(), out);
    }
  }
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Tensors of the file that are none of the layout's: layer_scalar, a head that is tied, or an
// error.
Status CheckLeftOver(const Layout& layout, const SafetensorsSet& set, const TensorNames& names,
                     const std::string& where, ImportedModel* model) {
  std::map<std::string, bool> known;
  for (const TensorSpec& spec : layout.tensors()) known[names.InFile(spec.name)] = true;
  for (const std::string& name : names.other_modules) known[name] = true;
  std::vector<double>& scalars = model->recipe.model.layer_scalar;
  for (int64_t l = 0; l < model->recipe.model.layers; ++l) {
    const std::string name = names.InFile(LayerScalarName(l));
    known[name] = true;
    if (!set.tensors().contains(name)) continue;
    RT_ASSIGN_OR_RETURN(const std::vector<float> value, set.ReadExactFloat(name));
    if (value.size() != 1) {
      return DamagedError(
          fmt::format("{}: '{}': expected one element, got {}", where, name, value.size()));
    }
    if (static_cast<float>(scalars[l]) == value[0]) continue;
    model->notices.push_back(
        fmt::format("model.layer_scalar[{}] = {}, as the files have it (the "
                    "recipe said {})",
                    l, value[0], scalars[l]));
    scalars[l] = value[0];
  }
  for (const auto& [name, member] : set.tensors()) {
    if (known.contains(name)) continue;
    if (name == kHeadName) {
      RT_ASSIGN_OR_RETURN(const std::vector<float> head, set.ReadExactFloat(name));
      RT_ASSIGN_OR_RETURN(const std::vector<float> embedding,
                          set.ReadExactFloat(names.InFile(kEmbeddingName)));
      if (SameBits(head, embedding)) continue;
      return UsageError(
          fmt::format("{}: {} is not the embedding, but the recipe ties the two: "
                      "--set model.tie_word_embeddings=false",
                      where, name));
    }
    return UsageError(fmt::format("{}: tensor '{}' is no part of the recipe's model", where, name));
  }
  return {};
}

struct Origin {
  Counters counters;
  RuleMemory memory;
};

// retrace.json of a folder that export wrote; nullopt where there is none.
Result<std::optional<Origin>> ReadOrigin(const std::string& folder, const Layout& layout) {
  const std::string path = folder + "/" + kExportOriginName;
  const FileOps ops;
  if (!ops.Exists(path)) return std::optional<Origin>();
  RT_ASSIGN_OR_RETURN(const Bytes text, ops.Read(path));
  const Json json = Json::parse(text.view(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object() || !json.contains("index")) {
    return DamagedError(path + ": expected what 'retrace export' writes, got something else");
  }
  Result<StepIndex> index = ParseStepIndex(json["index"].dump());
  if (!index.ok()) return index.status().Within(path);
  if (index->counters.adam_t.size() != layout.tensors().size()) {
    return DamagedError(fmt::format("{}: counters of {} tensors, the recipe's model has {}", path,
                                    index->counters.adam_t.size(), layout.tensors().size()));
  }
  return std::optional<Origin>(Origin{index->counters, index->memory});
}

// Digests of the tensors as they were read, for the ledger.
Json DigestsOf(const SafetensorsSet& set) {
  Json json = Json::object();
  for (const auto& file : set.files()) {
    DigestStream stream;
    for (const auto& [name, tensor] : file->tensors()) {
      stream.Update(name.data(), name.size());
      stream.Update(file->Data(tensor), tensor.size_bytes);
    }
    json[std::filesystem::path(file->path()).filename().string()] = stream.Finish().Hex();
  }
  return json;
}

class Importer {
 public:
  Importer(const ImportSources& sources, ImportedModel* model)
      : sources_(sources), model_(*model) {}

  Status Run() {
    RT_RETURN_IF_ERROR(Read(sources_.parameters, "model", Component::kParameter));
    if (!sources_.m.empty()) {
      RT_RETURN_IF_ERROR(ReadMoments(sources_.m, sources_.v));
      RT_RETURN_IF_ERROR(TakeAdamT());
    } else if (!sources_.fresh) {
      RT_RETURN_IF_ERROR(ReadOwnMoments(sources_.parameters));
    }
    model_.origin = Json{{"imported", origin_}}.dump();
    return {};
  }

 private:
  // The moments of the folder that has the parameters, if it has some.
  Status ReadOwnMoments(const std::string& folder) {
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) return {};
    const bool m = HasStem("m"), v = HasStem("v");
    if (m != v) {
      return UsageError(fmt::format("{0}: it has {1} and no {2}; expected both, or --fresh", folder,
                                    m ? "m" : "v", m ? "v" : "m"));
    }
    if (!m) return {};
    RT_RETURN_IF_ERROR(ReadMoments(folder, folder));
    RT_ASSIGN_OR_RETURN(const std::optional<Origin> origin, ReadOrigin(folder, model_.layout));
    if (!origin) return TakeAdamT();
    TakeCounters(*origin);
    return {};
  }

  Status ReadMoments(const std::string& m, const std::string& v) {
    RT_RETURN_IF_ERROR(Read(m, "m", Component::kM));
    return Read(v, "v", Component::kV);
  }

  // Moments without their t would be corrected for a bias that they no longer have.
  Status TakeAdamT() {
    if (!sources_.adam_t) {
      return UsageError(
          "expected --adam-t T, the number of updates that m and v have seen (or "
          "--fresh, to begin with zeros)");
    }
    for (int64_t& t : model_.state.counters.adam_t) t = *sources_.adam_t;
    return {};
  }

  bool HasStem(const std::string& stem) const {
    const std::string path = sources_.parameters + "/" + stem + ".safetensors";
    return FileExists(path) || FileExists(path + ".index.json");
  }

  // RUN@0 is the first position of a new run; everything else goes on as it was.
  void TakeCounters(const Origin& origin) {
    model_.state.counters = origin.counters;
    model_.state.counters.position = 0;
    model_.state.memory = origin.memory;
  }

  Status Read(const std::string& path, const std::string& stem, Component c) {
    RT_ASSIGN_OR_RETURN(const SafetensorsSet set, SafetensorsSet::Open(path, stem));
    const TensorNames names = NamesOf(set);
    RT_RETURN_IF_ERROR(CheckTensors(model_.layout, set, names, path));
    if (c == Component::kParameter) {
      RT_RETURN_IF_ERROR(CheckLeftOver(model_.layout, set, names, path, &model_));
      if (!names.other_modules.empty()) {
        model_.notices.push_back(
            fmt::format("{} tensors outside the text model are left out ({}, "
                        "...)",
                        names.other_modules.size(), names.other_modules[0]));
      }
    }
    for (size_t t = 0; t < model_.layout.tensors().size(); ++t) {
      const std::string name = names.InFile(model_.layout.tensors()[t].name);
      RT_ASSIGN_OR_RETURN(const std::vector<float> whole, set.ReadExactFloat(name));
      PutTensor(model_.layout, static_cast<int>(t), whole, c, &model_.state);
    }
    origin_[stem] = {{"path", path}, {"files", DigestsOf(set)}};
    return {};
  }

  const ImportSources& sources_;
  ImportedModel& model_;
  Json origin_ = Json::object();
};

}  // namespace

Result<ExportReport> ExportSafetensors(const Recipe& recipe, const Layout& layout,
                                       const State& state, const std::string& dir,
                                       const ExportOptions& options) {
  RT_RETURN_IF_ERROR(MakeEmptyFolder(dir));
  ExportReport report;
  for (int c = 0; c < kNumComponents; ++c) {
    if (!options.components[c]) continue;
    const std::vector<NamedTensor> tensors = StateTensors(layout, state, OneComponent(c));
    const std::vector<TensorSource> sources = SourcesOf(recipe, tensors, c == 0);
    for (const TensorSource& source : sources) report.bytes += source.size_bytes();
    RT_ASSIGN_OR_RETURN(
        const std::vector<std::string> files,
        WriteSafetensorsSet(dir, kStems[c], sources, {{"format", "pt"}}, options.file_bytes_max));
    report.files.insert(report.files.end(), files.begin(), files.end());
  }
  const Result<std::string> config = HfConfigJson(recipe);
  if (config.ok()) {
    RT_RETURN_IF_ERROR(PublishFile(dir + "/config.json", *config));
    report.files.push_back("config.json");
  } else {
    report.notices.push_back(config.status().message());
  }
  RT_RETURN_IF_ERROR(PublishFile(dir + "/" + kRecipeName, PrintRecipe(recipe)));
  RT_RETURN_IF_ERROR(
      PublishFile(dir + "/" + kExportOriginName, OriginText(state, layout, options)));
  report.files.push_back(kRecipeName);
  report.files.push_back(kExportOriginName);
  return report;
}

Result<ExportReport> ExportHdf5(const Recipe& recipe, const Layout& layout, const State& state,
                                const std::string& path, const ExportOptions& options) {
  if (FileExists(path)) return UsageError(path + ": exists already; choose another name");
  ExportReport report;
  RT_ASSIGN_OR_RETURN(Hdf5Builder builder, Hdf5Builder::Make(size_t{1} << 20));
  for (int c = 0; c < kNumComponents; ++c) {
    if (!options.components[c]) continue;
    const std::string group = std::string("/") + ComponentName(static_cast<Component>(c));
    RT_RETURN_IF_ERROR(builder.AddGroup(group));
    for (const NamedTensor& tensor : StateTensors(layout, state, OneComponent(c))) {
      const std::vector<float> values = FirstValues(tensor.view, tensor.view.numel());
      report.bytes += values.size() * sizeof(float);
      RT_RETURN_IF_ERROR(builder.AddPlainFloats(group + "/" + tensor.name, tensor.shape, values));
    }
  }
  RT_RETURN_IF_ERROR(builder.AddAttribute(kRecipeName, PrintRecipe(recipe)));
  RT_RETURN_IF_ERROR(builder.AddAttribute(kExportOriginName, OriginText(state, layout, options)));
  RT_ASSIGN_OR_RETURN(const Bytes bytes, builder.Finish());
  RT_RETURN_IF_ERROR(PublishFile(path, bytes.view()));
  report.files.push_back(path);
  return report;
}

Result<ImportedModel> ImportModel(const Recipe& recipe, const ImportSources& sources) {
  if (sources.m.empty() != sources.v.empty()) {
    return UsageError("expected both m and v, or neither");
  }
  RT_ASSIGN_OR_RETURN(Layout layout, Layout::Make(recipe.model, recipe.topology.virtual_shards));
  State state = MakeState(layout, 0, layout.shards());
  state.counters.adam_t.assign(layout.tensors().size(), 0);
  ImportedModel model{recipe, std::move(layout), std::move(state), "{}", {}};
  RT_RETURN_IF_ERROR(Importer(sources, &model).Run());
  return model;
}

// The run appears under its name when RUN@0 is in it: half a run would be taken for one to begin.
Status RecordImported(const ImportedModel& model, const std::string& run_dir,
                      const std::string& device, const std::string& isa, int threads) {
  std::error_code error;
  if (std::filesystem::exists(run_dir, error) && !std::filesystem::is_empty(run_dir, error)) {
    return UsageError(run_dir + ": there is something already; choose another name");
  }
  if (model.recipe.numerics.level != NumericsLevel::kPortable) {
    return UsageError("import: numerics.level: expected portable; a run of level native begins with "
                      "`retrace train`");
  }
  const std::string part = run_dir + ".importing";
  std::filesystem::remove_all(part, error);
  RunPlan plan;
  plan.recipe_text = PrintRecipe(model.recipe);
  plan.device = device;
  plan.isa = isa;
  {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer,
                        RunWriter::Create(part, model.layout, plan));
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<RankWriter> rank,
                        RankWriter::Open(model.layout, part, writer->attempt(), 0, threads));
    std::vector<SlabSource> slabs;
    for (int s = 0; s < model.layout.shards(); ++s) {
      for (int c = 0; c < kNumComponents; ++c) {
        slabs.push_back({{.shard = s, .kind = WholeKind(static_cast<Component>(c)), .pieces = {}},
                         model.state.shards[s].slabs[c].data()});
      }
    }
    rank->Snapshot(0, slabs);
    StepCommit commit;
    RT_ASSIGN_OR_RETURN(RankFileInfo info, rank->Wait());
    commit.files.push_back(std::move(info));
    commit.digest = StateDigest(model.layout, model.state);
    commit.counters = model.state.counters;
    commit.memory = model.state.memory;
    commit.record = model.origin;
    RT_RETURN_IF_ERROR(writer->CommitStep(commit));
    RT_RETURN_IF_ERROR(writer->Drain());
  }
  std::filesystem::rename(part, run_dir, error);
  return error ? FailedError(fmt::format("{}: {}", run_dir, error.message())) : Status();
}

}  // namespace retrace
