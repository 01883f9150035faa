#include "cmd/trace_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "cmd/element_text.h"
#include "cmd/text_table.h"
#include "core/glob.h"
#include "replay/trace_diff.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kListMax = 5;

Json Number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

// "the 17th of 4,014 ops".
std::string OrdinalText(const TraceDifference& d, const ComparedOp& op) {
  const int64_t n = &op - d.ops.data() + 1;
  const bool teen = n % 100 >= 11 && n % 100 <= 13;
  const char* end = teen || n % 10 > 3 || n % 10 == 0 ? "th"
                    : n % 10 == 1                     ? "st"
                    : n % 10 == 2                     ? "nd"
                                                      : "rd";
  return fmt::format("the {}{} of {} ops", Grouped(n), end, Grouped(std::ssize(d.ops)));
}

std::string BitWords(const TraceDiffFlags& flags, const TraceDifference& d) {
  const ComparedOp* first = d.FirstDiffering();
  if (first == nullptr) {
    if (!d.shapes.empty()) return "of another shape: " + d.shapes[0];
    const std::string all = fmt::format("{} ops", Grouped(std::ssize(d.ops)));
    if (!d.only_a.empty()) return all + " are the same; " + d.only_a[0] + " is only in A";
    if (!d.only_b.empty()) return all + " are the same; " + d.only_b[0] + " is only in B";
    return all;
  }
  const std::string where = fmt::format("{} ({})", first->name, OrdinalText(d, *first));
  if (first->difference) {
    const auto& element = first->difference->first;
    return fmt::format("{} {}: {}", where, first->IndexText(element->index), ElementText(*element));
  }
  return fmt::format("{}; its elements are in neither or one of them: 'retrace trace RUN@k "
                     "--tensors --only {}' makes files that have them",
                     where, std::string(flags.only.empty() ? first->name : flags.only));
}

double Relative(double distance, const TensorDifference& d) {
  const double norm = std::sqrt(std::max(d.sum_aa, d.sum_bb));
  return norm > 0 ? distance / norm : 0;
}

std::string RoundingWords(const TraceDifference& d) {
  if (!d.shapes.empty()) return "of another shape: " + d.shapes[0];
  const ComparedOp* first = d.FirstBeyond();
  if (first == nullptr) {
    const auto most = std::max_element(
        d.ops.begin(), d.ops.end(),
        [](const ComparedOp& x, const ComparedOp& y) { return x.share() < y.share(); });
    std::string words = fmt::format(
        "{} ops of {} are within what unit round-off {:.3g} explains; nearest to its bound is {}, at "
        "{:.2g} of it",
        Grouped(d.judged()), Grouped(std::ssize(d.ops)), d.unit_roundoff, most->name, most->share());
    if (d.unjudged() > 0) {
      words += fmt::format("\nNOT judged, for want of a rule or of elements: {} ops that differ "
                           "('--by bits' shows them)",
                           Grouped(d.unjudged()));
    }
    return words;
  }
  const TensorDifference& t = *first->difference;
  std::string side;
  if (d.by_truth && first->beyond != "both") {
    side = fmt::format(", {} farther from the truth ({:.3g}, the other {:.3g})", first->beyond,
                       Relative(first->beyond == "A" ? *first->truth_a : *first->truth_b, t),
                       Relative(first->beyond == "A" ? *first->truth_b : *first->truth_a, t));
  }
  return fmt::format("{} ({}): rel L2 {:.3g}, rounding explains {:.3g}{}; farthest at {}: {} and {}",
                     first->name, OrdinalText(d, *first), Relative(first->distance(), t),
                     first->bound ? Relative(*first->bound, t) : 0, side, first->IndexText(first->farthest), first->a,
                     first->b);
}

// What the table shows: what differs, or is beyond rounding, in order of execution; where nothing is,
// what is nearest to its bound.
std::vector<const ComparedOp*> Shown(const TraceDifference& d) {
  std::vector<const ComparedOp*> shown;
  for (const ComparedOp& op : d.ops) {
    const bool of_interest = d.by_rounding ? !op.beyond.empty() : !op.identical;
    if (of_interest) shown.push_back(&op);
  }
  if (!shown.empty() || !d.by_rounding) return shown;
  for (const ComparedOp& op : d.ops) {
    if (op.bound) shown.push_back(&op);
  }
  std::stable_sort(shown.begin(), shown.end(), [](const ComparedOp* x, const ComparedOp* y) {
    return x->share() > y->share();
  });
  return shown;
}

