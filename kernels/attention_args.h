// The arguments of blockwise attention on a device. Used by attention.cc, which has the same
// quantities in AttentionConfig, AttentionSaved and AttentionScratch, and by kernels/cuda. Values.
//
// Legend: that of attention.h; B sequences, S positions, D of a head.
#ifndef RETRACE_KERNELS_ATTENTION_ARGS_H_
#define RETRACE_KERNELS_ATTENTION_ARGS_H_

#include <cstdint>

#include "kernels/rounding.h"

namespace retrace {

// Positions of a block of keys and of a tile of queries (clause 9).
inline constexpr int64_t kAttentionBlock = 64;

template <class T>
struct BlockwiseAttention {
  int64_t sequences, length, query_heads, kv_heads, dim, window;
  T scale;
  Rounding scores, softmax, output, grad_scores, grad_softmax, grad_query;
  const T *q, *k, *v;
  T* out;         // [B*S, query_heads*D]; of the forward pass
  T *m, *l;       // [B, query_heads, S]; written forward, read backward
  const T *dout;  // backward only, as are the following
  const T* dot;   // [B, query_heads, S]: sum of dout * out
  T *dq, *dk, *dv;
  T *dk_head, *dv_head;  // [query_heads][B*S, D]: of heads that are not the first of their group
  T* workspace;
};

template <class T>
struct HeadGroups {
  int64_t sequences, length, query_heads, kv_heads, dim;
  const T* heads;  // [query_heads][B*S, D]
  T* dkv;          // [B*S, kv_heads*D]
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_ATTENTION_ARGS_H_
