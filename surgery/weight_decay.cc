// weight-decay: another decoupled weight decay, or other tensors that it acts on.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  const std::string &value = arguments.at("value"), &which = arguments.at("which");
  if (value == "recipe" && which == "recipe" && arguments.at("only") == "recipe") {
    return UsageError("expected value=DECAY, which=all|matrices or only=GLOB");
  }
  if (arguments.at("only") != "recipe") recipe->optimizer.decay_only = arguments.at("only");
  if (value != "recipe") {
    RT_ASSIGN_OR_RETURN(recipe->optimizer.weight_decay,
                        NumberArgumentIn(arguments, "value", 0, 1e30));
  }
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "which", {"recipe", "all", "matrices"}));
  if (which == "all") recipe->optimizer.decay_on = DecayOn::kAll;
  if (which == "matrices") recipe->optimizer.decay_on = DecayOn::kMatrices;
  return {};
}

}  // namespace

const InterventionKind kWeightDecay = {
    .name = "weight-decay",
    .summary = "Decay weights at another rate, on all tensors, on matrices, or on those of a glob",
    .touches = "recipe: optimizer.weight_decay, optimizer.decay_on, optimizer.decay_only",
    .formula = "u = u + decay * p",
    .example = "weight-decay:0.033,which=matrices",
    .reference =
        "Loshchilov and Hutter 2019, arXiv 1711.05101; Megatron Core decays tensors of two "
        "dimensions only",
    .parameters = {{"value", "times the learning rate, at least 0, or recipe", "recipe"},
                   {"which", "all, matrices, or recipe", "recipe"},
                   {"only", "glob over the names of those that decay, or recipe", "recipe"}},
    .edit_recipe = Edit};

}  // namespace retrace
