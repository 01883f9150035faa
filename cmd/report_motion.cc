#include "cmd/report_motion.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "replay/solo_comm.h"
#include "replay/state_norms.h"
#include "surgery/diagnose.h"
#include "surgery/excursion.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kHeatRuns = 6;  // heat maps of the first ones: each takes some 100 kB
constexpr int64_t kBefore = 12, kAfter = 8, kWindowMax = 40;  // updates around the onset

// Moves that count, by what is measured.
const double kLeastFactor = std::log(1.5);
constexpr double kLeastNats = 0.1, kLeastShare = 0.05, kLeastCosine = 0.2;

Json Number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

// Five digits: what a heat map can show.
Json Rounded(double x) {
  return std::isfinite(x) ? Json(std::strtod(fmt::format("{:.5g}", x).c_str(), nullptr))
                          : Number(x);
}

// --- Where to look ---

struct Spike {
  size_t run = 0;  // of sources.runs
  bool evaluation = false;
  CurveFacts facts;
  std::optional<Excursion> loss;  // the loss's own
  int64_t first = 0, last = 0;    // updates to show
};

// Of the first run that has a spike, else of the first that has records.
std::optional<Spike> FindSpike(const ReportSources& sources) {
  std::optional<Spike> found;
  for (size_t i = 0; i < sources.runs.size(); ++i) {
    const LoggedRun& run = sources.runs[i];
    if (run.records.empty()) continue;
    Spike spike{.run = i, .evaluation = true, .facts = {}, .loss = {}};
    for (const UpdateRecord& r : run.records) spike.evaluation &= r.evaluation_loss.has_value();
    spike.facts = FactsOf(LossCurve(run, spike.evaluation));
    const bool spikes = spike.facts.rise >= kSpikeNats;
    if (!found || spikes) found = spike;
    if (spikes) break;
  }
  if (!found) return found;
  const LoggedRun& run = sources.runs[found->run];
  const int64_t first = run.records.front().update, last = run.records.back().update;
  if (found->facts.rise <= 0) {
    found->last = last;
    found->first = std::max(first, last - kWindowMax + 1);
    return found;
  }
  std::vector<double> values;
  for (const auto& [update, value] : LossCurve(run, found->evaluation)) {
    if (update >= found->facts.rise_from && update <= found->facts.rise_to) values.push_back(value);
  }
  found->loss = FindExcursion(values, {.first = found->facts.rise_from,
                                       .end_first = found->facts.rise_to,
                                       .end_last = found->facts.rise_to});
  const int64_t onset = found->loss ? found->loss->onset : found->facts.rise_to;
  found->first = std::max(first, onset - kBefore);
  found->last = std::min({last, found->facts.rise_to + kAfter, found->first + kWindowMax - 1});
  return found;
}

// --- What is known of the updates in the window ---

struct WindowRun {
  size_t index = 0;
  const LoggedRun* run = nullptr;
  std::vector<const UpdateRecord*> records;  // in the window
  UpdateRange kept;
  std::vector<UpdateMotion> motions;    // of `kept`
  std::vector<PassDiagnostics> passes;  // of all in the window, or none

  int64_t first() const { return records.front()->update; }
};

Status LiveWindow(ReportSources& sources, WindowRun* window) {
  const OpenedRun& run = *window->run->run;
  const int64_t first = window->first(), last = window->records.back()->update;
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                      Job::Make(run.recipe(), comm, {.threads = sources.threads}));
  return Diagnose(run.reader(), *job, {first, last},
                  [&](int64_t update, const PassDiagnostics& passes) {
                    window->passes.push_back(passes);
                    if (sources.progress) sources.progress(run.dir(), update, first - 1, last);
                  });
}

Result<WindowRun> ReadWindow(ReportSources& sources, size_t index, const Spike& spike) {
  WindowRun window;
  window.index = index;
  window.run = &sources.runs[index];
  for (const UpdateRecord& r : window.run->records) {
    if (r.update >= spike.first && r.update <= spike.last) window.records.push_back(&r);
  }
  if (window.records.empty()) return window;
  if (sources.replay) RT_RETURN_IF_ERROR(LiveWindow(sources, &window));
  if (!sources.states) return window;
  OpenedRun& run = *sources.runs[index].run;
  window.kept = KeptUpdates(run.history(), window.first(), window.records.back()->update);
  if (window.kept.first > window.kept.last) return window;
  const auto progress = [&](int64_t k) {
    if (sources.progress) {
      sources.progress(run.dir(), k, window.kept.first - 1, window.kept.last);
    }
  };
  progress(window.kept.first - 1);
  RT_RETURN_IF_ERROR(WalkNorms(run.reader(), run.layout(), run.engine(), window.kept, {},
                               [&](UpdateMotion motion) {
                                 progress(motion.update);
                                 window.motions.push_back(std::move(motion));
                               }));
  return window;
}

