// Rows of activations for products, and reading of their results.
#pragma once
#include <cstdio>
#include <limits>
#include <string>

#include "../src/gemm.h"
#include "weights_data.h"

namespace pinnate::test {

struct Shape {
  int64_t m, n, k;

  std::string text() const {
    char s[64];
    std::snprintf(s, sizeof s, "m%ld n%ld k%ld", static_cast<long>(m), static_cast<long>(n), static_cast<long>(k));
    return s;
  }
};

// Activation rows: act [m, ldx], with NaNs where the kernel must not read.
struct Rows {
  Act act;
  int64_t m, k, ldx;
  std::vector<float> f32;
  std::vector<bf16> b16;

  const void* data() const { return row(0); }
  const void* row(int64_t r) const {
    return act == Act::kF32 ? static_cast<const void*>(f32.data() + r * ldx) : b16.data() + r * ldx;
  }
  double at(int64_t r, int64_t i) const {
    const auto j = static_cast<size_t>(r * ldx + i);
    return act == Act::kF32 ? f32[j] : from_bf16(b16[j]);
  }
};

inline Rows random_rows(std::mt19937& rng, Act act, int64_t m, int64_t k, int64_t ldx) {
  Rows x{act, m, k, ldx, {}, {}};
  std::normal_distribution<float> normal(0, 1);
  x.f32.assign(static_cast<size_t>(m * ldx), std::numeric_limits<float>::quiet_NaN());
  x.b16.assign(static_cast<size_t>(m * ldx), 0x7fc0);
  for (int64_t r = 0; r < m; ++r)
    for (int64_t i = 0; i < k; ++i) {
      const float f = normal(rng);
      x.f32[static_cast<size_t>(r * ldx + i)] = f;
      x.b16[static_cast<size_t>(r * ldx + i)] = to_bf16(f);
    }
  return x;
}

// What a product of m rows needs.
inline AlignedBuffer scratch_for(const KernelTable& kt, const PackedWeight& w, int64_t m) {
  return allocate_aligned(static_cast<size_t>(gemm_scratch(kt, w, m)));
}

inline double read_out(const std::vector<unsigned char>& out, int64_t i, bool f32) {
  if (f32) {
    float f;
    std::memcpy(&f, &out[static_cast<size_t>(i) * 4], 4);
    return f;
  }
  bf16 b;
  std::memcpy(&b, &out[static_cast<size_t>(i) * 2], 2);
  return from_bf16(b);
}

}  // namespace pinnate::test
