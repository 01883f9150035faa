#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/element_text.h"
#include "cmd/opened_run.h"
#include "cmd/tensor_file.h"
#include "cmd/text_table.h"
#include "cmd/trace_diff.h"
#include "core/recipe_toml.h"
#include "replay/record.h"
#include "surgery/first_difference.h"
#include "surgery/intervention.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace diff runs/demo@12 runs/demo-clip@12             # two states: p, m, v, counters, memories
  retrace diff runs/demo@12 runs/demo@13 --only 'model.layers.3.*'
  retrace diff 'runs/demo@12:*#m' 'runs/demo-clip@12:*#m' # Adam's first moments alone
  retrace diff runs/demo runs/demo-clip                   # two runs: where they part, and how
  retrace diff a.safetensors b.safetensors --quiet && echo same
  retrace diff runs/demo@24 megatron.safetensors          # fused qkv and fc1 are taken apart
  retrace diff runs/demo@24 demo-24.h5                    # what 'retrace export' wrote
  retrace diff a.jsonl b.jsonl                            # two traces: the first op that differs
  retrace diff ours.safetensors hf.safetensors            # the first op that rounding does not explain
  retrace diff ours.safetensors hf.safetensors --truth fp64.safetensors
Bits decide. Distances are of the numbers; ULP is the number of floats between two. max rel is
|a - b| / max(|a|, |b|), rel L2 is |a - b| / |a|.
Two runs are compared at the positions that both have: states by their digests, records but for their
timing. Recipes and interventions are listed; they do not decide.
Traces: by rounding, an op is beyond when its outputs are farther apart (root of the sum of squares)
than the distance of its inputs, as both traces have them, and roundings at the coarser unit round-off
explain; so the op is named where the fault is, and not those that follow. The bound is probabilistic,
4 sqrt(n) u for a sum of n terms, with norms of operands. With --truth an op is beyond when it is
more than 4 times as far from the truth as the other side's, and farther than the bound. Virtual shards
are put together where the two divide tensors in other ways.
Exit code 0: the same, 1: they differ, 2: usage, 3: damaged.)";

constexpr size_t kValueMax = 48;
constexpr size_t kListMax = 8;              // of names and scalars in text
constexpr uint64_t kUlpShown = 10'000'000;  // in full below

struct DiffFlags {
  std::string a, b, only, truth;
  std::string by = "auto";
  int64_t top = 10;
  bool top_given = false;
  OutputFlags output;
};

// One of the two things that are compared.
struct Side {
  std::string text;
  StateAddress address;
  std::unique_ptr<OpenedRun> run;  // nullptr: a file
  std::optional<TensorFile> file;
  std::vector<std::vector<float>> storage;  // of gradients that are read
  std::deque<std::vector<float>> scalars;   // of layers, beside a file
  std::optional<State> state;

  bool IsState() const { return run && address.position; }
};

Result<Side> OpenSide(const std::string& text) {
  Side side;
  side.text = StateOfStepFile(text);
  if (side.text == text && TensorFile::IsOne(text)) {
    RT_ASSIGN_OR_RETURN(side.file, TensorFile::Open(text));
    return side;
  }
  for (const char* suffix : {".safetensors", ".h5", ".hdf5", ".json"}) {
    if (text.ends_with(suffix) && side.text == text) {
      return UsageError(text + ": there is no such file");
    }
  }
  RT_ASSIGN_OR_RETURN(side.address, ParseStateAddress(side.text));
  RT_ASSIGN_OR_RETURN(side.run, OpenedRun::Open(side.address.run));
  if (side.address.position) RT_RETURN_IF_ERROR(side.run->CheckPosition(*side.address.position));
  return side;
}

// --- What the report shows of tensors ---

Json Number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

std::string FirstText(const ComparedTensor& tensor) {
  const ElementDifference& e = *tensor.difference.first;
  return fmt::format("{} {}: {}", tensor.Label(), tensor.IndexText(e.index), ElementText(e));
}

