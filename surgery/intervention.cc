#include "surgery/intervention.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <set>

#include "core/nearest_name.h"
#include "core/recipe_check.h"
#include "replay/recipe_plan.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

// "a,b=c" -> parts; a comma inside brackets belongs to its part.
std::vector<std::string> SplitArguments(const std::string& text) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (char c : text) {
    if (c == '[') ++depth;
    if (c == ']') --depth;
    if (c == ',' && depth == 0) {
      parts.push_back(part);
      part.clear();
    } else {
      part.push_back(c);
    }
  }
  if (!text.empty()) parts.push_back(part);
  return parts;
}

Result<int64_t> ParseUpdate(const std::string& text, const std::string& whole) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    return UsageError("'" + whole + "': expected @k or @k..l with updates from 1, got '@" + text +
                      "'");
  }
  return value;
}

Status ParseDates(const std::string& dates, const std::string& whole, Intervention* out) {
  const size_t dots = dates.find("..");
  RT_ASSIGN_OR_RETURN(out->first, ParseUpdate(dates.substr(0, dots), whole));
  if (dots == std::string::npos) {
    out->last = out->first;
    return {};
  }
  RT_ASSIGN_OR_RETURN(out->last, ParseUpdate(dates.substr(dots + 2), whole));
  if (*out->last < *out->first) {
    return UsageError("'" + whole + "': expected k <= l in @k..l");
  }
  return {};
}

// Does "NAME=VALUE" name a parameter, if only by mistake? A path or a glob may have a '=' too.
bool LooksLikeKey(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || c == '_' || c == '-';
  });
}

Status CheckArguments(const InterventionKind& kind, const Arguments& arguments) {
  if (kind.check != nullptr) return kind.check(arguments);
  if (kind.edit_recipe == nullptr) return {};
  Recipe recipe;
  return kind.edit_recipe(arguments, &recipe);
}

Status ParseArguments(const std::string& text, const std::string& whole, Intervention* out) {
  const std::vector<Parameter>& parameters = out->kind->parameters;
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    if (!parameter.default_value.empty()) out->arguments[parameter.name] = parameter.default_value;
  }
  std::set<std::string> given;
  const std::vector<std::string> parts = SplitArguments(text);
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    std::string name = parts[i].substr(0, equals);
    std::string value = equals == std::string::npos ? "" : parts[i].substr(equals + 1);
    const bool known = std::find(names.begin(), names.end(), name) != names.end();
    const bool key = equals != std::string::npos && LooksLikeKey(name);
    if (i == 0 && !names.empty() && !known && !key) {  // the first parameter's value, without its name
      name = names[0];
      value = parts[0];
    } else if (!known) {
      return UsageError(fmt::format("'{}': {} has no parameter '{}'{}", whole, out->kind->name, name,
                                    names.empty() ? "" : "; the nearest is '" +
                                                             NearestName(name, names) + "'"));
    }
    if (value.empty()) {
      return UsageError("'" + whole + "': expected a value for '" + name + "'");
    }
    if (!given.insert(name).second) {
      return UsageError("'" + whole + "': '" + name + "' is given twice");
    }
    out->arguments[name] = value;
  }
  for (const Parameter& parameter : parameters) {
    if (out->arguments.contains(parameter.name)) continue;
    return UsageError(fmt::format("'{}': {} needs {}: {}", whole, out->kind->name, parameter.name,
                                  parameter.meaning));
  }
  return CheckArguments(*out->kind, out->arguments).Within("'" + whole + "'");
}

}  // namespace

const std::vector<const InterventionKind*>& InterventionKinds() {
  static const std::vector<const InterventionKind*> kKinds = [] {
    std::vector<const InterventionKind*> kinds = RegisteredKinds();
    std::sort(kinds.begin(), kinds.end(),
              [](const auto* a, const auto* b) { return a->name < b->name; });
    return kinds;
  }();
  return kKinds;
}

