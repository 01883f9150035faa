// Attention over the heads of one virtual shard, in the two orders a recipe can choose:
// materialised scores, or key blocks with an online softmax (clause 9). Used by the transformer.
// Not thread-safe beyond the engine's own threads.
//
// Legend: B sequences, S positions each, T = B*S tokens; query head j uses KV head
// j * kv_heads / query_heads. q [T, query_heads*D], k and v [T, kv_heads*D], output as q.
#ifndef RETRACE_KERNELS_ATTENTION_H_
#define RETRACE_KERNELS_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "core/recipe.h"
#include "kernels/attention_args.h"
#include "kernels/engine.h"

namespace retrace {

template <class T>
struct AttentionConfig {
  AttentionKind kind;
  int64_t sequences, length, query_heads, kv_heads, dim;
  int64_t window;  // keys a query sees, itself included; 0: all before it
  T scale;
  Rounding scores, softmax, output;               // forward points
  Rounding grad_scores, grad_softmax, grad_query;  // gradients of scores, probabilities and q
};

// What the forward pass leaves for the backward pass.
template <class T>
struct AttentionSaved {
  ComputeVector<T> p;     // materialised: unrounded probabilities [B, heads, S, S]
  ComputeVector<T> m, l;  // blockwise: row maximum and sum [B, heads, S]
};

// Buffers shared by all layers.
template <class T>
struct AttentionScratch {
  ComputeVector<T> p_rounded, dp;      // materialised [B, heads, S, S]
  ComputeVector<T> dk_head, dv_head;   // heads of a group after the first [heads][T, D]
  ComputeVector<T> dot;                // blockwise [B, heads, S]
  std::vector<std::vector<T>> tile;  // blockwise, one per worker
};

// Computes   softmax(mask(q k^T * scale)) v
// Shapes     as in the legend
// Order      clause 9; products by clause 5 over D, and over all keys of the sequence (materialised,
//            masked probabilities +0) or of a block (blockwise)
// Guarantee  same bits for any threads
// Clause     5, 6, 9
template <class T>
void AttentionForward(Engine& engine, const AttentionConfig<T>& config, const T* q, const T* k,
                      const T* v, T* output, AttentionSaved<T>* saved,
                      AttentionScratch<T>* scratch);

// Computes   dq (rounded by grad_query), dk and dv (unrounded: the shard tree and rounding follow)
// Shapes     as in the legend; output and doutput as q
// Order      dq over keys (key blocks ascending); dk, dv over queries (query blocks ascending), then
//            the query heads of the group ascending
// Guarantee  same bits for any threads
// Clause     5, 6, 9
template <class T>
void AttentionBackward(Engine& engine, const AttentionConfig<T>& config, const T* q, const T* k,
                       const T* v, const T* output, const T* doutput,
                       const AttentionSaved<T>& saved, T* dq, T* dk, T* dv,
                       AttentionScratch<T>* scratch);

}  // namespace retrace

#endif  // RETRACE_KERNELS_ATTENTION_H_
