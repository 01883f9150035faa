// Initial values: RUN@0 of a recipe. Used by train and by the `init` intervention.
// A value is a function of (seed, tensor name, element): it depends neither on V nor on ranks, nor
// on which other tensors the model has (clause 13).
#ifndef RETRACE_REPLAY_INITIAL_STATE_H_
#define RETRACE_REPLAY_INITIAL_STATE_H_

#include "core/layout.h"
#include "core/recipe.h"
#include "kernels/engine.h"
#include "replay/rank_state.h"

namespace retrace {

// Computes   N(0, std) by Box-Muller over Philox in FP64, rounded once; norm weights 1; row pad_token
//            of the embedding 0 where the recipe says so
// Shapes     the elements of `piece`, row by row, to out
// Order      none
// Guarantee  same value for an element whatever the piece
// Clause     2, 13
// Source     transformers' _init_weights (hf); Megatron's scaled init of output layers
//            (residual-scaled: std / sqrt(2 * layers) for o_proj and down_proj)
void InitialPiece(const Recipe& recipe, const TensorSpec& spec, const Piece& piece, float* out);

// All of a rank's parameters, drawn by the engine's threads; moments and counters zero.
RankState InitialState(const Recipe& recipe, const ParameterMap& map, Engine& engine);

}  // namespace retrace

#endif  // RETRACE_REPLAY_INITIAL_STATE_H_