Json JsonOf(const ComparedTensor& tensor) {
  const TensorDifference& d = tensor.difference;
  Json json = {{"name", tensor.name},
               {"component", tensor.component},
               {"shape", tensor.shape},
               {"elements", d.elements},
               {"differing", d.differing},
               {"max_ulp", d.max_ulp},
               {"max_abs", Number(d.max_abs)},
               {"max_rel", Number(d.max_rel)},
               {"relative_l2", Number(d.RelativeL2())},
               {"cosine", Number(d.Cosine())},
               {"nan_a", d.nan_a},
               {"nan_b", d.nan_b},
               {"nan_one_side", d.nan_one_side},
               {"nan_bits", d.nan_bits},
               {"signed_zeros", d.signed_zeros}};
  if (d.first) {
    const ElementDifference& e = *d.first;
    json["first"] = {
        {"index", e.index},
        {"at", tensor.IndexText(e.index)},
        {"a", Number(e.fp64 ? e.wide_a : e.a)},
        {"b", Number(e.fp64 ? e.wide_b : e.b)},
        {"a_bits", e.fp64 ? std::bit_cast<uint64_t>(e.wide_a) : std::bit_cast<uint32_t>(e.a)},
        {"b_bits", e.fp64 ? std::bit_cast<uint64_t>(e.wide_b) : std::bit_cast<uint32_t>(e.b)},
        {"ulp", e.ulp == kUlpNan ? Json(nullptr) : Json(e.ulp)}};
  }
  return json;
}

// What NaNs and zeros differ in: the columns do not tell.
std::string SpecialText(const TensorDifference& d) {
  std::string text;
  const auto add = [&](int64_t count, const char* what) {
    if (count > 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", Grouped(count), what);
  };
  add(d.nan_one_side, "NaN in one");
  add(d.nan_bits, "NaN of other bits");
  add(d.signed_zeros, "-0 and +0");
  return text;
}

// Tensors that differ, those of the largest relative L2 distance first.
std::vector<const ComparedTensor*> ByRelativeL2(const TensorSetDifference& set,
                                                const std::string& component) {
  std::vector<const ComparedTensor*> order;
  for (const ComparedTensor& tensor : set.tensors) {
    if (tensor.component == component && !tensor.difference.identical()) order.push_back(&tensor);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const ComparedTensor* x, const ComparedTensor* y) {
                     return x->difference.RelativeL2() > y->difference.RelativeL2();
                   });
  return order;
}

std::vector<std::string> ComponentsOf(const TensorSetDifference& set) {
  std::vector<std::string> components;
  for (const ComparedTensor& tensor : set.tensors) {
    if (std::find(components.begin(), components.end(), tensor.component) == components.end()) {
      components.push_back(tensor.component);
    }
  }
  return components;
}

// "100 %" means all.
std::string ShareText(int64_t part, int64_t whole) {
  if (part == whole) return "100 %";
  const double percent = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return percent > 99.9 ? ">99.9 %" : fmt::format("{:.3g} %", percent);
}

void AddNumbers(const TensorDifference& d, std::vector<std::string>* cells) {
  cells->push_back(ShareText(d.differing, d.elements));
  cells->push_back(d.max_ulp < kUlpShown ? Grouped(static_cast<int64_t>(d.max_ulp))
                                         : fmt::format("{:.3g}", static_cast<double>(d.max_ulp)));
  for (double x : {d.max_abs, d.max_rel, d.RelativeL2()})
    cells->push_back(fmt::format("{:.3g}", x));
  cells->push_back(fmt::format("{:.6f}", d.Cosine()));
  cells->push_back(SpecialText(d));
}

std::vector<TextTable::Column> NumberColumns(std::vector<TextTable::Column> first) {
  for (const char* title : {"differ", "max ULP", "max abs", "max rel", "rel L2", "cosine"}) {
    first.push_back({title});
  }
  first.push_back({"", true});
  return first;
}

// A component as a whole. Elements that differ, and sums, over its tensors.
TensorDifference Together(const TensorSetDifference& set, const std::string& component) {
  TensorDifference all;
  for (const ComparedTensor& tensor : set.tensors) {
    const TensorDifference& d = tensor.difference;
    if (tensor.component != component) continue;
    all.elements += d.elements;
    all.differing += d.differing;
    all.max_ulp = std::max(all.max_ulp, d.max_ulp);
    all.max_abs = std::max(all.max_abs, d.max_abs);
    all.max_rel = std::max(all.max_rel, d.max_rel);
    all.nan_one_side += d.nan_one_side;
    all.nan_bits += d.nan_bits;
    all.signed_zeros += d.signed_zeros;
    all.sum_aa += d.sum_aa;
    all.sum_bb += d.sum_bb;
    all.sum_ab += d.sum_ab;
    all.sum_dd += d.sum_dd;
  }
  return all;
}

std::string ListText(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = fmt::format("{} ({}):", what, names.size());
  for (size_t i = 0; i < std::min(names.size(), kListMax); ++i) text += "\n  " + names[i];
  if (names.size() > kListMax) text += fmt::format("\n  and {} more", names.size() - kListMax);
  return text + "\n";
}

