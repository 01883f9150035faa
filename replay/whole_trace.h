// WholeTrace: the ops of a trace as whole tensors, whatever virtual shards computed their parts; names
// without "/shardN". Used where traces of different V, or of different frameworks, are compared.
// Columns of shards stand side by side: heads, MLP columns, vocabulary rows, in their order; of KV
// heads that several shards share one stands there; parameters are put together as Layout says.
// A value that borrows the trace. Thread-safe reads.
#ifndef RETRACE_REPLAY_WHOLE_TRACE_H_
#define RETRACE_REPLAY_WHOLE_TRACE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/recipe.h"
#include "formats/trace_file.h"

namespace retrace {

// "NAME/shard3" -> 3, and NAME; -1: it is no shard's.
int64_t TakeShard(std::string* name);

class WholeTrace {
 public:
  // The trace outlives it. Errors: kDamaged where its recipe can not be read, or parts do not make a
  // whole.
  static Result<WholeTrace> Make(const TraceFile& trace);

  struct Part {
    const TraceOp* op;
    int64_t row_first, col_first;
  };
  struct Op {
    std::string name;
    TensorType type = TensorType::kF32;
    int64_t rows = 0, cols = 0;
    std::vector<Part> parts;
    bool has_elements = false;
    double l2 = 0, max = 0;  // NaN: not known

    int64_t numel() const { return rows * cols; }
  };

  const TraceFile& trace() const { return *trace_; }
  const Recipe& recipe() const { return recipe_; }
  const std::vector<Op>& ops() const { return ops_; }  // in order of execution
  const Op* Find(std::string_view name) const;         // nullptr: none

  // Elements as FP64, row by row. Errors: those of TraceFile::Read.
  Result<std::vector<double>> Read(const Op& op) const;

 private:
  WholeTrace(const TraceFile& trace, Recipe recipe, Layout layout)
      : trace_(&trace), recipe_(std::move(recipe)), layout_(std::move(layout)) {}
  Status Place(int64_t shard, Op* op, const TraceOp& part) const;
  bool IsShownTwice(const std::string& name, int64_t shard) const;

  const TraceFile* trace_;
  Recipe recipe_;
  Layout layout_;
  std::vector<Op> ops_;
  std::map<std::string, size_t, std::less<>> index_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_WHOLE_TRACE_H_
