// One part of ApplyBlock (update.h): an optimizer block applied to some elements of a slab, by the
// calling thread. Used by journal_walk.h. Implemented beside ApplyBlock, with the same bits.
#ifndef RETRACE_REPLAY_BLOCK_PART_H_
#define RETRACE_REPLAY_BLOCK_PART_H_

#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/optimizer_block.h"
#include "core/state.h"
#include "kernels/isa.h"

namespace retrace {

// Elements [first, first + count) of a slab of these pieces; `gradient`: theirs alone. Thread-safe on
// disjoint ranges.
void ApplyBlockPart(Isa isa, const OptimizerBlock& block, const std::vector<Piece>& pieces,
                    int64_t first, int64_t count, const float* gradient, ShardState* slab);

}  // namespace retrace

#endif  // RETRACE_REPLAY_BLOCK_PART_H_
