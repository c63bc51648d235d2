// Packing of weights and the parallel matrix product: cuts the work into tiles for the kernels, owns packed memory.
#pragma once
#include <cstddef>
#include <memory>

#include "kernels.h"
#include "thread_pool.h"

namespace pinnate {

// Uninitialised memory, 64-byte aligned; from 2 MiB on aligned to 2 MiB and in huge pages where the kernel gives them.
struct AlignedFree {
  void operator()(unsigned char* p) const;
};
using AlignedBuffer = std::unique_ptr<unsigned char, AlignedFree>;
AlignedBuffer allocate_aligned(size_t bytes);  // throws std::bad_alloc

// A packed matrix and its memory. Move-only; `weight.data` stays valid across moves.
struct OwnedWeight {
  PackedWeight weight;
  AlignedBuffer memory;
};

// Bytes of one row of `cols` elements of storage type `type`. Throws std::invalid_argument if cols is not whole blocks.
size_t row_bytes(TensorType type, int64_t cols);

// Packs `count` sources stacked along n (with `swiglu`: exactly {gate, up}, of equal shape) on all threads.
// Throws std::invalid_argument on shapes that do not fit together.
OwnedWeight pack(const KernelTable& kernels, ThreadPool& pool, const SourceMatrix* sources, int count, Act act,
                 bool swiglu);

// The whole product of `a` on all threads of the pool.
void gemm(const KernelTable& kernels, ThreadPool& pool, const GemmArgs& a);

}  // namespace pinnate
