// Products for attention.cpp on AMX tiles: what attention_micro.inl does, for up to kGroup query rows together.
//
// A tile register holds 16 rows of 64 bytes. A tile of keys as it lies in its page is a right operand already: a row for each
// pair of elements, a lane for each token. Values are repacked for each block of keys, kChunk tokens to a step, whose pages may
// lie apart. The steps are the same for every page size, and no row is mixed with another (amx.h).

constexpr int kGroup = kTileGroup;  // query rows
constexpr int kChunk = kTileK;      // tokens of a step of p . v

// s[r][token] = q[r] . key[token] for N tiles of keys; q rows are q_stride bytes apart, s rows kBlock floats.
template <bool Both, int N>
void score_with_tiles(const float* q, int64_t q_stride, const unsigned char* const* keys, int64_t key_stride, int64_t steps,
                      float* s) {
  before_tile_loads();
  zero_tiles<Both, N>();
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t at = i * kTileRows * key_stride;
    multiply_tiles<Both, N>(q + i * kTileRows, q_stride, keys[0] + at, N == 2 ? keys[1] + at : nullptr, key_stride);
  }
  store_tiles<Both, N>(s, kBlock * 4);
}

// out[r][columns] += sum over the tokens of `chunks` chunks of p[r][token] * value[token], for N tiles of columns. `values`: the
// first of these columns as pack_values leaves them, with `step` bytes between chunks.
template <bool Both, int N>
void add_with_tiles(const float* p, const unsigned char* values, int64_t step, int64_t chunks, float* out, int64_t stride) {
  constexpr int64_t kStride = kBlock / 2 * 4;  // of p
  before_tile_loads();
  load_tiles<Both, N>(out, stride);
  for (int64_t i = 0; i < chunks; ++i)
    multiply_tiles<Both, N>(p + i * kTileRows, kStride, values + i * step, values + i * step + kTileBytes, 64);
  store_tiles<Both, N>(out, stride);
}

// The values of the first `tokens` tokens of a block as right operands: [chunk][16 columns][kChunk / 2 pairs of tokens][16]. A
// last column of ones (and 15 of zeros) makes the sum of the weights part of the product: it follows the others in State. What
// lies in the slots past them becomes zero: it may be no number. Fetches the values of `next` meanwhile unless null.
//
// Tiles are read and fetched line by line in turn: eight pages at once come faster than one after the other.
inline void pack_values(const BlockTiles& block, const BlockTiles* next, int64_t value_stride, int64_t columns, int64_t tokens,
                        unsigned char* out) {
  constexpr int64_t kPairs = kTile / 2;
  const int64_t tiles = (tokens + kChunk - 1) / kChunk * (kChunk / kTile), lines = value_stride / 64;
  for (int64_t s = 0; s < kPairs; ++s)
    for (int64_t t = 0; t < tiles; ++t) {
      unsigned char* to = out + t / 2 * (columns * 64 + kTileBytes) + t % 2 * (kPairs * 64) + s * 64;
      const int64_t rest = tokens - t * kTile - 2 * s;  // from this pair on
      const __mmask32 kept = rest >= 2 ? ~__mmask32{0} : rest == 1 ? __mmask32{0x55555555} : __mmask32{0};
      const unsigned char* line = block.values[rest > 0 ? t : 0] + s * value_stride;
      for (int64_t n = 0; n < columns / kTileRows; ++n)
        _mm512_store_si512(to + n * kTileBytes, _mm512_maskz_loadu_epi16(kept, line + n * 64));
      _mm512_store_si512(to + columns / kTileRows * kTileBytes, _mm512_maskz_set1_epi32(1, 0x3f803f80));
      for (int64_t n = t * lines; next && n < (t + 1) * lines; ++n)
        fetch_ahead(next->values[n % kBlockTiles] + s * value_stride + n / kBlockTiles * 64);
    }
}

// Tiles of keys whose steps do not fill a tile register, with zeros up to whole ones: [16 tokens][steps, padded][16].
inline void pad_keys(BlockTiles& block, int64_t tiles, int64_t key_stride, int64_t steps, unsigned char* out) {
  const int64_t padded = (steps + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t t = 0; t < tiles; ++t, out += padded * 64) {
    for (int64_t s = 0; s < padded; ++s)
      _mm512_store_si512(out + s * 64, s < steps ? _mm512_loadu_si512(block.keys[t] + s * key_stride) : _mm512_setzero_si512());
    block.keys[t] = out;
  }
}