// --- Which quantity moved first ---

enum class Measure { kNats, kFactor, kShare, kCosine };

struct Quantity {
  std::string name, group;  // group: "loss", "gradient", "state"
  Measure measure = Measure::kFactor;
  std::vector<double> values;  // by update of the window; NaN: not known
};

double LeastOf(Measure measure) {
  switch (measure) {
    case Measure::kNats:
      return kLeastNats;
    case Measure::kFactor:
      return kLeastFactor;
    case Measure::kShare:
      return kLeastShare;
    case Measure::kCosine:
      return kLeastCosine;
  }
  return 0;
}

using TensorSet = std::function<bool(const TensorSpec&)>;

// Quantities of one run's window, made from sums over sets of tensors.
class QuantityList {
 public:
  explicit QuantityList(const WindowRun& window)
      : window_(window), tensors_(window.run->run->layout().tensors()) {}

  void AddRecords() {
    const bool evaluated = std::all_of(window_.records.begin(), window_.records.end(),
                                       [](const UpdateRecord* r) { return r->evaluation_loss; });
    if (evaluated) {
      AddRecord("evaluation loss", "loss", Measure::kNats,
                [](const UpdateRecord& r) { return *r.evaluation_loss; });
    }
    AddRecord("training loss", "loss", Measure::kNats,
              [](const UpdateRecord& r) { return r.loss; });
    AddRecord("gradient norm", "gradient", Measure::kFactor,
              [](const UpdateRecord& r) { return r.gradient_norm; });
    AddRecord("clip factor", "gradient", Measure::kFactor,
              [](const UpdateRecord& r) { return r.clip; });
  }

  void AddTensors(const std::string& of, const TensorSet& in) {
    AddRecord("gradient norm of " + of, "gradient", Measure::kFactor, [&](const UpdateRecord& r) {
      double sum = 0;
      for (size_t t = 0; t < tensors_.size(); ++t) {
        if (in(tensors_[t])) sum += r.tensor_norms[t] * r.tensor_norms[t];
      }
      return std::sqrt(sum);
    });
  }

  void AddMotions(const std::string& of, const TensorSet& in) {
    if (window_.motions.empty()) return;
    std::vector<double> rms, relative, below, cosine, second;
    for (const UpdateRecord* r : window_.records) {
      const TensorMotion sum = SumOf(*r, in);
      rms.push_back(sum.UpdateRms(r->lr));
      relative.push_back(sum.RelativeUpdate());
      second.push_back(sum.RootV());
      below.push_back(sum.below_eps / sum.elements);
      cosine.push_back(sum.CosineWithM());
    }
    Add({"Adam update RMS of " + of, "state", Measure::kFactor, rms});
    Add({"relative update of " + of, "state", Measure::kFactor, relative});
    Add({"√v of " + of, "state", Measure::kFactor, second});
    Add({"share of √v̂ < ε of " + of, "state", Measure::kShare, below});
    Add({"cosine of m and g of " + of, "state", Measure::kCosine, cosine});
  }

  void AddPasses() {
    if (window_.passes.empty()) return;
    using P = const PassDiagnostics&;
    AddPass("logit RMS", Measure::kFactor, [](P p) { return p.logit_rms; });
    AddPass("logsumexp, mean", Measure::kNats, [](P p) { return p.logsumexp_mean; });
    AddPass("cosine between tokens", Measure::kCosine, [](P p) { return p.token_cosine; });
    AddPass("share of the most predicted token", Measure::kShare,
            [](P p) { return p.predicted_share; });
    for (size_t l = 0; l < window_.passes[0].layers.size(); ++l) {
      const std::string of = fmt::format(" of layer {}", l);
      AddPass("residual RMS" + of, Measure::kFactor,
              [l](P p) { return p.layers[l].residual_rms; });
      AddPass("largest attention logit" + of, Measure::kFactor,
              [l](P p) { return p.layers[l].attention_logit; });
      AddPass("attention entropy" + of, Measure::kNats,
              [l](P p) { return p.layers[l].attention_entropy; });
      AddPass("‖∂L/∂x‖" + of, Measure::kFactor,
              [l](P p) { return p.layers[l].gradient_norm; });
    }
  }

