// Tile registers (Intel AMX): eight of 16 rows x 64 bytes. tdpbf16ps adds to a tile of floats [rows][16] the product of a tile
// of rows [rows][32 k] and a tile of weights [16 pairs of k][16 columns][2].
//
// What one tdpbf16ps adds to an element depends on its row and its column alone: the sum over the even and the sum over the
// odd k of 32, each in ascending order from zero, then their sum. Rows that a tile has beyond those configured are neither
// read nor written. So a product over 32 k at a time in ascending order gives a row the same bits in any company.
//
// Tiles hold a thread's state: a kernel configures them when it begins and gives them back when it ends (TileScope).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace pinnate::PINNATE_KERNEL_ISA {

constexpr int64_t kTileRows = 16;   // and columns of floats, and pairs of k
constexpr int64_t kTileK = 32;      // bf16 of one tile row
constexpr int64_t kTileBytes = 1024;

// Shapes of the eight tiles, as ldtilecfg reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void shape(int tile, int64_t tile_rows) {
    row_bytes[tile] = 64;
    rows[tile] = static_cast<uint8_t>(tile_rows);
  }
};

class TileScope {
 public:
  TileScope() = default;
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope() { _tile_release(); }
  // Forgets what the tiles hold. (The compiler's own intrinsic tells it that 8 bytes are read.)
  void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config)); }
};

// Makes what was written to memory visible to tile loads: their intrinsics don't tell the compiler that they read it.
static inline __attribute__((always_inline)) void before_tile_loads() { __asm__ volatile("" : : : "memory"); }

}  // namespace pinnate::PINNATE_KERNEL_ISA
