// TraceFile: what an update computed, op by op: as digests (JSON lines) or with tensors
// (safetensors). Written by `retrace trace` and scripts/dump_hf_trace.py, read by diff.
//
// JSON lines: {"retrace_trace": HEADER}, then an op a line, in order of execution:
//   {"op": "mb0/layer3/q_proj/shard1", "shape": [24, 8], "type": "F32", "xxh3": "…", "l2": …, "max": …}
// xxh3 is clause 15's digest of the elements, row by row, NaN as 0x7fc00000 (0x7ff8000000000000);
// l2 the root of the sum of their squares, max the largest magnitude, both FP64 and no part of any
// comparison of bits; null: not finite. Safetensors: the same header and an array of such ops as
// texts "retrace_trace" and "retrace_ops" of __metadata__, and tensors under the ops' names.
// Another program's trace may leave out "xxh3", "l2", "max", and the ops as a whole.
#ifndef RETRACE_FORMATS_TRACE_FILE_H_
#define RETRACE_FORMATS_TRACE_FILE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.h"
#include "formats/safetensors.h"

namespace retrace {

struct TraceHeader {
  std::string producer;  // "retrace 0.1.0"
  std::string run;       // as it was called
  int64_t update = 0;    // which starts at RUN@(update - 1)
  std::string state;     // digest of the state that it starts at, after surgery that is dated there
  std::string recipe;    // in force: a recipe file's text
  std::string recorded;  // "identical" to the recording, "differs" from it, or "no": not recorded
  int64_t position() const { return update - 1; }
};

struct TraceOp {
  std::string name;
  TensorType type = TensorType::kF32;
  int64_t rows = 0, cols = 0;
  std::optional<Digest> digest;
  double l2 = 0, max = 0;

  int64_t numel() const { return rows * cols; }
  uint64_t size_bytes() const;
};

// Errors: kFailed where the file can not be written.
Status WriteTraceDigests(const std::string& path, const TraceHeader& header,
                         const std::vector<TraceOp>& ops);
// `tensors`: for each op its elements, or nothing where it has none in the file.
Status WriteTraceTensors(const std::string& path, const TraceHeader& header,
                         const std::vector<TraceOp>& ops,
                         std::vector<TensorSource> tensors);

class TraceFile {
 public:
  // Is this file a trace? (It may be damaged all the same.)
  static bool IsOne(const std::string& path);
  // Errors: kUsage where it can not be opened, kDamaged where it is not what it says.
  static Result<TraceFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const TraceHeader& header() const { return header_; }
  const std::vector<TraceOp>& ops() const { return ops_; }  // in order of execution
  const TraceOp* Find(std::string_view name) const;         // nullptr: none
  bool HasTensor(const std::string& name) const;
  bool has_tensors() const { return file_.has_value(); }

  // Elements as FP64, exactly. Errors: kUsage where the trace has none; kDamaged.
  Result<std::vector<double>> Read(const TraceOp& op) const;

 private:
  Status ReadLines();
  Status ReadSafetensors();
  Status AddOp(std::string_view json, const std::string& where);
  Status ParseHeader(std::string_view json);
  Status CheckDigests() const;

  std::string path_;
  TraceHeader header_;
  std::optional<int64_t> announced_;  // ops, by the header
  std::vector<TraceOp> ops_;
  std::map<std::string, size_t, std::less<>> index_;
  std::optional<SafetensorsFile> file_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_TRACE_FILE_H_
