// Times attention alone: prefill chunks and decode batches. Not a test: prints, asserts nothing.
// Usage: bench_attention [isa] [threads] [repeats] [part of a case's name]
//        bench_attention --json FLOPS READ [isa] [threads] [repeats] [part of a case's name]
// With --json: prefill and decode of three models' shapes, one JSON object a line, as shares of the peaks given: FLOPS in
// GFLOP/s of bf16, READ in GB/s (`pinnate bench` prints both).
// With one thread the time is the thread's CPU time, so that other processes on the machine disturb it less.
// Flops counted: 4 * head_dim for each query head and visible key. Bytes: the pages of the contexts, once.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "../src/cpu.h"
#include "../src/kernels.h"
#include "bench_clock.h"

namespace pinnate {
namespace portable { void register_attention(KernelTable& t); }
namespace avx2 { void register_attention(KernelTable& t); }
namespace avx512 { void register_attention(KernelTable& t); }
namespace amx { void register_attention(KernelTable& t); }
}  // namespace pinnate

namespace {

using namespace pinnate;

struct Case {
  std::string name;
  int seqs, rows, context, heads, kv_heads, head_dim;
  Act act = Act::kBF16;
  bool int8 = false;
  int shared = 0, groups = 1;  // leading tokens in the same pages, in each of `groups` groups of sequences that share
};

struct Peaks {  // zeros: print text
  double gflops = 0, read_gbs = 0;
};

constexpr size_t kMemory = size_t{1} << 30;  // of a case's pages at most: longer ones are left out

// The pool holds as many layers as make it larger than the caches, and calls go round them, as a model's layers do.
void measure(const KernelTable& t, const Case& c, int threads, int repeats, const Peaks& peaks) {
  const KVLayout kv{16, c.kv_heads, c.head_dim, c.act, c.int8};
  const size_t page = t.kv_page_bytes(kv), per_seq = static_cast<size_t>(c.context + 15) / 16, pages = per_seq * c.seqs;
  if (pages * page > kMemory) return;
  const size_t layers = std::clamp<size_t>((size_t{256} << 20) / (pages * page), 1, 30);
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t size = (layers * pages * page + kHuge - 1) / kHuge * kHuge;
  std::unique_ptr<unsigned char, void (*)(void*)> memory(static_cast<unsigned char*>(std::aligned_alloc(kHuge, size)), std::free);
  unsigned char* pool = memory.get();
  madvise(pool, size, MADV_HUGEPAGE);
  std::mt19937 rng(1);
  for (size_t i = 0; i + 2 <= pages * page; i += 2) {
    const uint16_t x = static_cast<uint16_t>(0x3e00 + rng() % 0x180 + (rng() % 2) * 0x8000);
    std::memcpy(pool + i, &x, 2);
  }
  for (size_t l = 1; l < layers; ++l) std::memcpy(pool + l * pages * page, pool, pages * page);
  std::vector<int32_t> starts, contexts(c.seqs, c.context), offsets, indices(pages);
  for (int s = 0; s <= c.seqs; ++s) starts.push_back(s * c.rows), offsets.push_back(static_cast<int32_t>(s * per_seq));
  std::iota(indices.begin(), indices.end(), 0);
  std::shuffle(indices.begin(), indices.end(), rng);
  const size_t held = static_cast<size_t>(c.shared) / 16, each = static_cast<size_t>(c.seqs / c.groups);
  for (size_t s = 0; s < static_cast<size_t>(c.seqs); ++s)
    std::copy_n(&indices[s / each * each * per_seq], held, &indices[s * per_seq]);
  const int64_t width = int64_t{c.heads} * c.head_dim, tokens = int64_t{c.seqs} * c.rows;
  std::vector<unsigned char> q(tokens * width * act_bytes(c.act)), out(q.size());
  for (size_t i = 0; i + 2 <= q.size(); i += 2) {
    const uint16_t x = static_cast<uint16_t>(0x3e00 + rng() % 0x180 + (rng() % 2) * 0x8000);
    std::memcpy(&q[i], &x, 2);
  }
  AttentionArgs a{q.data(), width, c.heads, kv, 0.125f, 0, c.seqs, starts.data(), contexts.data(), offsets.data(), indices.data(),
                  pool, out.data(), width, nullptr};
  // One shared memory for each layer: begun anew before each run over all of them.
  const size_t shared_bytes = (t.attention_shared(a) + 63) / 64 * 64;
  std::vector<unsigned char> shared(shared_bytes * layers);
  int64_t items = 0;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    std::vector<unsigned char> scratch(t.attention_scratch(a));
    for (int64_t i; (i = next++) < items * static_cast<int64_t>(layers);) {
      AttentionArgs layer = a;
      layer.pool = pool + i / items * pages * page;
      layer.shared = shared.data() + i / items * shared_bytes;
      t.attention(layer, i % items, scratch.data());
    }
  };
  std::vector<double> times;
  for (int r = 0; r < repeats; ++r) {
    next = 0;
    const double start = seconds_now(threads);
    for (size_t l = 0; l < layers; ++l) {
      AttentionArgs layer = a;
      layer.shared = shared.data() + l * shared_bytes;
      items = t.attention_begin(layer);
    }
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (auto& o : others) o.join();
    times.push_back((seconds_now(threads) - start) / static_cast<double>(layers));
  }
  std::sort(times.begin(), times.end());
  const double seconds = times[times.size() / 2];
  const double keys = static_cast<double>(c.seqs) * (static_cast<double>(c.rows) * (c.context - c.rows) + c.rows * (c.rows + 1) / 2.0);
  const double flops = keys * c.heads * c.head_dim * 4;
  const double bytes = static_cast<double>((pages - held * static_cast<size_t>(c.seqs - c.groups)) * page);
  const double gflops = flops / seconds * 1e-9, gbs = bytes / seconds * 1e-9;
  if (peaks.gflops == 0) {
    std::printf("%-44s %8.1f us (best %8.1f)  %7.1f GFLOP/s  %6.1f GB/s  %lld items\n", c.name.c_str(), seconds * 1e6, times[0] * 1e6,
                gflops, gbs, static_cast<long long>(items));
    return;
  }
  std::printf("{\"case\": \"%s\", \"threads\": %d, \"us\": %.1f, \"best_us\": %.1f, \"gflops\": %.1f, \"share_of_flops\": %.3f, "
              "\"gbs\": %.2f, \"share_of_read\": %.3f}\n",
              c.name.c_str(), threads, seconds * 1e6, times[0] * 1e6, gflops, gflops / peaks.gflops, gbs, gbs / peaks.read_gbs);
  std::fflush(stdout);
}

