// Matrix product over packed panels, packing, unpacking.
//
// Packed layout (but for bf16 with tile registers: gemm_amx.inl): panel p holds 64 columns, kSide of them side by side: all of
// them, or two halves one after the other where vectors are short; act bf16: [64 / kSide][pairs][kSide][2] (pairs of consecutive
// k side by side; k is padded to a multiple of 32); act f32: [64 / kSide][k][kSide]. Missing columns and padding are zeros.
//
// Order of a sum over k, for every output element: bf16 with AVX-512: pairs ascending, one vdpbf16ps each; elsewhere: k
// ascending, one multiply-add each. With float weights, k is summed in blocks of 128 that are added up in turn: the error of
// one long chain would be several times larger. Rows are computed in groups of 1 to 6 by the same template, and a long k is
// walked in blocks whose partial sums rest in memory as floats; neither changes an operation or its order.
#include "gemm_simd.h"
#include "register.h"
#include "unroll.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#include "dequant.inl"
#include "gemm_parts.inl"

int64_t padded_pairs(int64_t k) { return (k + 31) / 32 * 16; }

constexpr int kRows = 6;            // rows of a micro tile
constexpr int64_t kChunkRows = 96;  // rows whose partial sums rest in memory while a long k is walked block by block

// One block of k of the columns of a panel that lie side by side, as a micro kernel sees it.
struct Slice {
  const unsigned char* b;  // first packed row of the block
  int64_t k;               // its length
  bool first;              // starts from zero, else goes on from c
  const unsigned char* ahead;  // a micro kernel fetches `fetch` bytes of this (0 to two lines) for each packed row
  int64_t fetch;
};

// ---- micro kernels: c [R][64] (+)= x [R, k] * panel -----------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr int64_t kSide = kPanel;
constexpr int64_t kBlock[2] = {128, 2048};  // k of a block, by Act: 256 KiB of bf16 panel stay in L2, R rows of x in L1
constexpr int64_t kStreamBlock[2] = {128, 256};  // where two groups read a stream

PINNATE_INLINE __m512bh bits_bh(__m512i v) { return (__m512bh)v; }

template <int R, int Lines>
void micro_bf16(const Slice& s, const bf16* x, int64_t ldx, float* c) {
  vf acc[R][4];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) acc[r][v] = s.first ? _mm512_setzero_ps() : vload(c + r * kPanel + v * 16);
  const unsigned char* b = s.b;
  const unsigned char* ahead = s.ahead;
  auto step = [&](auto broadcast) __attribute__((always_inline)) {
    __m512i w[4];
    for (int v = 0; v < 4; ++v) w[v] = _mm512_loadu_si512(b + v * 64);
    for (int line = 0; line < Lines; ++line, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    for (int r = 0; r < R; ++r) {
      const __m512bh a = bits_bh(_mm512_set1_epi32(broadcast(r)));
      for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], a, bits_bh(w[v]));
    }
    b += 256;
  };
  const int64_t pairs = s.k / 2;
  for (int64_t p = 0; p < pairs; ++p)
    step([&](int r) __attribute__((always_inline)) {
      int32_t pair;
      std::memcpy(&pair, x + r * ldx + 2 * p, 4);
      return pair;
    });
  if (s.k % 2 != 0)
    step([&](int r) __attribute__((always_inline)) { return static_cast<int32_t>(x[r * ldx + s.k - 1]); });
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) vstore(c + r * kPanel + v * 16, acc[r][v]);
}

// Vectors of columns a float micro kernel takes at once: 32 registers hold 6 x 4 accumulators.
template <int R>
constexpr int kVectors = 4;

#else
constexpr int64_t kSide = kHalf;
constexpr int64_t kBlock[2] = {128, 128};  // the slice of half a panel, what is fetched and R rows of x as floats stay in L1

// 16 registers: at most 12 accumulators, and enough of them to hide the latency of a multiply-add.
template <int R>
constexpr int kVectors = R == 1 && kLanes == 4 ? 8 : R <= 2 ? 4 : 2;
#endif

// acc [R][V] += x [R] times V vectors of weights. Whichever needs fewer registers at once is loaded first.
template <int R, int V, class Load>
PINNATE_INLINE void multiply_add(vf (&acc)[R][V], const float* x, int64_t ldx, Load load) {
  if constexpr (R < V) {
    vf a[R];
    unrolled<R>(PINNATE_EACH(r) { a[r] = vset(x[r * ldx]); });
    unrolled<V>(PINNATE_EACH(v) {
      const vf w = load(v);
      unrolled<R>(PINNATE_EACH(r) { vadd_product(acc[r][v], a[r], w); });
    });
  } else {
    vf w[V];
    unrolled<V>(PINNATE_EACH(v) { w[v] = load(v); });
    unrolled<R>(PINNATE_EACH(r) { vadd_products(acc[r], x + r * ldx, w); });
  }
}

