// The checks that a recipe passes before anything runs: every value in its range, and every rule
// that ties values to each other. Used by the recipe parser, and by whoever edits a Recipe in
// memory (interventions). Pure.
#ifndef RETRACE_CORE_RECIPE_CHECK_H_
#define RETRACE_CORE_RECIPE_CHECK_H_

#include <optional>
#include <string>

#include "core/recipe.h"
#include "core/status.h"

namespace retrace {

struct RecipeProblem {
  std::string key;      // the dotted name that is best changed
  std::string message;  // expected, got, what to do
};

// The first problem in the order of the keys; nullopt: none.
std::optional<RecipeProblem> FindProblem(const Recipe& recipe);

// Errors: kUsage with "KEY: message".
Status CheckRecipe(const Recipe& recipe);

}  // namespace retrace

#endif  // RETRACE_CORE_RECIPE_CHECK_H_
