// DeviceAttention: blockwise attention on a CUDA device, and the sum over the heads of a group. Used
// by kernels/attention.cc through the Device (kernels/device.h), and by the tests. (The materialised
// order is made of products and softmax ops and needs nothing of its own.)
//
// Computes   what AttentionForward and AttentionBackward of kernels/attention.h do, blockwise
// Shapes     as there; all pointers are memory that the device can read
// Order      clause 9. A block of threads has a block of queries (forward, dq), for key blocks
//            ascending, or a block of keys (dk, dv), for query blocks ascending; scores are
//            computed again for each.
// Guarantee  the bits of kernels/attention.cc, for any grid
// Clause     5, 6, 9
#ifndef RETRACE_KERNELS_CUDA_DEVICE_ATTENTION_H_
#define RETRACE_KERNELS_CUDA_DEVICE_ATTENTION_H_

#include "kernels/attention_args.h"

namespace retrace::cuda {

// Fills output, m and l.
template <class T>
void DeviceAttentionForward(const BlockwiseAttention<T>& a);

// Fills dq, dk, dv from q, k, v, doutput, m, l and dot.
template <class T>
void DeviceAttentionBackward(const BlockwiseAttention<T>& a);

// Bytes that `workspace` of either must have.
template <class T>
int64_t DeviceAttentionWorkspace(const BlockwiseAttention<T>& a);

// dkv of each KV head += those of the further heads of its group, ascending (kernels/attention.cc).
template <class T>
void DeviceAddGroups(const HeadGroups<T>& a);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_ATTENTION_H_