constexpr int64_t kPairStep = 4;  // k that micro_f32 takes of pairs at once

// The same with float rows of x. Panels of bf16 (kPairs) are widened as they are read, two packed rows in a step.
template <int R, bool kPairs>
void micro_f32(const Slice& s, const float* x, int64_t ldx, float* c) {
  constexpr int V = kVectors<R>, kPasses = kSide / (V * kLanes), kPacked = kPairs ? 2 : 1;
  constexpr int kLines = (2 * kPacked + kPasses - 1) / kPasses;  // at most, in a step
  const unsigned char* ahead = s.ahead;
  const int64_t fetched = s.fetch * kPacked / kPasses;  // bytes, in a step
  for (int64_t pass = 0; pass < kPasses; ++pass, c += V * kLanes) {
    vf acc[R][V];
    const auto each = [&](auto f) __attribute__((always_inline)) {
      unrolled<R>(PINNATE_EACH(r) { unrolled<V>(PINNATE_EACH(v) { f(acc[r][v], c + r * kPanel + v * kLanes); }); });
    };
    each([&](vf& sum, const float* from) __attribute__((always_inline)) {
      sum = s.first || !kPairs ? vset(0.0f) : vload(from);
    });
    const unsigned char* b = s.b + pass * V * kLanes * 4;
    for (int64_t k = 0; k < s.k; k += kPairs ? kPairStep : 1) {  // of pairs, both x and the panel are padded to whole steps
      if constexpr (kSide != kPanel)
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * (fetched / kLines));
      ahead += fetched;
      if constexpr (kPairs) {
        unrolled<kPacked>(PINNATE_EACH(i) {
          const bf16* w = reinterpret_cast<const bf16*>(b);
          const float* at = x + k + 2 * i;
          multiply_add(acc, at, ldx, [&](int v) __attribute__((always_inline)) { return vlow(w + 2 * v * kLanes); });
          multiply_add(acc, at + 1, ldx, [&](int v) __attribute__((always_inline)) { return vhigh(w + 2 * v * kLanes); });
          b += 4 * kSide;
        });
      } else {
        const float* w = reinterpret_cast<const float*>(b);
        multiply_add(acc, x + k, ldx, [&](int v) __attribute__((always_inline)) { return vload(w + v * kLanes); });
        b += 4 * kSide;
      }
    }
    each([&](vf sum, float* to) __attribute__((always_inline)) {
      vstore(to, kPairs || s.first ? sum : vload(to) + sum);
    });
  }
}

#if !defined(__AVX512BF16__)
// Arranged rows are floats, block by block of k: [blocks][a.m][kBlock], each padded with zeros to whole steps of
// micro_f32. Rows that lie apart by their length may all fall into the same few sets of L1.
PINNATE_INLINE float* arranged(const GemmArgs& a, int64_t row, int64_t k0) {
  return reinterpret_cast<float*>(a.scratch) + k0 * a.m + row * kBlock[1];
}

void arrange_rows(const GemmArgs& a, int64_t m0, int64_t m1) {
  for (int64_t k0 = 0; k0 < a.w->k; k0 += kBlock[1]) {
    const int64_t k = min64(kBlock[1], a.w->k - k0);
    const bf16* x = static_cast<const bf16*>(a.x) + m0 * a.ldx + k0;
    float* out = arranged(a, m0, k0);
    for (int64_t r = m0; r < m1; ++r, x += a.ldx, out += kBlock[1]) {
      for (int64_t i = 0; i < k; ++i) {
        const uint32_t u = static_cast<uint32_t>(x[i]) << 16;
        std::memcpy(out + i, &u, 4);
      }
      for (int64_t i = k; i % kPairStep != 0; ++i) out[i] = 0.0f;
    }
  }
}
#endif

template <int R>
void micro(const GemmArgs& a, const Slice& s, int64_t row, int64_t k0, float* c) {
  if (a.w->act == Act::kF32) {
    micro_f32<R, false>(s, static_cast<const float*>(a.x) + row * a.ldx + k0, a.ldx, c);
    return;
  }
#if defined(__AVX512BF16__)
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.ldx + k0;
  if constexpr (R >= 3) {
    if (s.fetch == 128) return micro_bf16<R, 2>(s, x, a.ldx, c);
    if (s.fetch == 64) return micro_bf16<R, 1>(s, x, a.ldx, c);
  }
  micro_bf16<R, 0>(s, x, a.ldx, c);
#else
  micro_f32<R, true>(s, arranged(a, row, k0), kBlock[1], c);
#endif
}