std::string TensorsText(const DiffFlags& flags, const TensorSetDifference& set) {
  std::string out = ListText("only in A", set.only_a) + ListText("only in B", set.only_b) +
                    ListText("of another shape", set.shapes);
  const std::vector<std::string> components = ComponentsOf(set);
  if (components.size() > 1) {
    TextTable table(NumberColumns({{"", true}, {"tensors differ"}}));
    for (const std::string& component : components) {
      int64_t count = 0;
      for (const ComparedTensor& tensor : set.tensors) count += tensor.component == component;
      std::vector<std::string> cells = {
          component, fmt::format("{} of {}", ByRelativeL2(set, component).size(), count)};
      // A component whose tensors are all known to be equal was not read: it has no sums to show.
      AddNumbers(Together(set, component), &cells);
      table.AddRow(std::move(cells));
    }
    out += table.Text(flags.output) + "\n";
  }
  for (const std::string& component : components) {
    const std::vector<const ComparedTensor*> order = ByRelativeL2(set, component);
    if (order.empty()) continue;
    const size_t top = flags.top > 0 ? std::min<size_t>(order.size(), flags.top) : order.size();
    const std::string of = component.empty() ? "" : component + ", ";
    TextTable table(NumberColumns(
        {{fmt::format("{}by rel L2, {} of {} that differ", of, top, order.size()), true}}));
    for (size_t i = 0; i < top; ++i) {
      std::vector<std::string> cells = {order[i]->name};
      AddNumbers(order[i]->difference, &cells);
      table.AddRow(std::move(cells));
    }
    return out + table.Text(flags.output);  // of the first component that differs
  }
  return out;
}

void AddJson(const DiffFlags& flags, const TensorSetDifference& set, Json* json) {
  (*json)["tensors_compared"] = set.tensors.size();
  (*json)["tensors_differing"] = set.differing();
  (*json)["only_a"] = set.only_a;
  (*json)["only_b"] = set.only_b;
  (*json)["other_shapes"] = set.shapes;
  (*json)["tensors"] = Json::array();
  for (const std::string& component : ComponentsOf(set)) {
    const std::vector<const ComparedTensor*> order = ByRelativeL2(set, component);
    size_t top = order.size();
    if (flags.top_given && flags.top > 0) top = std::min<size_t>(top, flags.top);
    for (size_t i = 0; i < top; ++i) (*json)["tensors"].push_back(JsonOf(*order[i]));
  }
}

// Equal pairs of adam_t stand in one line.
struct ScalarLine {
  ScalarDifference scalar;
  int64_t tensors = 0;  // of adam_t
};

std::vector<ScalarLine> ScalarLines(const std::vector<ScalarDifference>& scalars) {
  std::vector<ScalarLine> lines;
  for (const ScalarDifference& scalar : scalars) {
    const bool adam_t = scalar.name.starts_with("adam_t of ");
    const auto like = std::find_if(lines.begin(), lines.end(), [&](const ScalarLine& line) {
      return adam_t && line.tensors > 0 && line.scalar.a == scalar.a && line.scalar.b == scalar.b;
    });
    if (like != lines.end())
      ++like->tensors;
    else
      lines.push_back({scalar, adam_t ? 1 : 0});
  }
  return lines;
}

std::string ScalarsText(const DiffFlags& flags, const std::vector<ScalarDifference>& scalars) {
  if (scalars.empty()) return "";
  TextTable table({{"counters and memories", true}, {"A"}, {"B"}});
  const std::vector<ScalarLine> lines = ScalarLines(scalars);
  for (size_t i = 0; i < std::min(lines.size(), 2 * kListMax); ++i) {
    const ScalarDifference& s = lines[i].scalar;
    table.AddRow(
        {lines[i].tensors > 1 ? fmt::format("adam_t of {} tensors", lines[i].tensors) : s.name, s.a,
         s.b});
  }
  std::string text = table.Text(flags.output);
  if (lines.size() > 2 * kListMax) {
    text += fmt::format("and {} more\n", lines.size() - 2 * kListMax);
  }
  return text + "\n";
}

Json JsonOf(const std::vector<ScalarDifference>& scalars) {
  Json json = Json::array();
  for (const ScalarDifference& s : scalars) {
    json.push_back({{"name", s.name}, {"a", s.a}, {"b", s.b}});
  }
  return json;
}

