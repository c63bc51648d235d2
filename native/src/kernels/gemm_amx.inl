// The product of bf16 rows and weights on tile registers, included by gemm.cpp.
//
// Packed layout: panel p holds 64 columns in two halves, each as tile_pass.inl reads it; with swiglu, the first tile of a half is
// gate's and the second up's. A sum starts from zero or, where the product is added to a row of floats (kAddF32 without a bias,
// in a whole half), from what lies there.
//
// A panel streams by a few rows, or by one group of them. Of more rows, one group after the other meets half a panel; arranged
// rows meet a slice of it that fits L1. The rows are loaded past L1, where they would push the weights out, and what comes next
// is fetched meanwhile. Where k is long and the rows are not arranged, a group takes the whole panel before the next.
#include "tile_pass.inl"

constexpr int64_t kWholeSteps = 20;  // of half a panel that fit L1
constexpr int64_t kSliceSteps = 16;  // of a longer one that are read together
constexpr int64_t kLongSteps = 64;   // more do not stay in L2 next to rows that are not arranged

// Position of a pair of k within a panel, in pairs; the columns of a tile lie side by side.
PINNATE_INLINE int64_t tile_pair_at(const PackedWeight& w, int64_t pair, int64_t column) {
  const int64_t steps = tile_steps(w), tile_column = column % kTileRows;
  const int64_t half = w.swiglu ? column % kHalf / kTileRows : column / kHalf;
  const int64_t tile = w.swiglu ? column / kHalf : column / kTileRows % 2;
  return (((half * steps + pair / kTileRows) * 2 + tile) * kTileRows + pair % kTileRows) * kTileRows + tile_column;
}

// Half a panel, or a slice of it.
struct TileSlice {
  const unsigned char* b;
  int64_t first, last;         // steps of k
  const unsigned char* after;  // what is read next

  int64_t bytes() const { return (last - first) * kStepBytes; }
};

// Group `group` of the rows that meet the slice fetches its part of an equal stretch of what comes next.
void pass_slice(const TileRows& x, int64_t rows, const TileSlice& slice, int64_t group, int64_t groups, const TileSums& from,
                const TileSums& to) {
  const int64_t parts = groups < 4 ? 2 : groups < 8 ? 4 : 8;
  if (group >= parts) return tile_rows<0, true>(x, rows, slice.b, {}, from, to);
  const Fetch fetch{slice.after + group * slice.bytes() / parts};
  if (parts == 2) return tile_rows<16, true>(x, rows, slice.b, fetch, from, to);
  if (parts == 4) return tile_rows<8, true>(x, rows, slice.b, fetch, from, to);
  tile_rows<4, true>(x, rows, slice.b, fetch, from, to);
}

// Results of half a panel from 32 sums of each row.
void finish_half(const GemmArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t half, const float* sums) {
  if (a.epilogue == Epilogue::kSwiGLUAct)
    return finish_columns<kTileRows, kHalf>(a, row, rows, panel * kHalf + half * kTileRows, sums);
  finish_columns<kHalf, kHalf>(a, row, rows, panel * kPanel + half * kHalf, sums);
}

// Where half a panel's sums of rows from `row` on are made: in the rows themselves, if they need nothing more, else in `own`.
struct TilePlace {
  bool in_place;
  TileSums from, to;

  TilePlace(const GemmArgs& a, int64_t row, int64_t panel, int64_t half, const TileSums& own) {
    const int64_t column = panel * kPanel + half * kHalf;
    in_place = stores_floats(a.epilogue) && a.bias == nullptr && column + kHalf <= a.w->n;
    to = in_place ? TileSums{static_cast<float*>(a.out) + row * a.ldo + column, a.ldo} : own;
    from = in_place && a.epilogue == Epilogue::kAddF32 ? to : TileSums{};
  }
};

