// Intervention: a named, parametrised, dated change to state, recipe or data, as in
// "clip:none@16..18". Used by replay --do and by experiments. One file and one registry entry each.
//
// Text: NAME[:KEY=VALUE,...][@k[..l]]; a value without a key is the first parameter's. A state
// intervention edits RUN@(k-1) just before update k; a recipe intervention is in force during updates
// k..l, and so does an intervention on the updates themselves. Without a date: k is the first
// replayed update, and all but state interventions stay in force.
// Pure: an intervention reads nothing but its arguments. Thread-safe.
#ifndef RETRACE_SURGERY_INTERVENTION_H_
#define RETRACE_SURGERY_INTERVENTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/glob.h"
#include "core/recipe.h"
#include "core/status.h"
#include "replay/job.h"

namespace retrace {

// The value of a parameter that leaves things as the recipe has them; canonical forms omit it.
inline constexpr char kAsTheRecipe[] = "recipe";

// One parameter of an intervention, for parsing and for documentation.
struct Parameter {
  std::string name;
  std::string meaning;        // values and unit
  std::string default_value;  // "": required
};

using Arguments = std::map<std::string, std::string>;  // every parameter, defaults filled in

// An update within the dates of an intervention.
struct DatedUpdate {
  int64_t update = 0, first = 0, last = 0;  // first <= update <= last, as dated
  int64_t cursor = 0;                       // samples consumed before the update
  int64_t samples = 0;                      // of an update
};

// What a verb is; the registry holds one of each.
struct InterventionKind {
  std::string name;
  std::string summary;
  std::string touches;    // "state: m, v", "recipe: optimizer.clip"
  std::string formula;    // what a touched value becomes, or what is computed with it
  std::string example;
  std::string reference;  // the paper or report it comes from
  std::vector<Parameter> parameters;

  // Checks values before anything runs; nullptr: `edit_recipe` on a recipe of defaults does. Errors:
  // kUsage.
  Status (*check)(const Arguments& arguments) = nullptr;
  // One of the three. `edit_state` works on this rank's slabs, replicas excluded (they are shared
  // afterwards); `edit_update` on what an update does besides its recipe.
  Status (*edit_state)(const Arguments& arguments, Job& job) = nullptr;
  Status (*edit_recipe)(const Arguments& arguments, Recipe* recipe) = nullptr;
  Status (*edit_update)(const Arguments& arguments, const DatedUpdate& dated,
                        UpdateDirective* directive) = nullptr;
  // With edit_state, at a branch's first update only: what it makes of the parent's recipe. The
  // state that is edited has then the tensors and shards of that recipe (remake.h).
  Status (*remake)(const Arguments& arguments, Recipe* recipe) = nullptr;
  // With edit_state, where that moves the data cursor: to where. `samples`: of an update.
  Status (*move_cursor)(const Arguments& arguments, int64_t samples, int64_t* cursor) = nullptr;
  // Fills in what the arguments leave to what lies on disk, the digest of another run's state, so
  // that a lineage says what was taken and not only from where.
  Status (*resolve)(Arguments* arguments) = nullptr;
};

struct Intervention {
  const InterventionKind* kind = nullptr;
  Arguments arguments;
  std::optional<int64_t> first, last;  // updates; state interventions: the same one
  bool inherited =
      false;  // stands in the parent's lineage: its dates may lie outside of the branch

  // Canonical text: every argument by name, dates as given. What lineage and plans show.
  std::string Text() const;
};

// All kinds, by name.
const std::vector<const InterventionKind*>& InterventionKinds();

// docs/interventions.md.
std::string InterventionReference();

// Errors: kUsage, naming what was expected and the nearest valid name.
Result<Intervention> ParseIntervention(const std::string& text);

// A list of interventions as a script of updates first..last of a branch.
class InterventionScript : public Script {
 public:
  // Errors: kUsage for a date outside first..last, but for inherited ones.
  static Result<InterventionScript> Make(std::vector<Intervention> interventions, int64_t first,
                                         int64_t last);

  Status EditState(int64_t update, Job& job, bool* edited) override;
  Result<Recipe> RecipeFor(int64_t update, const Recipe& base) override;
  Status EditDirective(int64_t update, const Recipe& recipe, UpdateDirective* directive) override;
  std::string Text() const;  // canonical, one a line
  const std::vector<Intervention>& interventions() const { return interventions_; }

  // What can be known before anything runs: every glob matches a tensor of `base`, the branch's
  // recipe, every recipe that will be in force is valid, and the samples that the updates will
  // consume, from `cursor` on, are there. Errors: kUsage.
  Status Check(const Recipe& base, int64_t cursor);

  // What each intervention makes of what each update does, as far as it is known before anything
  // runs: an update that is skipped for what it computes may leave the data cursor behind. `cursor`:
  // at the first update. Errors: kUsage; the samples have to be there.
  using SeeUpdate = std::function<void(const Intervention&, int64_t update,
                                       const UpdateDirective& before, const UpdateDirective& after)>;
  Status ForecastUpdates(const Recipe& base, int64_t cursor, const SeeUpdate& see);

 private:
  Status CheckSamples(const Recipe& base, int64_t cursor);
  Status MoveCursor(int64_t update, int64_t samples, int64_t* cursor) const;
  Status EditDirective(int64_t update, int64_t samples, UpdateDirective* directive,
                       const SeeUpdate& see) const;

  std::vector<Intervention> interventions_;
  int64_t first_ = 0, last_ = 0;
};

// Numbers of arguments. Errors: kUsage naming the parameter.
Result<double> NumberArgument(const Arguments& arguments, const std::string& name);
Result<uint64_t> WholeArgument(const Arguments& arguments, const std::string& name);  // <= 2^53
// In low .. high, both included; a NaN is not.
Result<double> NumberArgumentIn(const Arguments& arguments, const std::string& name, double low,
                                double high);
// Errors: kUsage where the value is none of `choices`; it names the nearest.
Status ChoiceArgument(const Arguments& arguments, const std::string& name,
                      const std::vector<std::string>& choices);
// "any", or 32 hexadecimal digits.
Status DigestArgument(const Arguments& arguments, const std::string& name);
Result<bool> OnOffArgument(const Arguments& arguments, const std::string& name);

// Errors: kUsage where no tensor matches.
Status CheckGlob(const Layout& layout, const std::string& glob);

// Calls visit(spec, piece, slab) for every piece of this rank's shards whose tensor matches.
void ForEachPiece(Job& job, const std::string& glob,
                  const std::function<void(const TensorSpec&, const Piece&, ShardState&)>& visit);

}  // namespace retrace

#endif  // RETRACE_SURGERY_INTERVENTION_H_
