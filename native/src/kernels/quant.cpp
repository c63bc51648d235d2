// Matrix product of quantised weights and quantised activations: packing, unpacking, tiles.
//
// Packed layout: a panel is two halves of 32 columns (with swiglu: gate and up), each half a stream of blocks of 32 k:
//   int8: [8 groups][32 columns][4 k] bytes (plus kWeightBias), 32 scales (half): 1088 bytes;
//   int4: [4 groups][32 columns][4 k] bytes, the low nibbles group g, the high ones group g + 4, 32 scales, 32 minima: 640.
// A row of activations is a sequence of blocks: 32 signed integers, of one byte (int8 with AVX2: of two, quant_avx2.inl), their
// scale (float), and what their sum adds to a dot product: int8: -kWeightBias * sum (int32); int4: scale * sum (float), to be
// multiplied by the minimum.
//
// With tile registers, rows of bf16 stay as they are and weights become bf16 (quant_amx.inl); all else here is of other rows
// and CPUs.
//
// A dot product over a block of k is exact. Sums of floats over the blocks run in ascending order, one multiply-add each
// (int4: two). Rows are computed in groups by one template and a long k in slices whose sums rest in memory; neither
// changes an operation or its order.
//
// What bounds it with VNNI: 6 rows x 32 columns x a block are 96 dot products, 12 products of scales and 12 multiply-adds, all
// for the same two units (conversions go elsewhere): 96 / 120 = 80 % of the instruction's peak for int8, 73 % for int4 with its
// minima. Scales of activations of few bits would turn the products into additions to the exponent. Tried: with 2, 4 and 8
// mantissas the best of six rows went from 372 to 403, 377 and 349 GOP/s a core, at 20, 10 and 5 % more rounding error. It
// does not pay.
#include "quant_simd.h"
#include "register.h"
#include "unroll.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#include "dequant.inl"
#include "gemm_parts.inl"
#include "quant_blocks.inl"

constexpr int64_t kGroupBytes = kHalf * 4;  // a group of 4 k of all columns of a half
constexpr int64_t integer_bytes(WeightFormat f) { return kQuantBlock * (f == WeightFormat::kInt8 && kWideRows ? 2 : 1); }
constexpr int64_t row_block_bytes(WeightFormat f) { return integer_bytes(f) + 8; }  // a block of a row of activations
constexpr int64_t kChunkRows = 96;                   // rows whose sums rest in memory while k is walked
constexpr int64_t kSliceBlocks = 20;                 // blocks of k: half a panel of them stays in L1 while row groups pass
constexpr int64_t kStreamBlocks = 96;                // the same in L2, for two row groups
constexpr int64_t kFetchers = 4;                     // row groups that fetch parts of the next panel
constexpr int64_t kAheadBlocks = kLanes == 8 ? 6 : 3;  // how far ahead a single row (with AVX2, one group) fetches

// Of a block of half a panel: its weights, and with them the scales (int4: and minima).
constexpr int64_t data_bytes(WeightFormat f) { return kQuantBlock * kHalf / (f == WeightFormat::kInt8 ? 1 : 2); }
constexpr int64_t unit_bytes(WeightFormat f) { return data_bytes(f) + kHalf * (f == WeightFormat::kInt8 ? 2 : 4); }

PINNATE_INLINE int64_t blocks_of(int64_t k) { return (k + kQuantBlock - 1) / kQuantBlock; }

int64_t quantized_row_bytes(const PackedWeight& w) { return (blocks_of(w.k) * row_block_bytes(w.format) + 63) / 64 * 64; }

#if defined(__AVX2__)
constexpr int kRows = 6;  // 6 x 2 integer accumulators and, with 32 registers, as many of floats
#else
constexpr int kRows = 4;
#endif
template <int R>
constexpr int kVectors = R == 1 && kLanes == 8 ? 4 : 2;

// ---- micro kernels: c [R][64], columns of one half, (+)= x [R] * half panel -----------------------------------------

struct Slice {
  const unsigned char* w;  // first block of the half
  int64_t blocks;
  bool first;              // starts from zero, else goes on from c
  const unsigned char* x;  // first block of the first row
  int64_t ldx;             // bytes
  const unsigned char* ahead;  // `lines` of this are fetched into L2 for each block
  int64_t lines;
};

