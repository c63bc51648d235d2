// attention.cpp on every instruction set: against loops in double precision, and bit for bit against itself when the same
// sequences are cut into other chunks, batched otherwise, laid out in other pages, beside other garbage.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../src/cpu.h"
#include "../src/kernels.h"
#include "isa_check.h"

namespace pinnate {
namespace portable { void register_attention(KernelTable& t); }
namespace avx2 { void register_attention(KernelTable& t); }
namespace avx512 { void register_attention(KernelTable& t); }
namespace amx { void register_attention(KernelTable& t); }
}  // namespace pinnate

using namespace pinnate;
using namespace pinnate::test;

namespace {

struct Shape {
  int heads, kv_heads, head_dim;
  Act act;
  int page_size = 16, window = 0, rotary = -1;  // -1: the whole head
  bool norm = false, int8 = false;
  float softcap = 0;
  int width() const { return (heads + 2 * kv_heads) * head_dim; }
  int rotated() const { return rotary < 0 ? head_dim : rotary; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

constexpr int kMaxPosition = 3000;
constexpr float kEps = 1e-6f;

// The weights of a layer: tables and norms.
struct Layer {
  std::vector<float> cosines, sines, q_norm, k_norm;
  explicit Layer(const Shape& s) {
    const int half = s.rotated() / 2;
    for (int p = 0; p < kMaxPosition; ++p)
      for (int i = 0; i < half; ++i) {
        const double angle = p * std::pow(10000.0, -static_cast<double>(i) / half);
        cosines.push_back(static_cast<float>(std::cos(angle)));
        sines.push_back(static_cast<float>(std::sin(angle)));
      }
    std::mt19937 rng(5);
    std::uniform_real_distribution<float> around(0.5f, 1.5f);
    for (int i = 0; i < s.head_dim; ++i) q_norm.push_back(around(rng)), k_norm.push_back(around(rng));
  }
};

using Rows = std::vector<float>;  // [length, width]: q, k, v of each token of a sequence, before norm and rope

Rows random_rows(const Shape& s, int length, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 1.5f);
  Rows rows(static_cast<size_t>(length) * static_cast<size_t>(s.width()));
  for (float& x : rows) x = normal(rng);
  return rows;
}

// What is read back of a row of keys or values: with int8, multiples of a 127th of its largest element.
std::vector<double> stored(const Shape& s, std::vector<double> row) {
  double largest = 0;
  for (double x : row) largest = std::max(largest, std::fabs(x));
  const float inverse = 127.0f / static_cast<float>(largest);
  for (double& x : row) x = s.int8 ? std::nearbyint(static_cast<float>(x) * inverse) * largest / 127 : x;
  return row;
}

enum class Garbage { kNumbers, kNaN };

struct Plan {  // how the sequences are served
  int chunk;        // tokens of each sequence in a step
  int stagger = 0;  // sequence i joins at step i * stagger
  uint32_t seed = 1;
  Garbage garbage = Garbage::kNumbers;
  int threads = 1;
  std::vector<int> chunks = {};  // of each sequence; else `chunk`
  std::vector<int> shared = {};  // leading tokens of each sequence that lie in the pages of sequence parents[i] < i
  std::vector<size_t> parents = {};
};

int length_of(const Shape& s, const Rows& r) { return static_cast<int>(r.size()) / s.width(); }

// Serves all sequences; returns for each its attention output, act [length, heads * head_dim], as bytes.
std::vector<std::vector<unsigned char>> serve(const KernelTable& t, const Shape& s, const std::vector<Rows>& seqs, const Plan& plan) {
  const Layer layer(s);
  const KVLayout kv{s.page_size, s.kv_heads, s.head_dim, s.act, s.int8};
  const size_t n = seqs.size(), page_bytes = t.kv_page_bytes(kv), act = act_bytes(s.act);
  const size_t q_width = static_cast<size_t>(s.heads * s.head_dim), ldq = q_width + 6;
  std::mt19937 rng(plan.seed);

  std::vector<std::vector<int32_t>> tables(n);
  size_t pages = 3;
  for (size_t i = 0; i < n; ++i) {
    tables[i].resize(static_cast<size_t>((length_of(s, seqs[i]) + s.page_size - 1) / s.page_size));
    pages += tables[i].size();
  }
  std::vector<int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  size_t used = 0;
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < tables[i].size(); ++j) {
      const bool held = !plan.shared.empty() && static_cast<int>(j + 1) * s.page_size <= plan.shared[i];
      tables[i][j] = held ? tables[plan.parents[i]][j] : order[used++];
    }

