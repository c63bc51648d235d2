// Tile registers (Intel AMX): eight of 16 rows x 64 bytes. tdpbf16ps adds to a tile of floats [rows][16] the product of a tile
// of rows [rows][32 k] and a tile of weights [16 pairs of k][16 columns][2].
//
// What one tdpbf16ps adds to an element depends on its row and its column alone: the sum over the even and the sum over the
// odd k of 32, each in ascending order from zero, then their sum. Rows that a tile has beyond those configured are neither
// read nor written. So a product over 32 k at a time in ascending order gives a row the same bits in any company.
//
// Tiles hold a thread's state: a kernel configures them when it begins and gives them back when it ends (Tiles).
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace pinnate::PINNATE_KERNEL_ISA {

constexpr int64_t kTileRows = 16;   // and columns of floats, and pairs of k
constexpr int64_t kTileK = 32;      // bf16 of one tile row
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileGroup = 2 * kTileRows;  // rows multiplied together at most

// The tiles of a product: 0 to 3 are sums, [half of the rows][right operand]; 4 and 5 left operands (the halves of the rows);
// 6 and 7 right operands. Where there is no second half of the rows, 2 and 3 can be sums of two more right operands.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_ != 0) _tile_release();
  }

  // Sums and left operands get exactly `count` rows (1 to kTileGroup), so that nothing is stored past them. Forgets what the
  // tiles hold where that is another number than before.
  void configure_rows(int64_t count) {
    if (count == rows_) return;
    rows_ = count;
    Config config;
    const int64_t first = count < kTileRows ? count : kTileRows, second = count - first;
    config.shape(0, first), config.shape(1, first), config.shape(4, first);
    if (second > 0) config.shape(2, second), config.shape(3, second), config.shape(5, second);
    else config.shape(2, first), config.shape(3, first);
    config.shape(6, kTileRows), config.shape(7, kTileRows);
    __asm__ volatile("ldtilecfg %0" : : "m"(config));  // the intrinsic tells the compiler that 8 bytes are read
  }

 private:
  // As ldtilecfg reads it.
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int64_t tile_rows) {
      row_bytes[tile] = 64;
      rows[tile] = static_cast<uint8_t>(tile_rows);
    }
  };

  int64_t rows_ = 0;
};

#define PINNATE_TILES static inline __attribute__((always_inline))

// Makes what was written to memory visible to tile loads: their intrinsics don't tell the compiler that they read it.
PINNATE_TILES void before_tile_loads() { __asm__ volatile("" : : : "memory"); }

// Of the routines below, Both: there are more than kTileRows rows; N: right operands, 1 or 2; strides are in bytes.

template <bool Both, int N>
PINNATE_TILES void zero_tiles() {
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (Both) _tile_zero(2);
  if constexpr (Both && N == 2) _tile_zero(3);
}

template <bool Both, int N>
PINNATE_TILES void load_tiles(const float* sums, int64_t stride) {
  const unsigned char* second = reinterpret_cast<const unsigned char*>(sums) + kTileRows * stride;
  _tile_loadd(0, sums, stride);
  if constexpr (N == 2) _tile_loadd(1, sums + kTileRows, stride);
  if constexpr (Both) _tile_loadd(2, second, stride);
  if constexpr (Both && N == 2) _tile_loadd(3, second + 64, stride);
}

template <bool Both, int N>
PINNATE_TILES void store_tiles(float* sums, int64_t stride) {
  unsigned char* second = reinterpret_cast<unsigned char*>(sums) + kTileRows * stride;
  _tile_stored(0, sums, stride);
  if constexpr (N == 2) _tile_stored(1, sums + kTileRows, stride);
  if constexpr (Both) _tile_stored(2, second, stride);
  if constexpr (Both && N == 2) _tile_stored(3, second + 64, stride);
}

// The sums of two more right operands.
PINNATE_TILES void zero_more_tiles() {
  _tile_zero(2);
  _tile_zero(3);
}

PINNATE_TILES void load_more_tiles(const float* sums, int64_t stride) {
  _tile_loadd(2, sums, stride);
  _tile_loadd(3, sums + kTileRows, stride);
}

PINNATE_TILES void store_more_tiles(float* sums, int64_t stride) {
  _tile_stored(2, sums, stride);
  _tile_stored(3, sums + kTileRows, stride);
}

// One step of kTileK: N right operands, at `right` and `other`, times the rows of the left operand. Passing: the left operand is
// not to take the place of the right ones in L1.
template <bool Both, int N, bool Passing = false>
PINNATE_TILES void multiply_tiles(const void* left, int64_t left_stride, const unsigned char* right,
                                  const unsigned char* other, int64_t right_stride) {
  _tile_loadd(6, right, right_stride);
  if constexpr (Passing) _tile_stream_loadd(4, left, left_stride);
  else _tile_loadd(4, left, left_stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (N == 2) {
    _tile_loadd(7, other, right_stride);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (Both) {
    const unsigned char* second = static_cast<const unsigned char*>(left) + kTileRows * left_stride;
    if constexpr (Passing) _tile_stream_loadd(5, second, left_stride);
    else _tile_loadd(5, second, left_stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// The same for two times two right operands, side by side in memory, and at most kTileRows rows.
PINNATE_TILES void multiply_four_tiles(const void* left, int64_t left_stride, const unsigned char* right, const unsigned char* more) {
  _tile_loadd(4, left, left_stride);
  _tile_loadd(6, right, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, more, 64);
  _tile_dpbf16ps(2, 4, 7);
  _tile_loadd(6, right + kTileBytes, 64);
  _tile_dpbf16ps(1, 4, 6);
  _tile_loadd(7, more + kTileBytes, 64);
  _tile_dpbf16ps(3, 4, 7);
}

#undef PINNATE_TILES

}  // namespace pinnate::PINNATE_KERNEL_ISA
