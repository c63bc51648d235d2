// How a product is cut: knows cache sizes and thread counts, not instruction sets. The cut never changes a bit of the result
// (the kernels' contract), so it is free to depend on m and on the number of threads.
#include "gemm.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include <stdlib.h>
#include <sys/mman.h>

namespace pinnate {
namespace {

constexpr int64_t kMinRows = 6;     // fewer rows a tile would stream weights from L3 for too little work
constexpr size_t kHuge = size_t{2} << 20;
constexpr int64_t kStreamRows = 12;         // up to this many rows, reading the weights takes longer than the arithmetic
constexpr int64_t kMinStreamRows = 4;        // of a piece of such a product
constexpr int64_t kStreamBytes = 512 << 10;  // of weights read by one thread in a row
constexpr int64_t kFetchFirst = 16 << 10;  // of weights, by each thread while the rows are prepared
constexpr int64_t kPrepareEach = 4096;     // elements of x; fewer are quantised before another thread has woken
constexpr size_t kArenaBlock = size_t{64} << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("pack: " + what); }

struct Block {
  int64_t elements;
  size_t bytes;
};

Block block_of(TensorType type) {
  switch (type) {
    case TensorType::kF32: return {1, 4};
    case TensorType::kF16: return {1, 2};
    case TensorType::kBF16: return {1, 2};
    case TensorType::kQ4_0: return {32, 18};
    case TensorType::kQ4_1: return {32, 20};
    case TensorType::kQ5_0: return {32, 22};
    case TensorType::kQ8_0: return {32, 34};
    case TensorType::kQ4_K: return {256, 144};
    case TensorType::kQ5_K: return {256, 176};
    case TensorType::kQ6_K: return {256, 210};
  }
  refuse("unknown storage type " + std::to_string(static_cast<int>(type)));
}

// Into how many pieces `rest` items are cut so that the threads end within a sixteenth of that work; at most `most`.
int64_t pieces_of(int64_t rest, int64_t threads, int64_t most) {
  int64_t pieces = 1;
  while (pieces < most && ceil_div(rest * pieces, threads) * threads * 16 > rest * pieces * 17) ++pieces;
  return pieces;
}

// How the rows and panels of a product become items. Every thread gets as many whole ones (a block of rows times a panel);
// what is left over, fewer than there are threads, is cut by rows so that the threads end together, or in halves.
struct Cut {
  int64_t panels, blocks;  // block outermost: a block of x stays in L2 while the panels stream by
  int64_t whole;           // items that are one block and one panel
  int64_t pieces;          // into which each of the others is cut
  bool halves;             // by columns: the pieces are the halves of the panel

  int64_t items() const { return whole + (blocks * panels - whole) * pieces; }
};

Cut cut(int64_t m, int64_t panels, int64_t threads, int64_t row_block, bool halves) {
  const int64_t blocks = ceil_div(m, row_block), rest = blocks * panels % threads;
  const int64_t pieces = halves ? 2 : pieces_of(rest, threads, m / blocks / kMinRows);
  return {panels, blocks, blocks * panels - rest, pieces, halves};
}

}  // namespace

int64_t row_share(int64_t m, int64_t i, int64_t n, int64_t unit) { return std::min(m, ceil_div(m, unit) * i / n * unit); }

void AlignedFree::operator()(unsigned char* p) const { ::free(p); }

AlignedBuffer allocate_aligned(size_t bytes) {
  const size_t align = bytes >= kHuge ? kHuge : 64, size = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
  void* p = nullptr;
  if (::posix_memalign(&p, align, size) != 0) throw std::bad_alloc();
  if (align == kHuge) ::madvise(p, size / 4096 * 4096, MADV_HUGEPAGE);  // a hint: failure costs speed only
  return AlignedBuffer(static_cast<unsigned char*>(p));
}

size_t row_bytes(TensorType type, int64_t cols) {
  const Block block = block_of(type);
  if (cols % block.elements != 0)
    refuse("rows of " + std::to_string(cols) + " columns are not whole blocks of " + std::to_string(block.elements));
  return static_cast<size_t>(cols / block.elements) * block.bytes;
}

unsigned char* WeightArena::allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > size_ - used_) {
    size_ = std::max(bytes, kArenaBlock);
    used_ = 0;
    blocks_.push_back(allocate_aligned(size_));  // pages that are never touched are never committed
  }
  used_ += bytes;
  return blocks_.back().get() + used_ - bytes;
}

