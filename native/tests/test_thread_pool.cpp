// The pool runs every item once, whatever the number of threads, parked or spinning, and never under another run's job.
#include "../src/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "check.h"

namespace {

using pinnate::ThreadPool;

// Every item exactly once, with a thread index in range.
void check_run(ThreadPool& pool, int64_t items) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(items));
  std::atomic<bool> threads_ok{true};
  pool.parallel_for(items, [&](int64_t i, int t) {
    seen[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
    if (t < 0 || t >= pool.threads()) threads_ok = false;
  });
  bool once = true;
  for (auto& s : seen) once = once && s.load() == 1;
  CHECK(once);
  CHECK(threads_ok.load());
}

// The same in ranges; a thread that nobody disturbs takes its own in order.
void check_ranges(ThreadPool& pool, int64_t items, int64_t shared, bool uneven) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(items));
  std::vector<std::vector<int64_t>> taken(static_cast<size_t>(pool.threads()));
  pool.parallel_ranges(items, shared, [&](int64_t i, int t) {
    seen[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
    taken[static_cast<size_t>(t)].push_back(i);
    if (uneven && t == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  bool once = true, ordered = true;
  for (auto& s : seen) once = once && s.load() == 1;
  CHECK(once);
  for (int t = 0; t < pool.threads(); ++t) {
    int64_t next = (items - shared) * t / pool.threads();
    for (const int64_t i : taken[static_cast<size_t>(t)]) {
      if (next < (items - shared) * (t + 1) / pool.threads() && i == next) ++next;
      else ordered = ordered && (i >= items - shared || i < (items - shared) * t / pool.threads() || i >= next);
    }
  }
  CHECK(ordered);
  if (pool.threads() == 1) CHECK(std::is_sorted(taken[0].begin(), taken[0].end()));
}

void test_ranges() {
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    for (const int64_t items : {0, 1, 2, 3, 7, 64, 1000})
      for (const int64_t shared : {int64_t{0}, items / 3, items})
        for (const bool uneven : {false, true}) check_ranges(pool, items, shared, uneven);
  }
}

void test_counts() {
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const int64_t items : {0, 1, 2, 3, 7, 64, 1000}) check_run(pool, items);
  }
  bool refused = false;
  try {
    ThreadPool pool(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

// Thousands of runs with more threads than cores: workers are descheduled in the middle of runs all the time. Each run has
// a context of its own, on the stack: an item run under a stale job would write into another run's memory.
void test_stress() {
  ThreadPool pool(4);
  for (int run = 0; run < 5000; ++run) {
    const int64_t items = 1 + run * 7 % 23;
    std::atomic<int64_t> sum{0};
    const int64_t add = run;
    pool.parallel_for(items, [&sum, add](int64_t i, int) { sum.fetch_add(add + i, std::memory_order_relaxed); });
    if (sum.load() != items * add + items * (items - 1) / 2) {
      CHECK(false);
      return;
    }
  }
  CHECK(true);
}

// What items wrote (without atomics) is visible to the caller after the run and to all threads in the next one.
void test_visibility() {
  ThreadPool pool(3);
  std::vector<int64_t> data(257, 0);
  for (int run = 0; run < 500; ++run)
    pool.parallel_for(257, [&](int64_t i, int) { data[static_cast<size_t>(256 - i)] += i; });
  bool right = true;
  for (int64_t i = 0; i < 257; ++i) right = right && data[static_cast<size_t>(256 - i)] == 500 * i;
  CHECK(right);
}

// Workers that parked wake up again; a caller that has to park for a slow item is woken.
void test_parking() {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    check_run(pool, 9);
    pool.parallel_for(3, [&](int64_t i, int) {
      if (i == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
}

void test_lifetime() {
  for (int i = 0; i < 100; ++i) {
    ThreadPool pool(1 + i % 4);  // destroyed while its workers start, spin or park
    if (i % 3 != 0) check_run(pool, 5);
  }
}

bool soon(const std::function<bool()>& ready) {
  for (int i = 0; i < 500 && !ready(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return ready();
}

// Idle time is used until nothing is left, again after a run, never beside a piece of its own, and not once it is taken away.
void test_idle_time() {
  ThreadPool pool(3);
  std::atomic<int> left{0}, pieces{0}, inside{0};
  std::atomic<bool> alone{true};
  const auto piece = [&] {
    if (inside.fetch_add(1) != 0) alone = false;
    const bool more = left.load() > 0;
    if (more) left.fetch_sub(1), pieces.fetch_add(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    inside.fetch_sub(1);
    return more;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // all have parked
  left = 5;
  pool.when_idle(piece);
  CHECK(soon([&] { return pieces.load() == 5; }));
  left = 3;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(pieces.load() == 5);  // it said that nothing was left; it is asked again after a run
  check_run(pool, 9);
  CHECK(soon([&] { return pieces.load() == 8; }));

  left = 1000000;
  check_run(pool, 9);
  CHECK(soon([&] { return pieces.load() > 8; }));
  for (int i = 0; i < 100; ++i) check_run(pool, 9);  // runs do not wait for idle time to end
  pool.when_idle({});
  CHECK(inside.load() == 0);
  const int last = pieces.load();
  check_run(pool, 9);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(pieces.load() == last);
  CHECK(alone.load());

  pool.when_idle(piece);
  CHECK(soon([&] { return pieces.load() > last; }));  // destroyed while it is used
}

void test_flushes_denormals() {
#if defined(__x86_64__)
  ThreadPool pool(4);
  std::vector<unsigned> mxcsr(4, 0xffff);
  std::atomic<int> arrived{0};
  pool.parallel_for(4, [&](int64_t, int t) {
    arrived.fetch_add(1);
    while (arrived.load() < 4) std::this_thread::yield();  // one item for each thread
    mxcsr[static_cast<size_t>(t)] = _mm_getcsr();
  });
  for (int t = 1; t < 4; ++t) CHECK((mxcsr[static_cast<size_t>(t)] & 0x8040) == 0x8040);
#endif
}

}  // namespace

int main() {
  test_counts();
  test_ranges();
  test_stress();
  test_visibility();
  test_parking();
  test_lifetime();
  test_idle_time();
  test_flushes_denormals();
  return pinnate::test::finish("thread_pool");
}
