#include "replay/whole_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/recipe_toml.h"

namespace retrace {
namespace {

// "layer3/k_proj.grad" behind "mb0/" -> 3, and "k_proj.grad"; -1: no layer's.
int64_t LayerOf(std::string_view name, std::string_view* op) {
  const size_t at = name.find("/layer");
  if (at == std::string_view::npos) return -1;
  int64_t layer = -1;
  const char* last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + at + 6, last, layer);
  if (error != std::errc() || end == last || *end != '/') return -1;
  *op = name.substr(end - name.data() + 1);
  return layer;
}

// "state/NAME#p", "mb0/NAME.grad", "optimizer/NAME#g" -> NAME; "": no parameter's.
std::string ParameterOf(std::string_view name) {
  const size_t slash = name.find('/');
  if (slash == std::string_view::npos) return "";
  std::string_view tensor = name.substr(slash + 1);
  if (tensor.ends_with(".grad")) tensor.remove_suffix(5);
  else if (tensor.size() > 2 && tensor[tensor.size() - 2] == '#') tensor.remove_suffix(2);
  return std::string(tensor);
}

}  // namespace

int64_t TakeShard(std::string* name) {
  const size_t at = name->rfind("/shard");
  if (at == std::string::npos) return -1;
  int64_t shard = -1;
  const char* last = name->data() + name->size();
  const auto [end, error] = std::from_chars(name->data() + at + 6, last, shard);
  if (error != std::errc() || end != last) return -1;
  name->resize(at);
  return shard;
}

Result<WholeTrace> WholeTrace::Make(const TraceFile& trace) {
  Result<Recipe> recipe = ParseRecipe(trace.header().recipe, trace.path() + ": recipe");
  if (!recipe.ok()) return DamagedError(recipe.status().message());
  RT_ASSIGN_OR_RETURN(Layout layout,
                      Layout::Make(recipe->model, recipe->topology.virtual_shards));
  WholeTrace whole(trace, std::move(recipe).value(), std::move(layout));
  for (const TraceOp& part : trace.ops()) {
    std::string name = part.name;
    const int64_t shard = TakeShard(&name);
    if (whole.IsShownTwice(name, shard)) continue;
    const auto [at, fresh] = whole.index_.emplace(name, whole.ops_.size());
    if (fresh) {
      whole.ops_.push_back({.name = name, .type = part.type, .parts = {}});
      whole.ops_.back().has_elements = true;
    }
    RT_RETURN_IF_ERROR(whole.Place(shard, &whole.ops_[at->second], part).Within(trace.path()));
  }
  for (const Op& op : whole.ops_) {
    int64_t numel = 0;
    for (const Part& part : op.parts) numel += part.op->numel();
    if (numel == op.numel()) continue;
    return DamagedError(fmt::format("{}: the parts of '{}' do not make a whole", trace.path(),
                                    op.name));
  }
  return whole;
}

const WholeTrace::Op* WholeTrace::Find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &ops_[found->second];
}

// Several shards compute the KV head that they share; the first of them counts.
bool WholeTrace::IsShownTwice(const std::string& name, int64_t shard) const {
  std::string_view op;
  const int64_t layer = LayerOf(name, &op);
  if (shard < 0 || layer < 0 || layer >= recipe_.model.layers) return false;
  if (op != "k_proj" && op != "k_rope" && op != "v_proj" && op != "v_norm") return false;
  return shard % std::max<int64_t>(1, layout_.shards() / recipe_.model.KvHeads(layer)) != 0;
}

Status WholeTrace::Place(int64_t shard, Op* op, const TraceOp& part) const {
  op->has_elements = op->has_elements && trace_->HasTensor(part.name);
  op->l2 = std::hypot(op->l2, part.l2);
  op->max = std::isnan(part.max) || part.max > op->max ? part.max : op->max;
  const int tensor = layout_.Find(ParameterOf(op->name));
  if (tensor >= 0) {
    const TensorSpec& spec = layout_.tensors()[tensor];
    op->rows = spec.rows;
    op->cols = spec.cols;
    const Piece* piece =
        shard >= 0 && shard < layout_.shards() ? layout_.FindPiece(shard, tensor) : nullptr;
    const bool fits = shard < 0 ? part.numel() == spec.numel()
                                : piece != nullptr && piece->rows() == part.rows &&
                                      piece->cols() == part.cols;
    if (!fits) return DamagedError("the shape of '" + part.name + "' is not that of its tensor");
    op->parts.push_back({&part, piece ? piece->row_first : 0, piece ? piece->col_first : 0});
    return {};
  }
  if (!op->parts.empty() && op->rows != part.rows) {
    return DamagedError("shards of '" + op->name + "' have different numbers of rows");
  }
  op->rows = part.rows;
  op->parts.push_back({&part, 0, op->cols});
  op->cols += part.cols;
  return {};
}

Result<std::vector<double>> WholeTrace::Read(const Op& op) const {
  if (op.parts.size() == 1) return trace_->Read(*op.parts[0].op);
  std::vector<double> whole(op.numel());
  for (const Part& part : op.parts) {
    RT_ASSIGN_OR_RETURN(const std::vector<double> values, trace_->Read(*part.op));
    for (int64_t row = 0; row < part.op->rows; ++row) {
      std::copy_n(values.begin() + row * part.op->cols, part.op->cols,
                  whole.begin() + (part.row_first + row) * op.cols + part.col_first);
    }
  }
  return whole;
}

}  // namespace retrace