  std::vector<unsigned char> memory(pages * page_bytes + 64);
  unsigned char* pool = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  for (size_t i = 0; i + 2 <= pages * page_bytes; i += 2) {
    const uint16_t number = static_cast<uint16_t>(0x3f00 + rng() % 0x300 + (rng() % 2) * 0x8000), nan = 0x7fc1;
    std::memcpy(pool + i, plan.garbage == Garbage::kNaN ? &nan : &number, 2);
  }

  std::vector<std::vector<unsigned char>> results(n);
  std::vector<int> done(n, 0);
  for (int step = 0;; ++step) {
    std::vector<int32_t> starts{0}, contexts, page_offsets{0}, page_indices, positions, slots;
    std::vector<float> x;
    std::vector<size_t> who;
    bool waiting = false;
    for (size_t i = 0; i < n; ++i) {
      const int chunk = plan.chunks.empty() ? plan.chunk : plan.chunks[i];
      const int length = length_of(s, seqs[i]), take = std::min(chunk, length - done[i]);
      if (step < static_cast<int>(i) * plan.stagger) { waiting = true; continue; }
      if (!take) continue;
      const auto from = seqs[i].begin() + static_cast<int64_t>(done[i]) * s.width();
      x.insert(x.end(), from, from + static_cast<int64_t>(take) * s.width());
      for (int p = done[i]; p < done[i] + take; ++p) {
        positions.push_back(p);
        slots.push_back(tables[i][static_cast<size_t>(p / s.page_size)] * s.page_size + p % s.page_size);
      }
      done[i] += take;
      who.push_back(i);
      starts.push_back(starts.back() + take);
      contexts.push_back(done[i]);
      const int held = (done[i] + s.page_size - 1) / s.page_size;
      page_indices.insert(page_indices.end(), tables[i].begin(), tables[i].begin() + held);
      page_offsets.push_back(static_cast<int32_t>(page_indices.size()));
    }
    if (who.empty() && !waiting) break;
    if (who.empty()) continue;
    const int64_t tokens = starts.back();
    std::vector<unsigned char> q(static_cast<size_t>(tokens) * ldq * act), out(q.size(), 0xCD);
    const bool rope = s.rotated() > 0;
    QKVArgs qa{x.data(), s.width(), s.heads, kv, s.norm ? layer.q_norm.data() : nullptr, s.norm ? layer.k_norm.data() : nullptr, kEps,
               rope ? layer.cosines.data() : nullptr, rope ? layer.sines.data() : nullptr, s.rotated(), positions.data(),
               slots.data(), q.data(), static_cast<int64_t>(ldq), pool};
    t.qkv(qa, tokens / 2, tokens);
    t.qkv(qa, 0, tokens / 2);
    AttentionArgs aa{q.data(), static_cast<int64_t>(ldq), s.heads, kv, s.scale(), s.window, static_cast<int>(who.size()), starts.data(),
                     contexts.data(), page_offsets.data(), page_indices.data(), pool, out.data(), static_cast<int64_t>(ldq), nullptr, s.softcap};
    std::vector<unsigned char> shared(t.attention_shared(aa), 0xFF);
    aa.shared = shared.data();
    const int64_t items = t.attention_begin(aa);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < plan.threads; ++thread)
      threads.emplace_back([&, thread] {
        __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
        std::vector<unsigned char> scratch(t.attention_scratch(aa), 0xFF);  // NaN
        for (int64_t i = items - 1 - thread; i >= 0; i -= plan.threads) t.attention(aa, i, scratch.data());
      });
    for (auto& thread : threads) thread.join();
    for (size_t k = 0; k < who.size(); ++k)
      for (int32_t r = starts[k]; r < starts[k + 1]; ++r) {
        const unsigned char* row = out.data() + static_cast<size_t>(r) * ldq * act;
        results[who[k]].insert(results[who[k]].end(), row, row + q_width * act);
        check(row[q_width * act] == 0xCD, "nothing is written past a row");
      }
  }
  return results;
}

float as_float(const unsigned char* at, Act act) {
  float f;
  if (act == Act::kF32) {
    std::memcpy(&f, at, 4);
    return f;
  }
  uint16_t b;
  std::memcpy(&b, at, 2);
  const uint32_t u = uint32_t{b} << 16;
  std::memcpy(&f, &u, 4);
  return f;
}