std::string Verdict(const DiffFlags& flags, bool identical, const std::string& words) {
  const Tint tint = identical ? Tint::kGreen : Tint::kRed;
  return fmt::format("{}{}\n", Tinted(flags.output, tint, identical ? "identical" : "differs"),
                     words.empty() ? "" : ": " + words);
}

// The first difference in words, or what was compared where there is none.
std::string FirstWords(const StateDifference& difference) {
  const TensorSetDifference& set = difference.tensors;
  if (!set.only_a.empty()) return set.only_a[0] + " is only in A";
  if (!set.only_b.empty()) return set.only_b[0] + " is only in B";
  if (!set.shapes.empty()) return set.shapes[0];
  if (const ComparedTensor* first = set.First()) return FirstText(*first);
  std::string components;
  for (const std::string& component : ComponentsOf(set)) {
    if (component.empty()) continue;
    components += (components.empty() ? " (" : ", ") + component;
  }
  if (!components.empty()) components += ")";
  const std::string compared = fmt::format("{} tensor{}{}", set.tensors.size(),
                                           set.tensors.size() == 1 ? "" : "s", components);
  if (difference.scalars.empty()) return compared;
  const ScalarDifference& s = difference.scalars[0];
  return fmt::format("{}: {} and {}; {} are the same", s.name, s.a, s.b, compared);
}

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

[[noreturn]] void EndWith(bool identical) { Exit(identical ? 0 : 1); }

void PrintDifference(const DiffFlags& flags, const StateDifference& difference) {
  if (flags.output.json) {
    Json json = {{"a", flags.a}, {"b", flags.b}, {"identical", difference.identical()}};
    if (!difference.identical()) json["first_difference"] = FirstWords(difference);
    json["counters_and_memories"] = JsonOf(difference.scalars);
    AddJson(flags, difference.tensors, &json);
    PrintJson(json);
  } else if (!flags.output.quiet) {
    std::string out = Verdict(flags, difference.identical(), FirstWords(difference));
    if (!difference.identical()) {
      out += "\n" + ScalarsText(flags, difference.scalars) + TensorsText(flags, difference.tensors);
    }
    PrintReport(out);
  }
  EndWith(difference.identical());
}

// --- Two states, or sets of tensors ---

Selection OnlyOf(const DiffFlags& flags, Selection selection) {
  if (flags.only.empty()) return selection;
  selection.tensor = [before = selection.tensor, only = flags.only](std::string_view name) {
    return (!before || before(name)) && GlobMatches(only, name);
  };
  return selection;
}

Result<std::vector<NamedTensor>> TensorsOf(const DiffFlags& flags, Side* side,
                                           const std::string& component) {
  if (side->file) return side->file->Read(flags.only);
  const Layout& layout = side->run->layout();
  const bool gradient = component == "g";
  RT_ASSIGN_OR_RETURN(Selection selection,
                      SelectionOf(layout, side->address.glob, gradient ? "" : component));
  selection = OnlyOf(flags, std::move(selection));
  if (!gradient) {
    RT_ASSIGN_OR_RETURN(side->state, side->run->timeline().Seek(*side->address.position));
    return StateTensors(layout, *side->state, selection);
  }
  RT_ASSIGN_OR_RETURN(Journal journal, side->run->ReadJournal(*side->address.position));
  side->storage = std::move(journal.gradients);
  return GradientTensors(layout, side->storage, selection);
}

// Where both sides are BF16, distances are counted in BF16's ULPs, of 2^16 of a float's.
void CountInBf16(const Side& a, const Side& b, TensorSetDifference* set) {
  if (!a.file || !b.file) return;
  for (ComparedTensor& tensor : set->tensors) {
    if (!a.file->IsBf16(tensor.name) || !b.file->IsBf16(tensor.name)) continue;
    TensorDifference& d = tensor.difference;
    d.max_ulp >>= 16;
    if (d.first && d.first->ulp != kUlpNan) d.first->ulp >>= 16;
  }
}

