// Sampling of one row of logits. Defined in NumPy by src/pinnate/executor/sampling.py: the same generator, the same
// order of steps.
//
// A draw never sorts the vocabulary: top_k, top_p and min_p each give a cut in the order "larger logit first, lower id
// first among equals", and the token is drawn by one walk over the ids in front of the cut. Vectors are the compiler's
// generic ones, as wide as the ISA's, without FMA: weights are the same bits on all three, their float64 sums the same
// to the last rounding.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "register.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are never returned across a call that is not inlined

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
#define PINNATE_INLINE inline __attribute__((always_inline))

constexpr float kGreedyBelow = 1e-5f;
constexpr float kExpZeroBelow = -87.0f;  // exp is 0 from here on: the end of normal floats
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kMaxBlocks = 1024;
constexpr int kBuckets = 2048;
alignas(64) constexpr int32_t kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// exp(s) for s in [-87, 0], 0 below. s = n ln2 + r, |r| <= ln2/2; Taylor to r^7 (error 6e-9), scaled by 2^n.
PINNATE_INLINE Floats exp_floats(const Floats& s) {
  const Ints alive = s >= kExpZeroBelow;
  const Floats shifted = s * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = (s - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
  p = p * r + (1.0f / 120.0f);
  p = p * r + (1.0f / 24.0f);
  p = p * r + (1.0f / 6.0f);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints exponent = ((Ints)shifted - 0x4B400000 + 127) << 23;
  return (Floats)(((Ints)(p * (Floats)exponent)) & alive);
}

float exp_float(float s) {
  Floats x = {};
  x[0] = s;
  return exp_floats(x)[0];
}

// A row as seen by the draw: s(i) = (x[i] - top) * inv, at most 0. Cut in up to kMaxBlocks blocks of `width`.
struct Row {
  const float* x;
  int64_t n;
  float top, inv;
  int64_t width;

  Row(const float* values, int64_t count, float shift, float scale) : x(values), n(count), top(shift), inv(scale) {
    width = (n + kMaxBlocks * 64 - 1) / (kMaxBlocks * 64) * 64;
  }
  int blocks() const { return static_cast<int>((n + width - 1) / width); }
  float s(int64_t i) const {
    const float v = (x[i] - top) * inv;
    return v == v ? v : -kInf;  // NaN would break the order that sorting relies on
  }
  bool before(int32_t a, int32_t b) const {  // the order of all choices
    const float sa = s(a), sb = s(b);
    return sa > sb || (sa == sb && a < b);
  }
};

PINNATE_INLINE Floats load(const float* x, int64_t i, int64_t n) {
  Floats v;
  if (i + kLanes <= n) {
    std::memcpy(&v, x + i, sizeof v);
    return v;
  }
  for (int l = 0; l < kLanes; ++l) v[l] = i + l < n ? x[i + l] : -kInf;
  return v;
}

// NaN is passed over.
float largest(const float* x, int64_t begin, int64_t end) {
  Floats m = Floats{} - kInf;
  for (int64_t i = begin; i < end; i += kLanes) {
    const Floats v = load(x, i, end);
    m = v > m ? v : m;
  }
  float best = m[0];
  for (int l = 1; l < kLanes; ++l) best = m[l] > best ? m[l] : best;
  return best;
}

// Index of the largest value, the lowest one of equals; 0 where nothing compares (all NaN).
int32_t argmax(const float* x, int64_t n) {
  constexpr int64_t kChunk = 1024;
  float best = -kInf;
  int64_t from = 0;
  for (int64_t i = 0; i < n; i += kChunk) {
    const float m = largest(x, i, std::min(n, i + kChunk));
    if (m > best) best = m, from = i;
  }
  for (int64_t i = from; i < std::min(n, from + kChunk); ++i)
    if (x[i] == best) return static_cast<int32_t>(i);
  return 0;
}

// The last token that is kept: everything in front of it in the order is kept too.
struct Cut {
  float s = kExpZeroBelow;
  int32_t id = std::numeric_limits<int32_t>::max();
};

PINNATE_INLINE Floats weights(const Row& row, int64_t i, int64_t end, const Cut& cut) {
  Ints id;
  std::memcpy(&id, kIota, sizeof id);
  id += static_cast<int32_t>(i);
  const Floats s = (load(row.x, i, end) - row.top) * row.inv;
  const Ints kept = (s > cut.s) | ((s == cut.s) & (id <= cut.id));
  return (Floats)((Ints)exp_floats(s) & kept);
}

double block_sum(const Row& row, int block, const Cut& cut) {
  const int64_t begin = block * row.width, end = std::min(row.n, begin + row.width);
  Doubles low = {}, high = {};
  for (int64_t i = begin; i < end; i += kLanes) {
    const Floats w = weights(row, i, end, cut);
    HalfFloats halves[2];
    std::memcpy(halves, &w, sizeof w);
    low += __builtin_convertvector(halves[0], Doubles);
    high += __builtin_convertvector(halves[1], Doubles);
  }
  low += high;
  double sum = 0;
  for (int l = 0; l < kLanes / 2; ++l) sum += low[l];
  return sum;
}

double total_weight(const Row& row, const Cut& cut, double* sums) {
  double total = 0;
  for (int b = 0; b < row.blocks(); ++b) total += sums[b] = block_sum(row, b, cut);
  return total;
}

// Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
double uniform(uint64_t seed, uint32_t index, uint32_t position) {
  uint32_t c[4] = {position, index, 0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * c[0], right = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next0 = static_cast<uint32_t>(right >> 32) ^ c[1] ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(left >> 32) ^ c[3] ^ k1;
    c[0] = next0, c[1] = static_cast<uint32_t>(right), c[2] = next2, c[3] = static_cast<uint32_t>(left);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(c[0] >> 5) << 26) + (c[1] >> 6);
  return static_cast<double>(bits) * 0x1p-53;
}

// Walks the ids in front of the cut to the share `u` of their weight.
int32_t draw(const Row& row, const Cut& cut, double u) {
  double sums[kMaxBlocks];
  const double wanted = u * total_weight(row, cut, sums);
  double passed = 0;
  int block = 0, last = 0;
  for (; block < row.blocks() && passed + sums[block] <= wanted; ++block) {
    passed += sums[block];
    if (sums[block] > 0) last = block;
  }
  if (block == row.blocks()) block = last;  // rounding of the sum, or no weight at all (NaN logits)
  const int64_t begin = block * row.width, end = std::min(row.n, begin + row.width);
  int64_t chosen = begin;
  for (int64_t i = begin; i < end; i += kLanes) {
    const Floats w = weights(row, i, end, cut);
    for (int l = 0; l < kLanes; ++l) {
      if (w[l] <= 0) continue;
      chosen = i + l;
      passed += static_cast<double>(w[l]);
      if (passed > wanted) return static_cast<int32_t>(chosen);
    }
  }
  return static_cast<int32_t>(chosen);
}

// Puts the ids of the first k tokens of the order into ids[0, k), the k-th at the end, the others in no order.
// Returns k, at most n.
int64_t select_top(const Row& row, int64_t k, int32_t* ids) {
  k = std::min(k, row.n);
  const auto before = [&](int32_t a, int32_t b) { return row.before(a, b); };
  const int blocks = row.blocks();
  int64_t count = 0;
  if (k * 2 <= blocks) {
    // The k-th largest of the blocks' maxima bounds the k-th largest value from below.
    float maxima[kMaxBlocks], sorted[kMaxBlocks];
    for (int b = 0; b < blocks; ++b) maxima[b] = largest(row.x, b * row.width, std::min(row.n, (b + 1) * row.width));
    std::copy(maxima, maxima + blocks, sorted);
    std::nth_element(sorted, sorted + (k - 1), sorted + blocks, [](float a, float b) { return a > b; });
    const float bound = (sorted[k - 1] - row.top) * row.inv;
    for (int b = 0; b < blocks; ++b) {
      if ((maxima[b] - row.top) * row.inv < bound) continue;
      for (int64_t i = b * row.width; i < std::min(row.n, (b + 1) * row.width); ++i)
        if (row.s(i) >= bound) ids[count++] = static_cast<int32_t>(i);
    }
  }
  if (count < k) {
    for (count = 0; count < row.n; ++count) ids[count] = static_cast<int32_t>(count);
  }
  std::nth_element(ids, ids + (k - 1), ids + count, before);
  return k;
}

// The last of the ids needed for their weight, and `passed` of those before them, to reach `wanted`; ids are permuted.
Cut nucleus(const Row& row, int32_t* ids, int64_t count, double passed, double wanted) {
  const auto before = [&](int32_t a, int32_t b) { return row.before(a, b); };
  int64_t low = 0, high = count;
  while (high - low > 64) {
    const int64_t middle = (low + high) / 2;
    std::nth_element(ids + low, ids + middle, ids + high, before);
    double mass = 0;
    for (int64_t i = low; i < middle; ++i) mass += static_cast<double>(exp_float(row.s(ids[i])));
    if (passed + mass >= wanted) {
      high = middle;
    } else {
      passed += mass, low = middle;
    }
  }
  std::sort(ids + low, ids + high, before);
  int64_t last = low;
  for (; last < high - 1; ++last) {
    passed += static_cast<double>(exp_float(row.s(ids[last])));
    if (passed >= wanted) break;
  }
  return {row.s(ids[last]), ids[last]};
}

// The bucket of each value: 0 holds the largest, and s below kExpZeroBelow has bucket kBuckets - 1.
PINNATE_INLINE Ints buckets_of(const Floats& s) {
  const Floats low = Floats{} + kExpZeroBelow;
  const Floats clamped = s > low ? s : low;
  return __builtin_convertvector(clamped * ((kBuckets - 1) / kExpZeroBelow), Ints);
}

// The nucleus of the whole vocabulary: a histogram of weight finds the bucket where it ends, only that one is ordered.
Cut nucleus_of_all(const Row& row, double share, int32_t* ids) {
  double mass[kBuckets] = {};
  const Cut all;
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const Floats w = weights(row, i, row.n, all);
    const Ints bucket = buckets_of((load(row.x, i, row.n) - row.top) * row.inv);
    for (int l = 0; l < kLanes; ++l) mass[bucket[l]] += static_cast<double>(w[l]);
  }
  double total = 0, passed = 0;
  for (const double m : mass) total += m;
  const double wanted = share * total;
  int last = 0;
  while (last < kBuckets - 1 && passed + mass[last] < wanted) passed += mass[last++];
  int64_t count = 0;
  for (int64_t i = 0; i < row.n; i += kLanes) {
    const Ints bucket = buckets_of((load(row.x, i, row.n) - row.top) * row.inv);
    for (int l = 0; l < kLanes && i + l < row.n; ++l) {
      ids[count] = static_cast<int32_t>(i) + l;
      count += bucket[l] == last;
    }
  }
  return count > 0 ? nucleus(row, ids, count, passed, wanted) : all;
}

