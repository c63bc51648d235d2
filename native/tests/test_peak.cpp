// The peak kernels do work and count it; measure_peaks fills in what the instruction set has.
#include <cmath>
#include <string>

#include "../src/cpu.h"
#include "../src/peaks.h"
#include "check.h"
#include "kernel_parts.h"

using namespace pinnate;

int main() {
  CHECK(!cpu_info().model.empty());
  CHECK(cpu_info().isas.back() == "portable");
  CHECK(cpu_runs("portable"));
  CHECK(!cpu_runs("sparc"));
  for (const std::string& isa : cpu_info().isas) {
    KernelTable kt{};
    kt.isa = isa.c_str();
    add_peak_kernels(kt);
    const double flops = kt.peak_flops(Act::kF32, 0.001);
    CHECK(flops > 0 && std::fmod(flops, 2.0) == 0);
    CHECK(kt.peak_flops(Act::kBF16, 0.001) > 0);
    CHECK((kt.peak_int8(0.001) > 0) == (isa != "portable"));
    if (isa != cpu_info().isas.front()) continue;
    const Peaks peaks = measure_peaks(kt, 2, 0.02);
    CHECK(std::isfinite(peaks.bf16_gflops) && peaks.bf16_gflops > 0);
    CHECK(std::isfinite(peaks.f32_gflops) && peaks.f32_gflops > 0);
    CHECK((peaks.int8_gops > 0) == (isa != "portable"));
    CHECK(std::isfinite(peaks.read_gbs) && peaks.read_gbs > 0);
  }
  return test::finish("peak");
}
