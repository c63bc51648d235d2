// Paged attention: keys and values into their pages, and causal attention that reads the pages in place.
//
// Softmax is the online form (Milakov and Gimelshein 2018; Dao et al. 2022): blocks of kBlock keys that start at multiples of
// kBlock, in order, fp32 maximum and sum; anew for each span of kSpan keys, whose results are folded in order, so that the
// spans of a long context can go to several threads. Determinism: a masked score is -inf and gives weight +0, which leaves the
// maximum and the sums as they were, as folding in a span without keys does; so a row's bits do not depend on how far its
// neighbours in the block of rows reach, nor on which rows these are: those of other sequences where pages are shared.
#include <cfloat>
#include <cmath>

#include "simd.h"
#include "unroll.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#include "attention_micro.inl"
#include "attention_items.inl"
#if defined(__AMX_BF16__)
#include "attention_amx.inl"
constexpr bool kAMX = true;
constexpr int kScored = kGroup;  // query rows whose scores are held at most
#else
constexpr bool kAMX = false;
constexpr int kScored = 8;
#endif
#include "attention_pages.inl"

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
      const int64_t offset = a.slots[t] % a.kv.page_size;
      const float* v = x + a.kv.num_kv_heads * d;
      if (a.kv.int8) {
        write_bytes(g, a.kv, y, v, page + h * g.head, offset, reinterpret_cast<int8_t*>(rounded));
      } else {
        write_slot(g, d, y, v, page + h * g.head, offset, rounded);
      }
    }
  }
}

// ---- attention ----------------------------------------------------------------------------------------------------

constexpr float kSlack = 5.0f;

// What is known of a query row after some of its keys: the weighted sum of values, the sum of weights by lane, both relative
// to a reference: a maximum of the unscaled scores, maybe of fewer keys.
struct State {
  float* out;        // [columns]
  float* sums;       // [kWidth]
  float* reference;  // [1]

  static int64_t floats(const Geometry& g) { return g.columns + 32; }
  static State at(const Geometry& g, float* memory) { return {memory, memory + g.columns, memory + g.columns + 16}; }
};

// Each of `rows` totals joined by its part, which follows it. An empty state (reference -FLT_MAX, zeros) on either side changes
// nothing. `stride`: floats between states.
void fold(const Geometry& g, float scale, int64_t rows, const State& totals, const State& parts, int64_t stride) {
  constexpr int kTogether = 8;
  for (int64_t r = 0; r < rows; r += kTogether) {
    const int64_t some = rows - r < kTogether ? rows - r : kTogether;
    alignas(64) float factor[2 * kTogether] = {};
    for (int64_t i = 0; i < some; ++i) {
      float& old = totals.reference[(r + i) * stride];
      const float fresh = parts.reference[(r + i) * stride], newest = fresh > old ? fresh : old;
      factor[2 * i] = (old - newest) * scale;
      factor[2 * i + 1] = (fresh - newest) * scale;
      old = newest;
    }
    for (int i = 0; i < 2 * kTogether; i += kWidth) store(factor + i, exp(load(factor + i)));
    for (int64_t i = 0; i < some; ++i) {
      const vf old = set1(factor[2 * i]), fresh = set1(factor[2 * i + 1]);
      float *total = totals.out + (r + i) * stride, *total_sums = totals.sums + (r + i) * stride;
      const float *part = parts.out + (r + i) * stride, *part_sums = parts.sums + (r + i) * stride;
      for (int64_t n = 0; n < g.columns; n += kWidth) store(total + n, fma(load(part + n), fresh, load(total + n) * old));
      store(total_sums, fma(load(part_sums), fresh, load(total_sums) * old));
    }
  }
}

// Per-thread memory of an item, in floats, each part 64-byte aligned.
struct Scratch {
  float* q;            // [kItemRows][q_words] left operand of the scores
  int32_t* positions;  // [kItemRows]
  int32_t* call_rows;  // [kItemRows] token * num_heads + head of each row
  float* totals;       // [kItemRows][State::floats] of the spans so far
  float* states;       // the same, of the span at hand
  float* scores;       // [kScored][kBlock]
  float* weights;      // [kScored][kBlock]
  unsigned char* wide; // with int8: the tiles of a block in lanes, keys and then values of each
  unsigned char* operands;  // with AMX: the values of a block, and its keys where they have to be padded