// Makes a state and a file comparable: what a file does not hold of a state (its moments, as a
// rule) is not asked for; a moment that the address names is what the file holds; a file's
// layer_scalar, which is no parameter here, is compared with the recipe's; rows that Megatron keeps
// for a v_proj that the model does not have are passed over.
void FitToFile(Side* run, const Side& file, std::vector<NamedTensor>* state,
               std::vector<NamedTensor>* stored) {
  if (!run->address.component.empty() && file.file->components().size() == 1) {
    for (NamedTensor& tensor : *stored) tensor.component = run->address.component;
  } else {
    std::erase_if(*state, [&](const NamedTensor& tensor) {
      return !file.file->components().contains(tensor.component);
    });
  }
  if (file.file->has_fused_qkv()) {
    std::erase_if(*stored, [&](const NamedTensor& tensor) {
      return tensor.name.ends_with("v_proj.weight") && run->run->layout().Find(tensor.name) < 0;
    });
  }
  const std::vector<double>& scalars = run->run->recipe().model.layer_scalar;
  for (const NamedTensor& tensor : *stored) {
    for (size_t l = 0; l < scalars.size(); ++l) {
      if (tensor.name != LayerTensorName(static_cast<int64_t>(l), "layer_scalar")) continue;
      run->scalars.push_back({static_cast<float>(scalars[l])});
      state->push_back({.name = tensor.name,
                        .component = tensor.component,
                        .shape = {1},
                        .view = TensorView(1, 1, run->scalars.back().data()),
                        .known_equal = false,
                        .doubles = {}});
    }
  }
}

void DiffSets(const DiffFlags& flags, Side* a, Side* b) {
  std::vector<NamedTensor> set_a = OrFail(TensorsOf(flags, a, a->address.component));
  std::vector<NamedTensor> set_b = OrFail(TensorsOf(flags, b, b->address.component));
  if (b->file && a->run) FitToFile(a, *b, &set_a, &set_b);
  if (a->file && b->run) FitToFile(b, *a, &set_b, &set_a);
  // Two single tensors are compared whatever their names.
  if (set_a.size() == 1 && set_b.size() == 1) {
    set_b[0].name = set_a[0].name;
    set_b[0].component = set_a[0].component;
  }
  ThreadPool pool(1);
  StateDifference difference;
  difference.tensors = DiffTensorSets(set_a, set_b, a->run ? a->run->engine().pool() : pool);
  if (difference.tensors.tensors.empty() && difference.tensors.shapes.empty()) {
    Fail(UsageError(flags.a + " and " + flags.b + " have no tensor in common"));
  }
  CountInBf16(*a, *b, &difference.tensors);
  PrintDifference(flags, difference);
}

// Do the two name the same tensors and components, so that digests can answer?
bool AlikeStates(const Side& a, const Side& b) {
  return a.IsState() && b.IsState() && a.address.glob == b.address.glob &&
         a.address.component == b.address.component && a.address.component != "g";
}

void DiffAddressed(const DiffFlags& flags, Side* a, Side* b) {
  // What only one address says holds for both.
  if (a->run && b->run) {
    if (a->address.glob.empty()) a->address.glob = b->address.glob;
    if (b->address.glob.empty()) b->address.glob = a->address.glob;
    if (a->address.component.empty()) a->address.component = b->address.component;
    if (b->address.component.empty()) b->address.component = a->address.component;
  }
  for (const Side* side : {a, b}) {
    if (side->run) OrFail(SelectionOf(side->run->layout(), flags.only, "").status());
  }
  if (!AlikeStates(*a, *b)) return DiffSets(flags, a, b);
  const Selection selection =
      OnlyOf(flags, OrFail(SelectionOf(a->run->layout(), a->address.glob, a->address.component)));
  RecordedState state_a(a->run->reader(), a->run->layout(), a->run->engine(), *a->address.position);
  RecordedState state_b(b->run->reader(), b->run->layout(), b->run->engine(), *b->address.position);
  StateDifference difference = OrFail(DiffRecorded(state_a, state_b, selection));
  // Who asks for tensors does not ask for counters.
  if (!a->address.glob.empty() || !a->address.component.empty() || !flags.only.empty()) {
    difference.scalars.clear();
  }
  PrintDifference(flags, difference);
}

// --- Two runs ---

// A field of two records of one update that differs.
struct FieldDifference {
  std::string name, a, b;
};

// Lists with a number a tensor: how many differ, for nobody reads hundreds of numbers.
void DiffLists(const std::string& name, const Json& a, const Json& b,
               std::vector<FieldDifference>* fields) {
  if (a == b) return;
  const size_t common = std::min(a.size(), b.size());
  size_t count = std::max(a.size(), b.size()) - common;
  for (size_t t = 0; t < common; ++t) count += a[t] != b[t];
  fields->push_back({fmt::format("{}, {} of {}", name, count, a.size()), "...", "..."});
}