void micro_rows(int64_t rows, const GemmArgs& a, const Slice& s, int64_t row, int64_t k0, float* c) {
  switch (rows) {
    case 1: return micro<1>(a, s, row, k0, c);
    case 2: return micro<2>(a, s, row, k0, c);
    case 3: return micro<3>(a, s, row, k0, c);
    case 4: return micro<4>(a, s, row, k0, c);
    case 5: return micro<5>(a, s, row, k0, c);
    default: return micro<6>(a, s, row, k0, c);
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

#if defined(__AMX_BF16__)
#include "gemm_amx.inl"

PINNATE_INLINE int64_t pair_at(const PackedWeight& w, int64_t pair, int64_t column) { return tile_pair_at(w, pair, column); }
#else
// Position of a pair of k within a panel of bf16, in pairs.
PINNATE_INLINE int64_t pair_at(const PackedWeight& w, int64_t pair, int64_t column) {
  return (column / kSide * padded_pairs(w.k) + pair) * kSide + column % kSide;
}
#endif
// Position of an element of a panel of floats.
PINNATE_INLINE int64_t float_at(const PackedWeight& w, int64_t k, int64_t column) {
  return (column / kSide * w.k + k) * kSide + column % kSide;
}

// How groups of rows walk through a panel.
struct Walk {
  int64_t block;            // k of a slice
  int64_t fetchers, fetch;  // leading groups that fetch what comes next, and how many bytes of it for each packed row
  int64_t ahead;            // bytes from a slice to that; 0: what lies next in memory
};

#if defined(__AVX512BF16__)
// Where there are rows enough to keep this core computing, two to four groups fetch the next panel into L2 meanwhile. Two groups
// that go through all panels fetch what lies next in memory, slice by slice.
Walk walk_of(const GemmArgs& a, int64_t panel, int64_t groups) {
  const int act = static_cast<int>(a.w->act);
  if (groups == 2 && a.ahead == 1) return {kStreamBlock[act], 2, 128, 0};
  const bool fetch = groups >= 2 && a.ahead > 0 && panel + a.ahead < a.w->panels;
  return {kBlock[act], !fetch ? 0 : groups == 2 ? 2 : 4, groups == 2 ? 128 : 64, a.ahead * a.w->panel_bytes};
}
#else
// Evenly over as many groups as can share two lines: faster than memory delivers, what is fetched holds up what is read.
Walk walk_of(const GemmArgs& a, int64_t, int64_t groups) {
  const int64_t fetchers = groups >= 4 ? 4 : min64(groups, 2);
  return {kBlock[static_cast<int>(a.w->act)], fetchers, 128 / fetchers, 0};
}
#endif

void gemm_tile(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  const PackedWeight& w = *a.w;
#if defined(__AMX_BF16__)
  if (w.act == Act::kBF16) return tile_gemm(a, m0, m1, panel);
#endif
  const int64_t row_size = kSide * (w.act == Act::kF32 ? 4 : 2);  // bytes for one k
  const Halves sides = kSide == kPanel ? Halves{0, 1} : halves_of(a);
  alignas(64) float sums[kChunkRows * kPanel];
  for (int64_t chunk = m0; chunk < m1; chunk += kChunkRows) {
    const int64_t rows = min64(kChunkRows, m1 - chunk), groups = (rows + kRows - 1) / kRows;
    const Walk walk = walk_of(a, panel, groups);
    const bool whole = kSide == kPanel && w.k <= walk.block;
    for (int64_t side = sides.first; side < sides.last; ++side) {
      const unsigned char* data = w.data + panel * w.panel_bytes + side * (w.panel_bytes * kSide / kPanel);
      for (int64_t k0 = 0; k0 < w.k; k0 += walk.block) {
        const int64_t length = min64(walk.block, w.k - k0), packed_rows = w.act == Act::kF32 ? length : length / 2;
        Slice s{data + k0 * row_size, length, k0 == 0, nullptr, 0};
        const unsigned char* next = s.b + (walk.ahead != 0 ? walk.ahead : length * row_size);
        for (int64_t g = 0; g < groups; ++g) {  // groups of nearly equal size: no thin one at the end
          const int64_t r0 = rows * g / groups, count = rows * (g + 1) / groups - r0;
          float* c = sums + (whole ? 0 : r0 * kPanel) + side * kSide;
          s.fetch = g < walk.fetchers ? walk.fetch : 0;
          s.ahead = next + g * walk.fetch * packed_rows;
          micro_rows(count, a, s, chunk + r0, k0, c);
          if (whole) finish(a, chunk + r0, count, panel, c);
        }
      }
    }
    if (!whole) finish(a, chunk, rows, panel, sums);
  }
}

// ---- packing --------------------------------------------------------------------------------------------------------

void pack_layout(PackedWeight& w) {
  const int64_t width = w.swiglu ? kHalf : kPanel, n = w.swiglu ? w.n / 2 : w.n;
  w.panels = (n + width - 1) / width;
  w.panel_bytes = kPanel * 4 * (w.act == Act::kF32 ? w.k : padded_pairs(w.k));
}

constexpr int64_t kGroup = 16;     // columns packed together: their packed elements of one row fill a cache line
constexpr int64_t kSegment = 256;  // k decoded at a time: whole blocks of every storage type

void pack_columns(const SourceMatrix* sources, int count, PackedWeight& w, int64_t panel, int64_t j0) {
  const unsigned char* rows[kGroup];
  TensorType types[kGroup];
  for (int64_t j = 0; j < kGroup; ++j) rows[j] = find_row(sources, count, w, panel, j0 + j, types[j]);
  uint32_t* out = reinterpret_cast<uint32_t*>(w.data + panel * w.panel_bytes);
  const bool f32 = w.act == Act::kF32;
  alignas(64) uint32_t words[kGroup][kSegment + 16];  // packed elements of each column; 16: or all would share a few sets of L1
  alignas(64) float decoded[kSegment] = {};
  for (int64_t k0 = 0; k0 < w.k; k0 += kSegment) {
    const int64_t k = min64(kSegment, w.k - k0), packed = f32 ? k : (k + 1) / 2;
    for (int64_t j = 0; j < kGroup; ++j) {
      if (rows[j] != nullptr) dequantize(types[j], rows[j] + stored_bytes(types[j], k0), k, decoded);
      else std::memset(decoded, 0, sizeof decoded);
      if (f32) {
        std::memcpy(words[j], decoded, sizeof decoded);
        continue;
      }
      if (k % 2 != 0) decoded[k] = 0.0f;
      bf16* column = reinterpret_cast<bf16*>(words[j]);
      for (int64_t i = 0; i < kSegment; ++i) {  // all of them, so that the compiler makes vectors of it
        uint32_t u;
        std::memcpy(&u, decoded + i, 4);
        column[i] = to_bf16_bits(u);
      }
    }
    for (int64_t i = 0; i < packed; ++i) {
      const int64_t row = f32 ? k0 + i : k0 / 2 + i;
      uint32_t* to = out + (f32 ? float_at(w, row, j0) : pair_at(w, row, j0));
      for (int64_t j = 0; j < kGroup; ++j) to[j] = words[j][i];
    }
  }
  if (f32) return;
  for (int64_t pair = (w.k + 1) / 2; pair < padded_pairs(w.k); ++pair) std::memset(out + pair_at(w, pair, j0), 0, 4 * kGroup);
}

void pack_panel(const SourceMatrix* sources, int count, PackedWeight& w, int64_t panel) {
  for (int64_t j = 0; j < kPanel; j += kGroup) pack_columns(sources, count, w, panel, j);
}

void unpack_rows(const PackedWeight& w, const int32_t* ids, int64_t count, float scale, float* out, int64_t ldo) {
  for (int64_t i = 0; i < count; ++i, out += ldo) {
    const unsigned char* data = w.data + ids[i] / kPanel * w.panel_bytes;
    const int64_t column = ids[i] % kPanel;
    if (w.act == Act::kF32) {
      for (int64_t k = 0; k < w.k; ++k) out[k] = reinterpret_cast<const float*>(data)[float_at(w, k, column)] * scale;
      continue;
    }
    for (int64_t k = 0; k < w.k; ++k) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(data)[pair_at(w, k / 2, column)];
      const uint32_t u = k % 2 == 0 ? pair << 16 : pair & 0xffff0000;
      float f;
      std::memcpy(&f, &u, 4);
      out[k] = f * scale;
    }
  }
}

}  // namespace

void register_gemm(KernelTable& t) {
#if defined(__AMX_BF16__)
  register_tiles(t);
  t.cuts_panels = true;
#elif !defined(__AVX512BF16__)
  t.cuts_panels = true;
  t.arrange_rows = arrange_rows, t.arranges_always = true, t.arranged_block = kBlock[1], t.arranged_size = 4;
#endif
  t.pack_layout = pack_layout;
  t.pack_panel = pack_panel;
  t.gemm_tile = gemm_tile;
  t.unpack_rows = unpack_rows;
  t.dequantize = dequantize;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
