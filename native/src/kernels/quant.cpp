// Matrix product of quantised weights and activations quantised to signed bytes: packing, unpacking, tiles.
//
// Packed layout: a panel is two halves of 32 columns (with swiglu: gate and up), each half a stream of blocks of 32 k:
//   int8: [8 groups][32 columns][4 k] bytes (plus kWeightBias), 32 scales (half): 1088 bytes;
//   int4: [4 groups][32 columns][4 k] bytes, the low nibbles group g, the high ones group g + 4, 32 scales, 32 minima: 640.
// A row of activations is a sequence of blocks: 32 signed bytes, their scale (float), and what the sum of the bytes adds
// to a dot product: int8: -kWeightBias * sum (int32); int4: scale * sum (float), to be multiplied by the minimum.
//
// A dot product over a block of k is exact. Sums of floats over the blocks run in ascending order, one multiply-add each
// (int4: two). Rows are computed in groups by one template and a long k in slices whose sums rest in memory; neither
// changes an operation or its order.
#include "quant_simd.h"
#include "register.h"

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#include "dequant.inl"
#include "gemm_parts.inl"
#include "quant_blocks.inl"

constexpr int64_t kHalf = kPanel / 2;
constexpr int64_t kGroupBytes = kHalf * 4;  // a group of 4 k of all columns of a half
constexpr int64_t kRowBlockBytes = kQuantBlock + 8;  // a block of a row of activations
constexpr int64_t kChunkRows = 96;                   // rows whose sums rest in memory while k is walked
constexpr int64_t kSliceBlocks = 20;                 // blocks of k: half a panel of them stays in L1 while row groups pass

// How a half panel lies in memory: as packed, or int4 with nibbles spread to bytes, scales and minima to floats.
enum class Form { kBytes, kNibbles, kSpread };
constexpr int64_t kDataBytes[] = {kQuantBlock * kHalf, kQuantBlock* kHalf / 2, kQuantBlock* kHalf};
constexpr int64_t kUnit[] = {kDataBytes[0] + 2 * kHalf, kDataBytes[1] + 4 * kHalf, kDataBytes[2] + 8 * kHalf};

PINNATE_INLINE int64_t blocks_of(int64_t k) { return (k + kQuantBlock - 1) / kQuantBlock; }
PINNATE_INLINE Form form_of(const PackedWeight& w) {
  return w.format == WeightFormat::kInt8 ? Form::kBytes : Form::kNibbles;
}

#if defined(__AVX512VNNI__)
constexpr int kRows = 6;  // 6 x 2 integer and as many float accumulators, of 32 registers
template <int R>
constexpr int kVectors = 2;
#else
constexpr int kRows = 4;
template <int R>
constexpr int kVectors = R == 1 && kLanes == 8 ? 4 : 2;
#endif

// ---- micro kernels: c [R][64], columns of one half, (+)= x [R] * half panel -----------------------------------------