double rounded(double x, Act act) {
  float f = static_cast<float>(x);
  if (act == Act::kF32) return f;
  uint32_t u;
  std::memcpy(&u, &f, 4);
  u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&f, &u, 4);
  return f;
}

std::vector<double> prepared(const Shape& s, const Layer& l, const float* x, const float* norm, int position) {
  std::vector<double> y(x, x + s.head_dim);
  if (s.norm) {
    double squares = 0;
    for (double v : y) squares += v * v;
    for (int i = 0; i < s.head_dim; ++i) y[i] *= norm[i] / std::sqrt(squares / s.head_dim + kEps);
  }
  const int half = s.rotated() / 2;
  for (int i = 0; i < half; ++i) {
    const double c = l.cosines[position * half + i], sn = l.sines[position * half + i], a = y[i], b = y[half + i];
    y[i] = a * c - b * sn;
    y[half + i] = b * c + a * sn;
  }
  return y;
}

std::vector<double> all_rounded(std::vector<double> row, Act act) {
  for (double& x : row) x = rounded(x, act);
  return row;
}

void check_values(const Shape& s, const Rows& rows, const std::vector<unsigned char>& got, const char* what) {
  const Layer layer(s);
  const int length = length_of(s, rows), d = s.head_dim, group = s.heads / s.kv_heads;
  const double tolerance = s.act == Act::kF32 ? 2e-5 : 2.5e-2;
  double worst = 0, squares = 0;
  for (int h = 0; h < s.heads; ++h) {
    const int kv = h / group;
    std::vector<std::vector<double>> keys, values;
    for (int p = 0; p < length; ++p) {
      const float* x = &rows[static_cast<size_t>(p) * s.width()];
      keys.push_back(all_rounded(stored(s, prepared(s, layer, x + (s.heads + kv) * d, layer.k_norm.data(), p)), s.act));
      const float* v = x + (s.heads + s.kv_heads + kv) * d;
      values.push_back(all_rounded(stored(s, {v, v + d}), s.act));
      const auto q = all_rounded(prepared(s, layer, x + h * d, layer.q_norm.data(), p), s.act);
      std::vector<double> weights, want(d, 0.0);
      const int first = s.window ? std::max(0, p - s.window + 1) : 0;
      double top = -1e300, sum = 0;
      for (int j = first; j <= p; ++j) {
        const double score = s.scale() * std::inner_product(q.begin(), q.end(), keys[j].begin(), 0.0);
        weights.push_back(s.softcap > 0 ? s.softcap * std::tanh(score / s.softcap) : score);
        top = std::max(top, weights.back());
      }
      for (double& w : weights) sum += w = std::exp(w - top);
      for (int j = first; j <= p; ++j)
        for (int i = 0; i < d; ++i)
          want[i] += weights[j - first] / sum * values[static_cast<size_t>(j)][static_cast<size_t>(i)];
      for (int i = 0; i < d; ++i) {
        const double g = as_float(&got[(static_cast<size_t>(p * s.heads + h) * d + i) * act_bytes(s.act)], s.act);
        const double error = std::isnan(g) ? 1e9 : std::fabs(g - want[i]);
        worst = std::max(worst, error);
        squares += error * error;
      }
    }
  }
  const double rms = std::sqrt(squares / (static_cast<double>(length) * s.heads * d));
  check(worst < tolerance, what, worst, tolerance);
  check(rms < tolerance / 8, "root mean square error", rms, tolerance / 8);
}

void test_values(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16}) {
    const Shape shapes[] = {
        {3, 1, 64, act}, {9, 3, 64, act}, {8, 1, 8, act}, {2, 2, 80, act, 48}, {4, 2, 96, act, 32, 40},
        {3, 3, 128, act, 16, 0, -1, true}, {4, 4, 16, act, 16, 1}, {8, 1, 10, act, 16, 65, 2, true}, {2, 1, 2, act, 64, 0, 0},
        {3, 1, 34, act, 16, 100, 18}, {4, 1, 64, act, 16, 0, 0, false, false, 3.0f}, {5, 1, 144, act, 48},
    };
    for (const Shape& s : shapes) {
      const std::vector<Rows> seqs{random_rows(s, 150, 1), random_rows(s, 1, 2), random_rows(s, 67, 3)};
      const auto got = serve(t, s, seqs, Plan{40, 1});
      for (size_t i = 0; i < seqs.size(); ++i) check_values(s, seqs[i], got[i], "attention");
    }
  }
}