  const std::vector<Quantity>& all() const { return quantities_; }

 private:
  void Add(Quantity quantity) { quantities_.push_back(std::move(quantity)); }

  template <class Get>
  void AddRecord(const std::string& name, const std::string& group, Measure measure, Get get) {
    Quantity quantity{name, group, measure, {}};
    for (const UpdateRecord* r : window_.records) quantity.values.push_back(get(*r));
    Add(std::move(quantity));
  }

  void AddPass(const std::string& name, Measure measure,
               const std::function<double(const PassDiagnostics&)>& get) {
    Quantity quantity{name, "pass", measure, {}};
    for (const PassDiagnostics& passes : window_.passes) quantity.values.push_back(get(passes));
    Add(std::move(quantity));
  }

  // Nothing, and so nothing but NaN, where no states are kept.
  TensorMotion SumOf(const UpdateRecord& r, const TensorSet& in) const {
    TensorMotion sum;
    if (r.update < window_.kept.first || r.update > window_.kept.last) return sum;
    const UpdateMotion& motion = window_.motions[r.update - window_.kept.first];
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (in(tensors_[t])) sum += motion.tensors[t];
    }
    return sum;
  }

  const WindowRun& window_;
  const std::vector<TensorSpec>& tensors_;
  std::vector<Quantity> quantities_;
};