PINNATE_INLINE int32_t load_int(const unsigned char* p) {
  int32_t i;
  std::memcpy(&i, p, 4);
  return i;
}
PINNATE_INLINE float load_float(const unsigned char* p) {
  float f;
  std::memcpy(&f, p, 4);
  return f;
}

// dot [R][V] += 32 k of R rows times V vectors of columns.
template <int R, int V, WeightFormat F>
PINNATE_INLINE void dot_block(vi (&dot)[R][V], const unsigned char* w, const unsigned char* x, int64_t ldx) {
  const auto step = [&](int group, auto weights) __attribute__((always_inline)) {
    vi b[V];
    for (int v = 0; v < V; ++v) b[v] = weights(v);
    for (int r = 0; r < R; ++r) {
      const vi a = iset(load_int(x + r * ldx + group * 4));
      for (int v = 0; v < V; ++v) {
        if constexpr (F == WeightFormat::kInt4) dot[r][v] = dot_nibbles(dot[r][v], b[v], a);
        else dot[r][v] = dot_bytes(dot[r][v], b[v], a);
      }
    }
  };
  constexpr int64_t kVectorBytes = kLanes * 4;
  if constexpr (F == WeightFormat::kInt4) {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const auto at = [&](int v) __attribute__((always_inline)) { return iload(w + g * kGroupBytes + v * kVectorBytes); };
      step(g, [&](int v) __attribute__((always_inline)) { return low_nibbles(at(v)); });
      step(g + 4, [&](int v) __attribute__((always_inline)) { return high_nibbles(at(v)); });
    }
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
      step(g, [&](int v) __attribute__((always_inline)) { return iload(w + g * kGroupBytes + v * kVectorBytes); });
  }
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "quant_avx2.inl"
#else
template <int R, WeightFormat F>
void micro(const Slice& s, float* c) {
  constexpr int V = kVectors<R>;
  for (int64_t column = 0; column < kHalf; column += V * kLanes) {
    vf acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = s.first ? vset(0.0f) : vload(c + r * kPanel + column + v * kLanes);
    const unsigned char *w = s.w, *x = s.x, *ahead = s.ahead;
    for (int64_t b = 0; b < s.blocks; ++b, w += unit_bytes(F), x += row_block_bytes(F)) {
      for (int64_t line = column == 0 ? s.lines : 0; line > 0; --line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      vi dot[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
          dot[r][v] = iset(F == WeightFormat::kInt8 && kWeightBias != 0 ? load_int(x + r * s.ldx + kQuantBlock + 4) : 0);
      dot_block<R, V, F>(dot, w + column * 4, x, s.ldx);
      const unsigned char* scales = w + data_bytes(F);
      for (int v = 0; v < V; ++v) {
        const int64_t lane = column + v * kLanes;
        const vf scale = load_halves(scales + lane * 2);
        for (int r = 0; r < R; ++r) {
          const vi sum = F == WeightFormat::kInt8 ? dot[r][v] : sum_nibbles(dot[r][v]);
          acc[r][v] = vfma(to_float((vi32)sum), scale * vset(load_float(x + r * s.ldx + kQuantBlock)), acc[r][v]);
        }
        if constexpr (F != WeightFormat::kInt8) {
          const vf minimum = load_halves(scales + (kHalf + lane) * 2);
          for (int r = 0; r < R; ++r)
            acc[r][v] = vfma(minimum, vset(load_float(x + r * s.ldx + kQuantBlock + 4)), acc[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) vstore(c + r * kPanel + column + v * kLanes, acc[r][v]);
  }
}
#endif

template <WeightFormat F>
void micro_of(int64_t rows, const Slice& s, float* c) {
  switch (rows) {
    case 1: return micro<1, F>(s, c);
    case 2: return micro<2, F>(s, c);
    case 3: return micro<3, F>(s, c);
#if defined(__AVX2__)
    case 4: return micro<4, F>(s, c);
    case 5: return micro<5, F>(s, c);
#endif
    default: return micro<kRows, F>(s, c);
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Rows [chunk, chunk + rows) of the product with blocks [b0, b0 + blocks) of the halves of a panel, into sums.
void add_slice(const GemmArgs& a, int64_t chunk, int64_t rows, int64_t panel, int64_t b0, int64_t blocks, float* sums) {
  const PackedWeight& w = *a.w;
  const int64_t groups = (rows + kRows - 1) / kRows, ldx = quantized_row_bytes(w), unit = unit_bytes(w.format);
  const unsigned char* x = a.scratch + chunk * ldx + b0 * row_block_bytes(w.format);
  const auto micro_rows = w.format == WeightFormat::kInt8 ? micro_of<WeightFormat::kInt8> : micro_of<WeightFormat::kInt4>;
  const Halves halves = halves_of(a);
  for (int64_t half = halves.first; half < halves.last; ++half) {
    const unsigned char* packed = w.data + panel * w.panel_bytes + half * (w.panel_bytes / 2) + b0 * unit;
    Slice s{packed, blocks, b0 == 0, x, ldx, nullptr, 0};
    // One row reads a stream and fetches what is a little ahead in it (with VNNI, two to one group gain nothing by that; with
    // AVX2, 2 and 4 rows took 9.5 and 11.0 ms without, 6.2 and 6.4 ms with it). Several groups share fetching what comes next,
    // which would wait for memory while only the first of them computes: with two, which go through all panels, that is what
    // lies next in memory; with more, the next panel of this thread. Beyond the last panel there is probably the next
    // product's weight.
    const int64_t fetchers = min64(groups, kFetchers);
    const int64_t next = groups == 2 && a.ahead == 1 ? blocks * unit : a.ahead * w.panel_bytes;
    const int64_t ahead = groups == 1 ? kAheadBlocks * unit : next;
    const bool fetch = a.ahead > 0 && (rows == 1 || groups > 1 || kLanes == 8) &&
                       (a.ahead == 1 || packed + ahead < w.data + w.panels * w.panel_bytes);
    const int64_t lines = (unit / 64 + fetchers - 1) / fetchers;
    for (int64_t g = 0; g < groups; ++g) {  // groups of nearly equal size: no thin one at the end
      const int64_t r0 = rows * g / groups, count = rows * (g + 1) / groups - r0;
      s.x = x + r0 * ldx;
      s.lines = fetch && g < fetchers ? lines : 0;
      s.ahead = packed + ahead + g * lines * 64 * blocks;
      micro_rows(count, s, sums + r0 * kPanel + half * kHalf);
    }
  }
}

#if defined(__AMX_BF16__)
#include "quant_amx.inl"
#endif

void quant_tile(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
#if defined(__AMX_BF16__)
  if (a.w->act == Act::kBF16) return tile_quant(a, m0, m1, panel);
#endif
  alignas(64) float sums[kChunkRows * kPanel];
  const int64_t blocks = blocks_of(a.w->k);
  for (int64_t chunk = m0; chunk < m1; chunk += kChunkRows) {
    const int64_t rows = min64(kChunkRows, m1 - chunk);
    // One or two row groups read the weights as they stream by.
    const int64_t slice = rows <= kRows ? blocks : rows <= 2 * kRows ? kStreamBlocks : kSliceBlocks;
    const int64_t slices = (blocks + slice - 1) / slice;
    for (int64_t i = 0; i < slices; ++i) {
      const int64_t b0 = blocks * i / slices;
      add_slice(a, chunk, rows, panel, b0, blocks * (i + 1) / slices - b0, sums);
    }
    finish(a, chunk, rows, panel, sums);
  }
}

// ---- activations ----------------------------------------------------------------------------------------------------

constexpr int kBlockVectors = static_cast<int>(kQuantBlock) / kLanes;

// 32 activations -> one block. A block with an infinity or a NaN gets a NaN for its scale: so does every sum it enters.
PINNATE_INLINE void quantize_block(const vf (&x)[kBlockVectors], WeightFormat format, unsigned char* out) {
  vi32 most{}, sum{};
  for (const vf v : x) {
    const vi32 magnitude = (vi32)v & 0x7fffffff;  // ordered as the floats are, infinities and NaNs last
    most = magnitude > most ? magnitude : most;
  }
  const int32_t bits = max_lane(most);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7f800000, tiny = largest < 1e-30f;  // the inverse must be finite, too
  const bool wide = kWideRows && format == WeightFormat::kInt8;
  const float levels = wide ? 32767.0f : 127.0f;
  const float scale = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest * (wide ? 1.0f / 32767 : 1.0f / 127);
  const float inverse = !finite || tiny ? 0.0f : levels / largest;
  for (int v = 0; v < kBlockVectors; ++v) {
    const vi32 q = to_ints(x[v] * vset(inverse));
    if (wide) store_wide(out + v * kLanes * 2, q);
    else store_bytes(out + v * kLanes, q);
    sum += q;
  }
  const int32_t total = sum_lanes(sum), correction = -kWeightBias * total;
  const float scaled = scale * static_cast<float>(total);
  out += integer_bytes(format);
  std::memcpy(out, &scale, 4);
  std::memcpy(out + 4, format == WeightFormat::kInt8 ? static_cast<const void*>(&correction) : &scaled, 4);
}

// The row at `row`, by load(pointer to kLanes elements).
template <class T, class Load>
PINNATE_INLINE void quantize_row(const T* row, int64_t k, WeightFormat format, unsigned char* out, Load load) {
  vf x[kBlockVectors];
  for (; k >= kQuantBlock; k -= kQuantBlock, row += kQuantBlock, out += row_block_bytes(format)) {
    for (int v = 0; v < kBlockVectors; ++v) x[v] = load(row + v * kLanes);
    quantize_block(x, format, out);
  }
  if (k == 0) return;
  T last[kQuantBlock] = {};
  std::memcpy(last, row, static_cast<size_t>(k) * sizeof(T));
  for (int v = 0; v < kBlockVectors; ++v) x[v] = load(last + v * kLanes);
  quantize_block(x, format, out);
}

void quantize_rows(const GemmArgs& a, int64_t m0, int64_t m1) {
  const PackedWeight& w = *a.w;
  for (int64_t r = m0; r < m1; ++r) {
    unsigned char* out = a.scratch + r * quantized_row_bytes(w);
    if (w.act == Act::kF32)
      quantize_row(static_cast<const float*>(a.x) + r * a.ldx, w.k, w.format, out,
                   [](const float* p) __attribute__((always_inline)) { return vload(p); });
    else
      quantize_row(static_cast<const bf16*>(a.x) + r * a.ldx, w.k, w.format, out,
                   [](const bf16* p) __attribute__((always_inline)) { return load_bf16(p); });
  }
}

// ---- packing --------------------------------------------------------------------------------------------------------

void quant_layout(PackedWeight& w) {
  const int64_t width = w.swiglu ? kHalf : kPanel, n = w.swiglu ? w.n / 2 : w.n;
  w.panels = (n + width - 1) / width;
  w.panel_bytes = 2 * blocks_of(w.k) * unit_bytes(w.format);
}

constexpr int64_t kSegment = 256;  // k decoded at a time: whole blocks of every storage type

// Block `to` of a half panel, one of its columns.
void put_block(WeightFormat format, const Quantized& block, int64_t column, unsigned char* to) {
  unsigned char bytes[kQuantBlock];
  const bool int8 = format == WeightFormat::kInt8;
  const int count = int8 ? kQuantBlock : kQuantBlock / 2;
  for (int i = 0; i < count; ++i)
    bytes[i] = static_cast<unsigned char>(int8 ? block.q[i] + kWeightBias : block.q[i] | block.q[i + 16] << 4);
  for (int i = 0; i < count; i += 4) std::memcpy(to + i / 4 * kGroupBytes + column * 4, bytes + i, 4);
  unsigned char* scales = to + data_bytes(format) + column * 2;
  std::memcpy(scales, &block.scale, 2);
  if (!int8) std::memcpy(scales + kHalf * 2, &block.minimum, 2);
}

// kLanes columns from `column` of a half panel whose first block is `to`; rows[i] is null for padding.
void pack_columns(const unsigned char* const* rows, const TensorType* types, const PackedWeight& w, int64_t column,
                  unsigned char* to) {
  const bool int8 = w.format == WeightFormat::kInt8;
  const int64_t unit = unit_bytes(w.format), data = data_bytes(w.format);
  bool quantize = false;
  for (int i = 0; i < kLanes; ++i) quantize = quantize || (rows[i] != nullptr && !takes(w.format, types[i]));
  alignas(64) float columns[kSegment * kLanes] = {};  // [k][kLanes]
  float decoded[kSegment] = {};
  for (int64_t b = 0; b < blocks_of(w.k); ++b, to += unit) {
    const int64_t in_segment = b * kQuantBlock % kSegment, k0 = b * kQuantBlock - in_segment;
    for (int i = 0; quantize && in_segment == 0 && i < kLanes; ++i) {
      if (rows[i] == nullptr) continue;
      const int64_t k = min64(kSegment, w.k - k0);
      dequantize(types[i], rows[i] + stored_bytes(types[i], k0), k, decoded);
      for (int64_t n = 0; n < kSegment; ++n) columns[n * kLanes + i] = n < k ? decoded[n] : 0.0f;
    }
    const float* block = columns + in_segment * kLanes;
    unsigned char *at = to + column * 4, *scales = to + data + column * 2;
    if (quantize && int8) pack_int8(block, kWeightBias, at, kGroupBytes, scales);
    if (quantize && !int8) pack_int4(block, at, kGroupBytes, scales, scales + kHalf * 2);
    for (int i = 0; i < kLanes; ++i) {
      Quantized taken{};
      if (rows[i] != nullptr && !takes(w.format, types[i])) continue;
      if (rows[i] != nullptr) take_block(rows[i], types[i], b, taken);
      if (rows[i] != nullptr && int8 && types[i] != TensorType::kQ8_0) widen(taken);
      put_block(w.format, taken, column + i, to);
    }
  }
}

void quant_pack_panel(const SourceMatrix* sources, int count, PackedWeight& w, int64_t panel) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const unsigned char* rows[kLanes];
    TensorType types[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) rows[i] = find_row(sources, count, w, panel, j + i, types[i]);
    unsigned char* half = w.data + panel * w.panel_bytes + j / kHalf * (w.panel_bytes / 2);
    pack_columns(rows, types, w, j % kHalf, half);
  }
}

void quant_unpack_rows(const PackedWeight& w, const int32_t* ids, int64_t count, float scale, float* out, int64_t ldo) {
  const bool bytes = w.format == WeightFormat::kInt8;
  const int64_t unit = unit_bytes(w.format), data = data_bytes(w.format);
  for (int64_t n = 0; n < count; ++n, out += ldo) {
    const int64_t j = ids[n] % kPanel, column = j % kHalf;
    const unsigned char* from = w.data + ids[n] / kPanel * w.panel_bytes + j / kHalf * (w.panel_bytes / 2);
    for (int64_t k0 = 0; k0 < w.k; k0 += kQuantBlock, from += unit) {
      uint16_t halves[2] = {0, 0};
      std::memcpy(halves, from + data + column * 2, 2);
      if (!bytes) std::memcpy(halves + 1, from + data + kHalf * 2 + column * 2, 2);
      const float d = half_to_float(halves[0]), m = half_to_float(halves[1]);
      for (int64_t i = 0; i < min64(kQuantBlock, w.k - k0); ++i) {
        const unsigned char q = from[i / 4 % (bytes ? 8 : 4) * kGroupBytes + column * 4 + i % 4];
        const int v = bytes ? static_cast<int8_t>(q - kWeightBias) : i < 16 ? q & 15 : q >> 4;
        out[k0 + i] = (bytes ? d * static_cast<float>(v) : d * static_cast<float>(v) + m) * scale;
      }
    }
  }
}

}  // namespace

void register_quant(KernelTable& t) {
#if defined(__AMX_BF16__)
  register_tiles(t);
  t.quantizes_bf16 = false;
#endif
  t.quant_layout = quant_layout;
  t.quant_pack_panel = quant_pack_panel;
  t.quant_unpack_rows = quant_unpack_rows;
  t.quantize_rows = quantize_rows;
  t.quantized_row_bytes = quantized_row_bytes;
  t.int8_levels = kWideRows ? 32767 : 127;
  t.quant_tile = quant_tile;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