  static int64_t align(int64_t floats) { return (floats + 15) / 16 * 16; }
  static int64_t row_floats(const Geometry& g) { return align(g.steps * 2) + 2 + 2 * State::floats(g); }
  static size_t bytes(const Geometry& g) {
    return static_cast<size_t>(kItemRows * row_floats(g) + 2 * kScored * kBlock) * 4 + 64 +
           static_cast<size_t>(kBlockTiles * wide_tile(g) + (kAMX ? packed_values(g) + kBlockTiles * align(g.steps) * 64 : 0));
  }
  static int64_t packed_values(const Geometry& g) { return kBlock * (g.columns + 16) * 2; }  // bytes
  static int64_t wide_keys(const Geometry& g) { return g.steps * kTile * 4; }  // bytes
  static int64_t wide_tile(const Geometry& g) { return wide_keys(g) + kTile / g.per * g.columns * 4; }

  Scratch(const Geometry& g, unsigned char* memory) {
    q = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
    positions = reinterpret_cast<int32_t*>(q + kItemRows * align(g.steps * 2));
    call_rows = positions + kItemRows;
    totals = q + kItemRows * (align(g.steps * 2) + 2);
    states = totals + kItemRows * State::floats(g);
    scores = states + kItemRows * State::floats(g);
    weights = scores + kScored * kBlock;
    wide = reinterpret_cast<unsigned char*>(weights + kScored * kBlock);
    operands = wide + align(kBlockTiles * wide_tile(g));
  }
};

size_t attention_scratch(const AttentionArgs& a) { return Scratch::bytes(Geometry(a.kv)); }

size_t attention_shared(const AttentionArgs& a) {
  const Order order = arrange(a, static_cast<int32_t*>(__builtin_alloca(Order::ints(a) * 4)));
  Cut cut = choose_cut(a, order);
  cut_blocks(a, order, cut, State::floats(Geometry(a.kv)), nullptr, nullptr);
  return static_cast<size_t>(Shared::bytes(cut));
}

int64_t attention_begin(const AttentionArgs& a) {
  const Order order = arrange(a, static_cast<int32_t*>(__builtin_alloca(Order::ints(a) * 4)));
  Cut cut = choose_cut(a, order);
  const int64_t state_floats = State::floats(Geometry(a.kv));
  cut_blocks(a, order, cut, state_floats, nullptr, nullptr);
  const Shared shared = Shared::make(a, cut);
  cut_blocks(a, order, cut, state_floats, shared.items, shared.members);
  memset(shared.counters, 0, static_cast<size_t>(cut.blocks) * 4);
  memcpy(Shared::base(a), &shared, sizeof shared);
  return cut.items;
}

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