PackedWeight pack(const KernelTable& kernels, ThreadPool& pool, WeightArena& arena, const SourceMatrix* sources,
                  int count, Act act, bool swiglu, WeightFormat format) {
  if (count < 1) refuse("no source");
  if (swiglu && (count != 2 || sources[0].rows != sources[1].rows)) refuse("swiglu takes gate and up of equal shape");
  PackedWeight w;
  w.act = act, w.swiglu = swiglu, w.format = format, w.k = sources[0].cols;
  for (int i = 0; i < count; ++i) {
    row_bytes(sources[i].type, sources[i].cols);
    if (sources[i].cols != w.k || sources[i].rows < 1 || w.k < 1) refuse("sources differ in columns or are empty");
    w.n += sources[i].rows;
  }
  const bool quantized = format != WeightFormat::kAct;
  (quantized ? kernels.quant_layout : kernels.pack_layout)(w);
  const auto pack_panel = quantized ? kernels.quant_pack_panel : kernels.pack_panel;
  w.data = arena.allocate(static_cast<size_t>(w.panels * w.panel_bytes));
  pool.parallel_for(w.panels, [&](int64_t panel, int) { pack_panel(sources, count, w, panel); });
  return w;
}

void unpack_rows(const KernelTable& kernels, const PackedWeight& w, const int32_t* ids, int64_t count, float scale,
                 float* out, int64_t ldo) {
  (w.format == WeightFormat::kAct ? kernels.unpack_rows : kernels.quant_unpack_rows)(w, ids, count, scale, out, ldo);
}

auto tile_of(const KernelTable& kernels, const PackedWeight& w) {
  return w.format == WeightFormat::kAct ? kernels.gemm_tile : kernels.quant_tile;
}

// Whether rows are quantised for a product.
bool quantizes(const KernelTable& kernels, const PackedWeight& w) {
  return w.format != WeightFormat::kAct && (w.act == Act::kF32 || kernels.quantizes_bf16);
}

// Whether a single thread arranges them (all threads together: with arranges_always).
bool arranges(const KernelTable& kernels, const PackedWeight& w, int64_t m) {
  return kernels.arrange_rows != nullptr && w.act == Act::kBF16 && !quantizes(kernels, w) &&
         (kernels.arranges_always || m > kernels.gemm_rows);
}

using Prepare = void (*)(const GemmArgs& a, int64_t m0, int64_t m1);

// What is done with the rows before a product, which knows of it by `a`; null: nothing.
Prepare preparation(const KernelTable& kernels, bool alone, GemmArgs& a) {
  if (quantizes(kernels, *a.w)) return kernels.quantize_rows;
  a.arranged = (alone || kernels.arranges_always) && arranges(kernels, *a.w, a.m);
  return a.arranged ? kernels.arrange_rows : nullptr;
}

// Whether a panel may be computed in two halves.
bool cuts_panels(const KernelTable& kernels, const PackedWeight& w) {
  return !w.swiglu && (w.format != WeightFormat::kAct || (kernels.cuts_panels && w.act == Act::kBF16));
}

// Items of a product of few rows, which is bound by reading weights: runs of adjacent panels, long enough to read at the
// memory's speed, in a number that the threads share evenly.
int64_t streams(int64_t panels, int64_t panel_bytes, int64_t threads) {
  const int64_t each = std::max<int64_t>(1, kStreamBytes / panel_bytes);
  return std::min(panels, threads * std::max<int64_t>(1, panels / (threads * each)));
}