std::vector<Quantity> QuantitiesOf(const WindowRun& window) {
  QuantityList list(window);
  list.AddRecords();
  std::vector<std::string> kinds;
  for (const TensorSpec& spec : window.run->run->layout().tensors()) {
    const std::string kind = TensorKind(spec);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  for (const std::string& kind : kinds) {
    list.AddTensors(kind, [&](const TensorSpec& spec) { return TensorKind(spec) == kind; });
  }
  for (int64_t layer = 0; layer < window.run->run->recipe().model.layers; ++layer) {
    list.AddTensors(fmt::format("layer {}", layer),
                    [&](const TensorSpec& spec) { return spec.layer == layer; });
  }
  list.AddMotions("all tensors", [](const TensorSpec&) { return true; });
  for (const std::string& kind : kinds) {
    list.AddMotions(kind, [&](const TensorSpec& spec) { return TensorKind(spec) == kind; });
  }
  list.AddPasses();
  return list.all();
}

Json MoversJson(const WindowRun& window, const Spike& spike) {
  Json movers = Json::array();
  int64_t asked = 0;
  for (const Quantity& quantity : QuantitiesOf(window)) {
    ++asked;
    const std::optional<Excursion> moved =
        FindExcursion(quantity.values, {.first = window.first(),
                                        .end_first = spike.loss->onset,
                                        .end_last = spike.facts.rise_to + 1,
                                        .log = quantity.measure == Measure::kFactor,
                                        .least = LeastOf(quantity.measure)});
    if (!moved) continue;
    movers.push_back({{"quantity", quantity.name},
                      {"group", quantity.group},
                      {"turn", moved->turn},
                      {"onset", moved->onset},
                      {"end", moved->end},
                      {"value_turn", Rounded(moved->value_turn)},
                      {"value_end", Rounded(moved->value_end)},
                      {"factor", quantity.measure == Measure::kFactor},
                      {"trend", moved->trend},
                      {"lead", spike.loss->onset - moved->onset}});
  }
  return {{"asked", asked}, {"moved", std::move(movers)}};
}

// --- Heat maps: a row a tensor, the page adds up layers and kinds ---

Json TensorsJson(const Layout& layout) {
  Json names = Json::array(), layers = Json::array(), kinds = Json::array(),
       elements = Json::array();
  for (const TensorSpec& spec : layout.tensors()) {
    names.push_back(spec.name);
    layers.push_back(spec.layer);
    kinds.push_back(TensorKind(spec));
    elements.push_back(spec.numel());
  }
  return {{"name", names}, {"layer", layers}, {"kind", kinds}, {"elements", elements}};
}

Json GradientRows(const WindowRun& window) {
  Json rows = Json::array();
  for (size_t t = 0; t < window.run->run->layout().tensors().size(); ++t) {
    Json row = Json::array();
    for (const UpdateRecord* r : window.records) row.push_back(Rounded(r->tensor_norms[t]));
    rows.push_back(std::move(row));
  }
  return rows;
}

Json MotionRows(const WindowRun& window, double (*get)(const TensorMotion&)) {
  Json rows = Json::array();
  for (size_t t = 0; t < window.run->run->layout().tensors().size(); ++t) {
    Json row = Json::array();
    for (const UpdateMotion& motion : window.motions) {
      row.push_back(Rounded(get(motion.tensors[t])));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

// A row a layer.
Json PassesJson(const WindowRun& window) {
  if (window.passes.empty()) return nullptr;
  Json json = Json::object();
  for (const auto& [name, member] :
       std::initializer_list<std::pair<const char*, double LayerDiagnostics::*>>{
           {"residual_rms", &LayerDiagnostics::residual_rms},
           {"attention_ratio", &LayerDiagnostics::attention_ratio},
           {"mlp_ratio", &LayerDiagnostics::mlp_ratio},
           {"attention_logit", &LayerDiagnostics::attention_logit},
           {"attention_peak", &LayerDiagnostics::attention_peak},
           {"attention_entropy", &LayerDiagnostics::attention_entropy},
           {"gradient_norm", &LayerDiagnostics::gradient_norm}}) {
    Json rows = Json::array();
    for (size_t l = 0; l < window.passes[0].layers.size(); ++l) {
      Json row = Json::array();
      for (const PassDiagnostics& p : window.passes) row.push_back(Rounded(p.layers[l].*member));
      rows.push_back(std::move(row));
    }
    json[name] = std::move(rows);
  }
  return json;
}

Json HeatJson(const WindowRun& window) {
  Json json = {{"run", window.index}, {"first", window.first()}, {"lr", Json::array()}};
  for (const UpdateRecord* r : window.records) json["lr"].push_back(Number(r->lr));
  json["gradient"] = GradientRows(window);
  json["passes"] = PassesJson(window);
  json["states"] = nullptr;
  if (window.motions.empty()) return json;
  Json states = {{"first", window.kept.first}, {"last", window.kept.last}};
  using Motion = const TensorMotion&;
  for (const auto& [name, get] :
       std::initializer_list<std::pair<const char*, double (*)(Motion)>>{
           {"parameter", [](Motion m) { return std::sqrt(m.parameter2); }},
           {"change", [](Motion m) { return std::sqrt(m.change2); }},
           {"second", [](Motion m) { return m.second; }},
           {"previous", [](Motion m) { return std::sqrt(m.previous2); }},
           {"along", [](Motion m) { return m.along; }},
           {"before", [](Motion m) { return std::sqrt(m.before2); }},
           {"turned", [](Motion m) { return m.turned; }},
           {"below_eps", [](Motion m) { return m.below_eps; }},
           {"gradient_below", [](Motion m) { return m.gradient_below; }}}) {
    states[name] = MotionRows(window, get);
  }
  json["states"] = std::move(states);
  return json;
}

Json SpikeJson(const Spike& spike) {
  if (!spike.loss) return nullptr;
  return {{"low", spike.facts.rise_from}, {"low_loss", spike.facts.rise_low},
          {"onset", spike.loss->onset},   {"peak", spike.facts.rise_to},
          {"rise", spike.facts.rise},     {"is_spike", spike.facts.rise >= kSpikeNats}};
}

}  // namespace

Result<std::string> MotionJson(ReportSources& sources) {
  const std::optional<Spike> spike = FindSpike(sources);
  if (!spike) return std::string();
  std::vector<size_t> order = {spike->run};
  for (size_t i = 0; i < sources.runs.size(); ++i) {
    if (i != spike->run) order.push_back(i);
  }
  Json json = {{"run", spike->run},          {"evaluation", spike->evaluation},
               {"first", spike->first},      {"last", spike->last},
               {"spike", SpikeJson(*spike)}, {"movers", nullptr},
               {"models", Json::array()},    {"heat", Json::array()}};
  int64_t left_out = 0;
  for (const size_t index : order) {
    if (json["heat"].size() == kHeatRuns) {
      ++left_out;
      continue;
    }
    RT_ASSIGN_OR_RETURN(const WindowRun window, ReadWindow(sources, index, *spike));
    if (window.records.empty()) continue;
    if (index == spike->run && spike->loss) json["movers"] = MoversJson(window, *spike);
    Json heat = HeatJson(window), tensors = TensorsJson(window.run->run->layout());
    const auto known = std::find(json["models"].begin(), json["models"].end(), tensors);
    heat["model"] = known - json["models"].begin();
    if (known == json["models"].end()) json["models"].push_back(std::move(tensors));
    json["heat"].push_back(std::move(heat));
  }
  json["heat_left_out"] = left_out;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace retrace