// Scores of R rows (Most at most, itself 16 at most) -> weights, and their sums added to the states unless that is done with
// the values (Summed). A row's reference follows its maximum only where a weight would exceed e^kSlack, which is rare after the
// first block; then what the state has is scaled.
template <Act A, int Most, bool Summed = false>
void update_softmax(int64_t R, int tiles, float scale, const Span* spans, float* s, float* p, const State& states,
                    int64_t stride, int64_t columns) {
  const int even_tiles = (tiles + 1) / 2 * 2;
  const float slack = kSlack / scale;
  bool rescale = false;
  vf largest[Most];
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
    largest[r] = load(row);
    for (int i = kWidth; i < tiles * kTile; i += kWidth) largest[r] = max(largest[r], load(row + i));
    rescale |= any_greater(largest[r], set1(states.reference[r * stride] + slack));
  }
  if (rescale) {
    alignas(64) float factor[16] = {};
    for (int64_t r = 0; r < R; ++r) {
      float& reference = states.reference[r * stride];
      const float old = reference, block = reduce_max(largest[r]);
      if (block > old + slack) reference = block;
      factor[r] = old - reference;
    }
    for (int i = 0; i < R; i += kWidth) store(factor + i, exp(load(factor + i) * set1(scale)));
    for (int64_t r = 0; r < R; ++r) {
      float* sums = states.sums + r * stride;
      float* out = states.out + r * stride;
      store(sums, load(sums) * set1(factor[r]));
      for (int64_t i = 0; i < columns; i += kWidth) store(out + i, load(out + i) * set1(factor[r]));
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    const float* row = s + r * kBlock;
    const Weights<A> weight(scale, states.reference[r * stride]);
    constexpr int64_t words = kTile / Dot<A>::kPer * Dot<A>::kWords;
    float* weights = p + r * (kBlockTiles * words);
    for (int t = 0; t < even_tiles; t += 2) {
      vf w[2 * kTileVecs];
      unrolled<2 * kTileVecs>(PINNATE_EACH(n) { w[n] = weight(load(row + t * kTile + n * kWidth)); });
      store_weights<A>(w, weights + t * words);
    }
    float* sums = states.sums + r * stride;
    if (!Summed) store(sums, add_weights<A>(weights, even_tiles * words, load(sums)));
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
  static constexpr bool kTiled = kAMX && A == Act::kBF16;
  const AttentionArgs& a;
  const Geometry g;
  const Shared shared;
  const Item item;
  const Member* const members;
  const Scratch m;
  const int64_t group, q_words, stride;   // stride: floats between states
  const int64_t key_stride, value_stride;  // of lanes
#if defined(__AMX_BF16__)
  mutable Tiles tiles;  // of the thread that runs the item
#endif

  ItemRun(const AttentionArgs& args, const Shared& all, int64_t which, unsigned char* memory)
      : a(args), g(args.kv), shared(all), item(all.items[which]), members(all.members + item.first_member), m(g, memory),
        group(group_size(args)), q_words(kTiled ? Scratch::align(g.steps) : g.steps * Dot<A>::kWords), stride(State::floats(g)),
        key_stride(a.kv.int8 ? kTile * 4 : g.key_stride), value_stride(g.columns * 4) {}

  int64_t position(int64_t r) const { return m.positions[r]; }
  int64_t first_key(int64_t r) const { return first_visible(a, position(r)); }

  // States of all rows of the item: in the scratch, or of one of the block's spans in the shared memory.
  float* stored(int64_t span) const { return shared.states + item.states + span * item.rows * stride; }
  State state(float* states, int64_t r) const { return State::at(g, states + r * stride); }

  void run() const {
    if (kTiled) memset(m.q, 0, static_cast<size_t>(item.rows * q_words) * 4);
    for (int64_t i = 0; i < item.members; ++i) load_member(members[i]);
    if (!kTiled) memset(m.scores, 0, kRows * kBlock * 4);
    if (item.parts > 1) {
      for (int64_t i = 0; i < item.spans; ++i) run_span(item.first_span + i, stored(item.first_span - item.block_span + i));
      return finish_part();
    }
    run_span(item.first_span, m.totals);
    for (int64_t i = 1; i < item.spans; ++i) {
      run_span(item.first_span + i, m.states);
      fold(g, a.scale, item.rows, state(m.totals, 0), state(m.states, 0), stride);
    }
    for (int64_t r = 0; r < item.rows; ++r) write_row(r, state(m.totals, r));
  }

  void load_member(const Member& member) const {
    for (int64_t i = 0; i < member.rows; ++i) {
      const int64_t at = member.first + i, r = member.row + i, token = at / group;
      m.positions[r] = static_cast<int32_t>(first_position(a, member.seq) + token);
      m.call_rows[r] = static_cast<int32_t>((a.seq_starts[member.seq] + token) * a.num_heads + item.head * group + at % group);
      load_query<A>(a, m.call_rows[r], m.q + r * q_words);
    }
  }

  int64_t low_key(const Member& member) const { return first_key(member.row); }
  int64_t end_key(const Member& member) const { return position(member.row + member.rows - 1) + 1; }

  void run_span(int64_t span, float* states) const {
    memset(states, 0, static_cast<size_t>(item.rows * stride) * 4);
    // finite, so that "masked minus reference" is -inf and never NaN
    for (int64_t r = 0; r < item.rows; ++r) *state(states, r).reference = -FLT_MAX;
    run_blocks(span * kSpan, states);
  }

  // The part that finishes last writes the rows.
  void finish_part() const {
    if (__atomic_add_fetch(&shared.counters[item.block], 1, __ATOMIC_ACQ_REL) != item.parts) return;
    for (int64_t i = 1; i < item.block_spans; ++i)
      fold(g, a.scale, item.rows, state(stored(0), 0), state(stored(i), 0), stride);
    for (int64_t r = 0; r < item.rows; ++r) write_row(r, state(stored(0), r));
  }

  // Neighbouring members that read the same keys at `start`, and the tiles of those that some row sees.
  struct Run {
    int64_t start;         // a multiple of kBlock
    int64_t member, last;  // [member, last)
    int tiles;
    BlockTiles block;
  };

  // Finds the run that starts at member run.last or follows it, in the blocks from run.start to `end`: block by block, so that
  // what members share is read once. False, with no tiles, where there is none.
  bool find_run(int64_t end, Run& run) const {
    run.tiles = 0;
    for (; run.start < end; run.start += kBlock, run.last = 0)
      for (int64_t i = run.last; i < item.members; ++i) {
        if (end_key(members[i]) <= run.start || low_key(members[i]) >= run.start + kBlock) continue;
        run.member = i++;
        while (i < item.members && members[i].common >= run.start + kBlock) ++i;
        run.last = i;
        find_tiles(run);
        return true;
      }
    return false;
  }

  void find_tiles(Run& run) const {
    const Member& member = members[run.member];
    const int32_t* pages = a.page_indices + a.page_offsets[member.seq];
    for (; run.tiles < kBlockTiles && run.start + run.tiles * kTile < end_key(member); ++run.tiles) {
      const int64_t token = run.start + run.tiles * kTile, offset = token % a.kv.page_size;
      const unsigned char* base = a.pool + pages[token / a.kv.page_size] * g.page + item.head * g.head;
      run.block.keys[run.tiles] = base + offset * g.lane;
      run.block.values[run.tiles] = base + g.keys + offset / g.per * g.value_stride;
    }
  }

  void run_blocks(int64_t start, float* states) const {  // of the span at `start`
    const int64_t item_end = (item.first_span + item.spans) * kSpan;
    Run run = {start, 0, 0, 0, {}};
    for (bool more = find_run(item_end, run); more && run.start < start + kSpan;) {
      Run next = run;
      more = find_run(item_end, next);
      BlockTiles fetch = next.block;
      for (int t = next.tiles; t < kBlockTiles; ++t) {  // nothing to fetch there: point at what is at hand
        fetch.keys[t] = run.block.keys[t < run.tiles ? t : 0];
        fetch.values[t] = run.block.values[t < run.tiles ? t : 0];
      }
      if (a.kv.int8) {
        run_block(run, widen(run.block, run.tiles, fetch, run.start), nullptr, states);
      } else {
        run_block(run, run.block, more ? &fetch : nullptr, states);
      }
      run = next;
    }
  }

  // The tiles of the block at `start` in lanes, in the scratch; fetches `next` meanwhile.
  BlockTiles widen(const BlockTiles& block, int tiles, const BlockTiles& next, int64_t start) const {
    BlockTiles wide = {};
    for (int t = 0; t < tiles; ++t) {
      unsigned char* keys = m.wide + t * Scratch::wide_tile(g);
      unsigned char* values = keys + Scratch::wide_keys(g);
      wide.keys[t] = keys, wide.values[t] = values;
      const int64_t offset = (start + t * kTile) % a.kv.page_size;
      const unsigned char* scales = block.keys[t] - offset * g.lane + g.scales + offset * 4;
      constexpr int kPer = Dot<A>::kPer;
      alignas(64) float each[kTile * kPer], scale[kTile];
      memcpy(scale, scales, sizeof scale);
      for (int i = 0; i < kTile * kPer; ++i) each[i] = scale[i / kPer];
      for (int64_t s = 0; s < g.steps; ++s) {
        __builtin_prefetch(next.keys[t] + s * g.key_stride);
        widen_row<A, kTile * kPer>(block.keys[t] + s * g.key_stride, each, kTile * kPer, keys + s * kTile * 4);
      }
      scales += a.kv.page_size * 4;
      for (int64_t s = 0; s < kTile / kPer; ++s) {
        for (int i = 0; i < kTile; i += kPer) memcpy(each + i, scales + s * kPer * 4, kPer * 4);
        const unsigned char* line = next.values[t] + s * g.value_stride;
        for (int64_t i = 0; i < g.value_stride; i += 64) __builtin_prefetch(line + i);
        widen_row<A, kTile>(block.values[t] + s * g.value_stride, each, g.columns * kPer, values + s * g.columns * 4);
      }
    }
    return wide;
  }

#if defined(__AMX_BF16__)
  struct Group {  // of query rows that are computed together
    int64_t row, rows, tokens;  // leading tokens of the block that some row sees
  };

  template <bool Both>
  void score_group(const BlockTiles& block, const Group& group, const BlockTiles* next) const {
    const int tiles = static_cast<int>((group.tokens + kTile - 1) / kTile);
    const int64_t steps = q_words / kTileRows, keys_apart = g.steps % kTileRows ? 64 : key_stride;
    const float* q = m.q + group.row * q_words;
    for (int64_t i = 0; i < g.steps / 8 && next; ++i)  // the hardware goes on with what follows
      for (int t = 0; t < kBlockTiles; ++t) fetch_ahead(next->keys[t] + i * g.key_stride);
    for (int t = 0; t + 2 <= tiles; t += 2)
      score_with_tiles<Both, 2>(q, q_words * 4, block.keys + t, keys_apart, steps, m.scores + t * kTile);
    if (tiles % 2)
      score_with_tiles<Both, 1>(q, q_words * 4, block.keys + tiles - 1, keys_apart, steps, m.scores + (tiles - 1) * kTile);
  }

  void weigh_group(int64_t start, const Group& group, const State& states) const {
    const int tiles = static_cast<int>((group.tokens + kTile - 1) / kTile);
    cap_scores(m.scores, group.rows, tiles);
    for (int64_t i = 0; i < group.rows; i += kTileRows) {
      const int64_t rows = group.rows - i < kTileRows ? group.rows - i : kTileRows, first = group.row + i;
      Span spans[kTileRows];
      for (int64_t j = 0; j < rows; ++j) spans[j] = {first_key(first + j) - start, position(first + j) + 1 - start};
      const State half = {states.out + i * stride, states.sums + i * stride, states.reference + i * stride};
      update_softmax<A, kTileRows, true>(rows, tiles, a.scale, spans, m.scores + i * kBlock, m.weights + i * kBlock / 2, half,
                                         stride, g.columns);
    }
  }

  template <bool Both>
  void add_group(const Group& group, const State& states) const {
    const int64_t chunks = (group.tokens + kChunk - 1) / kChunk, step = (g.columns + kTileRows) * 64;
    const int64_t pairs = (g.columns + kTileRows) / (2 * kTileRows);
    const unsigned char* values = m.operands;
    float* out = states.out;
    for (int64_t n = 0; n < pairs; ++n, values += 2 * kTileBytes, out += 2 * kTileRows)
      add_with_tiles<Both, 2>(m.weights, values, step, chunks, out, stride * 4);
    if (g.columns % (2 * kTileRows) == 0) add_with_tiles<Both, 1>(m.weights, values, step, chunks, out, stride * 4);
  }

  // Scores of one group are computed between the weights of the one before it, when those scores are done with, and their use: a
  // tile is loaded from fresh stores only once they have left for the cache.
  void run_block_tiled(const Run& run, const BlockTiles& lanes, const BlockTiles* next, float* states) const {
    const int64_t seen = end_key(members[run.member]) - run.start;
    pack_values(lanes, next, value_stride, g.columns, seen < kBlock ? seen : kBlock, m.operands);
    BlockTiles block = lanes;
    if (g.steps % kTileRows) pad_keys(block, run.tiles, key_stride, g.steps, m.operands + Scratch::packed_values(g));
    const auto score = [&](const Group& group) {
      tiles.configure_rows(group.rows);
      group.rows > kTileRows ? score_group<true>(block, group, next) : score_group<false>(block, group, next);
      next = nullptr;
    };
    Group last = {0, 0, 0};
    const auto finish_last = [&](const Group* following) {
      if (last.rows) weigh_group(run.start, last, state(states, last.row));
      if (following) score(*following);
      if (!last.rows) return;
      tiles.configure_rows(last.rows);
      last.rows > kTileRows ? add_group<true>(last, state(states, last.row)) : add_group<false>(last, state(states, last.row));
    };
    for_groups<kGroup>(run, [&](int64_t r, int64_t rows, int64_t tokens) {
      const Group group = {r, rows, tokens};
      finish_last(&group);
      last = group;
    });
    finish_last(nullptr);
  }
#endif

  // f(first row, rows, leading keys of the block that some of them sees) for each group of at most Most rows that sees any.
  template <int Most, class F>
  void for_groups(const Run& run, F&& f) const {
    const int64_t first = members[run.member].row, end = members[run.last - 1].row + members[run.last - 1].rows;
    for (int64_t r = first; r < end; r += Most) {
      const int64_t rows = end - r < Most ? end - r : Most;
      int64_t low = kBlock, high = 0;  // what some row sees
      for (int64_t i = r; i < r + rows; ++i) {
        const int64_t from = first_key(i) - run.start, to = position(i) + 1 - run.start;
        low = from < low ? from : low;
        high = to > high ? to : high;
      }
      if (high <= 0 || low >= kBlock) continue;
      f(r, rows, high < kBlock ? high : kBlock);
    }
  }

  // `block`: the keys of the run in lanes.
  void run_block(const Run& run, const BlockTiles& block, const BlockTiles* next, float* states) const {
#if defined(__AMX_BF16__)
    if constexpr (kTiled) return run_block_tiled(run, block, next, states);
#endif
    const int64_t first = members[run.member].row;
    for_groups<kRows>(run, [&](int64_t r, int64_t rows, int64_t tokens) {
      run_rows(block, r == first ? next : nullptr, run.start, r, rows, tokens, state(states, r));
    });
  }

  // Rows [r, r + rows), with `states` for the first of them, against the first `tokens` keys of the block at `start`; fetches
  // `next` meanwhile unless null.
  void run_rows(const BlockTiles& block, const BlockTiles* next, int64_t start, int64_t r, int64_t rows, int64_t tokens,
                const State& states) const {
    const int tiles = static_cast<int>((tokens + kTile - 1) / kTile);
    Span spans[kRows];
    for (int64_t i = 0; i < rows; ++i) spans[i] = {first_key(r + i) - start, position(r + i) + 1 - start};
    const float* q = m.q + r * q_words;
    with_constant<kRows>(rows, [&]<int R>() {
      constexpr int kTiles = tiles_for(R);
      for (int t = 0; t < tiles; t += kTiles)
        with_constant<kTiles>(tiles - t, [&]<int T>() {
          score_tiles<A, R, T>(q, q_words, block.keys + t, next ? next->keys + t : nullptr, key_stride, g.steps,
                               m.scores + t * kTile);
        });
    });
    cap_scores(m.scores, rows, tiles);
    update_softmax<A, kRows>(rows, tiles, a.scale, spans, m.scores, m.weights, states, stride, g.columns);
    next ? add_values<true>(block, next, rows, tokens, states) : add_values<false>(block, next, rows, tokens, states);
  }

  void cap_scores(float* scores, int64_t rows, int tiles) const {
    if (a.softcap <= 0) return;
    const vf in = set1(a.scale / a.softcap), out = set1(a.softcap / a.scale);  // scores are not scaled yet
    for (int64_t i = 0; i < rows; ++i)
      for (int t = 0; t < tiles * kTile; t += kWidth) {
        float* s = scores + i * kBlock + t;
        store(s, tanh(load(s) * in) * out);
      }
  }

  template <bool Ahead>
  void add_values(const BlockTiles& block, const BlockTiles* next, int64_t rows, int64_t tokens, const State& states) const {
    const int64_t tiles = g.columns / kTile, whole = tokens / kTile, rest = tokens % kTile;
    const float* rest_weights = m.weights + whole * (kTile / Dot<A>::kPer * Dot<A>::kWords);
    with_constant<kRows>(rows, [&]<int R>() {
      constexpr int kTiles = tiles_for(R);
      for (int64_t t = 0; t < tiles; t += kTiles)
        with_constant<kTiles>(tiles - t, [&]<int T>() {
          constexpr int N = T * kTileVecs;
          const int64_t offset = t * kTile * 4;
          float* out = states.out + t * kTile;
          add_tiles<A, R, N, Ahead>(m.weights, block, next, offset, value_stride, whole, out, stride);
          if (rest) add_part_of_tile<A, R, N>(rest_weights, block.values[whole] + offset, value_stride, rest, out, stride);
        });
    });
  }

  void write_row(int64_t r, const State& state) const {
    const vf inverse = set1(1.0f / reduce_add(load(state.sums)));
    // + 0 turns -0 into +0: whether masked zeros were added to a zero must not show
    for (int64_t i = 0; i < g.columns; i += kWidth) store(state.out + i, load(state.out + i) * inverse + set1(0.0f));
    const int64_t row = m.call_rows[r], at = row / a.num_heads * a.ldo + row % a.num_heads * a.kv.head_dim;
    store_act_row(state.out, static_cast<unsigned char*>(a.out) + static_cast<size_t>(at) * act_bytes(A), A, a.kv.head_dim);
  }
};

void attention(const AttentionArgs& a, int64_t item, unsigned char* scratch) {
  Shared shared;
  memcpy(&shared, Shared::base(a), sizeof shared);
  if (a.kv.act == Act::kBF16) {
    ItemRun<Act::kBF16>(a, shared, item, scratch).run();
  } else {
    ItemRun<Act::kF32>(a, shared, item, scratch).run();
  }
}

}  // namespace

void register_attention(KernelTable& t) {
  t.kv_page_bytes = kv_page_bytes;
  t.qkv = qkv;
  t.attention_scratch = attention_scratch;
  t.attention_shared = attention_shared;
  t.attention_begin = attention_begin;
  t.attention = attention;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