Cut find_cut(const SampleArgs& a, const Row& row, int32_t* ids) {
  Cut cut;
  int64_t count = 0;
  if (a.top_k > 0 && a.top_k < row.n) {
    count = select_top(row, a.top_k, ids);
    cut = {row.s(ids[count - 1]), ids[count - 1]};
  }
  if (a.top_p < 1.0f && count > 0) {
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += static_cast<double>(exp_float(row.s(ids[i])));
    cut = nucleus(row, ids, count, 0, static_cast<double>(a.top_p) * total);
  } else if (a.top_p < 1.0f) {
    cut = nucleus_of_all(row, static_cast<double>(a.top_p), ids);
  }
  if (a.min_p > 0) {
    const float least = static_cast<float>(std::log(static_cast<double>(a.min_p)));
    if (least > cut.s) cut = {least, std::numeric_limits<int32_t>::max()};
  }
  return cut;
}

void apply_penalties(const SampleArgs& a, float* logits, int32_t* counts) {
  constexpr int32_t kInPrompt = 1 << 30;
  std::memset(counts, 0, static_cast<size_t>(a.vocab) * sizeof(int32_t));
  for (int64_t i = 0; i < a.prompt_len; ++i) counts[a.prompt[i]] |= kInPrompt;
  for (int64_t i = 0; i < a.output_len; ++i) ++counts[a.output[i]];
  const auto apply = [&](int32_t id) {  // once for each id: its count is taken
    const int32_t count = std::exchange(counts[id], 0);
    if (count == 0) return;
    float& x = logits[id];
    x = x > 0 ? x / a.repetition : x * a.repetition;
    const int32_t outputs = count & ~kInPrompt;
    if (outputs > 0) x = x - a.frequency * static_cast<float>(outputs) - a.presence;
  };
  for (int64_t i = 0; i < a.prompt_len; ++i) apply(a.prompt[i]);
  for (int64_t i = 0; i < a.output_len; ++i) apply(a.output[i]);
}