// The keys of a row may give it one dominant weight, far larger scores late in the sequence, or all equal scores.
void test_extreme_scores(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16}) {
    const Shape s{2, 1, 16, act, 16, 0, 0};
    for (float factor : {0.0f, 12.0f}) {
      Rows rows = random_rows(s, 300, 9);
      for (int p = 0; p < 300; ++p)
        for (int i = 0; i < s.heads * s.head_dim; ++i) {
          float& x = rows[static_cast<size_t>(p * s.width() + i)];
          x = std::round(x * factor);  // exact in bf16: the reference sees the same scores
        }
      check_values(s, rows, serve(t, s, {rows}, Plan{64})[0], factor == 0.0f ? "equal scores" : "large scores");
    }
  }
}

void same(const std::vector<unsigned char>& a, const std::vector<unsigned char>& b, const char* what) {
  check(a.size() == b.size() && !a.empty() && !std::memcmp(a.data(), b.data(), a.size()), what);
}

void test_same_bits(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16}) {
    const Shape shapes[] = {{3, 1, 64, act}, {8, 1, 16, act, 16, 37}, {2, 2, 80, act, 48}, {6, 2, 8, act, 16, 130, -1, true}};
    for (const Shape& s : shapes) {
      std::vector<Rows> seqs{random_rows(s, 530, 11)};
      const auto alone = serve(t, s, seqs, Plan{1});
      for (int chunk : {7, 64, 512}) same(serve(t, s, seqs, Plan{chunk, 0, 2})[0], alone[0], "chunks");
      for (uint32_t i = 0; i < 5; ++i) seqs.push_back(random_rows(s, 40 + 61 * static_cast<int>(i), 20 + i));
      const auto batch = serve(t, s, seqs, Plan{33, 2, 3, Garbage::kNumbers, 2});
      same(batch[0], alone[0], "in a batch, staggered");
      const auto other = serve(t, s, seqs, Plan{19, 0, 4, Garbage::kNaN});
      for (size_t i = 0; i < seqs.size(); ++i) same(other[i], batch[i], "batches, pages, NaN in unused slots");
    }
  }
}

// Contexts of several spans, alone (spans go to several items) and beside a long prompt (they do not), windows that begin in
// later spans.
void test_long_contexts(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16})
    for (int window : {0, 600}) {
      const Shape s{4, 2, 8, act, 32, window};
      const Rows rows = random_rows(s, 1300, 31);
      const auto whole = serve(t, s, {rows}, Plan{1300})[0];
      check_values(s, rows, whole, "a context of several spans");
      for (int chunk : {1, 5, 300}) same(serve(t, s, {rows}, Plan{chunk, 0, 2, Garbage::kNaN, 2})[0], whole, "spans in parts");
      const std::vector<Rows> both{rows, random_rows(s, 700, 32)};
      same(serve(t, s, both, Plan{650, 1, 3})[0], whole, "spans in a batch");
    }
}

// The same contexts kept as int8: values, bits, and rows that no byte could hold.
void test_int8(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16}) {
    Shape shapes[] = {{9, 3, 64, act}, {4, 2, 96, act, 32, 40}, {3, 1, 34, act, 48, 100, 18, true}, {2, 1, 2, act, 16, 0, 0}};
    for (Shape& s : shapes) {
      s.int8 = true;
      // One rounding to a byte the other way is far more than fp32's tolerance: there, the reference has to see the same keys.
      if (act == Act::kF32) s.rotary = 0, s.norm = false;
      const std::vector<Rows> seqs{random_rows(s, 560, 41), random_rows(s, 67, 42)};
      const auto got = serve(t, s, seqs, Plan{40, 1});
      for (size_t i = 0; i < seqs.size(); ++i) check_values(s, seqs[i], got[i], "int8");
      same(serve(t, s, {seqs[0]}, Plan{1, 0, 2, Garbage::kNaN, 2})[0], got[0], "int8, token by token");
      same(serve(t, s, {seqs[0]}, Plan{560, 0, 3})[0], got[0], "int8, all at once");
    }
    Shape s{2, 1, 16, act, 16, 0, 0};
    s.int8 = true;
    Rows rows = random_rows(s, 3, 43);
    std::fill(rows.begin(), rows.begin() + s.width(), 0.0f);
    rows[static_cast<size_t>(2 * s.width() + 3 * 16 + 5)] = std::numeric_limits<float>::infinity();  // a value of token 2
    const auto got = serve(t, s, {rows}, Plan{3})[0];
    const size_t row = got.size() / 3;
    check(as_float(got.data(), act) == 0.0f, "zeros stay zeros");
    check(std::isfinite(as_float(got.data() + row, act)), "a token does not see what follows it");
    check(std::isnan(as_float(got.data() + 2 * row, act)), "infinity is not made a number");
  }
}

