// How one call of attention.cpp is cut into items for the threads.
//
// The query rows of a sequence for one KV head are its tokens times the query heads of the group, token by token. A block is a
// run of at most `rows` of them; the keys that a block sees lie in spans of kSpan keys, and a part of a block is a run of its
// spans. An item is one part. Blocks of several parts leave a state for each row and span in the shared memory; the item that
// finishes last folds them, in the order of the spans.

constexpr int64_t kSpan = 512;     // keys; spans start at multiples of it. A multiple of kBlock
constexpr int64_t kItemRows = 96;  // query rows of a block at most: they share one pass over the keys
constexpr int64_t kEnough = 16;    // items that a few threads share evenly
static_assert(kSpan % kBlock == 0);

struct Item {
  int64_t seq, head;            // head: of the keys
  int64_t first, rows;          // query rows
  int64_t block_span, block_spans;  // what the whole block sees
  int64_t first_span, spans;    // of this item
  int64_t parts, block;         // of the block; its number, which is that of its counter
  int64_t states;               // floats before this block's states in the shared memory
};

struct Cut {
  int64_t rows, spans;                        // of an item at most
  int64_t items = 0, blocks = 0, states = 0;  // states: floats
};

// Memory of a call that its threads share: this header, items, a counter for each block, states; each 64-byte aligned.
struct Shared {
  Item* items;
  int32_t* counters;  // finished parts of each block
  float* states;

  static constexpr int64_t kHeader = 64;
  static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  static int64_t item_bytes(const Cut& cut) { return align(cut.items * static_cast<int64_t>(sizeof(Item))); }
  static int64_t bytes(const Cut& cut) {
    return 64 + kHeader + item_bytes(cut) + align(cut.blocks * 4) + cut.states * 4;
  }
  static unsigned char* base(const AttentionArgs& a) {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(a.shared) + 63) & ~uintptr_t{63});
  }
  static Shared make(const AttentionArgs& a, const Cut& cut) {
    unsigned char* items = base(a) + kHeader;
    unsigned char* counters = items + item_bytes(cut);
    unsigned char* states = counters + align(cut.blocks * 4);
    return {reinterpret_cast<Item*>(items), reinterpret_cast<int32_t*>(counters), reinterpret_cast<float*>(states)};
  }
};

int64_t group_size(const AttentionArgs& a) { return a.num_heads / a.kv.num_kv_heads; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t first_visible(const AttentionArgs& a, int64_t position) {
  return a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
}

int64_t first_position(const AttentionArgs& a, int64_t seq) {  // of the sequence's rows in this call
  return a.contexts[seq] - (a.seq_starts[seq + 1] - a.seq_starts[seq]);
}

// f(item) for each block of one KV head, undivided.
template <class F>
void for_blocks(const AttentionArgs& a, int64_t rows_each, F&& f) {
  const int64_t group = group_size(a);
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t rows = (a.seq_starts[s + 1] - a.seq_starts[s]) * group, start = first_position(a, s);
    for (int64_t r = 0; r < rows; r += rows_each) {
      const int64_t count = rows - r < rows_each ? rows - r : rows_each;
      const int64_t low = first_visible(a, start + r / group) / kSpan, high = (start + (r + count - 1) / group) / kSpan;
      f(Item{s, 0, r, count, low, high - low + 1, low, high - low + 1, 1, 0, 0});
    }
  }
}

int64_t count_blocks(const AttentionArgs& a, int64_t rows) {
  int64_t blocks = 0;
  for (int s = 0; s < a.num_seqs; ++s) blocks += ceil_div((a.seq_starts[s + 1] - a.seq_starts[s]) * group_size(a), rows);
  return blocks * a.kv.num_kv_heads;
}

// Work is cut finer where there is little of it. By rows first as long as a block keeps enough of them to be worth its keys'
// way from memory; then by spans; a single span by rows again, where no long context is read, and no int8 widened, twice for it.
Cut choose_cut(const AttentionArgs& a) {
  const int64_t group = group_size(a);
  int64_t rows = kItemRows, spans = 0, longest = 0;
  while (rows / 2 >= 2 * kRows && count_blocks(a, rows) < kEnough) rows /= 2;
  for_blocks(a, rows, [&](const Item& block) {
    spans += block.spans * a.kv.num_kv_heads;
    longest = block.spans > longest ? block.spans : longest;
  });
  const int64_t least = longest > 1 || a.kv.int8 ? group : 1;
  if (spans < kEnough)
    while (rows / 2 >= least && count_blocks(a, rows) < kEnough) rows /= 2;
  return {rows, spans > kEnough ? spans / kEnough : 1};
}

// Fills in what the cut needs; the items too, unless null.
void cut_blocks(const AttentionArgs& a, Cut& cut, int64_t state_floats, Item* items) {
  cut.items = cut.blocks = cut.states = 0;
  for_blocks(a, cut.rows, [&](Item item) {
    item.parts = ceil_div(item.block_spans, cut.spans);
    for (int64_t head = 0; head < a.kv.num_kv_heads; ++head) {
      item.head = head, item.block = cut.blocks++, item.states = cut.states;
      if (item.parts > 1) cut.states += item.rows * item.block_spans * state_floats;
      for (int64_t part = 0; part < item.parts; ++part) {
        const int64_t from = item.block_spans * part / item.parts;
        item.first_span = item.block_span + from;
        item.spans = item.block_spans * (part + 1) / item.parts - from;
        if (items) items[cut.items] = item;
        ++cut.items;
      }
    }
  });
}
