// replace-data: the updates of the dates consume another dataset.
#include <algorithm>
#include <limits>

#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  recipe->data.path = arguments.at("path");
  if (arguments.at("split") != "recipe") {
    recipe->data.split = arguments.at("split");
    std::replace(recipe->data.split.begin(), recipe->data.split.end(), '+', ',');
  }
  if (arguments.at("seed") != "recipe") {
    RT_ASSIGN_OR_RETURN(const uint64_t seed, WholeArgument(arguments, "seed"));
    if (seed > std::numeric_limits<uint32_t>::max()) {
      return UsageError("seed: expected at most 2^32 - 1, got '" + arguments.at("seed") + "'");
    }
    recipe->data.seed = static_cast<uint32_t>(seed);
  }
  RT_RETURN_IF_ERROR(DigestArgument(arguments, "identity"));
  const std::string& identity = arguments.at("identity");
  recipe->data.identity = identity == "any" ? "" : identity;
  return {};
}

}  // namespace

const InterventionKind kReplaceData = {
    .name = "replace-data",
    .summary = "Consume another dataset; the data cursor counts on, the evaluation batch stays",
    .touches = "recipe: data.path, data.split, data.seed, data.identity",
    .formula = "sample i = sample i of the other dataset",
    .example = "replace-data:data/other@6..9",
    .reference =
        "Chowdhery et al. 2022, arXiv 2204.02311, section 5.1; docs/architecture.md, \"Surgery\"",
    .parameters = {{"path", "prefix of the other dataset's .bin and .idx", ""},
                   {"split", "TRAIN+VALIDATION+TEST weights, or recipe", "recipe"},
                   {"seed", "of its shuffles, or recipe", "recipe"},
                   {"identity", "digest that the dataset has to have, or any", "any"}},
    .edit_recipe = Edit};

}  // namespace retrace