// `length` tokens, the first `shared` of them those of `parent`.
Rows branch(const Shape& s, const Rows& parent, int shared, int length, uint32_t seed) {
  Rows rows = random_rows(s, length, seed);
  std::copy(parent.begin(), parent.begin() + static_cast<int64_t>(shared) * s.width(), rows.begin());
  return rows;
}

// Sequences whose page tables begin with the same pages, as a tree: each gives what it gives alone, in pages of its own. They
// share up to the end of a page that may lie anywhere in a block or a span of keys; all are at their last few tokens together
// (first the shared tokens are computed, once for each that holds them: the same numbers again, as a cache would find them).
void test_shared_pages(const KernelTable& t) {
  std::mt19937 rng(71);
  const auto from = [&](int low, int high) { return low + static_cast<int>(rng() % static_cast<uint32_t>(high - low + 1)); };
  for (Act act : {Act::kF32, Act::kBF16})
    for (int round = 0; round < 6; ++round) {
      Shape s = round % 3 == 0 ? Shape{9, 3, 16, act} : round % 3 == 1 ? Shape{4, 1, 8, act, 48} : Shape{2, 2, 34, act, 32};
      s.int8 = round % 4 == 3;
      s.window = round % 5 == 4 ? from(100, 700) : 0;
      const size_t count = static_cast<size_t>(from(2, round % 6 == 5 ? 40 : 9));
      std::vector<Rows> seqs{random_rows(s, from(200, 1300), 80)};
      Plan together{1, 0, static_cast<uint32_t>(round + 1), Garbage::kNaN, 2};
      together.shared = {0}, together.parents = {0};
      for (size_t i = 1; i < count; ++i) {
        const size_t parent = i < 3 ? 0 : static_cast<size_t>(from(0, static_cast<int>(i) - 1));
        const int most = length_of(s, seqs[parent]) / s.page_size * s.page_size;
        const int shared = (i == 1 ? most : from(0, most)) / s.page_size * s.page_size;
        seqs.push_back(branch(s, seqs[parent], shared, shared + from(1, 300), 90 + static_cast<uint32_t>(i)));
        together.shared.push_back(shared), together.parents.push_back(parent);
      }
      // All but the last rows in the first step, then those, one or a few at a time, side by side.
      for (const Rows& rows : seqs) together.chunks.push_back(std::max(1, length_of(s, rows) - from(1, 4)));
      const auto got = serve(t, s, seqs, together);
      for (size_t i = 0; i < count; ++i) same(got[i], serve(t, s, {seqs[i]}, Plan{length_of(s, seqs[i])})[0], "shared pages");
    }
}

void test_geometry(const KernelTable& t) {
  for (Act act : {Act::kF32, Act::kBF16})
    for (int d : {2, 16, 64, 80, 128}) {
      const size_t bytes = t.kv_page_bytes({16, 3, d, act}), least = 2 * 16 * 3 * static_cast<size_t>(d) * act_bytes(act);
      check(bytes >= least, "a page holds its keys and values", static_cast<double>(bytes), static_cast<double>(least));
      if (d % 16 == 0) check(bytes == least, "no padding where none is needed", static_cast<double>(bytes), static_cast<double>(least));
      check(t.kv_page_bytes({32, 3, d, act}) == 2 * bytes, "pages of twice the tokens");
      const size_t small = t.kv_page_bytes({16, 3, d, act, true}), scales = 16 * 3 * 2 * 4;
      check(small - scales == bytes / act_bytes(act), "a byte for an element, and scales", static_cast<double>(small));
    }
}

void test_all(const char* name, void (*reg)(KernelTable&)) {
  isa = name;
  KernelTable t{};
  reg(t);
  test_geometry(t);
  test_values(t);
  test_extreme_scores(t);
  test_same_bits(t);
  test_long_contexts(t);
  test_int8(t);
  test_shared_pages(t);
}

}  // namespace

int main() {
  if (cpu_runs("amx") && is_wanted("amx")) {
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ, DAZ
    test_all("amx", amx::register_attention);
  }
  return for_every_isa("test_attention", test_all, portable::register_attention, avx2::register_attention, avx512::register_attention);
}