// At most kTileRows rows: both halves at once, since two streams come faster from memory than one.
void tile_few(const GemmArgs& a, int64_t m0, int64_t rows, int64_t panel) {
  const int64_t half = a.w->panel_bytes / 2, steps = tile_steps(*a.w);
  alignas(64) float sums[2][kTileRows * kHalf];
  alignas(64) bf16 tail[kTileGroup * kTileK];
  Tiles tiles;
  tiles.configure_rows(rows);
  const TileRows x = rows_as_tiles(a, m0, rows, 0, steps, tail);
  const TilePlace first(a, m0, panel, 0, {sums[0], kHalf}), second(a, m0, panel, 1, {sums[1], kHalf});
  first.from.at != nullptr ? load_tiles<false, 2>(first.from.at, first.from.stride * 4) : zero_tiles<false, 2>();
  second.from.at != nullptr ? load_more_tiles(second.from.at, second.from.stride * 4) : zero_more_tiles();
  const unsigned char *b = a.w->data + panel * a.w->panel_bytes, *next = next_panel(a, panel);
  for (int64_t i = 0; i < steps; ++i, b += kStepBytes) {
    const unsigned char* ahead = i + 1 < steps ? b + kStepBytes : next;
    for (int64_t line = 0; line < kStepBytes; line += 64)
      __builtin_prefetch(ahead + line, 0, 2), __builtin_prefetch(ahead + half + line, 0, 2);
    const bool in_tail = i >= x.steps;
    multiply_four_tiles(in_tail ? reinterpret_cast<const unsigned char*>(x.tail) : x.x + i * x.step, in_tail ? 2 * kTileK : x.stride, b,
                        b + half);
  }
  store_tiles<false, 2>(first.to.at, first.to.stride * 4);
  store_more_tiles(second.to.at, second.to.stride * 4);
  if (!first.in_place) finish_half(a, m0, rows, panel, 0, sums[0]);
  if (!second.in_place) finish_half(a, m0, rows, panel, 1, sums[1]);
}

// At most kTileChunk rows, or a group of rows of a long k. `first`: the panel is still in memory.
void tile_chunk(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel, bool first) {
  const PackedWeight& w = *a.w;
  const int64_t steps = tile_steps(w), groups = (m1 - m0 + kTileGroup - 1) / kTileGroup;
  const int64_t slices = !a.arranged || steps <= kWholeSteps ? 1 : (steps + kSliceSteps - 1) / kSliceSteps;
  const Halves halves = halves_of(a);
  alignas(64) float sums[kTileChunk * kHalf];
  alignas(64) bf16 tail[kTileGroup * kTileK];
  Tiles tiles;
  for (int64_t half = halves.first; half < halves.last; ++half) {
    const unsigned char* data = w.data + panel * w.panel_bytes + half * (w.panel_bytes / 2);
    for (int64_t i = 0; i < slices; ++i) {
      TileSlice slice{data + steps * i / slices * kStepBytes, steps * i / slices, steps * (i + 1) / slices, nullptr};
      const bool last = i + 1 == slices;
      slice.after = last && half + 1 == halves.last ? next_panel(a, panel) : slice.b + slice.bytes();
      for (int64_t row = m0, group = 0; row < m1; row += kTileGroup, ++group) {
        const int64_t rows = min64(kTileGroup, m1 - row);
        tiles.configure_rows(rows);
        const TileRows x = rows_as_tiles(a, row, rows, slice.first, slice.last, tail);
        const TileSums own{slices == 1 ? sums : sums + (row - m0) * kHalf, kHalf};
        const TilePlace place(a, row, panel, half, own);
        const TileSums &from = i > 0 ? own : place.from, &to = last ? place.to : own;
        if (groups > 1) {
          pass_slice(x, rows, slice, group, groups, from, to);
        } else if (first) {
          const Fetch fetch{slice.b + kFetchSteps * kStepBytes, steps - kFetchSteps, slice.after};
          tile_rows<kStepLines, false>(x, rows, slice.b, fetch, from, to);
        } else {
          tile_rows<0, false>(x, rows, slice.b, {}, from, to);
        }
        if (last && !place.in_place) finish_half(a, row, rows, panel, half, own.at);
      }
    }
  }
}

void tile_gemm(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel) {
  const int64_t rows = m1 - m0;
  if (rows > 0 && rows <= kTileRows && a.half < 0) return tile_few(a, m0, rows, panel);
  const int64_t most = a.arranged || tile_steps(*a.w) <= kLongSteps ? kTileChunk : kTileGroup;
  for (int64_t row = m0; row < m1; row += most) tile_chunk(a, row, min64(m1, row + most), panel, row == m0);
}
