// The product of bf16 rows and weights on tile registers, included by gemm.cpp.
//
// Packed layout: panel p holds 64 columns in two halves, each as tile_pass.inl reads it. So one pass over a half, and then over
// the other, reads straight through memory. A sum starts from zero or, where the product is added to a row of floats (kAddF32
// without a bias, in a whole panel), from what lies there.
#include "tile_pass.inl"

// Position of a pair of k within a panel, in pairs; the columns of a tile lie side by side.
PINNATE_INLINE int64_t tile_pair_at(int64_t k, int64_t pair, int64_t column) {
  const int64_t steps = (k + kTileK - 1) / kTileK, half = column / 32, tile = column / kTileRows % 2;
  return (((half * steps + pair / kTileRows) * 2 + tile) * kTileRows + pair % kTileRows) * kTileRows + column % kTileRows;
}

void tile_gemm(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  const PackedWeight& w = *a.w;
  const unsigned char* data = w.data + panel * w.panel_bytes;
  const int64_t half = w.panel_bytes / 2, steps = (w.k + kTileK - 1) / kTileK;
  const Halves halves = halves_of(a);
  const unsigned char* after[] = {data + half, next_panel(a, panel)};  // what a half is followed by
  // Sums that need nothing more are made where they go.
  const bool in_place = (a.epilogue == Epilogue::kStoreF32 || a.epilogue == Epilogue::kAddF32) && a.bias == nullptr &&
                        panel * kPanel + halves.last * kHalf <= w.n;
  alignas(64) float sums[kTileGroup * kPanel];
  alignas(64) bf16 tail[kTileGroup * kTileK];
  Tiles tiles;
  for (int64_t row = m0; row < m1; row += kTileGroup) {
    const int64_t rows = min64(kTileGroup, m1 - row);
    tiles.configure_rows(rows);
    const TileRows x = rows_as_tiles(a, row, rows, 0, steps, tail);
    TileSums s{sums, kPanel, false};
    if (in_place) s = {static_cast<float*>(a.out) + row * a.ldo + panel * kPanel, a.ldo, a.epilogue == Epilogue::kAddF32};
    s.c += halves.first * kHalf;
    for (int64_t h = halves.first; h < halves.last; ++h, s.c += kHalf)
      tile_rows(x, rows, data + h * half, row == m0 ? after[h] : nullptr, s);
    if (!in_place) finish(a, row, rows, panel, sums);
  }
}
