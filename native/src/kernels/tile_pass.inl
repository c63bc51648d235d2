// Rows times half a panel on tile registers (amx.h), included by gemm.cpp and quant.cpp.
//
// A half has 32 columns: [ceil(k / 32)][2 tiles of 16 columns][16 pairs of k][16 columns][2], zeros where k or the columns end.
// Order of a sum over k: 32 at a time, ascending, from zero or from what lies where the sum goes.

constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a half, for 32 k
constexpr int kStepLines = kStepBytes / 64;
constexpr int64_t kFetchSteps = 2;              // how far ahead of its use a first pass fetches a panel into L2
constexpr int64_t kTileChunk = 512;             // rows of x that stay in L2 next to a panel

// Rows as tiles: `steps` of 32 k, each `step` bytes after the one before it, then perhaps a padded copy of what is left of k.
struct TileRows {
  const unsigned char* x;
  int64_t stride;    // bytes between rows; the second tile follows the first
  int64_t step;
  int64_t steps;
  const bf16* tail;  // [32][32], null where there is none
};

// Sums of 32 columns of some rows; `stride`: floats.
struct TileSums {
  float* at;
  int64_t stride;
};

// What a pass fetches into L2: kLines lines in each step, from `from` on; from step `turn` on, from `then` on.
struct Fetch {
  const unsigned char* from;
  int64_t turn = -1;
  const unsigned char* then = nullptr;
};

// to = from + x [rows, k] * half a panel, or a slice of it, for up to 32 rows: one or two tiles of rows meet two of columns.
// from.at is null for zeros.
template <bool kTwo, int kLines, bool kPassing>
void tile_pass(const TileRows& x, const unsigned char* b, const Fetch& fetch, const TileSums& from, const TileSums& to) {
  from.at != nullptr ? load_tiles<kTwo, 2>(from.at, from.stride * 4) : zero_tiles<kTwo, 2>();
  const unsigned char* ahead = fetch.from;
  auto step = [&](int64_t i, const void* rows, int64_t stride) __attribute__((always_inline)) {
    if constexpr (kLines > 0) {
      if (i == fetch.turn) ahead = fetch.then;
      for (int64_t line = 0; line < kLines * 64; line += 64) __builtin_prefetch(ahead + line, 0, 2);
      ahead += kLines * 64;
    }
    multiply_tiles<kTwo, 2, kPassing>(rows, stride, b, b + kTileBytes, 64);
    b += kStepBytes;
  };
  for (int64_t i = 0; i < x.steps; ++i) step(i, x.x + i * x.step, x.stride);
  if (x.tail != nullptr) step(x.steps, x.tail, 2 * kTileK);
  store_tiles<kTwo, 2>(to.at, to.stride * 4);
}

template <int kLines, bool kPassing>
void tile_rows(const TileRows& x, int64_t rows, const unsigned char* b, const Fetch& fetch, const TileSums& from, const TileSums& to) {
  if (rows > kTileRows) return tile_pass<true, kLines, kPassing>(x, b, fetch, from, to);
  tile_pass<false, kLines, kPassing>(x, b, fetch, from, to);
}

inline int64_t tile_steps(const PackedWeight& w) { return (w.k + kTileK - 1) / kTileK; }

// [group of 32 rows][step][32][32 k], with zeros where k ends: a step is read straight through memory.
void arrange_rows(const GemmArgs& a, int64_t m0, int64_t m1) {
  const int64_t steps = tile_steps(*a.w), whole = a.w->k / kTileK;
  for (int64_t r = m0; r < m1; ++r) {
    const bf16* x = static_cast<const bf16*>(a.x) + r * a.ldx;
    unsigned char* to = a.scratch + (r / kTileGroup * steps * kTileGroup + r % kTileGroup) * 2 * kTileK;
    for (int64_t i = 0; i < whole; ++i) _mm512_store_si512(to + i * kStepBytes, _mm512_loadu_si512(x + i * kTileK));
    if (whole < steps) {
      const __mmask32 rest = (__mmask32{1} << (a.w->k % kTileK)) - 1;
      _mm512_store_si512(to + whole * kStepBytes, _mm512_maskz_loadu_epi16(rest, x + whole * kTileK));
    }
  }
}

// Steps [begin, end) of k of rows [row, row + rows), a group at most. What is left of k goes to `tail` [32][32], padded.
TileRows rows_as_tiles(const GemmArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end, bf16* tail) {
  if (a.arranged) {
    const unsigned char* group = a.scratch + row / kTileGroup * tile_steps(*a.w) * kStepBytes;
    return {group + begin * kStepBytes, 2 * kTileK, kStepBytes, end - begin, nullptr};
  }
  const int64_t whole = min64(end, a.w->k / kTileK);
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.ldx;
  if (whole < end) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(tail + r * kTileK, 0, 2 * kTileK);
      std::memcpy(tail + r * kTileK, x + r * a.ldx + whole * kTileK, static_cast<size_t>(2 * (a.w->k % kTileK)));
    }
    before_tile_loads();
  }
  return {reinterpret_cast<const unsigned char*>(x + begin * kTileK), 2 * a.ldx, 2 * kTileK, whole - begin, whole < end ? tail : nullptr};
}

// The panel that this thread probably goes on with.
const unsigned char* next_panel(const GemmArgs& a, int64_t panel) {
  const PackedWeight& w = *a.w;
  return w.data + (panel + a.ahead < w.panels ? panel + a.ahead : panel) * w.panel_bytes;
}

void register_tiles(KernelTable& t) {
  t.gemm_rows = kTileGroup, t.gemm_row_block = kTileChunk, t.arrange_rows = arrange_rows;
}
