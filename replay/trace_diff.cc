#include "replay/trace_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>

#include "replay/rounding_bound.h"
#include "replay/whole_trace.h"

namespace retrace {
namespace {

// A worse distance from the truth than this many times the other's is no luck.
constexpr double kHeadroom = 4;

// An op of a trace, as it stands there or put together.
struct Item {
  std::string name;
  int64_t rows = 0, cols = 0;
  TensorType type = TensorType::kF32;
  std::optional<Digest> digest;
  bool has_elements = false;
  const TraceOp* op = nullptr;
  const WholeTrace::Op* whole = nullptr;
};

class Items {
 public:
  explicit Items(const TraceFile& trace) : trace_(&trace) {
    for (const TraceOp& op : trace.ops()) {
      Add({op.name, op.rows, op.cols, op.type, op.digest, trace.HasTensor(op.name), &op, nullptr});
    }
  }
  explicit Items(const WholeTrace& whole) : trace_(&whole.trace()), whole_(&whole) {
    for (const WholeTrace::Op& op : whole.ops()) {
      Add({op.name, op.rows, op.cols, op.type, {}, op.has_elements, nullptr, &op});
    }
  }
  const std::vector<Item>& all() const { return all_; }
  const Item* Find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &all_[found->second];
  }
  Result<std::vector<double>> Read(const Item& item) const {
    return item.whole != nullptr ? whole_->Read(*item.whole) : trace_->Read(*item.op);
  }

 private:
  void Add(Item item) {
    index_.emplace(item.name, all_.size());
    all_.push_back(std::move(item));
  }
  const TraceFile* trace_;
  const WholeTrace* whole_ = nullptr;
  std::vector<Item> all_;
  std::map<std::string, size_t> index_;
};

bool IsFp64(TensorType type) { return type == TensorType::kF64; }

double Distance(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

// Is one not finite where the other is another value? No rounding explains that.
bool IsOdd(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return !(std::isnan(x) && std::isnan(y));
  return x != y && (std::isinf(x) || std::isinf(y));
}

bool AnyOdd(const std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (IsOdd(x[i], y[i])) return true;
  }
  return false;
}

void FindFarthest(const std::vector<double>& a, const std::vector<double>& b, ComparedOp* op) {
  double most = -1;
  for (size_t i = 0; i < a.size(); ++i) {
    const double distance =
        IsOdd(a[i], b[i]) ? std::numeric_limits<double>::infinity() : std::fabs(a[i] - b[i]);
    if (!(distance > most)) continue;
    most = distance;
    op->farthest = static_cast<int64_t>(i);
    op->a = a[i];
    op->b = b[i];
  }
}

// "NAME@rank1" is compared with NAME where the other side's ranks agreed.
const Item* Counterpart(const Items& items, const std::string& name) {
  if (const Item* same = items.Find(name)) return same;
  const size_t at = name.rfind("@rank");
  return at == std::string::npos ? nullptr : items.Find(name.substr(0, at));
}

class Comparison {
 public:
  Comparison(const TraceFile& a, const TraceFile& b, const TraceDiffOptions& options)
      : a_(a), b_(b), options_(options) {}

  Result<TraceDifference> Run() {
    difference_.by_truth = options_.truth != nullptr;
    difference_.by_rounding = options_.rounding || difference_.by_truth;
    RT_RETURN_IF_ERROR(Prepare());
    for (const Item& item : items_a_->all()) {
      if (options_.only && !options_.only(item.name)) continue;
      const Item* other = Counterpart(*items_b_, item.name);
      if (other == nullptr) difference_.only_a.push_back(item.name);
      else RT_RETURN_IF_ERROR(Compare(item, *other));
    }
    RT_RETURN_IF_ERROR(CompareRest());
    if (difference_.ops.empty() && difference_.shapes.empty()) {
      return UsageError(a_.path() + " and " + b_.path() +
                        (difference_.by_rounding
                             ? " have no op in common whose elements both have: see 'retrace trace "
                               "--tensors'"
                             : " have no op in common"));
    }
    if (difference_.by_rounding && difference_.judged() == 0 && difference_.beyond() == 0) {
      return UsageError(fmt::format(
          "none of the {} ops that both have can be judged by rounding: an op needs its inputs' "
          "elements{}, and the optimizer's ops have no rule. '--by bits' compares all",
          difference_.ops.size(),
          difference_.by_truth ? " in both traces and in the truth" : " in the traces"));
    }
    return std::move(difference_);
  }

