// Paged attention: keys and values into their pages, and causal attention that reads the pages in place.
//
// A page holds for each KV head a tile of keys, then a tile of values, in the 32-bit lanes of attention_micro.inl:
//   keys   [head_dim / per][page_size]           lanes: neighbours are tokens; a vector is one step of q . k for many tokens
//   values [page_size / per][head_dim, padded]   lanes: neighbours are columns; a vector is one step of p . v for many columns
// with per = 2 (bf16, pairs) or 1 (fp32), columns padded to a multiple of 16. Pages should be 64-byte aligned (speed only).
//
// Softmax is the online form (Milakov and Gimelshein 2018; Dao et al. 2022): blocks of kBlock keys that start at multiples of
// kBlock, in order, fp32 maximum and sum. Determinism: a masked score is -inf and gives weight +0, which leaves the maximum and
// the sums as they were; so a row's bits do not depend on how far its neighbours in the block of rows reach.
#include <cfloat>
#include <cmath>

#include "simd.h"

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#include "attention_micro.inl"

constexpr int64_t kItemRows = 96;  // query rows of an item at most: they share one pass over the keys

struct Geometry {  // of one layer's pages; bytes unless said otherwise
  int64_t per, steps;               // elements in a lane; lanes of one key
  int64_t columns;                  // of a value row, padded, in lanes
  int64_t key_stride, value_stride;
  int64_t keys, head, page;         // keys of a head, keys and values of a head, a page

  explicit Geometry(const KVLayout& kv) {
    per = kv.act == Act::kBF16 ? 2 : 1;
    steps = kv.head_dim / per;
    columns = (kv.head_dim + 15) / 16 * 16;
    key_stride = int64_t{kv.page_size} * 4;
    value_stride = columns * 4;
    keys = steps * key_stride;
    head = keys + kv.page_size / per * value_stride;
    page = kv.num_kv_heads * head;
  }
};

size_t kv_page_bytes(const KVLayout& kv) { return static_cast<size_t>(Geometry(kv).page); }

// ---- q, k, v of new tokens ----------------------------------------------------------------------------------------

// y = rope(norm(x)) for one head. Norm and rope are each optional.
void prepare_head(const QKVArgs& a, const float* x, const float* norm, int32_t position, float* y) {
  const int64_t d = a.kv.head_dim, half = a.rotary / 2;
  if (norm) {
    const vf inverse = set1(1.0f / sqrtf(sum_squares(x, d) / static_cast<float>(d) + a.norm_eps));
    for_lanes(d, [&](int64_t i, int n) {
      store_lanes(y + i, load_lanes(x + i, n) * inverse * load_lanes(norm + i, n), n);
    });
  } else {
    memcpy(y, x, static_cast<size_t>(d) * 4);
  }
  const float* cosines = a.cos + position * half;
  const float* sines = a.sin + position * half;
  for_lanes(half, [&](int64_t i, int n) {
    const vf c = load_lanes(cosines + i, n), s = load_lanes(sines + i, n);
    const vf first = load_lanes(y + i, n), second = load_lanes(y + half + i, n);
    store_lanes(y + i, first * c - second * s, n);
    store_lanes(y + half + i, second * c + first * s, n);
  });
}

// Writes one token's key and value of one head. Only that token's bytes are touched: other threads may write its neighbours.
void write_slot(const Geometry& g, int64_t head_dim, const float* k, const float* v, unsigned char* base, int64_t offset,
                bf16* scratch) {
  unsigned char* keys = base + offset * 4;
  unsigned char* values = base + g.keys + offset / g.per * g.value_stride;
  if (g.per == 1) {
    for (int64_t i = 0; i < head_dim; ++i) memcpy(keys + i * g.key_stride, k + i, 4);
    memcpy(values, v, static_cast<size_t>(head_dim) * 4);
    return;
  }
  store_act_row(k, scratch, Act::kBF16, head_dim);
  for (int64_t i = 0; i < g.steps; ++i) memcpy(keys + i * g.key_stride, scratch + 2 * i, 4);
  store_act_row(v, scratch, Act::kBF16, head_dim);
  values += offset % 2 * 2;
  for (int64_t i = 0; i < head_dim; ++i) memcpy(values + i * 4, scratch + i, 2);
}