std::string TableText(const TraceDiffFlags& flags, const TraceDifference& d) {
  const std::vector<const ComparedOp*> shown = Shown(d);
  if (shown.empty()) return "";
  const size_t top = flags.top > 0 ? std::min<size_t>(shown.size(), flags.top) : shown.size();
  const char* what = !d.by_rounding       ? "differ"
                     : d.beyond() > 0     ? "are beyond rounding"
                                          : "have a bound, nearest to it first";
  std::vector<TextTable::Column> columns = {
      {fmt::format("{} of {} that {}", top, shown.size(), what), true},
      {"differ"}, {"max ULP"}, {"max abs"}, {"rel L2"}};
  if (d.by_rounding) columns.push_back({"explained"});
  if (d.by_truth) columns.insert(columns.end(), {{"A, truth"}, {"B, truth"}});
  TextTable table(columns);
  for (size_t i = 0; i < top; ++i) {
    const ComparedOp& op = *shown[i];
    std::vector<std::string> cells = {op.name};
    if (!op.difference) {
      cells.resize(columns.size(), "-");
      table.AddRow(std::move(cells));
      continue;
    }
    const TensorDifference& t = *op.difference;
    const auto relative = [&](const std::optional<double>& x) {
      return x ? fmt::format("{:.3g}", Relative(*x, t)) : std::string("-");
    };
    cells.push_back(fmt::format("{} of {}", Grouped(t.differing), Grouped(t.elements)));
    cells.push_back(t.max_ulp < 10'000'000 ? Grouped(static_cast<int64_t>(t.max_ulp))
                                           : fmt::format("{:.3g}", static_cast<double>(t.max_ulp)));
    cells.push_back(fmt::format("{:.3g}", t.max_abs));
    cells.push_back(relative(op.distance()));
    if (d.by_rounding) cells.push_back(relative(op.bound));
    if (d.by_truth) cells.insert(cells.end(), {relative(op.truth_a), relative(op.truth_b)});
    table.AddRow(std::move(cells));
  }
  return "\n" + table.Text(flags.output);
}

std::string ListText(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = fmt::format("{}: {} op{}", what, Grouped(std::ssize(names)),
                                 names.size() == 1 ? "" : "s");
  for (size_t i = 0; i < std::min(names.size(), kListMax); ++i) {
    text += (i == 0 ? ", " : ", ") + names[i];
  }
  return text + (names.size() > kListMax ? ", ...\n" : "\n");
}

// Traces of different updates or states are compared all the same; it is said.
std::string HeadersText(const TraceHeader& a, const TraceHeader& b) {
  std::string text;
  if (a.update != b.update) {
    text += fmt::format("A is of update {}, B of update {}\n", a.update, b.update);
  }
  if (a.state != b.state) text += "A and B start at different states\n";
  for (const auto& [name, header] : {std::pair("A", &a), {"B", &b}}) {
    if (header->recorded == "differs") {
      text += fmt::format("{} is not the update that {} recorded\n", name, header->run);
    }
  }
  return text;
}

Json JsonOf(const TraceDifference& d, const ComparedOp& op) {
  Json json = {{"op", op.name}, {"shape", {op.rows, op.cols}}, {"identical", op.identical}};
  if (!op.difference) return json;
  const TensorDifference& t = *op.difference;
  json["differing"] = t.differing;
  json["max_ulp"] = t.max_ulp;
  json["max_abs"] = Number(t.max_abs);
  json["relative_l2"] = Number(Relative(op.distance(), t));
  if (t.first) {
    const ElementDifference& e = *t.first;
    json["first"] = {{"index", e.index},
                     {"at", op.IndexText(e.index)},
                     {"a", Number(e.fp64 ? e.wide_a : e.a)},
                     {"b", Number(e.fp64 ? e.wide_b : e.b)},
                     {"ulp", e.ulp == kUlpNan ? Json(nullptr) : Json(e.ulp)}};
  }
  if (!d.by_rounding) return json;
  json["farthest"] = {{"at", op.IndexText(op.farthest)}, {"a", Number(op.a)}, {"b", Number(op.b)}};
  json["bound"] = op.bound ? Number(Relative(*op.bound, t)) : Json(nullptr);
  json["beyond"] = !op.beyond.empty();
  if (op.truth_a) json["truth_a"] = Number(Relative(*op.truth_a, t));
  if (op.truth_b) json["truth_b"] = Number(Relative(*op.truth_b, t));
  if (d.by_truth) json["beyond_side"] = op.beyond;
  return json;
}