// Copies logits, -inf where the bit is not set; 32 logits for each word.
void apply_mask(const uint32_t* mask, const float* from, float* to, int64_t vocab) {
  Ints lane;
  std::memcpy(&lane, kIota, sizeof lane);
  const Floats none = Floats{} - kInf;
  for (int64_t i = 0; i + 32 <= vocab; i += 32) {
    const uint32_t word = mask[i / 32];
    for (int part = 0; part < 32; part += kLanes) {
      const Ints bits = (Ints{} + static_cast<int32_t>(word >> part)) >> lane;
      Floats x;
      std::memcpy(&x, from + i + part, sizeof x);
      x = (bits & 1) != 0 ? x : none;
      std::memcpy(to + i + part, &x, sizeof x);
    }
  }
  for (int64_t i = vocab / 32 * 32; i < vocab; ++i) to[i] = (mask[i / 32] >> (i % 32) & 1u) != 0 ? from[i] : -kInf;
}

// The token that alone is allowed, -1 where several are or none. Most tokens of an object whose keys are known are such.
int32_t only_allowed(const uint32_t* mask, int64_t vocab) {
  int64_t found = -1;
  for (int64_t i = 0; i * 32 < vocab; ++i) {
    const int64_t left = vocab - i * 32;
    const uint32_t word = left >= 32 ? mask[i] : mask[i] & ((1u << left) - 1);
    if (word == 0) continue;
    if (found >= 0 || (word & (word - 1)) != 0) return -1;
    found = i * 32 + __builtin_ctz(word);
  }
  return static_cast<int32_t>(found);
}