void qkv(const QKVArgs& a, int64_t r0, int64_t r1) {
  const Geometry g(a.kv);
  const int64_t d = a.kv.head_dim;
  float* y = static_cast<float*>(__builtin_alloca(static_cast<size_t>(d) * 4));
  bf16* rounded = static_cast<bf16*>(__builtin_alloca(static_cast<size_t>(d) * 2));
  for (int64_t t = r0; t < r1; ++t) {
    const float* x = a.qkv + t * a.ldx;
    unsigned char* q_out = static_cast<unsigned char*>(a.q_out);
    for (int64_t h = 0; h < a.num_heads; ++h, x += d) {
      prepare_head(a, x, a.q_norm, a.positions[t], y);
      store_act_row(y, q_out + static_cast<size_t>(t * a.ldq + h * d) * act_bytes(a.kv.act), a.kv.act, d);
    }
    unsigned char* page = a.pool + a.slots[t] / a.kv.page_size * g.page;
    for (int64_t h = 0; h < a.kv.num_kv_heads; ++h, x += d) {
      prepare_head(a, x, a.k_norm, a.positions[t], y);
      write_slot(g, d, y, x + a.kv.num_kv_heads * d, page + h * g.head, a.slots[t] % a.kv.page_size, rounded);
    }
  }
}

// ---- items --------------------------------------------------------------------------------------------------------
// The query rows of a sequence for one KV head are its tokens times the query heads of the group, token by token. An item is a
// run of at most `item_rows` of them.

int64_t group_size(const AttentionArgs& a) { return a.num_heads / a.kv.num_kv_heads; }

int64_t count_items(const AttentionArgs& a, int64_t item_rows) {
  const int64_t group = group_size(a);
  int64_t blocks = 0;
  for (int s = 0; s < a.num_seqs; ++s) blocks += ((a.seq_starts[s + 1] - a.seq_starts[s]) * group + item_rows - 1) / item_rows;
  return blocks * a.kv.num_kv_heads;
}

// Small steps are cut finer, so that a few threads share them evenly. Long contexts are not cut below a group of heads: it
// would read the keys from memory once more for each part.
int64_t choose_item_rows(const AttentionArgs& a) {
  constexpr int64_t kEnough = 16, kLongContext = 4096;
  int64_t longest = 0;
  for (int s = 0; s < a.num_seqs; ++s) longest = a.contexts[s] > longest ? a.contexts[s] : longest;
  const int64_t least = longest > kLongContext ? group_size(a) : 1;
  int64_t rows = kItemRows;
  while (rows / 2 >= least && count_items(a, rows) < kEnough) rows /= 2;
  return rows;
}

int64_t attention_items(const AttentionArgs& a) { return count_items(a, choose_item_rows(a)); }

struct Item {
  int64_t seq, head;    // head: of the keys
  int64_t first, rows;  // query rows
};

Item find_item(const AttentionArgs& a, int64_t item) {
  const int64_t item_rows = choose_item_rows(a), group = group_size(a);
  int64_t s = 0, rows = 0, blocks = 0;
  for (;; ++s) {
    rows = (a.seq_starts[s + 1] - a.seq_starts[s]) * group;
    blocks = (rows + item_rows - 1) / item_rows;
    if (item < blocks * a.kv.num_kv_heads) break;
    item -= blocks * a.kv.num_kv_heads;
  }
  const int64_t first = item % blocks * item_rows;
  return {s, item / blocks, first, rows - first < item_rows ? rows - first : item_rows};
}

// ---- attention ----------------------------------------------------------------------------------------------------

// Per-thread memory of an item, in floats, each part 64-byte aligned.
struct Scratch {
  float* q;            // [kItemRows][q_words] left operand of the scores
  float* out;          // [kItemRows][columns]
  float* sums;         // [kItemRows][kWidth] running sum of weights, by lane
  float* maximum;      // [kItemRows]
  int32_t* positions;  // [kItemRows]
  float* scores;       // [kRows][kBlock]
  float* weights;      // [kRows][kBlock]

  static int64_t align(int64_t floats) { return (floats + 15) / 16 * 16; }
  static int64_t row_floats(const Geometry& g) { return align(g.steps * 2) + g.columns + 16 + 1 + 1; }
  static size_t bytes(const Geometry& g) { return static_cast<size_t>(kItemRows * row_floats(g) + 2 * 8 * kBlock) * 4 + 64; }

  Scratch(const Geometry& g, unsigned char* memory) {
    q = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
    out = q + kItemRows * align(g.steps * 2);
    sums = out + kItemRows * g.columns;
    maximum = sums + kItemRows * 16;
    positions = reinterpret_cast<int32_t*>(maximum + kItemRows);
    scores = maximum + 2 * kItemRows;
    weights = scores + 8 * kBlock;
  }
};

size_t attention_scratch(const AttentionArgs& a) { return Scratch::bytes(Geometry(a.kv)); }