Result<Intervention> ParseIntervention(const std::string& text) {
  Intervention out;
  const size_t at = text.rfind('@');
  const std::string verb = text.substr(0, at);
  const size_t colon = verb.find(':');
  const std::string name = verb.substr(0, colon);
  std::vector<std::string> names;
  for (const InterventionKind* kind : InterventionKinds()) {
    names.push_back(kind->name);
    if (kind->name == name) out.kind = kind;
  }
  if (out.kind == nullptr) {
    return UsageError(fmt::format("'{}': there is no intervention '{}'; the nearest is '{}', all "
                                  "are {}",
                                  text, name, NearestName(name, names), fmt::join(names, ", ")));
  }
  if (at != std::string::npos) {
    RT_RETURN_IF_ERROR(ParseDates(text.substr(at + 1), text, &out));
    if (out.kind->edit_state && out.first != out.last) {
      return UsageError("'" + text + "': " + name +
                        " edits a state, so it takes one date, @k, not a range");
    }
  }
  const std::string arguments = colon == std::string::npos ? "" : verb.substr(colon + 1);
  RT_RETURN_IF_ERROR(ParseArguments(arguments, text, &out));
  return out;
}

std::string Intervention::Text() const {
  std::string text = kind->name;
  char separator = ':';
  for (const Parameter& parameter : kind->parameters) {
    const std::string& value = arguments.at(parameter.name);
    if (value == kAsTheRecipe && parameter.default_value == kAsTheRecipe) continue;
    text += separator + parameter.name + "=" + value;
    separator = ',';
  }
  if (first) text += "@" + std::to_string(*first);
  if (last && last != first) text += ".." + std::to_string(*last);
  return text;
}

Result<InterventionScript> InterventionScript::Make(std::vector<Intervention> interventions,
                                                    int64_t first, int64_t last) {
  for (Intervention& intervention : interventions) {
    if (!intervention.first) {
      intervention.first = first;
      intervention.last = intervention.kind->edit_state ? first : last;
    }
    if (intervention.inherited) continue;
    if (*intervention.first < first || *intervention.last > last) {
      return UsageError(fmt::format("'{}': expected dates within the replayed updates {}..{}",
                                    intervention.Text(), first, last));
    }
  }
  InterventionScript script;
  script.interventions_ = std::move(interventions);
  script.first_ = first;
  script.last_ = last;
  return script;
}

Status InterventionScript::EditState(int64_t update, Job& job, bool* edited) {
  for (const Intervention& intervention : interventions_) {
    if (!intervention.kind->edit_state || *intervention.first != update) continue;
    RT_RETURN_IF_ERROR(intervention.kind->edit_state(intervention.arguments, job)
                           .Within("'" + intervention.Text() + "'"));
    *edited = true;
  }
  return {};
}

Result<Recipe> InterventionScript::RecipeFor(int64_t update, const Recipe& base) {
  Recipe recipe = base;
  for (const Intervention& intervention : interventions_) {
    if (!intervention.kind->edit_recipe || update < *intervention.first ||
        update > *intervention.last) {
      continue;
    }
    RT_RETURN_IF_ERROR(intervention.kind->edit_recipe(intervention.arguments, &recipe)
                           .Within("'" + intervention.Text() + "'"));
  }
  return recipe;
}

Status InterventionScript::EditDirective(int64_t update, const Recipe& recipe,
                                         UpdateDirective* directive) {
  return EditDirective(update, recipe.data.SamplesPerStep(), directive, nullptr);
}

Status InterventionScript::EditDirective(int64_t update, int64_t samples,
                                         UpdateDirective* directive, const SeeUpdate& see) const {
  const int64_t cursor = directive->cursor - samples;
  for (const Intervention& intervention : interventions_) {
    const DatedUpdate dated = {.update = update, .first = *intervention.first,
                               .last = *intervention.last, .cursor = cursor, .samples = samples};
    if (!intervention.kind->edit_update || update < dated.first || update > dated.last) continue;
    const UpdateDirective before = *directive;
    RT_RETURN_IF_ERROR(
        intervention.kind->edit_update(intervention.arguments, dated, directive)
            .Within("'" + intervention.Text() + "'"));
    if (see) see(intervention, update, before, *directive);
  }
  return {};
}

