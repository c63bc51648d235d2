// A small pool of its own: tiles are handed out dynamically, waiting is spin-then-park.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace pinnate {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // >= 1; the caller is one of them, so threads-1 are started
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls fn(ctx, item, thread) once for each item in [0, items), in any order, on all threads; returns when all are done.
  // `thread` is in [0, threads()). Must not be called from inside itself. fn must not throw.
  using Fn = void (*)(void* ctx, int64_t item, int thread);
  void run(int64_t items, Fn fn, void* ctx);

  template <class F>
  void parallel_for(int64_t items, F&& f) {  // f(item, thread)
    run(items, [](void* c, int64_t i, int t) { (*static_cast<std::remove_reference_t<F>*>(c))(i, t); }, &f);
  }

  // The same, but every thread has an equal range of the first items - `shared` and takes these in order; then what is left of
  // the others in turn; then what other threads have left, from their ends. So what a thread wrote in one call is mostly read and
  // written by it in the next: the lines are in its caches. Throws std::invalid_argument for 2^31 items or more.
  template <class F>
  void parallel_ranges(int64_t items, int64_t shared, F&& f) {
    begin_ranges(items, shared);
    parallel_for(items, [&](int64_t, int thread) { f(take(thread), thread); });
  }

  // What one of the started threads does in pieces of a few milliseconds while no run has come for kIdle; it returns
  // whether more is left, and is asked again after the next run. A run that comes in the middle of a piece goes on without
  // that thread until the piece is over. Setting another (or an empty one) waits for the piece under way. A pool of one
  // thread never calls it.
  void when_idle(std::function<bool()> piece);

 private:
  void begin_ranges(int64_t items, int64_t shared);
  int64_t take(int thread);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pinnate
