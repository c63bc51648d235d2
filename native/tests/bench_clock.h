// The clock of the benchmarks of kernels: of one thread its CPU time, so that other processes on the machine disturb it less.
#pragma once
#include <ctime>

namespace pinnate {

inline double seconds_now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace pinnate
