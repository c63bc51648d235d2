// Vectors of floats, one width for each instruction set, so that elementwise code is written once.
//
// kWidth lanes: 16 (AVX-512), 8 (AVX2 + FMA), 4 (GCC vector extensions; no fused multiply-add). Every function treats each
// lane alike and does the same operations whatever the other lanes hold, so a partial vector (load_n, store_n) gives the same
// bits as a whole one. max and min return their second operand where either is NaN. Only for kernels/*.cpp: all names are
// local to the ISA's namespace, and no standard template is instantiated here (it could be shared with another ISA's object).
#pragma once
#include <cstdint>
#include <cstring>

#include "register.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms about _mm512_undefined_ps in GCC's own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

namespace pinnate::PINNATE_KERNEL_ISA {

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

constexpr int kWidth = 16;
using vf = __m512;
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline vf load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_n(float* p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline void add_product(vf& acc, vf a, vf b) { acc = fma(a, b, acc); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf abs(vf a) { return _mm512_abs_ps(a); }
inline vf select_lt(vf a, vf b, vf x, vf y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
inline float reduce_add(vf v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(vf v) { return _mm512_reduce_max_ps(v); }
inline bool any_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline void store_bf16(bf16* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void store_bf16_n(bf16* p, vf v, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)_mm512_cvtneps_pbh(v));
}
// x * 2^n, where t = n + 1.5 * 2^23
inline vf scale_pow2(vf x, vf, vf n) { return _mm512_scalef_ps(x, n); }
inline vf iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kWidth = 8;
using vf = __m256;
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vf load_n(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_n(float* p, vf v, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
// acc += a * b. Left to choose, GCC 12 puts the sum where a was, and then has too few of 16 registers.
inline void add_product(vf& acc, vf a, vf b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b)); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf abs(vf a) { return _mm256_andnot_ps(set1(-0.0f), a); }
inline vf select_lt(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline float reduce_add(vf v) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
inline float reduce_max(vf v) {
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
inline bool any_greater(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
// v rounded to bf16 (nearest even), as floats; NaN stays NaN
inline vf round_bf16(vf v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const vf rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  const vf nan = _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000)));
  return _mm256_blendv_ps(rounded, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
inline __m128i pack_bf16(vf v) {
  const __m256i u = _mm256_srli_epi32(_mm256_castps_si256(round_bf16(v)), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
inline void store_bf16(bf16* p, vf v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack_bf16(v)); }
inline void store_bf16_n(bf16* p, vf v, int64_t n) {
  const __m128i packed = pack_bf16(v);
  memcpy(p, &packed, 2 * static_cast<size_t>(n));
}
inline vf scale_pow2(vf x, vf t, vf) {  // in two steps, for n = 128; below 2^-125 it is zero
  const __m256i bias = _mm256_set1_epi32(126 - 0x4b400000);
  const __m256i e = _mm256_max_epi32(_mm256_add_epi32(_mm256_castps_si256(t), bias), _mm256_setzero_si256());
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)) * set1(2.0f);
}
inline vf iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

#else

constexpr int kWidth = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline vf load_n(const float* p, int64_t n) {
  vf v = {};
  memcpy(&v, p, 4 * static_cast<size_t>(n));
  return v;
}
inline void store_n(float* p, vf v, int64_t n) { memcpy(p, &v, 4 * static_cast<size_t>(n)); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline void add_product(vf& acc, vf a, vf b) { acc = fma(a, b, acc); }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
inline vf select_lt(vf a, vf b, vf x, vf y) { return a < b ? x : y; }
inline float reduce_add(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float reduce_max(vf v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
inline bool any_greater(vf a, vf b) { return a[0] > b[0] || a[1] > b[1] || a[2] > b[2] || a[3] > b[3]; }
inline vf round_bf16(vf v) {
  const vu u = (vu)v;
  const vu rounded = (u + ((u >> 16) & 1u) + 0x7fffu) & 0xffff0000u;
  return v == v ? (vf)rounded : (vf)(u | 0x00400000u);
}
inline void store_bf16_n(bf16* p, vf v, int64_t n) {
  const vu u = (vu)round_bf16(v) >> 16;
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<bf16>(u[i]);
}
inline void store_bf16(bf16* p, vf v) { store_bf16_n(p, v, kWidth); }
inline vf scale_pow2(vf x, vf t, vf) {
  vi e = (vi)t + (126 - 0x4b400000);
  e = e > 0 ? e : vi{};
  return x * (vf)(e << 23) * 2.0f;
}
inline vf iota() { return vf{0, 1, 2, 3}; }

#endif

// Horner's rule, highest coefficient first.
template <int N>
inline vf polynomial(vf x, const float (&c)[N]) {
  vf y = set1(c[0]);
  for (int i = 1; i < N; ++i) y = fma(y, x, set1(c[i]));
  return y;
}

// e^x to about 1 ulp; exactly 1 at 0; 0 below -86.6 (-87.3 with AVX-512, where results are subnormal), inf above 88.72.
// x = n ln 2 + r; e^r = 1 + r + r^2 q(r), q a minimax polynomial fitted for this file (relative error 3e-9).
inline vf exp(vf x) {
  constexpr float kQ[] = {1.381451e-3f, 8.368786e-3f, 4.166838e-2f, 1.6666520e-1f, 4.9999994e-1f};
  const vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = min(set1(89.0f), max(set1(-104.0f), x));
  const vf t = fma(x, set1(1.44269504f), magic);
  const vf n = t - magic;
  vf r = fma(n, set1(-0.693359375f), x);  // ln 2 = 0.693359375 - 2.12194440e-4; the first product is exact
  r = fma(n, set1(2.12194440e-4f), r);
  return scale_pow2(fma(polynomial(r, kQ), r * r, r) + set1(1.0f), t, n);
}

inline vf sigmoid(vf x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }
inline vf silu(vf x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline vf tanh(vf x) {  // near 0: x + x^3 p(x^2), relative error 4e-9; else 1 - 2 / (e^2|x| + 1)
  constexpr float kP[] = {-5.7170399e-3f, 2.0650594e-2f, -5.3743497e-2f, 1.3331491e-1f, -3.3333284e-1f};
  const vf a = abs(x), z = x * x;
  const vf small = fma(polynomial(z, kP) * z, x, x);
  const vf big = set1(1.0f) - set1(2.0f) / (exp(a + a) + set1(1.0f));
  const vf signed_big = select_lt(x, set1(0.0f), set1(0.0f) - big, big);
  return select_lt(a, set1(0.625f), small, signed_big);
}

// erfc(z) for z >= 0, relative error about 1e-6: t p(t) e^(-z^2), t = 1 / (1 + 0.4 z), p fitted for this file.
inline vf erfc_positive(vf z) {
  constexpr float kP[] = {-2.9594000e-2f, 1.9801149e-1f, -4.9880764e-1f, 5.4743057e-1f, -2.8436290e-1f,
                          2.7206434e-1f,  1.2968022e-1f, 2.1491898e-1f,  2.2495204e-1f, 2.2570691e-1f};
  const vf t = set1(1.0f) / fma(z, set1(0.4f), set1(1.0f));
  return t * polynomial(t, kP) * exp(set1(0.0f) - z * z);
}

// f(vector, index, lanes) over a row; the last call may have fewer than kWidth lanes.
template <class F>
inline void for_lanes(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(i, kWidth);
  if (i < count) f(i, static_cast<int>(count - i));
}
inline vf load_lanes(const float* p, int n) { return n == kWidth ? load(p) : load_n(p, n); }
inline void store_lanes(float* p, vf v, int n) { n == kWidth ? store(p, v) : store_n(p, v, n); }
inline void store_bf16_lanes(bf16* p, vf v, int n) { n == kWidth ? store_bf16(p, v) : store_bf16_n(p, v, n); }

// Sum of f(i, lanes) over a row in an order that depends on `count` alone; f must give 0 in the lanes past `lanes`.
template <class F>
inline float sum_lanes(int64_t count, F&& f) {
  vf s[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) s[j] = s[j] + f(i + j * kWidth, kWidth);
  for (; i + kWidth <= count; i += kWidth) s[0] = s[0] + f(i, kWidth);
  if (i < count) s[1] = s[1] + f(i, static_cast<int>(count - i));
  return reduce_add((s[0] + s[1]) + (s[2] + s[3]));
}

inline float sum_squares(const float* x, int64_t count) {
  return sum_lanes(count, [=](int64_t i, int n) {
    const vf v = load_lanes(x + i, n);
    return v * v;
  });
}

inline void store_act_row(const float* x, void* out, Act act, int64_t count) {
  if (act == Act::kF32) {
    memcpy(out, x, static_cast<size_t>(count) * 4);
    return;
  }
  bf16* o = static_cast<bf16*>(out);
  for_lanes(count, [=](int64_t i, int n) { store_bf16_lanes(o + i, load_lanes(x + i, n), n); });
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
