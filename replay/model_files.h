// Model files: a state written for other programs, and a state made from theirs. Used by export and
// import.
//
// An export in Hugging Face's layout is a folder: model.safetensors (the parameters, with every
// layer_scalar), m.safetensors and v.safetensors (the moments, under the parameters' names), each
// perhaps split with an index; config.json; and recipe.toml and retrace.json, which say whose state
// it is. Bits are moved, never rounded. Functions are thread-safe.
#ifndef RETRACE_REPLAY_MODEL_FILES_H_
#define RETRACE_REPLAY_MODEL_FILES_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/recipe.h"
#include "core/state.h"
#include "core/status.h"

namespace retrace {

inline constexpr char kExportOriginName[] = "retrace.json";

struct ExportOptions {
  std::array<bool, kNumComponents> components = {true, false, false};
  uint64_t file_bytes_max = uint64_t{5} << 30;  // of one safetensors file
  std::string run;                              // RUN of RUN@k, for retrace.json
};

struct ExportReport {
  std::vector<std::string> files;
  std::vector<std::string> notices;  // for the user
  uint64_t bytes = 0;                // of tensors
};

// `state` holds all shards. Errors: kUsage where `dir` exists with something in it; kFailed.
Result<ExportReport> ExportSafetensors(const Recipe& recipe, const Layout& layout,
                                       const State& state, const std::string& dir,
                                       const ExportOptions& options);

// One file with groups /p, /m, /v of whole tensors under their names, not compressed; attributes
// recipe.toml and retrace.json. Errors: kUsage where `path` exists; kFailed.
Result<ExportReport> ExportHdf5(const Recipe& recipe, const Layout& layout, const State& state,
                                const std::string& path, const ExportOptions& options);

struct ImportSources {
  std::string parameters;         // a folder, an index or a .safetensors file
  std::string m, v;               // likewise; "": that of the folder where it has one, else zeros
  std::optional<int64_t> adam_t;  // updates in m and v, where no retrace.json tells
  bool fresh = false;             // zero moments and counters, whatever the folder has
};

struct ImportedModel {
  Recipe recipe;  // with the layer_scalar of the files
  Layout layout;
  State state;                       // position 0
  std::string origin;                // JSON object: files and digests, for the ledger
  std::vector<std::string> notices;  // for the user
};

// Counters: those of retrace.json where m and v come from that folder, else zeros but for Adam's t.
// Errors: kUsage where a tensor of the recipe's model is missing, is left over or has another
// shape, where only one of m and v is there, or nothing tells their t; kDamaged; kUnsupported for
// elements that are no FP32 numbers.
Result<ImportedModel> ImportModel(const Recipe& recipe, const ImportSources& sources);

// The imported state as RUN@0 of a new run. Errors: those of RunWriter and RankWriter.
Status RecordImported(const ImportedModel& model, const std::string& run_dir,
                      const std::string& device, const std::string& isa, int threads);

}  // namespace retrace

#endif  // RETRACE_REPLAY_MODEL_FILES_H_
