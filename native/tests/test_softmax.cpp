// The softmax weights that become bf16 (attention_micro.inl), compiled here with the flags of AVX-512 or AVX2: how far they are
// from powers of two, over all fractions that a float of one binade has.
#include <cfloat>
#include <cmath>
#include <cstdio>

#include "../src/kernels/simd.h"
#include "../src/kernels/unroll.h"

namespace pinnate::PINNATE_KERNEL_ISA {
#include "../src/kernels/attention_micro.inl"
}

#include "isa_check.h"

using namespace pinnate;
namespace kernel = pinnate::PINNATE_KERNEL_ISA;
using namespace pinnate::test;

namespace {

constexpr double kBound = 2.4e-7;  // the polynomial (8e-8) and the rounding of its sums
constexpr int kAtOnce = kernel::kWidth;

struct Results {
  float at[kAtOnce];
};

Results powers(const float* x) {  // 2^x
  kernel::Weights<Act::kBF16> weight(1.0f, 0.0f);
  weight.unit = kernel::set1(1.0f), weight.offset = kernel::set1(0.0f);
  Results r;
  kernel::store(r.at, weight(kernel::load(x)));
  return r;
}

uint16_t to_bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void test_every_fraction() {
  double worst = 0;
  int apart = 0;
  for (int i = 0; i < 1 << 23; i += kAtOnce) {
    alignas(64) float x[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) x[j] = std::ldexp(static_cast<float>(i + j), -23) - 2.0f;  // [-2, -1), exact
    const Results got = powers(x);
    for (int j = 0; j < kAtOnce; ++j) {
      const double want = std::exp2(static_cast<double>(x[j]));
      worst = std::fmax(worst, std::fabs(got.at[j] / want - 1));
      const int steps = std::abs(to_bf16(got.at[j]) - to_bf16(want));
      apart = steps > apart ? steps : apart;
    }
  }
  check(worst < kBound, "relative error of a weight", worst, kBound);
  check(worst > kBound / 2, "the bound is that of this polynomial", worst, kBound);
  check(apart <= 1, "once rounded to bf16, at most one step away", apart, 1);
}

// Whole powers of two are exact: other binades give the same bits, shifted.
void test_every_power() {
  for (int n = 0; n < 124; ++n)
    for (int i = 0; i < 1 << 10; i += kAtOnce) {
      alignas(64) float base[kAtOnce], x[kAtOnce];
      for (int j = 0; j < kAtOnce; ++j) base[j] = static_cast<float>(i + j) / 1024 - 2.0f, x[j] = base[j] - static_cast<float>(n);
      const Results one = powers(base), other = powers(x);
      for (int j = 0; j < kAtOnce; ++j)
        check(other.at[j] == std::ldexp(one.at[j], -n), "shifted", other.at[j], std::ldexp(one.at[j], -n));
    }
}

void test_near_zero_and_far() {
  for (float size = 1.0f; size > 1e-38f; size /= 2) {
    alignas(64) float x[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) x[j] = (j % 2 ? size : -size) * (1.0f + static_cast<float>(j) / 16);
    const Results got = powers(x);
    for (int j = 0; j < kAtOnce; ++j) {
      const double error = std::fabs(got.at[j] / std::exp2(static_cast<double>(x[j])) - 1);
      check(error < kBound, "near zero", error, kBound);
    }
  }
  alignas(64) float far[kAtOnce];
  for (int j = 0; j < kAtOnce; ++j) far[j] = j % 2 ? -INFINITY : -1000.0f - static_cast<float>(j);
  for (float w : powers(far).at) check(w == 0.0f, "nothing at a distance", w, 0);
}

[[gnu::noinline]] void test_all() {
  test_every_fraction();
  test_every_power();
  test_near_zero_and_far();
}

}  // namespace

int main() {
  __builtin_cpu_init();
  if (kAtOnce == 16 ? !__builtin_cpu_supports("avx512bf16") : !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::puts("test_softmax: not this CPU's instruction set");
    return 0;
  }
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ, DAZ
  test_all();
  std::printf("test_softmax: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
