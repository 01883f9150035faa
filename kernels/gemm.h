// Matrix products in the contract's order of additions. Used by every projection, by attention, by
// the head and by all their gradients; operands are read through strides, so a transpose costs no
// copy.
//
// Computes:  C = A·B, or C = C + A·B; the product is finished, and rounded, before it is added
//            (clause 8: a weight gradient is never chained into its accumulator).
// Shapes:    A [m, k] and B [k, n] with any element strides; C [m, n] row-major with a row stride.
//            m, n, k >= 0; k = 0 is a product of +0. C may not overlap A or B.
// Order:     element (i, j) is P0 + P1 + …, left to right; P_b is the chain of fused multiply-adds
// over
//            the b-th block of 256 values of k in ascending order, starting from +0, in type T.
// Guarantee: the same bits for any Isa, threads, tiling, strides and scratch. Only the sign and
//            payload of a NaN may differ, because a processor hands on that of its *first* NaN
//            operand and compilers choose which comes first. A NaN is a NaN everywhere: state,
//            journal and traces store 0x7fc00000 (clause 1), as does Rounding::kBf16 here. Reads
//            and writes nothing outside of the matrices.
// Clause:    5 (order), 8 (add), 4 (round).
// Thread-safety: calls that share neither scratch, pool nor C may run at the same time.
#ifndef RETRACE_KERNELS_GEMM_H_
#define RETRACE_KERNELS_GEMM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/gemm_args.h"
#include "kernels/isa.h"
#include "kernels/thread_pool.h"

namespace retrace {

// Memory in which one worker packs operands. Grows on first use, then no call allocates.
class GemmScratch {
 public:
  // At least `size_bytes`, aligned to 64; the contents are whatever was there.
  void* Reserve(size_t size_bytes);

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_bytes_ = 0;
};

// On the calling thread.
template <class T>
void GemmSerial(Isa isa, const GemmArgs<T>& args, GemmScratch& scratch);

// On the pool, cut into tiles of C. `scratch` has one element per thread of the pool.
template <class T>
void Gemm(Isa isa, ThreadPool& pool, std::vector<GemmScratch>& scratch, const GemmArgs<T>& args);

// Independent products in one parallel region (attention heads, virtual shards): best of about
// equal size. No product's C may overlap another's A, B or C.
template <class T>
void GemmBatch(Isa isa, ThreadPool& pool, std::vector<GemmScratch>& scratch,
               std::span<const GemmArgs<T>> products);

}  // namespace retrace

#endif  // RETRACE_KERNELS_GEMM_H_
