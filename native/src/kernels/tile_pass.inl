// Rows times half a panel on tile registers (amx.h), included by gemm.cpp and quant.cpp.
//
// A half has 32 columns: [ceil(k / 32)][2 tiles of 16 columns][16 pairs of k][16 columns][2], zeros where k or the columns end.
// Order of a sum over k: 32 at a time, ascending, from zero or from what lies where the sum goes.

constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a half, for 32 k
constexpr int64_t kFetchSteps = 2;              // how far ahead of its use a first pass fetches a panel into L2
constexpr int64_t kTileChunk = 512;             // rows of x that stay in L2 next to a panel

// Rows as tiles: `steps` whole ones of 32 k in place, then perhaps a padded copy of what is left of k.
struct TileRows {
  const bf16* x;
  int64_t ldx;
  int64_t steps;
  const bf16* tail;  // [32][32], null where k is whole steps
};

// Where the sums of 32 columns go.
struct TileSums {
  float* c;
  int64_t ldc;  // floats
  bool add;     // the sums start from what is there
};

// c (+)= x [rows, k] * half a panel, for up to 32 rows: one or two tiles of rows meet two of columns. A pass that fetches
// reads `next` after the end of the half.
template <bool kTwo, bool kFetch>
void tile_pass(const TileRows& x, const unsigned char* b, const unsigned char* next, const TileSums& s) {
  const int64_t bytes = s.ldc * 4;
  s.add ? load_tiles<kTwo, 2>(s.c, bytes) : zero_tiles<kTwo, 2>();
  const int64_t all = x.steps + (x.tail != nullptr);
  auto step = [&](int64_t i, const bf16* rows, int64_t ldx) __attribute__((always_inline)) {
    if constexpr (kFetch) {
      const int64_t over = i + kFetchSteps - all;  // steps of `next`
      const unsigned char* ahead = over < 0 ? b + kFetchSteps * kStepBytes : next + over * kStepBytes;
      for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    }
    multiply_tiles<kTwo, 2>(rows, 2 * ldx, b, b + kTileBytes, 64);
    b += kStepBytes;
  };
  for (int64_t i = 0; i < x.steps; ++i) step(i, x.x + i * kTileK, x.ldx);
  if (x.tail != nullptr) step(x.steps, x.tail, kTileK);
  store_tiles<kTwo, 2>(s.c, bytes);
}

// `next` is null where nothing is fetched.
void tile_rows(const TileRows& x, int64_t rows, const unsigned char* b, const unsigned char* next, const TileSums& s) {
  if (rows > kTileRows) return next ? tile_pass<true, true>(x, b, next, s) : tile_pass<true, false>(x, b, next, s);
  return next ? tile_pass<false, true>(x, b, next, s) : tile_pass<false, false>(x, b, next, s);
}

// Steps [begin, end) of k of rows [row, row + rows) of a.x. What is left of k goes to `tail` [32][32], padded.
TileRows rows_as_tiles(const GemmArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end, bf16* tail) {
  const int64_t whole = min64(end, a.w->k / kTileK);
  const TileRows x{static_cast<const bf16*>(a.x) + row * a.ldx + begin * kTileK, a.ldx, whole - begin, whole < end ? tail : nullptr};
  if (x.tail == nullptr) return x;
  for (int64_t r = 0; r < rows; ++r, tail += kTileK) {
    std::memset(tail, 0, 2 * kTileK);
    std::memcpy(tail, x.x + r * x.ldx + x.steps * kTileK, static_cast<size_t>(2 * (a.w->k % kTileK)));
  }
  before_tile_loads();
  return x;
}

// The panel that this thread probably goes on with.
const unsigned char* next_panel(const GemmArgs& a, int64_t panel) {
  const PackedWeight& w = *a.w;
  return w.data + (panel + a.ahead < w.panels ? panel + a.ahead : panel) * w.panel_bytes;
}
