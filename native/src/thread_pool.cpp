// The pool's state machine. One 64-bit word says which run is on and how many of its items are not handed out yet; a
// thread takes an item by decrementing it. A thread that was descheduled across runs can therefore never take an item of a
// run under the wrong job: holding an item keeps that run from ending, so the job fields it then reads are that run's.
#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pinnate {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kIdle = std::chrono::milliseconds(10);
constexpr int64_t kMaxItems = int64_t{1} << 31;  // of one run; longer ones are cut

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void flush_denormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ and DAZ
#endif
}

// Spins until ready() or the time is over; true if ready.
template <class Ready>
bool spin(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

struct ThreadPool::Impl {
  // epoch << 32 | items not handed out. Written by the caller to start a run, decremented by whoever takes an item.
  alignas(64) std::atomic<uint64_t> state{0};
  // Written only between runs, read only while holding an item.
  alignas(64) Fn fn = nullptr;
  void* ctx = nullptr;
  int64_t first = 0, items = 0;
  alignas(64) std::atomic<int64_t> finished{0};

  std::mutex mutex;
  std::condition_variable work_ready, run_done;
  std::atomic<int> parked{0};
  std::atomic<bool> caller_parked{false};
  std::atomic<bool> stop{false};
  std::vector<std::thread> workers;

  struct alignas(64) Range {
    std::atomic<uint64_t> left{0};  // first << 32 | end
  };
  std::vector<Range> ranges;  // of parallel_ranges: of each thread, and shared

  explicit Impl(int threads) : ranges(static_cast<size_t>(threads) + 1) {}

  std::mutex idle_mutex;  // held while a piece runs
  std::function<bool()> idle_piece;
  std::atomic<bool> idle_news{false};  // another piece is being set, or was and has not been asked yet

  bool has_work() const { return static_cast<uint32_t>(state.load()) != 0; }

  // Runs items until none is left.
  void drain(int thread) {
    int64_t mine = 0, total = 0;
    uint64_t s = state.load(std::memory_order_relaxed);
    while (static_cast<uint32_t>(s) != 0) {
      if (!state.compare_exchange_weak(s, s - 1, std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
      total = items;
      fn(ctx, first + (total - static_cast<int64_t>(static_cast<uint32_t>(s))), thread);
      ++mine;
      s = state.load(std::memory_order_relaxed);
    }
    // Until here the run could not end, so every item taken above belongs to it.
    if (mine == 0 || finished.fetch_add(mine) + mine != total) return;
    if (caller_parked.load()) {
      std::lock_guard lock(mutex);
      run_done.notify_one();
    }
  }

  void work(int thread) {
    flush_denormals();
    while (!stop.load(std::memory_order_relaxed)) {
      drain(thread);
      if (spin([&] { return has_work() || stop.load(std::memory_order_relaxed); })) continue;
      std::unique_lock lock(mutex);
      parked.fetch_add(1);  // before the check below; run() checks in the opposite order
      const auto awake = [&] { return has_work() || stop.load(); };
      if (thread == 1) use_idle_time(lock, awake);
      work_ready.wait(lock, awake);
      parked.fetch_sub(1);
    }
  }

  // Returns when there is work.
  template <class Awake>
  void use_idle_time(std::unique_lock<std::mutex>& lock, Awake awake) {
    uint64_t last_run = state.load();
    for (bool more = true; !awake();) {
      if (!more) {
        work_ready.wait(lock, [&] { return awake() || state.load() != last_run || idle_news.exchange(false); });
        more = true;
        continue;
      }
      if (work_ready.wait_for(lock, kIdle, awake)) return;
      const uint64_t latest = state.load();
      if (std::exchange(last_run, latest) != latest) continue;  // the caller did a run alone meanwhile
      lock.unlock();
      {
        std::lock_guard idle(idle_mutex);
        while (more && !awake() && !idle_news.load()) more = idle_piece && idle_piece();
      }
      if (idle_news.exchange(false)) more = true;
      lock.lock();
    }
  }

  void wait_done() {
    auto done = [&] { return finished.load() == items; };
    if (spin(done)) return;
    std::unique_lock lock(mutex);
    caller_parked.store(true);
    run_done.wait(lock, done);
    caller_parked.store(false);
  }

  void run_one(int64_t begin, int64_t count, Fn f, void* c) {
    fn = f, ctx = c, first = begin, items = count;
    finished.store(0);
    const uint64_t epoch = (state.load(std::memory_order_relaxed) >> 32) + 1;
    state.store(epoch << 32 | static_cast<uint64_t>(count));
    if (parked.load() != 0) {
      std::lock_guard lock(mutex);
      work_ready.notify_all();
    }
    drain(0);
    wait_done();
  }
};

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) throw std::invalid_argument("threads: must be at least 1");
  impl_ = std::make_unique<Impl>(threads);
  impl_->workers.reserve(static_cast<size_t>(threads - 1));
  for (int t = 1; t < threads; ++t) impl_->workers.emplace_back([p = impl_.get(), t] { p->work(t); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop.store(true);
  }
  impl_->work_ready.notify_all();
  for (auto& worker : impl_->workers) worker.join();
}

int ThreadPool::threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::when_idle(std::function<bool()> piece) {
  impl_->idle_news.store(true);  // a piece under way is the last
  {
    std::lock_guard idle(impl_->idle_mutex);
    impl_->idle_piece = std::move(piece);
  }
  impl_->idle_news.store(true);  // for a thread that looked before it was set
  std::lock_guard lock(impl_->mutex);
  impl_->work_ready.notify_all();
}

void ThreadPool::begin_ranges(int64_t items, int64_t shared) {
  if (items >= kMaxItems) throw std::invalid_argument("parallel_ranges: too many items");
  const int64_t owned = items - shared;
  const auto set = [&](int64_t range, int64_t first, int64_t end) {
    impl_->ranges[static_cast<size_t>(range)].left.store(static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end));
  };
  for (int64_t t = 0; t < threads(); ++t) set(t, owned * t / threads(), owned * (t + 1) / threads());
  set(threads(), owned, items);
}

// There is an item for each call: whoever finds all ranges empty has looked while others took, and looks again.
int64_t ThreadPool::take(int thread) {
  const int ranges = threads() + 1;
  const auto take_from = [&](int range, bool first) {
    auto& left = impl_->ranges[static_cast<size_t>(range)].left;
    uint64_t old = left.load();
    while (old >> 32 != (old & 0xffffffff)) {
      if (!left.compare_exchange_weak(old, first ? old + (uint64_t{1} << 32) : old - 1)) continue;
      return static_cast<int64_t>(first ? old >> 32 : (old & 0xffffffff) - 1);
    }
    return int64_t{-1};
  };
  int64_t item = take_from(thread, true);
  if (item < 0) item = take_from(threads(), true);
  for (int i = 1; item < 0; ++i) item = take_from((thread + i) % ranges, false);
  return item;
}

void ThreadPool::run(int64_t items, Fn fn, void* ctx) {
  if (items <= 1 || impl_->workers.empty()) {
    for (int64_t i = 0; i < items; ++i) fn(ctx, i, 0);
    return;
  }
  for (int64_t begin = 0; begin < items; begin += kMaxItems)
    impl_->run_one(begin, std::min(items - begin, kMaxItems), fn, ctx);
}

}  // namespace pinnate
