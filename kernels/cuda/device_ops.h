// DeviceOps: the op table on a CUDA device, with the same arguments and ranges as kernels/ops.h, all
// pointers being memory that the device can read. Calls are put in the order of the device's default
// stream and return before they are done; the bits are those of the scalar table.
//
// Used by device_cuda.cu, and by the tests through the emulator. Calls come from one thread at a
// time. Legend, order and clause of each op: kernels/ops.h.
#ifndef RETRACE_KERNELS_CUDA_DEVICE_OPS_H_
#define RETRACE_KERNELS_CUDA_DEVICE_OPS_H_

#include "kernels/ops.h"

namespace retrace::cuda {

template <class T>
const OpTable<T>& DeviceOps();

// Each file's share of the table.
template <class T>
void AddElementOps(OpTable<T>* table);
template <class T>
void AddRowOps(OpTable<T>* table);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_OPS_H_