 private:
  Status Prepare() {
    RT_ASSIGN_OR_RETURN(WholeTrace whole_a, WholeTrace::Make(a_));
    RT_ASSIGN_OR_RETURN(WholeTrace whole_b, WholeTrace::Make(b_));
    whole_a_ = std::make_unique<WholeTrace>(std::move(whole_a));
    whole_b_ = std::make_unique<WholeTrace>(std::move(whole_b));
    difference_.wholes = difference_.by_rounding || !SameShards();
    if (!difference_.wholes) {
      items_a_ = std::make_unique<Items>(a_);
      items_b_ = std::make_unique<Items>(b_);
      return {};
    }
    if (!a_.has_tensors() || !b_.has_tensors()) {
      return UnsupportedError(fmt::format(
          "{} has digests alone, and {}: expected tensors of both ('retrace trace --tensors')",
          (a_.has_tensors() ? b_ : a_).path(),
          difference_.by_rounding ? "rounding is judged by elements"
                                  : "the traces divide tensors in other ways"));
    }
    items_a_ = std::make_unique<Items>(*whole_a_);
    items_b_ = std::make_unique<Items>(*whole_b_);
    if (difference_.by_truth) {
      RT_RETURN_IF_ERROR(CheckTruth());
      RT_ASSIGN_OR_RETURN(WholeTrace truth, WholeTrace::Make(*options_.truth));
      whole_truth_ = std::make_unique<WholeTrace>(std::move(truth));
      bound_a_ = std::make_unique<RoundingBound>(*whole_truth_, *whole_a_);
      bound_b_ = std::make_unique<RoundingBound>(*whole_truth_, *whole_b_);
    } else if (difference_.by_rounding) {
      bound_a_ = std::make_unique<RoundingBound>(*whole_a_, *whole_b_);
    }
    difference_.unit_roundoff = UnitRoundoff(*whole_a_, *whole_b_);
    return {};
  }

  Status CheckTruth() const {
    for (const TraceOp& op : options_.truth->ops()) {
      if (!op.name.starts_with("mb") || op.name.ends_with("/ids") || op.name.ends_with("/labels")) {
        continue;
      }
      if (IsFp64(op.type)) return {};
      break;
    }
    return UsageError(options_.truth->path() +
                      ": expected a truth that was computed in FP64: a trace of a branch by "
                      "'retrace replay RUN --steps A..B --do precision:fp64'");
  }

  bool SameShards() const {
    const auto divided = [](const TraceFile& trace) {
      return std::any_of(trace.ops().begin(), trace.ops().end(), [](const TraceOp& op) {
        return op.name.find("/shard") != std::string::npos;
      });
    };
    return divided(a_) == divided(b_) &&
           whole_a_->recipe().topology.virtual_shards == whole_b_->recipe().topology.virtual_shards;
  }

  // What only B has.
  Status CompareRest() {
    for (const Item& item : items_b_->all()) {
      if ((options_.only && !options_.only(item.name)) || items_a_->Find(item.name)) continue;
      const Item* other = Counterpart(*items_a_, item.name);
      if (other == nullptr) {
        difference_.only_b.push_back(item.name);
        continue;
      }
      RT_RETURN_IF_ERROR(Compare(*other, item));
      difference_.ops.back().name = item.name;
      // It stands behind the op whose copy on another rank it is.
      const auto at = std::find_if(difference_.ops.begin(), difference_.ops.end(),
                                   [&](const ComparedOp& op) { return op.name == other->name; });
      std::rotate(at + 1, difference_.ops.end() - 1, difference_.ops.end());
    }
    return {};
  }

  Status Compare(const Item& a, const Item& b) {
    if (a.rows * a.cols != b.rows * b.cols || a.cols != b.cols) {
      difference_.shapes.push_back(
          fmt::format("{}: [{}, {}] and [{}, {}]", a.name, a.rows, a.cols, b.rows, b.cols));
      return {};
    }
    ComparedOp op;
    op.name = a.name;
    op.rows = a.rows;
    op.cols = a.cols;
    const bool elements = a.has_elements && b.has_elements;
    if (a.digest && b.digest && a.type == b.type) op.identical = *a.digest == *b.digest;
    else if (!elements) return {};  // nothing says whether it is the same
    if (!elements || (op.identical && a.digest && b.digest && !difference_.by_rounding)) {
      difference_.ops.push_back(std::move(op));
      return {};
    }
    RT_ASSIGN_OR_RETURN(const std::vector<double> x, items_a_->Read(a));
    RT_ASSIGN_OR_RETURN(const std::vector<double> y, items_b_->Read(b));
    op.difference = DiffElements(x, a.type, y, b.type, a.cols);
    op.identical = op.difference->identical();
    FindFarthest(x, y, &op);
    if (difference_.by_rounding) RT_RETURN_IF_ERROR(Judge(x, y, &op));
    difference_.ops.push_back(std::move(op));
    return {};
  }

  Status Judge(const std::vector<double>& x, const std::vector<double>& y, ComparedOp* op) {
    if (difference_.by_truth) return JudgeByTruth(x, y, op);
    RT_ASSIGN_OR_RETURN(op->bound, bound_a_->Of(op->name));
    if (AnyOdd(x, y) || (op->bound && op->distance() > *op->bound)) op->beyond = "both";
    return {};
  }

