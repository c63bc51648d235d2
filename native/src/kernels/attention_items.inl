// How one call of attention.cpp is cut into items for the threads.
//
// The query rows of a sequence for one KV head are its tokens times the query heads of the group, token by token. A block is a
// run of at most `rows` of them, or the rows of several sequences that have few: its members. Members whose page tables begin
// alike are neighbours, and are computed together over the pages they share. The keys that a block sees lie in spans of kSpan
// keys, and a part of a block is a run of its spans. An item is one part. Blocks of several parts leave a state for each row
// and span in the shared memory; the item that finishes last folds them, in the order of the spans.

constexpr int64_t kSpan = 512;     // keys; spans start at multiples of it. A multiple of kBlock
#if defined(__AMX_BF16__)
constexpr int64_t kItemRows = 192;  // query rows of a block at most: they share one pass over the keys
constexpr bool kPacks = true;       // an item packs all values that it reads
#else
constexpr int64_t kItemRows = 96;
constexpr bool kPacks = false;
#endif
constexpr int64_t kEnough = 16;    // items that a few threads share evenly
static_assert(kSpan % kBlock == 0);

struct Member {
  int32_t seq;
  int32_t first, rows;  // query rows of the sequence
  int32_t row;          // of the block, the first of these
  int32_t common;       // leading keys that lie in the same pages as the member's before it, all seen by all rows of both; a
                        // multiple of kBlock
};

struct Item {
  int64_t head;                     // of the keys
  int64_t first_member, members;
  int64_t rows;
  int64_t block_span, block_spans;  // what the whole block sees
  int64_t first_span, spans;        // of this item
  int64_t parts, block;             // of the block; its number, which is that of its counter
  int64_t states;                   // floats before this block's states in the shared memory
};

struct Cut {
  int64_t rows, spans;     // of an item at most
  int64_t sharing_rows;    // of a block whose members share pages, at most
  int64_t strangers;       // members of a block that share nothing, at most
  int64_t items = 0, members = 0, blocks = 0, states = 0;  // states: floats
};

// Memory of a call that its threads share: this header, items, members, a counter for each block, states; each 64-byte aligned.
struct Shared {
  Item* items;
  Member* members;
  int32_t* counters;  // finished parts of each block
  float* states;