std::vector<FieldDifference> DiffRecords(const UpdateRecord& a, const UpdateRecord& b) {
  std::vector<FieldDifference> fields;
  const Json x = Json::parse(RecordJson(a)), y = Json::parse(RecordJson(b));
  const auto text = [](const Json& json, const std::string& name) {
    return json.contains(name) ? json[name].dump() : std::string("-");
  };
  for (const auto& [name, value] : x.items()) {
    if (name == "timing" || text(x, name) == text(y, name)) continue;
    if (name == "tensor_norms") {
      DiffLists(name, value, y[name], &fields);
    } else if (name != "norms") {
      fields.push_back({name, text(x, name), text(y, name)});
    } else if (y.contains(name)) {  // which older recordings have not
      for (const auto& [part, list] : value.items()) {
        DiffLists("norms." + part, list, y[name][part], &fields);
      }
    }
  }
  if (!x.contains("evaluation_loss") && y.contains("evaluation_loss")) {
    fields.push_back({"evaluation_loss", "-", text(y, "evaluation_loss")});
  }
  return fields;
}

struct RunDifference {
  int64_t first = 0, last = 0;          // common positions
  bool digests = true;                  // of equal V: they say whether states are the same
  std::optional<int64_t> state;         // the first position whose states differ
  std::optional<int64_t> record;        // the first update whose records differ, up to that
  std::vector<FieldDifference> fields;  // of that record
  std::optional<int64_t> compared;      // the position whose tensors were compared
  StateDifference tensors;

  bool identical() const { return !state && !record; }
};

Result<StateDifference> DiffAt(const DiffFlags& flags, OpenedRun& a, OpenedRun& b, int64_t k) {
  RecordedState state_a(a.reader(), a.layout(), a.engine(), k);
  RecordedState state_b(b.reader(), b.layout(), b.engine(), k);
  return DiffRecorded(state_a, state_b, OnlyOf(flags, Selection()));
}

// Positions of first..last whose states both runs can rebuild.
std::vector<int64_t> KeptByBoth(const RunHistory& a, const RunHistory& b, int64_t first,
                                int64_t last) {
  std::vector<int64_t> kept;
  for (int64_t k = first; k <= last; ++k) {
    if (a.NearestKeyframe(k) && b.NearestKeyframe(k)) kept.push_back(k);
  }
  return kept;
}

// Of different V, digests say nothing: states are compared, by halves, since reading one is work.
Status FindByStates(const DiffFlags& flags, OpenedRun& a, OpenedRun& b, RunDifference* d) {
  d->digests = false;
  const std::vector<int64_t> kept = KeptByBoth(a.history(), b.history(), d->first, d->last);
  if (kept.empty()) {
    return UsageError(
        fmt::format("{} and {}: the runs are of {} and {} virtual shards, so only "
                    "states tell whether they are the same; none is kept by both",
                    a.dir(), b.dir(), a.layout().shards(), b.layout().shards()));
  }
  size_t low = 0, high = kept.size();  // the first that differs is in [low, high]
  while (low < high) {
    const size_t middle = (low + high) / 2;
    RT_ASSIGN_OR_RETURN(StateDifference difference, DiffAt(flags, a, b, kept[middle]));
    if (difference.identical()) {
      low = middle + 1;
      continue;
    }
    high = middle;
    d->state = d->compared = kept[middle];
    d->tensors = std::move(difference);
  }
  return {};
}

Status FindRecord(const RunHistory& a, const RunHistory& b, RunDifference* d) {
  const int64_t begin = std::max(d->first, std::max(a.first_position(), b.first_position()) + 1);
  for (int64_t k = begin; k <= d->state.value_or(d->last); ++k) {
    if (a.Find(k)->record == b.Find(k)->record) continue;
    RT_ASSIGN_OR_RETURN(const UpdateRecord record_a, ParseRecord(a.Find(k)->record));
    RT_ASSIGN_OR_RETURN(const UpdateRecord record_b, ParseRecord(b.Find(k)->record));
    if (record_a.Same(record_b)) continue;
    d->record = k;
    d->fields = DiffRecords(record_a, record_b);
    return {};
  }
  return {};
}