  Status JudgeByTruth(const std::vector<double>& x, const std::vector<double>& y, ComparedOp* op) {
    const WholeTrace::Op* truth = whole_truth_->Find(op->name);
    if (truth == nullptr || !truth->has_elements || truth->numel() != std::ssize(x)) return {};
    RT_ASSIGN_OR_RETURN(const std::vector<double> t, whole_truth_->Read(*truth));
    RT_ASSIGN_OR_RETURN(const std::optional<double> bound_a, bound_a_->Of(op->name));
    RT_ASSIGN_OR_RETURN(const std::optional<double> bound_b, bound_b_->Of(op->name));
    op->truth_a = Distance(x, t);
    op->truth_b = Distance(y, t);
    const bool odd_a = AnyOdd(x, t), odd_b = AnyOdd(y, t);
    if (bound_a && bound_b) op->bound = std::max(*bound_a, *bound_b);
    else if (!odd_a && !odd_b) return {};
    const double a_may = bound_a.value_or(0), b_may = bound_b.value_or(0);
    const bool a = odd_a || (op->bound && !(*op->truth_a <= std::max(kHeadroom * *op->truth_b, a_may)));
    const bool b = odd_b || (op->bound && !(*op->truth_b <= std::max(kHeadroom * *op->truth_a, b_may)));
    op->beyond = a && b ? "both" : a ? "A" : b ? "B" : "";
    return {};
  }

  const TraceFile &a_, &b_;
  const TraceDiffOptions& options_;
  TraceDifference difference_;
  std::unique_ptr<WholeTrace> whole_a_, whole_b_, whole_truth_;
  std::unique_ptr<Items> items_a_, items_b_;
  std::unique_ptr<RoundingBound> bound_a_, bound_b_;  // the only one; or each one's from the truth
};

}  // namespace

double ComparedOp::distance() const { return difference ? std::sqrt(difference->sum_dd) : 0; }

std::string ComparedOp::IndexText(int64_t element) const {
  return fmt::format("[{}, {}]", element / std::max<int64_t>(cols, 1),
                     element % std::max<int64_t>(cols, 1));
}

const ComparedOp* TraceDifference::FirstDiffering() const {
  const auto found = std::find_if(ops.begin(), ops.end(),
                                  [](const ComparedOp& op) { return !op.identical; });
  return found == ops.end() ? nullptr : &*found;
}

const ComparedOp* TraceDifference::FirstBeyond() const {
  const auto found = std::find_if(ops.begin(), ops.end(),
                                  [](const ComparedOp& op) { return !op.beyond.empty(); });
  return found == ops.end() ? nullptr : &*found;
}

int64_t TraceDifference::differing() const {
  return std::count_if(ops.begin(), ops.end(), [](const ComparedOp& op) { return !op.identical; });
}

int64_t TraceDifference::beyond() const {
  return std::count_if(ops.begin(), ops.end(),
                       [](const ComparedOp& op) { return !op.beyond.empty(); });
}

int64_t TraceDifference::judged() const {
  return std::count_if(ops.begin(), ops.end(),
                       [](const ComparedOp& op) { return op.bound.has_value(); });
}

int64_t TraceDifference::unjudged() const {
  return std::count_if(ops.begin(), ops.end(), [](const ComparedOp& op) {
    return !op.identical && !op.bound && op.beyond.empty();
  });
}

bool TraceDifference::same() const {
  if (!shapes.empty()) return false;
  if (by_rounding) return FirstBeyond() == nullptr;
  return only_a.empty() && only_b.empty() && FirstDiffering() == nullptr;
}

bool AreOfDifferentPrecision(const TraceFile& a, const TraceFile& b) {
  const auto program = [](const TraceFile& trace) {
    return trace.header().producer.substr(0, trace.header().producer.find(' '));
  };
  if (program(a) != program(b)) return true;
  const auto type = [](const TraceFile& trace) {
    for (const TraceOp& op : trace.ops()) {
      if (op.name.starts_with("mb")) return op.type;
    }
    return TensorType::kF32;
  };
  if (type(a) != type(b)) return true;
  const Result<WholeTrace> whole_a = WholeTrace::Make(a), whole_b = WholeTrace::Make(b);
  if (!whole_a.ok() || !whole_b.ok()) return false;
  const PrecisionPolicy &x = whole_a->recipe().precision, &y = whole_b->recipe().precision;
  return x.forward != y.forward || x.gradient != y.gradient || x.partials != y.partials;
}

TensorDifference DiffElements(const std::vector<double>& a, TensorType type_a,
                              const std::vector<double>& b, TensorType type_b, int64_t cols) {
  if (IsFp64(type_a) && IsFp64(type_b)) return DiffDoubles(a, b);
  // FP64 beside FP32: rounded.
  const std::vector<float> x(a.begin(), a.end()), y(b.begin(), b.end());
  const int64_t rows = cols == 0 ? 0 : std::ssize(x) / cols;
  return DiffTensors(TensorView(rows, cols, x.data()), TensorView(rows, cols, y.data()));
}

Result<TraceDifference> DiffTraces(const TraceFile& a, const TraceFile& b,
                                   const TraceDiffOptions& options) {
  return Comparison(a, b, options).Run();
}

}  // namespace retrace