struct Model {
  const char* name;
  int heads, kv_heads, head_dim;
};

std::vector<Case> model_cases() {
  std::vector<Case> cases;
  for (const Model& m : {Model{"135M", 9, 3, 64}, Model{"1B", 32, 8, 64}, Model{"8B", 32, 8, 128}})
    for (const bool int8 : {false, true}) {
      const std::string model = std::string(m.name) + (int8 ? " int8 kv" : "");
      for (int n : {512, 2000, 8000})
        cases.push_back({model + " prefill " + std::to_string(n), 1, n, n, m.heads, m.kv_heads, m.head_dim, Act::kBF16, int8});
      for (int batch : {1, 8, 32, 64})
        for (int n : {128, 512, 2048, 8192})
          cases.push_back({model + " decode " + std::to_string(batch) + " x " + std::to_string(n), batch, 1, n, m.heads, m.kv_heads,
                           m.head_dim, Act::kBF16, int8});
      cases.push_back({model + " decode 8 x 8 sharing 400 of 450", 64, 1, 450, m.heads, m.kv_heads, m.head_dim, Act::kBF16, int8,
                       400, 8});
      cases.push_back({model + " decode 16 sharing 1500 of 1600", 16, 1, 1600, m.heads, m.kv_heads, m.head_dim, Act::kBF16, int8,
                       1500});
    }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
  Peaks peaks;
  if (argc > 3 && std::string(argv[1]) == "--json") {
    peaks = {std::atof(argv[2]), std::atof(argv[3])};
    argc -= 3, argv += 3;
  }
  const std::string isa = argc > 1 ? argv[1] : "avx512";
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1, repeats = argc > 3 ? std::atoi(argv[3]) : 5;
  KernelTable t{};
  if (isa == "amx" && !cpu_runs("amx")) {
    std::fprintf(stderr, "this CPU has no AMX\n");
    return 1;
  }
  if (isa == "amx") amx::register_attention(t);
  else if (isa == "avx512") avx512::register_attention(t);
  else if (isa == "avx2") avx2::register_attention(t);
  else portable::register_attention(t);
  const char* part = argc > 4 ? argv[4] : "";
  if (peaks.gflops > 0) {
    for (const Case& c : model_cases())
      if (c.name.find(part) != std::string::npos) measure(t, c, threads, repeats, peaks);
    return 0;
  }
  std::printf("%s, %d threads, median of %d\n", isa.c_str(), threads, repeats);
  const Case cases[] = {
      {"prefill 512 at context 2000, 9/3 x 64", 1, 512, 2000, 9, 3, 64},
      {"prefill 512 at context 512, 9/3 x 64", 1, 512, 512, 9, 3, 64},
      {"prefill 512 at context 2000, 32/8 x 128", 1, 512, 2000, 32, 8, 128},
      {"prefill 512 at context 2000, 9/3 x 64, fp32", 1, 512, 2000, 9, 3, 64, Act::kF32},
      {"decode 32 at context 500, 9/3 x 64", 32, 1, 500, 9, 3, 64},
      {"decode 32 at context 500, 9/3 x 64, fp32", 32, 1, 500, 9, 3, 64, Act::kF32},
      {"decode 32 at context 150, 9/3 x 64", 32, 1, 150, 9, 3, 64},
      {"decode 32 at context 64, 9/3 x 64", 32, 1, 64, 9, 3, 64},
      {"decode 32 at context 220, 9/3 x 64", 32, 1, 220, 9, 3, 64},
      {"decode 64 at context 220, 9/3 x 64", 64, 1, 220, 9, 3, 64},
      {"decode 64 at context 430, 9/3 x 64", 64, 1, 430, 9, 3, 64},
      {"decode 64 at context 600, 9/3 x 64", 64, 1, 600, 9, 3, 64},
      {"sharing 8 x 8, 400 of 450, 9/3 x 64", 64, 1, 450, 9, 3, 64, Act::kBF16, false, 400, 8},
      {"sharing 8, 400 of 450, 9/3 x 64", 8, 1, 450, 9, 3, 64, Act::kBF16, false, 400},
      {"sharing 16, 1500 of 1600, 9/3 x 64", 16, 1, 1600, 9, 3, 64, Act::kBF16, false, 1500},
      {"sharing 16, 1500 of 1600, 9/3 x 64, int8", 16, 1, 1600, 9, 3, 64, Act::kBF16, true, 1500},
      {"prefill 2000, 9/3 x 64", 1, 2000, 2000, 9, 3, 64},
      {"decode 1 at context 500, 9/3 x 64", 1, 1, 500, 9, 3, 64},
      {"decode 1 at context 32000, 9/3 x 64", 1, 1, 32000, 9, 3, 64},
      {"decode 8 at context 2000, 32/8 x 128", 8, 1, 2000, 32, 8, 128},
      {"kv 32 at context 500, 9/3 x 64", 32, 1, 500, 9, 3, 64},
      {"kv 32 at context 500, 9/3 x 64, int8", 32, 1, 500, 9, 3, 64, Act::kBF16, true},
      {"kv 32 at context 2000, 9/3 x 64", 32, 1, 2000, 9, 3, 64},
      {"kv 32 at context 2000, 9/3 x 64, int8", 32, 1, 2000, 9, 3, 64, Act::kBF16, true},
      {"kv 8 at context 8000, 9/3 x 64", 8, 1, 8000, 9, 3, 64},
      {"kv 8 at context 8000, 9/3 x 64, int8", 8, 1, 8000, 9, 3, 64, Act::kBF16, true},
      {"kv prefill 512 at context 2000, 9/3 x 64, int8", 1, 512, 2000, 9, 3, 64, Act::kBF16, true},
  };
  for (const Case& c : cases)
    if (c.name.find(part) != std::string::npos) measure(t, c, threads, repeats, peaks);
}
