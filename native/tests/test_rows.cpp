// rows.cpp on every instruction set, against loops in double precision.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "../src/kernels.h"
#include "isa_check.h"

namespace pinnate {
namespace portable { void register_rows(KernelTable& t); }
namespace avx2 { void register_rows(KernelTable& t); }
namespace avx512 { void register_rows(KernelTable& t); }
}  // namespace pinnate

using namespace pinnate;
using namespace pinnate::test;

namespace {

void near(double got, double want, double absolute, double relative, const char* what) {
  const bool ok = std::isnan(want) ? std::isnan(got) : got == want || std::fabs(got - want) <= absolute + relative * std::fabs(want);
  check(ok, what, got, want);
}

float from_bf16(bf16 b) {
  const uint32_t u = uint32_t{b} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

std::vector<float> randoms(size_t n, float scale, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

// Rows of `cols` columns in groups of `group`, row strides larger than the rows.
void test_norm(const KernelTable& t, bool layer, Act act, bool out_f32, int64_t cols, int64_t group) {
  const int64_t rows = 5, ldx = cols + 3, ldo = cols + 5;
  const bool bias = layer && cols % 2;
  const auto x = randoms(static_cast<size_t>(rows * ldx), 3, 1), w = randoms(static_cast<size_t>(group), 1, 2),
             b = randoms(static_cast<size_t>(group), 1, 3);
  const bool f32 = out_f32 || act == Act::kF32;
  const size_t size = f32 ? 4 : 2;
  std::vector<unsigned char> out(static_cast<size_t>(rows * ldo) * size, 0xAB), alone = out;
  NormArgs a{x.data(), ldx, w.data(), bias ? b.data() : nullptr, 1e-5f, cols, group, out.data(), ldo, out_f32};
  const auto norm = layer ? t.layer_norm : t.rms_norm;
  norm(a, act, 0, rows);
  a.out = alone.data();
  for (int64_t r = rows - 1; r >= 0; --r) norm(a, act, r, r + 1);
  check(out == alone, "a row does not depend on the rows of its call");
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < ldo; ++c) {
      const unsigned char* at = out.data() + static_cast<size_t>(r * ldo + c) * size;
      if (c >= cols) {
        check(at[0] == 0xAB, "nothing is written past the row");
        continue;
      }
      const float* g = &x[static_cast<size_t>(r * ldx + c / group * group)];
      double mean = 0, var = 0;
      for (int64_t i = 0; layer && i < group; ++i) mean += static_cast<double>(g[i]) / static_cast<double>(group);
      for (int64_t i = 0; i < group; ++i) var += (g[i] - mean) * (g[i] - mean) / static_cast<double>(group);
      double want = (g[c % group] - mean) / std::sqrt(var + 1e-5f) * w[static_cast<size_t>(c % group)];
      if (bias) want += b[static_cast<size_t>(c % group)];
      float got;
      bf16 half;
      std::memcpy(&half, at, 2);
      if (f32) std::memcpy(&got, at, 4);
      near(f32 ? got : from_bf16(half), want, f32 ? 3e-6 : 1e-5, f32 ? 2e-6 : 1.0 / 256, layer ? "layer_norm" : "rms_norm");
    }
}

void test_unary(const KernelTable& t, Unary op, float p, double absolute, double relative, const char* name,
                const std::function<double(double)>& f) {
  std::vector<float> x = randoms(1000, 4, 7);
  for (float s : {0.0f, 1e-20f, 1e-4f, 0.6249f, 0.6251f, 5.0f, 9.5f, 30.0f, 88.5f, 100.0f, 1e4f, 3e38f})
    for (float sign : {1.0f, -1.0f}) x.push_back(s * sign);
  x.push_back(std::numeric_limits<float>::quiet_NaN());
  for (size_t count : {x.size(), size_t{1}, size_t{7}, size_t{19}, size_t{0}}) {
    const float* from = x.data() + x.size() - count;
    std::vector<float> out(count + 1, 77.0f);
    t.unary(op, p, from, out.data(), static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) near(out[i], static_cast<float>(f(from[i])), absolute, relative, name);
    check(out[count] == 77.0f, "unary writes count values");
  }
  std::vector<float> whole(x.size()), in_place = x;
  t.unary(op, p, x.data(), whole.data(), static_cast<int64_t>(x.size()));
  t.unary(op, p, in_place.data(), in_place.data(), static_cast<int64_t>(x.size()));
  check(!std::memcmp(whole.data(), in_place.data(), x.size() * 4), "unary in place");
  for (size_t i = 0; i < x.size(); ++i) {
    float one;
    t.unary(op, p, &x[i], &one, 1);
    check(!std::memcmp(&one, &whole[i], 4), "unary bits do not depend on the place in a vector", one, whole[i]);
  }
}

void test_binary(const KernelTable& t) {
  const auto a = randoms(1003, 6, 8), b = randoms(1003, 2, 9);
  for (size_t n : {size_t{1003}, size_t{5}, size_t{16}}) {
    std::vector<float> out(n);
    t.binary(Binary::kAdd, a.data(), b.data(), out.data(), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) near(out[i], a[i] + b[i], 0, 0, "add");
    t.binary(Binary::kMul, a.data(), b.data(), out.data(), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) near(out[i], a[i] * b[i], 0, 0, "mul");
    t.binary(Binary::kSwiGLU, a.data(), b.data(), out.data(), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) {
      const double x = a[i];
      near(out[i], x / (1 + std::exp(-x)) * b[i], 1e-30, 1e-6, "swiglu");
    }
  }
}

void test_to_act(const KernelTable& t) {
  std::vector<float> x = randoms(517, 100, 10);
  const float inf = std::numeric_limits<float>::infinity();
  for (float s : {0.0f, -0.0f, inf, -inf, 3.4e38f, 1.00390625f, 1.01171875f, std::numeric_limits<float>::quiet_NaN()}) x.push_back(s);
  uint32_t tricky = 0x7fffffffu;  // a NaN that a careless rounding turns into zero
  x.emplace_back();
  std::memcpy(&x.back(), &tricky, 4);
  std::vector<bf16> out(x.size());
  t.to_act(x.data(), out.data(), Act::kBF16, static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      check(std::isnan(from_bf16(out[i])), "NaN to bf16");
      continue;
    }
    uint32_t u;
    std::memcpy(&u, &x[i], 4);
    u += 0x7fff + ((u >> 16) & 1);
    check(out[i] == u >> 16, "round to nearest even", out[i], u >> 16);
  }
  std::vector<float> copy(x.size());
  t.to_act(x.data(), copy.data(), Act::kF32, static_cast<int64_t>(x.size()));
  check(!std::memcmp(copy.data(), x.data(), x.size() * 4), "fp32 is copied");
}

void test_all(const char* name, void (*reg)(KernelTable&)) {
  isa = name;
  KernelTable t{};
  reg(t);
  for (bool layer : {false, true})
    for (Act act : {Act::kF32, Act::kBF16})
      for (bool f32 : {false, true}) {
        for (int64_t cols : {1, 7, 16, 33, 63, 64, 65, 128, 576, 577}) test_norm(t, layer, act, f32, cols, cols);
        test_norm(t, layer, act, f32, 3 * 64, 64);
        test_norm(t, layer, act, f32, 5 * 10, 10);
      }
  test_unary(t, Unary::kScale, 0.37f, 0, 0, "scale", [](double x) { return static_cast<float>(x) * 0.37f; });
  test_unary(t, Unary::kSoftcap, 30.0f, 1e-37, 5e-7, "softcap", [](double x) { return 30 * std::tanh(x / 30); });
  test_unary(t, Unary::kGeluErf, 0, 1e-12, 5e-6, "gelu",
             [](double x) { return std::isinf(x) || x > 40 ? x : x * 0.5 * std::erfc(-x / std::sqrt(2.0)); });
  test_unary(t, Unary::kGeluTanh, 0, 1e-12, 5e-6, "gelu tanh", [](double x) {
    const double u = 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    return x / (1 + std::exp(-u));
  });
  test_binary(t);
  test_to_act(t);
}

}  // namespace

int main() {
  return for_every_isa("test_rows", test_all, portable::register_rows, avx2::register_rows, avx512::register_rows);
}