template <Act A>
void load_query(const AttentionArgs& a, int64_t row, float* q) {  // row of the call: token * num_heads + head
  const int64_t d = a.kv.head_dim, group_offset = row / a.num_heads * a.ldq + row % a.num_heads * d;
  const unsigned char* x = static_cast<const unsigned char*>(a.q) + static_cast<size_t>(group_offset) * act_bytes(A);
  if constexpr (A == Act::kBF16 && Dot<A>::kWords == 2) {
    for (int64_t i = 0; i < d; ++i) {
      bf16 b;
      memcpy(&b, x + 2 * i, 2);
      const uint32_t u = uint32_t{b} << 16;
      memcpy(q + i, &u, 4);
    }
  } else {
    memcpy(q, x, static_cast<size_t>(d) * act_bytes(A));
  }
}

// Keys a row sees in the block at hand: [low, high) relative to the block's start.
struct Span {
  int64_t low, high;
};

// Scores of R rows -> weights, updated maximum and sums; alpha[r] is what earlier results of the row are to be scaled by.
template <Act A>
void update_softmax(int64_t R, int tiles, const Span* spans, float* s, float* p, float* maximum, float* sums, float* alpha) {
  const int even_tiles = (tiles + 1) / 2 * 2;
  alignas(64) float newest[16] = {}, factor[16] = {};
  for (int64_t r = 0; r < R; ++r) {
    float* row = s + r * kBlock;
    const int64_t low = spans[r].low, high = spans[r].high;
    if (low > 0 || high < even_tiles * kTile) {
      const vf lo = set1(static_cast<float>(low)), hi = set1(static_cast<float>(high)), hidden = set1(-INFINITY);
      for (int i = 0; i < even_tiles * kTile; i += kWidth) {
        const vf at = iota() + set1(static_cast<float>(i));
        store(row + i, select_lt(at, lo, hidden, select_lt(at, hi, load(row + i), hidden)));
      }
    }
    vf m = load(row);
    for (int i = kWidth; i < tiles * kTile; i += kWidth) m = max(m, load(row + i));
    const float block = reduce_max(m);
    newest[r] = block > maximum[r] ? block : maximum[r];
  }
  for (int i = 0; i < 16; i += kWidth) {
    if (i >= R) break;
    store(factor + i, exp(load_n(maximum + i, R - i < kWidth ? R - i : kWidth) - load(newest + i)));
  }
  for (int64_t r = 0; r < R; ++r) {
    const float* row = s + r * kBlock;
    alpha[r] = factor[r];
    maximum[r] = newest[r];
    vf sum = load(sums + r * kWidth) * set1(factor[r]);
    for (int t = 0; t < even_tiles; t += 2) {
      vf w[2 * kTileVecs];
      for (int n = 0; n < 2 * kTileVecs; ++n) w[n] = exp(load(row + t * kTile + n * kWidth) - set1(newest[r]));
      constexpr int64_t words = kTile / Dot<A>::kPer * Dot<A>::kWords;
      sum = store_weights<A>(w, p + r * (kBlockTiles * words) + t * words, sum);
    }
    store(sums + r * kWidth, sum);
  }
}

// Calls f with R (and so on) as a compile-time constant.
template <int Max, class F>
[[gnu::always_inline]] inline void with_constant(int64_t n, F&& f) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, f);
  }
  f.template operator()<Max>();
}

template <Act A>
struct ItemRun {
  const AttentionArgs& a;
  const Geometry g;
  const Item item;
  const Scratch m;
  const int64_t group, q_words;

  ItemRun(const AttentionArgs& args, const Item& which, unsigned char* memory)
      : a(args), g(args.kv), item(which), m(g, memory), group(group_size(args)), q_words(g.steps * Dot<A>::kWords) {}

  int64_t position(int64_t r) const { return m.positions[r]; }
  int64_t first_key(int64_t r) const {  // of row r
    return a.window > 0 && position(r) >= a.window ? position(r) - a.window + 1 : 0;
  }

  int64_t call_row(int64_t r) const {  // row r as token * num_heads + head
    const int64_t at = item.first + r;
    return (a.seq_starts[item.seq] + at / group) * a.num_heads + item.head * group + at % group;
  }

  void run() const {
    const int64_t first_position = a.contexts[item.seq] - (a.seq_starts[item.seq + 1] - a.seq_starts[item.seq]);
    for (int64_t r = 0; r < item.rows; ++r) {
      m.positions[r] = static_cast<int32_t>(first_position + (item.first + r) / group);
      load_query<A>(a, call_row(r), m.q + r * q_words);
      m.maximum[r] = -FLT_MAX;  // finite, so that "masked minus maximum" is -inf and never NaN
    }
    memset(m.out, 0, static_cast<size_t>(item.rows * g.columns) * 4);
    memset(m.sums, 0, static_cast<size_t>(item.rows * kWidth) * 4);
    memset(m.scores, 0, kRows * kBlock * 4);
    const int64_t last = position(item.rows - 1) / kBlock;
    for (int64_t b = first_key(0) / kBlock; b <= last; ++b) run_block(b * kBlock);
    for (int64_t r = 0; r < item.rows; ++r) write_row(r);
  }