Status InterventionScript::MoveCursor(int64_t update, int64_t samples, int64_t* cursor) const {
  for (const Intervention& intervention : interventions_) {
    if (!intervention.kind->move_cursor || *intervention.first != update) continue;
    RT_RETURN_IF_ERROR(intervention.kind->move_cursor(intervention.arguments, samples, cursor)
                           .Within("'" + intervention.Text() + "'"));
  }
  return {};
}

Status InterventionScript::ForecastUpdates(const Recipe& base, int64_t cursor,
                                           const SeeUpdate& see) {
  const int64_t samples = base.data.SamplesPerStep(), planned = PlannedSamples(base);
  for (int64_t update = first_; update <= last_; ++update) {
    RT_RETURN_IF_ERROR(MoveCursor(update, samples, &cursor));
    UpdateDirective directive = {.samples = Consecutive(cursor, samples),
                                 .cursor = cursor + samples};
    RT_RETURN_IF_ERROR(EditDirective(update, samples, &directive, see));
    for (const int64_t sample : directive.samples) {
      if (sample >= 0 && sample < planned) continue;
      return UsageError(fmt::format(
          "update {} would consume sample {}: expected one of 0..{}, the samples that the recipe "
          "plans (steps = {}, {} an update). End before that update, pass over fewer samples, or "
          "record a run that plans more steps",
          update, sample, planned - 1, base.steps, samples));
    }
    cursor = directive.cursor;
  }
  return {};
}

namespace {

// What an intervention on updates does, over all of its dates.
struct Effect {
  bool any = false;
  int64_t least = std::numeric_limits<int64_t>::max(), most = 0;  // samples without it

  void Add(const UpdateDirective& before, const UpdateDirective& after) {
    any |= before.samples != after.samples || before.cursor != after.cursor ||
           before.skip != after.skip;
    const auto [from, to] = std::minmax_element(before.samples.begin(), before.samples.end());
    least = std::min(least, *from);
    most = std::max(most, *to);
  }
};

}  // namespace

// Every update has its samples, and each intervention on updates changes some, alone or after
// others: a typing error in a sample's number would else pass for a theory that came to nothing.
Status InterventionScript::CheckSamples(const Recipe& base, int64_t cursor) {
  std::map<const Intervention*, Effect> effects;
  UpdateDirective plain;  // of the update, as it is without interventions
  int64_t at = -1;
  Status status;
  const auto see = [&](const Intervention& intervention, int64_t update,
                       const UpdateDirective& before, const UpdateDirective& after) {
    if (update != at) plain = before;
    at = update;
    const int64_t samples = std::ssize(plain.samples);
    UpdateDirective alone = plain;
    const DatedUpdate dated = {.update = update,
                               .first = *intervention.first,
                               .last = *intervention.last,
                               .cursor = plain.cursor - samples,
                               .samples = samples};
    const Status edited =
        intervention.kind->edit_update(intervention.arguments, dated, &alone);
    if (status.ok()) status = edited.Within("'" + intervention.Text() + "'");
    effects[&intervention].Add(plain, alone);
    effects[&intervention].Add(before, after);
  };
  RT_RETURN_IF_ERROR(ForecastUpdates(base, cursor, see));
  RT_RETURN_IF_ERROR(status);
  for (const auto& [intervention, effect] : effects) {
    const bool drawn = intervention->arguments.contains("seed");  // perhaps the order that was
    if (effect.any || drawn || intervention->inherited) continue;
    return UsageError(fmt::format("'{}': changes nothing: its updates consume samples of {}..{}",
                                  intervention->Text(), effect.least, effect.most));
  }
  return {};
}