Result<RunDifference> DiffRuns(const DiffFlags& flags, OpenedRun& a, OpenedRun& b) {
  const RunHistory &x = a.history(), &y = b.history();
  RunDifference d;
  d.first = std::max(x.first_position(), y.first_position());
  d.last = std::min(x.last_position(), y.last_position());
  if (d.last < d.first) {
    return UsageError(fmt::format("{} has positions {}..{}, {} has {}..{}: none in common", a.dir(),
                                  x.first_position(), x.last_position(), b.dir(),
                                  y.first_position(), y.last_position()));
  }
  if (a.layout().shards() != b.layout().shards()) {
    RT_RETURN_IF_ERROR(FindByStates(flags, a, b, &d));
  } else {
    d.state = FirstOtherDigest(x, y, d.first, d.last);
    const std::vector<int64_t> kept = d.state && !flags.output.quiet
                                          ? KeptByBoth(x, y, *d.state, d.last)
                                          : std::vector<int64_t>();
    if (!kept.empty()) {
      d.compared = kept[0];
      RT_ASSIGN_OR_RETURN(d.tensors, DiffAt(flags, a, b, kept[0]));
    }
  }
  RT_RETURN_IF_ERROR(FindRecord(x, y, &d));
  return d;
}

// A recipe's value on one line, its end left out where it is long.
std::string ValueText(const std::string& value) {
  std::string text;
  for (char c : value) {
    const bool blank = c == ' ' || c == '\n';
    if (!blank)
      text += c;
    else if (!text.empty() && text.back() != ' ' && text.back() != '[')
      text += ' ';
  }
  if (text.size() > kValueMax) {
    size_t end = kValueMax - 3;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // a whole one
    text = text.substr(0, end) + "...";
  }
  return text;
}

std::string KinText(const OpenedRun& a, const OpenedRun& b) {
  std::string text;
  for (const auto& [name, run, other] : {std::tuple("A", &a, &b), std::tuple("B", &b, &a)}) {
    const std::optional<Lineage>& lineage = run->history().header.lineage;
    if (!lineage) continue;
    const bool parent = lineage->parent_run == other->history().run;
    text += fmt::format("{} is a branch of {}@{}{}\n", name,
                        parent ? (name[0] == 'A' ? "B" : "A") : lineage->parent, lineage->position,
                        run->Interventions().empty() ? "" : ", with");
    for (const std::string& intervention : run->Interventions()) text += "  " + intervention + "\n";
  }
  return text;
}

std::string RunWords(const RunDifference& d) {
  if (d.identical()) {
    return d.digests ? fmt::format("states and records of positions {}..{}", d.first, d.last)
                     : fmt::format("the kept states, and all records, of positions {}..{}", d.first,
                                   d.last);
  }
  std::string words;
  if (d.record && (!d.state || *d.record < *d.state)) {
    words = fmt::format("first differing record: update {}; ", *d.record);
  }
  if (!d.state) return words + fmt::format("the states of {}..{} are the same", d.first, d.last);
  words += fmt::format("first differing {}: {}", d.digests ? "state" : "kept state", *d.state);
  if (*d.state == d.first) return words + ", the first position of both";
  if (!d.digests) return words;  // those between kept states are not known
  return words + fmt::format(" (after update {}); the same: {}", *d.state,
                             *d.state - 1 == d.first
                                 ? fmt::format("{}", d.first)
                                 : fmt::format("{}..{}", d.first, *d.state - 1));
}

std::string RunText(const DiffFlags& flags, const OpenedRun& a, const OpenedRun& b,
                    const RunDifference& d, const std::vector<RecipeDifference>& recipes) {
  std::string out = Verdict(flags, d.identical(), RunWords(d));
  if (a.history().last_position() != b.history().last_position()) {
    out += fmt::format("A ends at {}, B at {}; compared is what both have\n",
                       a.history().last_position(), b.history().last_position());
  }
  out += KinText(a, b);
  if (!recipes.empty()) {
    TextTable table({{"recipe", true}, {"A", true}, {"B", true}});
    for (const RecipeDifference& r : recipes) table.AddRow({r.key, ValueText(r.a), ValueText(r.b)});
    out += "\n" + table.Text(flags.output);
  }
  if (d.record) {
    TextTable table(
        {{fmt::format("record of update {}", *d.record), true}, {"A", true}, {"B", true}});
    for (const FieldDifference& f : d.fields) table.AddRow({f.name, f.a, f.b});
    out += "\n" + table.Text(flags.output);
  }
  if (!d.state) return out;
  if (!d.compared) {
    return out +
           "\nno later state is kept by both, so tensors are not compared; 'retrace replay' "
           "with --out makes a branch that keeps its states\n";
  }
  out += fmt::format("\nstates at {}{}: {}\n\n", *d.compared,
                     *d.compared == *d.state ? "" : ", the first from there on that both keep",
                     FirstWords(d.tensors));
  return out + ScalarsText(flags, d.tensors.scalars) + TensorsText(flags, d.tensors.tensors);
}

