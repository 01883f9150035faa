// init: parameters drawn anew, as RUN@0 of another init recipe.
#include <algorithm>

#include "replay/initial_state.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Apply(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(
      ChoiceArgument(arguments, "scheme", {"recipe", "hf", "residual-scaled", "zero"}));
  const std::string& scheme = arguments.at("scheme");
  for (const char* name : {"std", "embedding_std", "seed"}) {
    if (scheme != "zero" || arguments.at(name) == "recipe") continue;
    return UsageError(std::string(name) + ": scheme=zero draws nothing, so it would change nothing");
  }
  if (scheme == "hf") recipe->init.scheme = InitScheme::kHf;
  if (scheme == "residual-scaled") recipe->init.scheme = InitScheme::kResidualScaled;
  if (arguments.at("std") != "recipe") {
    RT_ASSIGN_OR_RETURN(recipe->init.std, NumberArgumentIn(arguments, "std", 0, 1e30));
  }
  if (arguments.at("embedding_std") != "recipe") {
    RT_ASSIGN_OR_RETURN(recipe->init.embedding_std,
                        NumberArgumentIn(arguments, "embedding_std", 0, 1e30));
  }
  if (arguments.at("seed") != "recipe") {
    RT_ASSIGN_OR_RETURN(recipe->init.seed, WholeArgument(arguments, "seed"));
  }
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Apply(arguments, &recipe);
}

Status Edit(const Arguments& arguments, Job& job) {
  Recipe recipe = job.recipe();
  RT_RETURN_IF_ERROR(Apply(arguments, &recipe));
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), arguments.at("only")));
  ForEachPiece(job, arguments.at("only"), [&](const TensorSpec& spec, const Piece& piece,
                                              ShardState& slab) {
    float* out = slab.slab(Component::kParameter).data() + piece.offset;
    if (arguments.at("scheme") == "zero") std::fill_n(out, piece.numel(), 0.0f);
    else InitialPiece(recipe, spec, piece, out);
  });
  return {};
}

}  // namespace

const InterventionKind kInit = {
    .name = "init",
    .summary = "Draw parameters anew; moments and counters stay",
    .touches = "state: p",
    .formula = "p = std * N(0, 1), norm weights 1; or 0",
    .example = "init:residual-scaled@1",
    .reference = "Megatron-LM's scaled init of output layers; Takase et al. 2023, arXiv 2312.16903",
    .parameters = {{"scheme", "recipe (as the run began), hf, residual-scaled or zero", "recipe"},
                   {"std", "of the matrices within layers, or recipe", "recipe"},
                   {"embedding_std", "of the embedding and an untied head, or recipe", "recipe"},
                   {"seed", "or recipe", "recipe"},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
