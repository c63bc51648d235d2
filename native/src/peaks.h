// The machine's limits, measured.
#pragma once
#include "kernels.h"

namespace pinnate {

struct Peaks {  // all threads together; 0 where the instruction set has no such operation
  double bf16_gflops = 0, f32_gflops = 0, int8_gops = 0;
  double read_gbs = 0;  // sequential reads of a buffer much larger than the caches
};

// Takes about `seconds` in all, plus the touching of the buffer. Best of several rounds each: the machine may be shared.
Peaks measure_peaks(const KernelTable& kernels, int threads, double seconds);

}  // namespace pinnate
