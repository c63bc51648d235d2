// Row-wise kernels: norms, elementwise functions, conversion to the activation type.
//
// Knows rows of floats; knows nothing of models or of how work is divided: every routine may be called on any range of rows.
#include <cmath>

#include "simd.h"

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

// Writes f(i, lanes) for each vector of a row, as floats or as act.
template <class F>
inline void write_row(void* out, bool f32, int64_t count, F&& f) {
  if (f32) {
    float* o = static_cast<float*>(out);
    for_lanes(count, [&](int64_t i, int n) { store_lanes(o + i, f(i, n), n); });
  } else {
    bf16* o = static_cast<bf16*>(out);
    for_lanes(count, [&](int64_t i, int n) { store_bf16_lanes(o + i, f(i, n), n); });
  }
}

// norm(x, out) for each group of each row.
template <class F>
inline void for_groups(const NormArgs& a, bool f32, int64_t r0, int64_t r1, F&& norm) {
  const size_t size = f32 ? 4 : 2;
  for (int64_t r = r0; r < r1; ++r) {
    unsigned char* out = static_cast<unsigned char*>(a.out) + static_cast<size_t>(r * a.ldo) * size;
    for (int64_t c = 0; c < a.cols; c += a.group) norm(a.x + r * a.ldx + c, out + static_cast<size_t>(c) * size);
  }
}

void rms_norm(const NormArgs& a, Act act, int64_t r0, int64_t r1) {
  const bool f32 = a.out_f32 || act == Act::kF32;
  for_groups(a, f32, r0, r1, [&](const float* x, void* out) {
    const vf inverse = set1(1.0f / sqrtf(sum_squares(x, a.group) / static_cast<float>(a.group) + a.eps));
    write_row(out, f32, a.group, [&](int64_t i, int n) {
      const vf y = load_lanes(x + i, n) * inverse * load_lanes(a.weight + i, n);
      return a.bias ? y + load_lanes(a.bias + i, n) : y;
    });
  });
}

void layer_norm(const NormArgs& a, Act act, int64_t r0, int64_t r1) {
  const bool f32 = a.out_f32 || act == Act::kF32;
  for_groups(a, f32, r0, r1, [&](const float* x, void* out) {
    const float size = static_cast<float>(a.group);
    const vf mean = set1(sum_lanes(a.group, [&](int64_t i, int n) { return load_lanes(x + i, n); }) / size);
    const float squares = sum_lanes(a.group, [&](int64_t i, int n) {
      const vf d = select_lt(iota(), set1(static_cast<float>(n)), load_lanes(x + i, n) - mean, set1(0.0f));
      return d * d;
    });
    const vf inverse = set1(1.0f / sqrtf(squares / size + a.eps));
    write_row(out, f32, a.group, [&](int64_t i, int n) {
      const vf y = (load_lanes(x + i, n) - mean) * inverse * load_lanes(a.weight + i, n);
      return a.bias ? y + load_lanes(a.bias + i, n) : y;
    });
  });
}

// gelu(x) = x P(X <= x): for x >= 0 it is x - x erfc(x / sqrt 2) / 2, for x < 0 x erfc(-x / sqrt 2) / 2.
inline vf gelu_erf(vf x) {
  const vf tail = x * erfc_positive(abs(x) * set1(0.70710678f)) * set1(0.5f);
  return select_lt(x, set1(0.0f), tail, x - tail);
}

// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline vf gelu_tanh(vf x) {
  const vf u = x * fma(x * x, set1(2.0f * 0.79788456f * 0.044715f), set1(2.0f * 0.79788456f));
  return x * sigmoid(u);
}

template <class F>
inline void map(const float* x, float* out, int64_t count, F&& f) {
  for_lanes(count, [&](int64_t i, int n) { store_lanes(out + i, f(load_lanes(x + i, n)), n); });
}

void unary(Unary op, float p, const float* x, float* out, int64_t count) {
  switch (op) {
    case Unary::kGeluTanh: return map(x, out, count, [](vf v) { return gelu_tanh(v); });
    case Unary::kGeluErf: return map(x, out, count, [](vf v) { return gelu_erf(v); });
    case Unary::kSoftcap: return map(x, out, count, [p](vf v) { return set1(p) * tanh(v / set1(p)); });
    case Unary::kScale: return map(x, out, count, [p](vf v) { return v * set1(p); });
  }
}

template <class F>
inline void map2(const float* a, const float* b, float* out, int64_t count, F&& f) {
  for_lanes(count, [&](int64_t i, int n) { store_lanes(out + i, f(load_lanes(a + i, n), load_lanes(b + i, n)), n); });
}

void binary(Binary op, const float* a, const float* b, float* out, int64_t count) {
  switch (op) {
    case Binary::kAdd: return map2(a, b, out, count, [](vf x, vf y) { return x + y; });
    case Binary::kMul: return map2(a, b, out, count, [](vf x, vf y) { return x * y; });
    case Binary::kSwiGLU: return map2(a, b, out, count, [](vf x, vf y) { return silu(x) * y; });
  }
}

void to_act(const float* x, void* out, Act act, int64_t count) { store_act_row(x, out, act, count); }

}  // namespace

void register_rows(KernelTable& t) {
  t.rms_norm = rms_norm;
  t.layer_norm = layer_norm;
  t.unary = unary;
  t.binary = binary;
  t.to_act = to_act;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
