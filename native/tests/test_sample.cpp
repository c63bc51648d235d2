// The sampling kernel alone: every ISA must draw the same tokens, and bad logits must not hurt.
// What the draws mean is tested against the NumPy definition in tests/unit/executor/test_native_sampling.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "../src/cpu.h"
#include "../src/kernels.h"

namespace pinnate {
namespace portable { void register_sample(KernelTable&); }
namespace avx2 { void register_sample(KernelTable&); }
namespace avx512 { void register_sample(KernelTable&); }
}  // namespace pinnate

using namespace pinnate;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);       \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

SampleArgs arguments(std::vector<float>& logits) {
  SampleArgs a{};
  a.logits = logits.data(), a.vocab = static_cast<int64_t>(logits.size());
  a.temperature = 1, a.top_p = 1, a.repetition = 1, a.target = -1, a.num_top = -1;
  return a;
}

std::vector<float> random_logits(int64_t vocab, uint32_t seed, float spread) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& x : logits) x = normal(rng);
  return logits;
}

int32_t run(const KernelTable& t, SampleArgs a) {
  std::vector<float> scratch(static_cast<size_t>(2 * a.vocab + 64));
  t.sample(a, scratch.data());
  CHECK(a.token >= 0 && a.token < a.vocab);
  return a.token;
}

void test_greedy(const KernelTable& t) {
  for (int64_t vocab : {1, 2, 15, 16, 17, 1023, 1025, 49152, 151936}) {
    auto logits = random_logits(vocab, static_cast<uint32_t>(vocab), 3);
    auto a = arguments(logits);
    a.temperature = 0;
    int32_t best = 0;
    for (int32_t i = 1; i < vocab; ++i)
      if (logits[static_cast<size_t>(i)] > logits[static_cast<size_t>(best)]) best = i;
    CHECK(run(t, a) == best);
    logits.back() = logits[static_cast<size_t>(best)];  // a tie: the lower id wins
    CHECK(run(t, a) == best);
  }
}

void test_isas_agree(const std::vector<KernelTable>& tables) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    auto logits = random_logits(3001, seed, 0.1f + static_cast<float>(seed % 7));
    auto a = arguments(logits);
    a.seed = seed * 0x9E3779B97F4A7C15ull, a.position = seed, a.temperature = 0.3f + 0.01f * static_cast<float>(seed);
    a.top_k = seed % 3 == 0 ? 40 : 0, a.top_p = seed % 2 ? 0.9f : 1.0f, a.min_p = seed % 5 == 0 ? 0.05f : 0.0f;
    const int32_t first = run(tables[0], a);
    for (const auto& t : tables) CHECK(run(t, a) == first);
  }
}

void test_distribution(const KernelTable& t) {
  std::vector<float> logits = {0.0f, 1.0f, 2.0f, -kInf, 1.5f};
  std::vector<double> expected(5), seen(5);
  double total = 0;
  for (size_t i = 0; i < 5; ++i) total += expected[i] = std::exp(static_cast<double>(logits[i]));
  auto a = arguments(logits);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    a.position = static_cast<uint32_t>(i);
    ++seen[static_cast<size_t>(run(t, a))];
  }
  CHECK(seen[3] == 0);
  double chi = 0;
  for (size_t i : {0, 1, 2, 4}) {
    const double mean = kDraws * expected[i] / total;
    chi += (seen[i] - mean) * (seen[i] - mean) / mean;
  }
  CHECK(chi < 16.3);  // 3 degrees of freedom, p = 0.001; the draws are fixed, so this cannot flicker
}

void test_bad_logits(const KernelTable& t) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (float value : {nan, kInf, -kInf, 0.0f, 3e38f, -3e38f}) {
    for (float temperature : {0.0f, 1e-30f, 1e-4f, 1.0f, 1e30f}) {
      for (int32_t top_k : {0, 3, 900}) {
        std::vector<float> logits(2500, value);
        logits[7] = 1.0f, logits[11] = nan;
        auto a = arguments(logits);
        int32_t ids[5];
        float values[5];
        a.temperature = temperature, a.top_k = top_k, a.top_p = 0.9f, a.min_p = 0.1f;
        a.num_top = 5, a.top_ids = ids, a.top_logprobs = values;
        run(t, a);
      }
    }
  }
}

void test_mask(const KernelTable& t) {
  for (int64_t vocab : {1, 31, 32, 33, 3001}) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
      auto logits = random_logits(vocab, seed, 3);
      std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32), 0);
      std::mt19937 rng(seed);
      for (int i = 0; i < 3; ++i) {
        const size_t id = rng() % static_cast<size_t>(vocab);
        mask[id / 32] |= 1u << (id % 32);
      }
      auto a = arguments(logits);
      a.mask = mask.data(), a.seed = seed, a.temperature = seed % 2 ? 1.0f : 0.0f, a.top_k = seed % 3 ? 0 : 2;
      const auto token = static_cast<size_t>(run(t, a));
      CHECK((mask[token / 32] >> (token % 32) & 1u) != 0);
    }
  }
}

// Whatever is asked for beside it; bits behind the vocabulary mean nothing.
void test_one_allowed_token(const KernelTable& t) {
  for (int64_t vocab : {1, 31, 32, 33, 3001}) {
    for (int64_t only : {int64_t{0}, vocab / 2, vocab - 1}) {
      auto logits = random_logits(vocab, 7, 3);
      std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32), 0);
      if (vocab % 32 != 0) mask.back() = ~uint32_t{0} << (vocab % 32);
      mask[static_cast<size_t>(only / 32)] |= 1u << (only % 32);
      const auto token = static_cast<int32_t>(only);
      const float banned = -kInf;
      auto a = arguments(logits);
      a.mask = mask.data(), a.top_k = 2;
      for (float temperature : {0.0f, 1.0f}) {
        for (int64_t bans : {0, 1}) {
          a.temperature = temperature, a.bias_ids = &token, a.bias = &banned, a.bias_len = bans;
          CHECK(run(t, a) == token);
        }
      }
    }
  }
}

// Several samples read one row, in several threads.
void test_logits_stay(const KernelTable& t) {
  auto logits = random_logits(3001, 3, 3);
  const auto before = logits;
  std::vector<uint32_t> mask(94, 0x55555555u);
  const int32_t history[] = {1, 2, 3, 3};
  const float bias = 2.5f;
  auto a = arguments(logits);
  a.repetition = 1.3f, a.presence = 0.5f, a.prompt = history, a.prompt_len = 2, a.output = history + 2, a.output_len = 2;
  a.bias_ids = history, a.bias = &bias, a.bias_len = 1, a.num_top = 0;
  for (const uint32_t* m : {static_cast<const uint32_t*>(nullptr), static_cast<const uint32_t*>(mask.data())}) {
    a.mask = m;
    run(t, a);
    CHECK(logits == before);
  }
}

}  // namespace

int main() {
  std::vector<KernelTable> tables(1);
  portable::register_sample(tables[0]);
  if (cpu_runs("avx2")) avx2::register_sample(tables.emplace_back());
  if (cpu_runs("avx512")) avx512::register_sample(tables.emplace_back());
  for (const auto& t : tables) {
    test_greedy(t);
    test_distribution(t);
    test_bad_logits(t);
    test_mask(t);
    test_one_allowed_token(t);
    test_logits_stay(t);
  }
  test_isas_agree(tables);
  std::printf("sample: ok (%zu ISAs)\n", tables.size());
}