Json ReportJson(const TraceDiffFlags& flags, const TraceDifference& d, const std::string& words) {
  Json json = {{"a", flags.a},
               {"b", flags.b},
               {"by", d.by_rounding ? "rounding" : "bits"},
               {"same", d.same()},
               {"summary", words},
               {"ops", d.ops.size()},
               {"differing", d.differing()}};
  const ComparedOp* first = d.by_rounding ? d.FirstBeyond() : d.FirstDiffering();
  json["first"] = first ? JsonOf(d, *first) : Json(nullptr);
  if (d.by_rounding) {
    json["unit_roundoff"] = d.unit_roundoff;
    json["judged"] = d.judged();
    json["unjudged_differing"] = d.unjudged();
    json["beyond_rounding"] = d.beyond();
  }
  json["only_a"] = d.only_a;
  json["only_b"] = d.only_b;
  json["other_shapes"] = d.shapes;
  json["table"] = Json::array();
  const std::vector<const ComparedOp*> shown = Shown(d);
  size_t top = shown.size();
  if (flags.top_given && flags.top > 0) top = std::min<size_t>(top, flags.top);
  for (size_t i = 0; i < top; ++i) json["table"].push_back(JsonOf(d, *shown[i]));
  return json;
}

}  // namespace

bool AreTraces(const std::string& a, const std::string& b) {
  const bool trace_a = TraceFile::IsOne(a), trace_b = TraceFile::IsOne(b);
  if (trace_a == trace_b) return trace_a;
  const Result<SafetensorsFile> other = SafetensorsFile::Open(trace_a ? b : a);
  if (other.status().code() == StatusCode::kDamaged) Fail(other.status());
  Fail(UsageError(fmt::format("'{}' is a trace and '{}' is not; expected two traces",
                              trace_a ? a : b, trace_a ? b : a)));
}

void CompareTraces(const TraceDiffFlags& flags) {
  const TraceFile a = OrFail(TraceFile::Open(flags.a)), b = OrFail(TraceFile::Open(flags.b));
  std::optional<TraceFile> truth;
  if (!flags.truth.empty()) truth = OrFail(TraceFile::Open(flags.truth));
  TraceDiffOptions options;
  if (!flags.only.empty()) {
    options.only = [&](std::string_view name) { return GlobMatches(flags.only, name); };
  }
  options.rounding =
      flags.by == "rounding" || (flags.by == "auto" && AreOfDifferentPrecision(a, b));
  if (truth && flags.by != "bits") options.truth = &*truth;
  const TraceDifference d = OrFail(DiffTraces(a, b, options));
  const std::string words = d.by_rounding ? RoundingWords(d) : BitWords(flags, d);
  if (flags.output.json) {
    PrintReport(ReportJson(flags, d, words).dump(2, ' ', false, Json::error_handler_t::replace) +
                "\n");
  } else if (!flags.output.quiet) {
    const char* verdict = d.same() ? (d.by_rounding ? "the same within rounding" : "identical")
                                   : (d.by_rounding ? "beyond rounding" : "differs");
    PrintReport(Tinted(flags.output, d.same() ? Tint::kGreen : Tint::kRed, verdict) + ": " + words +
                "\n" + HeadersText(a.header(), b.header()) + ListText("only in A", d.only_a) +
                ListText("only in B", d.only_b) + TableText(flags, d));
  }
  Exit(d.same() ? 0 : 1);
}

}  // namespace retrace