// The row that the draw sees: the raw one where nothing changes it, else `changed`. `counts` has a place for each id.
const float* changed_logits(const SampleArgs& a, float* changed, int32_t* counts) {
  const bool penalised = a.prompt_len + a.output_len > 0;
  if (a.mask != nullptr) {
    apply_mask(a.mask, a.logits, changed, a.vocab);
  } else if (penalised || a.bias_len > 0) {
    std::memcpy(changed, a.logits, static_cast<size_t>(a.vocab) * sizeof(float));
  } else {
    return a.logits;
  }
  if (penalised) apply_penalties(a, changed, counts);
  for (int64_t i = 0; i < a.bias_len; ++i) changed[a.bias_ids[i]] += a.bias[i];
  return changed;
}

// Where penalties and bans leave nothing: the best token that the mask allows, of the raw logits.
int32_t last_resort(const SampleArgs& a, float* changed) {
  if (a.mask == nullptr) return argmax(a.logits, a.vocab);
  apply_mask(a.mask, a.logits, changed, a.vocab);
  return argmax(changed, a.vocab);
}

int32_t choose(const SampleArgs& a, float* changed, int32_t* ids) {
  if (a.mask != nullptr)
    if (const int32_t token = only_allowed(a.mask, a.vocab); token >= 0) return token;
  const float* logits = changed_logits(a, changed, ids);
  if (a.temperature < kGreedyBelow) {
    const int32_t best = argmax(logits, a.vocab);
    return logits[best] == -kInf ? last_resort(a, changed) : best;
  }
  const float top = largest(logits, 0, a.vocab);
  if (top == -kInf) return last_resort(a, changed);
  const Row row(logits, a.vocab, top, 1.0f / a.temperature);
  return draw(row, find_cut(a, row, ids), uniform(a.seed, a.index, a.position));
}

// Log-probability and rank of a.token, and the best alternatives, of the raw logits.
void report(SampleArgs& a, int32_t* ids) {
  const float* raw = a.logits;
  const float top = largest(raw, 0, a.vocab);
  double sums[kMaxBlocks];
  const double log_total = std::log(total_weight(Row(raw, a.vocab, top, 1.0f), Cut{}, sums));
  const auto logprob = [&](int32_t id) { return static_cast<float>(static_cast<double>(raw[id] - top) - log_total); };
  const float own = raw[a.token];
  int32_t rank = 1;
  for (int64_t i = 0; i < a.token; ++i) rank += raw[i] >= own;
  for (int64_t i = a.token + 1; i < a.vocab; ++i) rank += raw[i] > own;
  a.logprob = logprob(a.token), a.rank = rank;
  if (a.num_top <= 0) return;
  const Row row(raw, a.vocab, 0.0f, 1.0f);
  const int64_t count = select_top(row, a.num_top, ids);
  std::sort(ids, ids + count, [&](int32_t x, int32_t y) { return row.before(x, y); });
  for (int64_t i = 0; i < a.num_top; ++i) {
    a.top_ids[i] = i < count ? ids[i] : -1;
    a.top_logprobs[i] = i < count ? logprob(ids[i]) : 0.0f;
  }
}

// scratch: vocab floats for changed logits, vocab ints for counts or candidates.
void sample(SampleArgs& a, float* scratch) {
  int32_t* ids = reinterpret_cast<int32_t*>(scratch + a.vocab);
  a.token = a.target >= 0 ? a.target : choose(a, scratch, ids);
  if (a.num_top >= 0) report(a, ids);
}

}  // namespace

void register_sample(KernelTable& t) { t.sample = sample; }

}  // namespace pinnate::PINNATE_KERNEL_ISA