Json RunJson(const DiffFlags& flags, const OpenedRun& a, const OpenedRun& b, const RunDifference& d,
             const std::vector<RecipeDifference>& recipes) {
  Json json = {{"a", flags.a},
               {"b", flags.b},
               {"identical", d.identical()},
               {"first_common", d.first},
               {"last_common", d.last}};
  json["first_differing_state"] = d.state ? Json(*d.state) : Json(nullptr);
  json["first_differing_record"] = d.record ? Json(*d.record) : Json(nullptr);
  json["record"] = Json::array();
  for (const FieldDifference& f : d.fields) {
    json["record"].push_back({{"field", f.name}, {"a", f.a}, {"b", f.b}});
  }
  json["recipe"] = Json::array();
  for (const RecipeDifference& r : recipes) {
    json["recipe"].push_back({{"key", r.key}, {"a", r.a}, {"b", r.b}});
  }
  json["interventions"] = {{"a", a.Interventions()}, {"b", b.Interventions()}};
  if (d.compared) {
    json["compared"] = *d.compared;
    if (!d.tensors.identical()) json["first_difference"] = FirstWords(d.tensors);
    json["counters_and_memories"] = JsonOf(d.tensors.scalars);
    AddJson(flags, d.tensors.tensors, &json);
  }
  return json;
}

void CompareRuns(const DiffFlags& flags, OpenedRun& a, OpenedRun& b) {
  for (const OpenedRun* run : {&a, &b}) {
    OrFail(SelectionOf(run->layout(), flags.only, "").status());
  }
  const RunDifference d = OrFail(DiffRuns(flags, a, b));
  const std::vector<RecipeDifference> recipes = DiffRecipes(a.recipe(), b.recipe());
  if (flags.output.json)
    PrintJson(RunJson(flags, a, b, d, recipes));
  else if (!flags.output.quiet)
    PrintReport(RunText(flags, a, b, d, recipes));
  EndWith(d.identical());
}

void RunDiff(const DiffFlags& flags) {
  if (AreTraces(flags.a, flags.b)) {
    CompareTraces({.a = flags.a, .b = flags.b, .only = flags.only, .truth = flags.truth,
                   .by = flags.by, .top = flags.top, .top_given = flags.top_given,
                   .output = flags.output});
  }
  if (!flags.truth.empty() || flags.by != "auto") {
    Fail(UsageError("--truth and --by are for two traces ('retrace trace'); " + flags.a + " and " +
                    flags.b + " are none"));
  }
  Side a = OrFail(OpenSide(flags.a)), b = OrFail(OpenSide(flags.b));
  const bool run_a = a.run && !a.address.position, run_b = b.run && !b.address.position;
  if (run_a && run_b) return CompareRuns(flags, *a.run, *b.run);
  if (run_a || run_b) {
    const std::string& run = run_a ? flags.a : flags.b;
    Fail(
        UsageError(fmt::format("'{}' is a run and '{}' is not; expected two runs, or a state: "
                               "'{}@k'",
                               run, run_a ? flags.b : flags.a, run)));
  }
  DiffAddressed(flags, &a, &b);
}

}  // namespace

void AddDiffCommand(CLI::App& app) {
  CLI::App* diff = app.add_subcommand("diff", "What differs between two states, runs or files");
  auto flags = std::make_shared<DiffFlags>();
  constexpr char kWhat[] =
      "RUN@k[:GLOB][#p|#m|#v|#g], RUN, a safetensors file, index or folder, an HDF5 file, or a trace";
  diff->add_option("a", flags->a, kWhat)->required();
  diff->add_option("b", flags->b, kWhat)->required();
  diff->add_option("--only", flags->only,
                   "Compare only tensors, or ops, whose names match this glob");
  diff->add_option("--by", flags->by,
                   "Two traces: bits, or what rounding explains; auto: that where their program or "
                   "precision differs")
      ->check(CLI::IsMember({"auto", "bits", "rounding"}))
      ->capture_default_str();
  diff->add_option("--truth", flags->truth, "Two traces: a third one, computed in FP64, to judge by");
  CLI::Option* top =
      WholeIn(diff->add_option("--top", flags->top, "Tensors in the table; 0: all"), 0)
          ->capture_default_str();
  AddOutputFlags(diff, &flags->output, true);
  diff->get_option("--quiet")->description("Print nothing: the exit code is the answer");
  diff->footer(kExamples);
  diff->callback([flags, top] {
    flags->top_given = top->count() > 0;
    RunDiff(*flags);
  });
}

}  // namespace retrace