void fetch(const unsigned char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A product of few rows. The first thread to take an item prepares the rows, if they still are to be, while the weights' first
// bytes are on their way; the others fetch theirs and wait for it.
void gemm_stream(const KernelTable& kernels, ThreadPool& pool, GemmArgs a, Prepare prepare) {
  const PackedWeight& w = *a.w;
  const auto tile = tile_of(kernels, w);
  const int64_t threads = pool.threads();
  // Panels that the threads cannot share evenly are cut: in halves, or by rows where there are enough.
  const bool halves = cuts_panels(kernels, w);
  const int64_t rest = halves || a.m >= threads * kMinStreamRows ? w.panels % threads : 0;
  const int64_t pieces = halves ? 2 : pieces_of(rest, threads, a.m / kMinStreamRows);
  const int64_t panels = w.panels - rest, runs = streams(panels, w.panel_bytes, threads);
  std::atomic<bool> begun{prepare == nullptr}, ready{prepare == nullptr};
  a.ahead = 1;
  pool.parallel_for(runs + rest * pieces, [&](int64_t item, int) {
    const bool whole = item < runs;
    const int64_t begin = whole ? panels * item / runs : panels + (item - runs) / pieces;
    const int64_t end = whole ? panels * (item + 1) / runs : begin + 1;
    const int64_t piece = whole ? 0 : (item - runs) % pieces;
    const bool by_rows = !whole && !halves;
    const int64_t m0 = by_rows ? a.m * piece / pieces : 0, m1 = by_rows ? a.m * (piece + 1) / pieces : a.m;
    GemmArgs part = a;
    if (!whole && halves) part.half = static_cast<int>(piece);
    if (!ready.load(std::memory_order_acquire)) {
      fetch(w.data + begin * w.panel_bytes, std::min(kFetchFirst, w.panel_bytes));
      if (!begun.exchange(true)) {
        prepare(a, 0, a.m);
        ready.store(true, std::memory_order_release);
      }
      while (!ready.load(std::memory_order_acquire)) pause();
    }
    for (int64_t panel = begin; panel < end; ++panel) tile(part, m0, m1, panel);
  });
}

int64_t gemm_scratch(const KernelTable& kernels, const PackedWeight& w, int64_t m) {
  if (quantizes(kernels, w)) return m * kernels.quantized_row_bytes(w);
  const int64_t rows = ceil_div(m, kernels.gemm_rows) * kernels.gemm_rows, block = kernels.arranged_block;
  return arranges(kernels, w, m) ? rows * ceil_div(w.k, block) * block * kernels.arranged_size : 0;
}

void gemm(const KernelTable& kernels, ThreadPool& pool, const GemmArgs& args) {
  GemmArgs a = args;
  const int64_t panels = a.w->panels;
  const Prepare prepare = preparation(kernels, false, a);
  const auto tile = tile_of(kernels, *a.w);
  const int64_t parts = std::clamp<int64_t>(a.m * a.w->k / kPrepareEach, 1, std::min(a.m, pool.threads() * int64_t{4}));
  const bool streamed = a.m <= kStreamRows;
  if (prepare != nullptr && (parts > 1 || !streamed))
    pool.parallel_for(parts, [&](int64_t part, int) { prepare(a, a.m * part / parts, a.m * (part + 1) / parts); });
  if (streamed) return gemm_stream(kernels, pool, a, parts == 1 ? prepare : nullptr);
  a.ahead = 1;
  const int64_t unit = kernels.gemm_rows;
  const bool halves = a.m <= unit && cuts_panels(kernels, *a.w);  // too few rows to be cut
  const Cut c = cut(a.m, panels, pool.threads(), kernels.gemm_row_block, halves);
  pool.parallel_ranges(c.items(), c.items() - c.whole, [&](int64_t item, int) {
    const int64_t whole = item < c.whole ? item : c.whole + (item - c.whole) / c.pieces;
    const int64_t piece = item < c.whole ? 0 : (item - c.whole) % c.pieces, pieces = item < c.whole ? 1 : c.pieces;
    const int64_t block = whole / panels, m0 = row_share(a.m, block, c.blocks, unit);
    const int64_t rows = row_share(a.m, block + 1, c.blocks, unit) - m0;
    if (c.halves && item >= c.whole) {
      GemmArgs part = a;
      part.half = static_cast<int>(piece);
      return tile(part, m0, m0 + rows, whole % panels);
    }
    tile(a, m0 + row_share(rows, piece, pieces, unit), m0 + row_share(rows, piece + 1, pieces, unit), whole % panels);
  });
}

void gemm_alone(const KernelTable& kernels, GemmArgs a) {
  if (const Prepare prepare = preparation(kernels, true, a)) prepare(a, 0, a.m);
  a.ahead = 1;
  for (int64_t panel = 0; panel < a.w->panels; ++panel) tile_of(kernels, *a.w)(a, 0, a.m, panel);
}

}  // namespace pinnate
