// The product of bf16 rows and weights on tile registers (amx.h), included by gemm.cpp.
//
// Packed layout: panel p holds 64 columns; [ceil(k / 32)][4 tiles of 16 columns][16 pairs of k][16 columns][2], zeros where k or
// the columns end. Order of a sum over k: 32 at a time, ascending (amx.h).

constexpr int64_t kStepBytes = 4 * kTileBytes;  // of a panel, for 32 k

// Bytes that somebody will read soon, fetched into L2 a few lines at a time.
struct Fetch {
  const unsigned char* next;
  int64_t lines;  // at each step

  static void step(Fetch& f) {
    for (int64_t i = 0; i < f.lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(f.next + 64 * i), _MM_HINT_T1);
    f.next += 64 * f.lines;
  }
};

// Rows as A tiles: `steps` whole ones of 32 k in place, then perhaps a padded copy of what is left of k.
struct TileRows {
  const bf16* x;
  int64_t ldx;
  const bf16* tail;  // [32][32], null where k is whole steps
};

// c [rows][64] = x [rows, k] * panel, for at most 16 rows: each row tile meets four column tiles.
void tiles_1x4(const TileRows& x, int64_t steps, const unsigned char* b, float* c, Fetch fetch) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  auto step = [&](const bf16* rows, int64_t stride) __attribute__((always_inline)) {
    Fetch::step(fetch);
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + 2 * kTileBytes, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b + 3 * kTileBytes, 64);
    _tile_dpbf16ps(3, 4, 7);
    b += kStepBytes;
  };
  for (int64_t s = 0; s < steps; ++s) step(x.x + s * kTileK, 2 * x.ldx);
  if (x.tail != nullptr) step(x.tail, 2 * kTileK);
  _tile_stored(0, c, 4 * kPanel);
  _tile_stored(1, c + 16, 4 * kPanel);
  _tile_stored(2, c + 32, 4 * kPanel);
  _tile_stored(3, c + 48, 4 * kPanel);
}

// c [rows][64] = x [rows, k] * 32 columns of a panel, for 17 to 32 rows: two row tiles meet two column tiles.
void tiles_2x2(const TileRows& x, int64_t steps, const unsigned char* b, float* c, Fetch& fetch) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  auto step = [&](const bf16* rows, int64_t ldx) __attribute__((always_inline)) {
    Fetch::step(fetch);
    _tile_loadd(4, rows, 2 * ldx);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + kTileRows * ldx, 2 * ldx);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    b += kStepBytes;
  };
  for (int64_t s = 0; s < steps; ++s) step(x.x + s * kTileK, x.ldx);
  if (x.tail != nullptr) step(x.tail, kTileK);
  _tile_stored(0, c, 4 * kPanel);
  _tile_stored(1, c + 16, 4 * kPanel);
  _tile_stored(2, c + kTileRows * kPanel, 4 * kPanel);
  _tile_stored(3, c + kTileRows * kPanel + 16, 4 * kPanel);
}

// Tiles 0 to 3: sums; 4 and 5: rows; 6 and 7: weights.
TileConfig product_config(int64_t rows) {
  TileConfig config;
  const int64_t upper = min64(rows, kTileRows), lower = rows - upper;
  for (int t = 0; t < 4; ++t) config.shape(t, lower == 0 || t < 2 ? upper : lower);
  config.shape(4, upper);
  config.shape(5, lower == 0 ? upper : lower);
  config.shape(6, kTileRows);
  config.shape(7, kTileRows);
  return config;
}

void tile_gemm(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  constexpr int64_t kGroup = 2 * kTileRows;
  const PackedWeight& w = *a.w;
  const unsigned char* data = w.data + panel * w.panel_bytes;
  const int64_t steps = w.k / kTileK, rest = w.k - steps * kTileK, all_steps = steps + (rest > 0);
  alignas(64) float sums[kGroup * kPanel];
  alignas(64) bf16 tail[kGroup * kTileK];
  const int64_t passes = (m1 - m0) / kGroup * 2 + ((m1 - m0) % kGroup > kTileRows ? 2 : (m1 - m0) % kGroup > 0 ? 1 : 0);
  Fetch fetch{data, 0};
  if (a.ahead > 0 && panel + a.ahead < w.panels)
    fetch = {data + a.ahead * w.panel_bytes, (w.panel_bytes / 64 + passes * all_steps - 1) / (passes * all_steps)};
  TileScope tiles;
  int64_t configured = 0;
  for (int64_t row = m0; row < m1; row += kGroup) {
    const int64_t rows = min64(kGroup, m1 - row);
    if (rows != configured) tiles.configure(product_config(configured = rows));
    TileRows x{static_cast<const bf16*>(a.x) + row * a.ldx, a.ldx, rest > 0 ? tail : nullptr};
    if (rest > 0)
      for (int64_t r = 0; r < rows; ++r) {
        std::memset(tail + r * kTileK, 0, 2 * kTileK);
        std::memcpy(tail + r * kTileK, x.x + r * a.ldx + steps * kTileK, static_cast<size_t>(2 * rest));
      }
    before_tile_loads();
    if (rows <= kTileRows) {
      tiles_1x4(x, steps, data, sums, fetch);
    } else {
      tiles_2x2(x, steps, data, sums, fetch);
      tiles_2x2(x, steps, data + 2 * kTileBytes, sums + 2 * kTileRows, fetch);
    }
    finish(a, row, rows, panel, sums);
  }
}
