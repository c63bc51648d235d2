// The product of bf16 rows and quantised weights on tile registers, included by quant.cpp.
//
// Blocks of half a panel become tiles of bf16 in a buffer, a slice of k at a time, once for all rows of the tile. A weight is
// what it stands for (scale * q, or scale * q + minimum), rounded once to a float and then to bf16; rows are not
// rounded. Order of a sum over k: as tile_pass.inl says, whatever the slices.
#include "tile_pass.inl"

constexpr int64_t kTileSlice = 8;    // blocks of k: their tiles stay in L1
constexpr int64_t kFetchBlocks = 8;  // how far ahead of its use a block is fetched

// The number of kBits at bit `At` of each lane, as the float 2^kBits + u.
template <int kBits, int At>
PINNATE_INLINE vf number_at(vi v) {
  constexpr int kTo = 23 - kBits;  // the highest bits of the fraction
  if constexpr (At < kTo) v = _mm512_slli_epi32(v, kTo - At);
  if constexpr (At > kTo) v = _mm512_srli_epi32(v, At - kTo);
  const vi mask = iset(((1 << kBits) - 1) << kTo), exponent = iset((127 + kBits) << 23);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));  // (v & mask) | exponent
}

// Floats rounded to bf16 and laid side by side. To nearest; halves away from zero, which costs less than to even.
PINNATE_INLINE vi round_pairs(vf even, vf odd) {
  const vi half = iset(0x8000), low = _mm512_add_epi32(_mm512_castps_si512(even), half),
           high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  const vi down = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);  // bytes 2 and 3 of each four, as bytes 0 and 1
  return _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, down);
}

// Two rows of a tile from the numbers at bit `At` and the next three of a group of 4 k.
template <int kBits, int At>
PINNATE_INLINE void store_pairs(vi v, vf scale, vf base, unsigned char* out) {
  const auto weight = [&](vf number) __attribute__((always_inline)) { return vfma(number, scale, base); };
  const vf k0 = weight(number_at<kBits, At>(v)), k1 = weight(number_at<kBits, At + 8>(v));
  const vf k2 = weight(number_at<kBits, At + 16>(v)), k3 = weight(number_at<kBits, At + 24>(v));
  _mm512_store_si512(out, round_pairs(k0, k1));
  _mm512_store_si512(out + 64, round_pairs(k2, k3));
}

// A block of half a panel -> its two tiles. Meanwhile fetches the block at `ahead` into L2, line by line: seventeen lines at
// once would keep the loads waiting.
template <WeightFormat F>
PINNATE_INLINE void decode_block(const unsigned char* w, const unsigned char* ahead, unsigned char* out) {
  constexpr bool kBytes = F == WeightFormat::kInt8;
  vf scale[2], base[2];  // a weight is scale * (2^bits + u) + base: exactly, but for scales 2,000 times smaller than the minimum
  for (int tile = 0; tile < 2; ++tile) {
    const unsigned char* scales = w + data_bytes(F) + tile * kTileRows * 2;
    scale[tile] = load_halves(scales);
    base[tile] = kBytes ? scale[tile] * vset(-static_cast<float>(256 + kWeightBias))
                        : load_halves(scales + kHalf * 2) - scale[tile] * vset(16);
  }
  for (int64_t line = data_bytes(F); line < unit_bytes(F); line += 64) __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 8
  for (int g = 0; g < (kBytes ? 8 : 4); ++g)
    for (int tile = 0; tile < 2; ++tile) {
      const int64_t at = g * kGroupBytes + tile * kTileRows * 4;
      __builtin_prefetch(ahead + at, 0, 2);
      const vi v = iload(w + at);
      unsigned char* to = out + tile * kTileBytes + g * 128;
      store_pairs<kBytes ? 8 : 4, 0>(v, scale[tile], base[tile], to);
      if constexpr (!kBytes) store_pairs<4, 4>(v, scale[tile], base[tile], to + 512);
    }
}

// `blocks` blocks of a stream of them -> tiles. Fetches what lies kFetchBlocks further in the stream, after its end in `next`.
template <WeightFormat F>
void decode(const unsigned char* w, int64_t blocks, const unsigned char* end, const unsigned char* next, unsigned char* out) {
  for (int64_t b = 0; b < blocks; ++b, w += unit_bytes(F), out += kStepBytes) {
    const unsigned char* ahead = w + kFetchBlocks * unit_bytes(F);
    decode_block<F>(w, ahead < end ? ahead : next + (ahead - end), out);
  }
  before_tile_loads();
}

// Rows [m0, m1) times blocks [b0, b1) of k of half a panel, in tiles at `b`; `s`: of row m0, nothing there yet if b0 is 0.
void add_tiles(const GemmArgs& a, int64_t m0, int64_t m1, int64_t b0, int64_t b1, const unsigned char* b, Tiles& tiles,
               TileSums s) {
  alignas(64) bf16 tail[kTileGroup * kTileK];
  for (int64_t row = m0; row < m1; row += kTileGroup, s.at += kTileGroup * s.stride) {
    const int64_t rows = min64(kTileGroup, m1 - row);
    tiles.configure_rows(rows);
    tile_rows<0, false>(rows_as_tiles(a, row, rows, b0, b1, tail), rows, b, {}, b0 > 0 ? s : TileSums{}, s);
  }
}

void tile_quant(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  const PackedWeight& w = *a.w;
  const int64_t blocks = blocks_of(w.k), slices = (blocks + kTileSlice - 1) / kTileSlice;
  const unsigned char *data = w.data + panel * w.panel_bytes, *next = next_panel(a, panel);
  const auto to_tiles = w.format == WeightFormat::kInt8 ? decode<WeightFormat::kInt8> : decode<WeightFormat::kInt4>;
  const Halves halves = halves_of(a);
  alignas(64) unsigned char buffer[kTileSlice * kStepBytes];
  alignas(64) float sums[kTileChunk * kPanel];
  Tiles tiles;
  for (int64_t chunk = m0; chunk < m1; chunk += kTileChunk) {
    const int64_t end = min64(m1, chunk + kTileChunk);
    for (int64_t half = halves.first; half < halves.last; ++half)
      for (int64_t i = 0; i < slices; ++i) {
        const int64_t b0 = blocks * i / slices, b1 = blocks * (i + 1) / slices;
        const unsigned char* from = data + half * (w.panel_bytes / 2) + b0 * unit_bytes(w.format);
        to_tiles(from, b1 - b0, data + w.panel_bytes, next, buffer);
        add_tiles(a, chunk, end, b0, b1, buffer, tiles, {sums + half * kHalf, kPanel});
      }
    finish(a, chunk, end - chunk, panel, sums);
  }
}
