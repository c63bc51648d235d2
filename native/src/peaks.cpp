// Drives the peak kernels and a memory read on all threads at once; a limit is the best of a few short rounds.
#include "peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include <unistd.h>

#include "gemm.h"
#include "thread_pool.h"

namespace pinnate {
namespace {

constexpr int kRounds = 5;
constexpr size_t kMinBuffer = size_t{256} << 20, kMaxBuffer = size_t{1} << 30;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Best rate over the rounds; work(thread, seconds) returns operations done. Every thread takes exactly one item: it keeps
// its item until all have one.
template <class Work>
double best_rate(ThreadPool& pool, double seconds, Work work) {
  const int threads = pool.threads();
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> arrived{0};
    std::vector<double> rate(static_cast<size_t>(threads));
    pool.parallel_for(threads, [&](int64_t, int thread) {
      arrived.fetch_add(1);
      while (arrived.load() < threads) {
      }
      const auto begin = std::chrono::steady_clock::now();
      const double done = work(thread, seconds / kRounds);
      rate[static_cast<size_t>(thread)] = done / seconds_since(begin);
    });
    double sum = 0;
    for (const double r : rate) sum += r;
    best = std::max(best, sum);
  }
  return best;
}

size_t buffer_bytes() {
  size_t bytes = kMinBuffer;
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long l3 = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (l3 > 0) bytes = std::clamp<size_t>(static_cast<size_t>(l3) * 4, kMinBuffer, kMaxBuffer);
#endif
  return bytes;
}

uint64_t sum_words(const uint64_t* p, size_t count) {
  uint64_t s[16] = {};
  for (size_t i = 0; i + 16 <= count; i += 16)
    for (size_t j = 0; j < 16; ++j) s[j] += p[i + j];
  uint64_t all = 0;
  for (const uint64_t v : s) all += v;
  return all;
}

double read_rate(ThreadPool& pool, double seconds) {
  const size_t bytes = buffer_bytes(), threads = static_cast<size_t>(pool.threads());
  const size_t share = bytes / threads / 4096 * 4096, chunk = std::min<size_t>(share, size_t{1} << 20);
  const AlignedBuffer buffer = allocate_aligned(bytes);
  pool.parallel_for(static_cast<int64_t>(bytes >> 20), [&](int64_t i, int) {
    std::memset(buffer.get() + (static_cast<size_t>(i) << 20), static_cast<int>(i & 0xff), size_t{1} << 20);
  });
  std::vector<size_t> at(threads, 0);  // each thread goes on where it stopped, so no round finds its data in the cache
  std::atomic<uint64_t> sink{0};
  return best_rate(pool, seconds, [&](int thread, double limit) {
    const auto begin = std::chrono::steady_clock::now();
    size_t& offset = at[static_cast<size_t>(thread)];
    uint64_t sum = 0;
    double read = 0;
    do {
      const unsigned char* p = buffer.get() + static_cast<size_t>(thread) * share + offset;
      sum += sum_words(reinterpret_cast<const uint64_t*>(p), chunk / 8);
      read += static_cast<double>(chunk);
      offset = offset + 2 * chunk <= share ? offset + chunk : 0;
    } while (seconds_since(begin) < limit);
    sink += sum;  // so that the reads cannot be removed
    return read;
  });
}

}  // namespace

Peaks measure_peaks(const KernelTable& kernels, int threads, double seconds) {
  ThreadPool pool(threads);
  const double each = seconds / 4;
  Peaks peaks;
  peaks.bf16_gflops =
      best_rate(pool, each, [&](int, double s) { return kernels.peak_flops(Act::kBF16, s); }) / 1e9;
  peaks.f32_gflops = best_rate(pool, each, [&](int, double s) { return kernels.peak_flops(Act::kF32, s); }) / 1e9;
  peaks.int8_gops = best_rate(pool, each, [&](int, double s) { return kernels.peak_int8(s); }) / 1e9;
  peaks.read_gbs = read_rate(pool, each) / 1e9;
  return peaks;
}

}  // namespace pinnate