  // The tiles of the block at `start` that hold keys some row sees; returns how many.
  int find_tiles(int64_t start, BlockTiles& block) const {
    const int64_t end = position(item.rows - 1) + 1;
    const int32_t* pages = a.page_indices + a.page_offsets[item.seq];
    int t = 0;
    for (; t < kBlockTiles && start + t * kTile < end; ++t) {
      const int64_t token = start + t * kTile, offset = token % a.kv.page_size;
      const unsigned char* base = a.pool + pages[token / a.kv.page_size] * g.page + item.head * g.head;
      block.keys[t] = base + offset * 4;
      block.values[t] = base + g.keys + offset / g.per * g.value_stride;
    }
    return t;
  }

  void run_block(int64_t start) const {
    BlockTiles block = {}, next = {};
    const int tiles = find_tiles(start, block), next_tiles = find_tiles(start + kBlock, next);
    for (int t = next_tiles; t < kBlockTiles; ++t) {  // nothing to fetch there: point at what is at hand
      next.keys[t] = block.keys[t < tiles ? t : 0];
      next.values[t] = block.values[t < tiles ? t : 0];
    }
    for (int64_t r = 0; r < item.rows; r += kRows) {
      const int64_t rows = item.rows - r < kRows ? item.rows - r : kRows;
      const int64_t high = position(r + rows - 1) + 1 - start;
      if (high <= 0 || first_key(r) >= start + kBlock) continue;
      run_rows(block, r == 0 && next_tiles ? &next : nullptr, start, r, rows, high < kBlock ? high : kBlock);
    }
  }

  // Rows [r, r + rows) against the first `tokens` keys of the block at `start`; fetches `next` meanwhile unless null.
  void run_rows(const BlockTiles& block, const BlockTiles* next, int64_t start, int64_t r, int64_t rows, int64_t tokens) const {
    const int tiles = static_cast<int>((tokens + kTile - 1) / kTile);
    Span spans[kRows];
    float alpha[kRows];
    for (int64_t i = 0; i < rows; ++i) spans[i] = {first_key(r + i) - start, position(r + i) + 1 - start};
    const float* q = m.q + r * q_words;
    with_constant<kRows>(rows, [&]<int R>() {
      constexpr int kTiles = kVecs / kTileVecs;  // scored together
      for (int t = 0; t < tiles; t += kTiles)
        with_constant<kTiles>(tiles - t, [&]<int T>() {
          score_tiles<A, R, T>(q, q_words, block.keys + t, next ? next->keys + t : nullptr, g.key_stride, g.steps, a.scale,
                               m.scores + t * kTile);
        });
    });
    update_softmax<A>(rows, tiles, spans, m.scores, m.weights, m.maximum + r, m.sums + r * kWidth, alpha);
    const int64_t vecs = g.columns / kWidth;
    for (int64_t n = 0; n < vecs; n += kVecs)
      with_constant<kRows>(rows, [&]<int R>() {
        with_constant<kVecs>(vecs - n, [&]<int N>() {
          add_values<A, R, N>(m.weights, block, next, n * kWidth * 4, g.value_stride, tokens, alpha,
                              m.out + r * g.columns + n * kWidth, g.columns);
        });
      });
  }

  void write_row(int64_t r) const {
    float* out = m.out + r * g.columns;
    const vf sum = set1(reduce_add(load(m.sums + r * kWidth)));
    // + 0 turns -0 into +0: whether masked zeros were added to a zero must not show
    for (int64_t i = 0; i < g.columns; i += kWidth) store(out + i, load(out + i) / sum + set1(0.0f));
    const int64_t row = call_row(r), at = row / a.num_heads * a.ldo + row % a.num_heads * a.kv.head_dim;
    store_act_row(out, static_cast<unsigned char*>(a.out) + static_cast<size_t>(at) * act_bytes(A), A, a.kv.head_dim);
  }
};

void attention(const AttentionArgs& a, int64_t item, unsigned char* scratch) {
  const Item which = find_item(a, item);
  if (a.kv.act == Act::kBF16) {
    ItemRun<Act::kBF16>(a, which, scratch).run();
  } else {
    ItemRun<Act::kF32>(a, which, scratch).run();
  }
}

}  // namespace

void register_attention(KernelTable& t) {
  t.kv_page_bytes = kv_page_bytes;
  t.qkv = qkv;
  t.attention_items = attention_items;
  t.attention_scratch = attention_scratch;
  t.attention = attention;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
