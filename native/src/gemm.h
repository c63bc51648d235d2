// Packing of weights and the parallel matrix product: cuts the work into tiles for the kernels, owns packed memory.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace pinnate {

// Uninitialised memory, 64-byte aligned; from 2 MiB on aligned to 2 MiB and in huge pages where the kernel gives them.
struct AlignedFree {
  void operator()(unsigned char* p) const;
};
using AlignedBuffer = std::unique_ptr<unsigned char, AlignedFree>;
AlignedBuffer allocate_aligned(size_t bytes);  // throws std::bad_alloc

// Memory of all packed weights of a model, side by side in few large blocks: a matrix is often smaller than a huge page,
// and reading from 4 KiB pages costs a third of the memory's speed. Gives memory back only as a whole.
class WeightArena {
 public:
  unsigned char* allocate(size_t bytes);  // 64-byte aligned, uninitialised; throws std::bad_alloc

 private:
  std::vector<AlignedBuffer> blocks_;
  size_t used_ = 0, size_ = 0;  // of the last block
};

// Bytes of one row of `cols` elements of storage type `type`. Throws std::invalid_argument if cols is not whole blocks.
size_t row_bytes(TensorType type, int64_t cols);

// Packs `count` sources stacked along n (with `swiglu`: exactly {gate, up}, of equal shape) on all threads, into memory
// of `arena`. Throws std::invalid_argument on shapes that do not fit together.
PackedWeight pack(const KernelTable& kernels, ThreadPool& pool, WeightArena& arena, const SourceMatrix* sources,
                  int count, Act act, bool swiglu, WeightFormat format = WeightFormat::kAct);

// out[i] = row ids[i] of w (not swiglu) as floats, times scale.
void unpack_rows(const KernelTable& kernels, const PackedWeight& w, const int32_t* ids, int64_t count, float scale,
                 float* out, int64_t ldo);

// Bytes of a.scratch that a product of m rows needs: its rows quantised, or arranged as the kernel reads them.
int64_t gemm_scratch(const KernelTable& kernels, const PackedWeight& w, int64_t m);

// The whole product of `a` on all threads of the pool.
void gemm(const KernelTable& kernels, ThreadPool& pool, const GemmArgs& a);

// The same on the thread that calls.
void gemm_alone(const KernelTable& kernels, GemmArgs a);

// Where part i of n of m rows begins: between groups of `unit` rows.
int64_t row_share(int64_t m, int64_t i, int64_t n, int64_t unit);

}  // namespace pinnate