Status InterventionScript::Check(const Recipe& base, int64_t cursor) {
  RT_ASSIGN_OR_RETURN(const Layout layout, Layout::Make(base.model, base.topology.virtual_shards));
  std::set<int64_t> changes;  // updates at which the recipe in force may change
  for (const Intervention& intervention : interventions_) {
    changes.insert(*intervention.first);
    const auto only = intervention.arguments.find("only");
    if (only == intervention.arguments.end() || only->second == "recipe") continue;
    RT_RETURN_IF_ERROR(CheckGlob(layout, only->second).Within("'" + intervention.Text() + "'"));
  }
  for (const Intervention& intervention : interventions_) {
    if (*intervention.last < last_) changes.insert(*intervention.last + 1);
  }
  RT_RETURN_IF_ERROR(CheckSamples(base, cursor));
  for (const int64_t update : changes) {
    RT_ASSIGN_OR_RETURN(const Recipe recipe, RecipeFor(update, base));
    RT_RETURN_IF_ERROR(
        CheckRecipe(recipe).Within("the interventions in force at update " + std::to_string(update)));
    if (SameDataset(recipe.data, base.data)) continue;
    RT_RETURN_IF_ERROR(OpenTrainingSource(recipe, nullptr).status());
  }
  return {};
}

std::string InterventionScript::Text() const {
  std::string text;
  for (const Intervention& intervention : interventions_) text += intervention.Text() + "\n";
  return text;
}

Result<double> NumberArgument(const Arguments& arguments, const std::string& name) {
  const std::string& text = arguments.at(name);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return UsageError(name + ": expected a number, got '" + text + "'");
  }
  return value;
}

Result<uint64_t> WholeArgument(const Arguments& arguments, const std::string& name) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgument(arguments, name));
  if (value >= 0 && value <= 9007199254740992.0 &&
      value == static_cast<double>(static_cast<uint64_t>(value))) {
    return static_cast<uint64_t>(value);
  }
  return UsageError(name + ": expected a whole number of at most 2^53, got '" +
                    arguments.at(name) + "'");
}

Result<double> NumberArgumentIn(const Arguments& arguments, const std::string& name, double low,
                                double high) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgument(arguments, name));
  if (value >= low && value <= high) return value;
  return UsageError(fmt::format("{}: expected a number in {} .. {}, got '{}'", name, low, high,
                                arguments.at(name)));
}

Status ChoiceArgument(const Arguments& arguments, const std::string& name,
                      const std::vector<std::string>& choices) {
  const std::string& value = arguments.at(name);
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return {};
  return UsageError(fmt::format("{}: expected one of {}, got '{}'; the nearest is '{}'", name,
                                fmt::join(choices, ", "), value, NearestName(value, choices)));
}

Result<bool> OnOffArgument(const Arguments& arguments, const std::string& name) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, name, {"off", "on"}));
  return arguments.at(name) == "on";
}

Status DigestArgument(const Arguments& arguments, const std::string& name) {
  const std::string& text = arguments.at(name);
  if (text == "any" || ParseDigest(text).ok()) return {};
  return UsageError(name + ": expected any, or a digest of 32 hexadecimal digits, got '" + text +
                    "'");
}

Status CheckGlob(const Layout& layout, const std::string& glob) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : layout.tensors()) {
    if (GlobMatches(glob, spec.name)) return {};
    names.push_back(spec.name);
  }
  return UsageError("only: no tensor matches '" + glob + "'; the nearest is '" +
                    NearestName(glob, names) + "'");
}

void ForEachPiece(Job& job, const std::string& glob,
                  const std::function<void(const TensorSpec&, const Piece&, ShardState&)>& visit) {
  const Layout& layout = job.layout();
  for (int i = 0; i < job.map().shard_count(); ++i) {
    for (const Piece& piece : layout.pieces(job.map().first_shard() + i)) {
      const TensorSpec& spec = layout.tensors()[piece.tensor];
      if (GlobMatches(glob, spec.name)) visit(spec, piece, job.state().slab(i));
    }
  }
}

}  // namespace retrace