  static constexpr int64_t kHeader = 64;
  static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  static int64_t item_bytes(const Cut& cut) { return align(cut.items * static_cast<int64_t>(sizeof(Item))); }
  static int64_t member_bytes(const Cut& cut) { return align(cut.members * static_cast<int64_t>(sizeof(Member))); }
  static int64_t bytes(const Cut& cut) {
    return 64 + kHeader + item_bytes(cut) + member_bytes(cut) + align(cut.blocks * 4) + cut.states * 4;
  }
  static unsigned char* base(const AttentionArgs& a) {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(a.shared) + 63) & ~uintptr_t{63});
  }
  static Shared make(const AttentionArgs& a, const Cut& cut) {
    unsigned char* items = base(a) + kHeader;
    unsigned char* members = items + item_bytes(cut);
    unsigned char* counters = members + member_bytes(cut);
    unsigned char* states = counters + align(cut.blocks * 4);
    return {reinterpret_cast<Item*>(items), reinterpret_cast<Member*>(members), reinterpret_cast<int32_t*>(counters),
            reinterpret_cast<float*>(states)};
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

int64_t query_rows(const AttentionArgs& a, int64_t seq) { return (a.seq_starts[seq + 1] - a.seq_starts[seq]) * group_size(a); }

// ---- the order of sequences -----------------------------------------------------------------------------------------

struct Pages {
  const int32_t* first;
  int64_t count;
  Pages(const AttentionArgs& a, int64_t seq)
      : first(a.page_indices + a.page_offsets[seq]), count(a.page_offsets[seq + 1] - a.page_offsets[seq]) {}
};

int64_t common_pages(const Pages& a, const Pages& b) {
  const int64_t least = a.count < b.count ? a.count : b.count;
  int64_t i = 0;
  while (i < least && a.first[i] == b.first[i]) ++i;
  return i;
}

bool comes_before(const Pages& a, const Pages& b) {  // in the order of dictionaries
  const int64_t i = common_pages(a, b);
  return i == b.count ? false : i == a.count ? true : a.first[i] < b.first[i];
}

int32_t common_keys(const AttentionArgs& a, int64_t s, int64_t t) {
  int64_t keys = common_pages(Pages(a, s), Pages(a, t)) * a.kv.page_size;
  const int64_t first = first_position(a, s), second = first_position(a, t), seen = (first < second ? first : second) + 1;
  return static_cast<int32_t>((keys < seen ? keys : seen) / kBlock * kBlock);
}

struct Order {
  int32_t* seqs;    // [num_seqs] a permutation
  int32_t* common;  // [num_seqs] common_keys of a sequence and the one before it, where both have few rows

  static size_t ints(const AttentionArgs& a) { return 2 * static_cast<size_t>(a.num_seqs); }
};

// Brings sequences with few rows whose pages begin alike together: in dictionary order behind the first of them.
Order arrange(const AttentionArgs& a, int32_t* memory) {
  const Order order{memory, memory + a.num_seqs};
  const auto few = [&](int32_t seq) {
    return query_rows(a, seq) <= kItemRows / 2 && a.contexts[seq] > kBlock;
  };
  const auto first_page = [&](int32_t seq) { return a.page_indices[a.page_offsets[seq]]; };
  int32_t* left = order.common;  // for now: the first page; -1 for a sequence that has its place, -2 where it does not matter
  for (int32_t s = 0; s < a.num_seqs; ++s) left[s] = few(s) ? first_page(s) : -2;
  int64_t placed = 0;
  for (int32_t s = 0; s < a.num_seqs; ++s) {
    if (left[s] == -1) continue;
    const int64_t start = placed;
    order.seqs[placed++] = s;
    if (left[s] == -2) continue;
    for (int32_t t = s + 1; t < a.num_seqs; ++t) {
      if (left[t] != left[s]) continue;
      left[t] = -1;
      int64_t at = placed++;
      for (; at > start && comes_before(Pages(a, t), Pages(a, order.seqs[at - 1])); --at) order.seqs[at] = order.seqs[at - 1];
      order.seqs[at] = t;
    }
  }
  for (int64_t k = 0; k < a.num_seqs; ++k) {
    const bool both = k > 0 && few(order.seqs[k]) && few(order.seqs[k - 1]);
    order.common[k] = both ? common_keys(a, order.seqs[k - 1], order.seqs[k]) : 0;
  }
  return order;
}

// ---- blocks and items -----------------------------------------------------------------------------------------------

// f(item, members) for each block of one KV head, undivided.
template <class F>
void for_blocks(const AttentionArgs& a, const Order& order, const Cut& cut, F&& f) {
  const int64_t group = group_size(a);
  Member members[kItemRows];
  Item item = {};
  int64_t low = 0, high = 0;
  const auto add = [&](int64_t seq, int64_t first, int64_t rows, int32_t common) {
    const int64_t start = first_position(a, seq);
    const int64_t from = first_visible(a, start + first / group) / kSpan, to = (start + (first + rows - 1) / group) / kSpan;
    low = item.members && low < from ? low : from;
    high = item.members && high > to ? high : to;
    members[item.members++] = {static_cast<int32_t>(seq), static_cast<int32_t>(first), static_cast<int32_t>(rows),
                               static_cast<int32_t>(item.rows), common};
    item.rows += rows;
  };
  const auto finish = [&] {
    if (!item.members) return;
    item.block_span = item.first_span = low;
    item.block_spans = item.spans = high - low + 1;
    item.parts = 1;
    f(item, members);
    item = {};
  };
  for (int64_t k = 0; k < a.num_seqs; ++k) {
    const int64_t seq = order.seqs[k], rows = query_rows(a, seq);
    if (rows == 0) continue;
    const int32_t common = item.members ? order.common[k] : 0;
    const int64_t most = common ? cut.sharing_rows : item.members < cut.strangers ? kItemRows : 0;
    if (rows <= cut.rows && item.rows + rows <= most) {
      add(seq, 0, rows, common);
      continue;
    }
    finish();
    // The last rows see most: first, so that what is left at the end is small.
    for (int64_t r = (rows - 1) / cut.rows * cut.rows; r > 0; r -= cut.rows) {
      add(seq, r, rows - r < cut.rows ? rows - r : cut.rows, 0);
      finish();
    }
    add(seq, 0, rows < cut.rows ? rows : cut.rows, 0);
    if (rows > cut.rows) finish();
  }
  finish();
}

int64_t count_blocks(const AttentionArgs& a, int64_t rows) {
  int64_t blocks = 0;
  for (int s = 0; s < a.num_seqs; ++s) blocks += ceil_div(query_rows(a, s), rows);
  return blocks * a.kv.num_kv_heads;
}

// Work is cut finer where there is little of it. By rows first as long as a block keeps enough of them to be worth its keys'
// way from memory; then by spans; a single span by rows again, where no long context is read, no int8 widened and nothing packed
// twice for it.
// Where there is much, a block takes several sequences: one's first keys are fetched while another's are computed with.
Cut choose_cut(const AttentionArgs& a, const Order& order) {
  const int64_t group = group_size(a);
  Cut cut{kItemRows, 1, 0, 0};
  int64_t spans = 0, longest = 0;
  const auto count_spans = [&] {
    spans = longest = 0;
    for_blocks(a, order, cut, [&](const Item& block, const Member*) {
      spans += block.spans * a.kv.num_kv_heads;
      longest = block.spans > longest ? block.spans : longest;
    });
  };
  while (cut.rows / 2 >= 2 * kRows && count_blocks(a, cut.rows) < kEnough) cut.rows /= 2;
  count_spans();
  const int64_t least = longest > 1 || a.kv.int8 || kPacks ? group : 1;
  if (spans < kEnough)
    while (cut.rows / 2 >= least && count_blocks(a, cut.rows) < kEnough) cut.rows /= 2;
  cut.strangers = count_blocks(a, cut.rows) / (2 * kEnough);
  cut.sharing_rows = kItemRows;
  for (count_spans(); cut.sharing_rows / 2 >= 2 * kRows && spans < kEnough; count_spans()) cut.sharing_rows /= 2;
  cut.spans = spans > kEnough ? spans / kEnough : 1;
  return cut;
}

// Fills in what the cut needs; the items and members too, unless null.
void cut_blocks(const AttentionArgs& a, const Order& order, Cut& cut, int64_t state_floats, Item* items, Member* all) {
  cut.items = cut.members = cut.blocks = cut.states = 0;
  for_blocks(a, order, cut, [&](Item item, const Member* members) {
    item.first_member = cut.members;
    if (all) memcpy(all + cut.members, members, static_cast<size_t>(item.members) * sizeof(Member));
    cut.members += item.members;
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