struct Slice {
  const unsigned char* w;  // first block of the half
  int64_t blocks;
  bool first;              // starts from zero, else goes on from c
  const unsigned char* x;  // first block of the first row
  int64_t ldx;             // bytes
  const unsigned char* ahead;  // a micro kernel of 4 or more rows prefetches kAheadLines of this for each block
};
constexpr int64_t kAheadLines = 5;

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
template <int R, int V, Form F>
PINNATE_INLINE void dot_block(vi (&dot)[R][V], const unsigned char* w, const unsigned char* x, int64_t ldx) {
  const auto step = [&](int group, auto weights) __attribute__((always_inline)) {
    vi b[V];
    for (int v = 0; v < V; ++v) b[v] = weights(v);
    for (int r = 0; r < R; ++r) {
      const vi a = iset(load_int(x + r * ldx + group * 4));
      for (int v = 0; v < V; ++v) dot[r][v] = F == Form::kBytes ? dot_bytes(dot[r][v], b[v], a) : dot_nibbles(dot[r][v], b[v], a);
    }
  };
  constexpr int64_t kVectorBytes = kLanes * 4;
  if constexpr (F == Form::kNibbles) {
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

template <Form F>
PINNATE_INLINE vf load_scales(const unsigned char* p, int64_t lane) {
  return F == Form::kSpread ? vload(reinterpret_cast<const float*>(p) + lane) : load_halves(p + lane * 2);
}

template <int R, Form F>
void micro(const Slice& s, float* c) {
  constexpr int V = kVectors<R>;
  constexpr int64_t kData = kDataBytes[static_cast<int>(F)], kStep = kUnit[static_cast<int>(F)];
  for (int64_t column = 0; column < kHalf; column += V * kLanes) {
    vf acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = s.first ? vset(0.0f) : vload(c + r * kPanel + column + v * kLanes);
    const unsigned char *w = s.w, *x = s.x, *ahead = s.ahead;
    for (int64_t b = 0; b < s.blocks; ++b, w += kStep, x += kRowBlockBytes) {
      if (R >= 4 && column == 0)
        for (int line = 0; line < kAheadLines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      vi dot[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
          dot[r][v] = iset(F == Form::kBytes && kWeightBias != 0 ? load_int(x + r * s.ldx + kQuantBlock + 4) : 0);
      dot_block<R, V, F>(dot, w + column * 4, x, s.ldx);
      for (int v = 0; v < V; ++v) {
        const int64_t lane = column + v * kLanes;
        const vf scale = load_scales<F>(w + kData, lane);
        for (int r = 0; r < R; ++r) {
          const vi sum = F == Form::kBytes ? dot[r][v] : sum_nibbles(dot[r][v]);
          acc[r][v] = vfma(to_float(sum), scale * vset(load_float(x + r * s.ldx + kQuantBlock)), acc[r][v]);
        }
        if constexpr (F != Form::kBytes) {
          const vf minimum = load_scales<F>(w + kData, kHalf + lane);
          for (int r = 0; r < R; ++r)
            acc[r][v] = vfma(minimum, vset(load_float(x + r * s.ldx + kQuantBlock + 4)), acc[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) vstore(c + r * kPanel + column + v * kLanes, acc[r][v]);
  }
}

template <Form F>
void micro_rows(int64_t rows, const Slice& s, float* c) {
  switch (rows) {
    case 1: return micro<1, F>(s, c);
    case 2: return micro<2, F>(s, c);
    case 3: return micro<3, F>(s, c);
#if defined(__AVX512VNNI__)
    case 4: return micro<4, F>(s, c);
    case 5: return micro<5, F>(s, c);
#endif
    default: return micro<kRows, F>(s, c);
  }
}

void micro_rows(Form form, int64_t rows, const Slice& s, float* c) {
  switch (form) {
    case Form::kBytes: return micro_rows<Form::kBytes>(rows, s, c);
    case Form::kNibbles: return micro_rows<Form::kNibbles>(rows, s, c);
    case Form::kSpread: return micro_rows<Form::kSpread>(rows, s, c);
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

void spread(const unsigned char* w, int64_t blocks, unsigned char* out) {
  constexpr int64_t kData = kDataBytes[1], kVectorBytes = kLanes * 4;
  for (int64_t b = 0; b < blocks; ++b, w += kUnit[1], out += kUnit[2]) {
    for (int64_t i = 0; i < kData; i += kVectorBytes) {
      const vi v = iload(w + i);
      istore(out + i, low_nibbles(v));
      istore(out + kData + i, high_nibbles(v));
    }
    float* scales = reinterpret_cast<float*>(out + 2 * kData);
    for (int64_t i = 0; i < 2 * kHalf; i += kLanes) vstore(scales + i, load_halves(w + kData + i * 2));
  }
}

// Rows [chunk, chunk + rows) of the product with blocks [b0, b0 + blocks) of both halves of a panel, into sums.
void add_slice(const GemmArgs& a, int64_t chunk, int64_t rows, int64_t panel, int64_t b0, int64_t blocks, float* sums) {
  const PackedWeight& w = *a.w;
  const int64_t groups = (rows + kRows - 1) / kRows, ldx = quantized_row_bytes(w.k);
  // Where there are rows enough to keep this core computing, four groups fetch the next panel into L2 meanwhile.
  const bool prefetch = groups >= 4 && a.ahead > 0 && panel + a.ahead < w.panels;
  const unsigned char* x = a.scratch + chunk * ldx + b0 * kRowBlockBytes;
  const int64_t unit = kUnit[static_cast<int>(form_of(w))];
  alignas(64) unsigned char bytes[kSliceBlocks * kUnit[static_cast<int>(Form::kSpread)]];
  for (int64_t half = 0; half < 2; ++half) {
    Form form = form_of(w);
    const unsigned char* packed = w.data + panel * w.panel_bytes + half * (w.panel_bytes / 2) + b0 * unit;
    Slice s{packed, blocks, b0 == 0, x, ldx, x};
    if (form == Form::kNibbles && groups >= 3) {
      spread(packed, blocks, bytes);
      form = Form::kSpread, s.w = bytes;
    }
    for (int64_t g = 0; g < groups; ++g) {  // groups of nearly equal size: no thin one at the end
      const int64_t r0 = rows * g / groups, count = rows * (g + 1) / groups - r0;
      s.x = x + r0 * ldx;
      s.ahead = prefetch && g * kAheadLines * 64 < unit ? packed + a.ahead * w.panel_bytes + g * kAheadLines * 64 * blocks : s.x;
      micro_rows(form, count, s, sums + r0 * kPanel + half * kHalf);
    }
  }
}

void quant_tile(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  alignas(64) float sums[kChunkRows * kPanel];
  const int64_t blocks = blocks_of(a.w->k);
  for (int64_t chunk = m0; chunk < m1; chunk += kChunkRows) {
    const int64_t rows = min64(kChunkRows, m1 - chunk);
    // One or two row groups read the weights as they stream by.
    const int64_t slices = rows <= 2 * kRows ? 1 : (blocks + kSliceBlocks - 1) / kSliceBlocks;
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
  const float scale = !finite ? __builtin_nanf("") : tiny ? 0.0f : largest * (1.0f / 127);
  const float inverse = !finite || tiny ? 0.0f : 127.0f / largest;
  for (int v = 0; v < kBlockVectors; ++v) {
    const vi32 q = to_ints(x[v] * vset(inverse));
    store_bytes(out + v * kLanes, q);
    sum += q;
  }
  const int32_t total = sum_lanes(sum), correction = -kWeightBias * total;
  const float scaled = scale * static_cast<float>(total);
  std::memcpy(out + kQuantBlock, &scale, 4);
  std::memcpy(out + kQuantBlock + 4, format == WeightFormat::kInt8 ? static_cast<const void*>(&correction) : &scaled, 4);
}

// The row at `row`, by load(pointer to kLanes elements).
template <class T, class Load>
PINNATE_INLINE void quantize_row(const T* row, int64_t k, WeightFormat format, unsigned char* out, Load load) {
  vf x[kBlockVectors];
  for (; k >= kQuantBlock; k -= kQuantBlock, row += kQuantBlock, out += kRowBlockBytes) {
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
    unsigned char* out = a.scratch + r * quantized_row_bytes(w.k);
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
  w.panel_bytes = 2 * blocks_of(w.k) * kUnit[static_cast<int>(form_of(w))];
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
  unsigned char* scales = to + kDataBytes[int8 ? 0 : 1] + column * 2;
  std::memcpy(scales, &block.scale, 2);
  if (!int8) std::memcpy(scales + kHalf * 2, &block.minimum, 2);
}

// kLanes columns from `column` of a half panel whose first block is `to`; rows[i] is null for padding.
void pack_columns(const unsigned char* const* rows, const TensorType* types, const PackedWeight& w, int64_t column,
                  unsigned char* to) {
  const bool int8 = w.format == WeightFormat::kInt8;
  const int64_t unit = kUnit[int8 ? 0 : 1], data = kDataBytes[int8 ? 0 : 1];
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
  const int64_t unit = kUnit[static_cast<int>(form_of(w))], data = kDataBytes[bytes ? 0 : 1];
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
  t.quant_layout = quant_layout;
  t.quant_pack_panel = quant_pack_panel;
  t.quant_unpack_rows = quant_unpack_rows;
  t.quantize_rows = quantize_rows;
  t.quant_tile = quant_tile;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
