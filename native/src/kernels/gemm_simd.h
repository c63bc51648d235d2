// The few vector operations gemm.cpp and peak.cpp need, for the instruction set this file is compiled for.
// Everything is forced inline: an out-of-line copy compiled for AVX-512 must never be linked into code for other CPUs.
#pragma once
#include <cstdint>
#include <cstring>

#include "../tensor_type.h"
#include "unroll.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PINNATE_INLINE static inline __attribute__((always_inline))

namespace pinnate::PINNATE_KERNEL_ISA {

// Rounds to nearest even; NaNs stay NaNs. Integer arithmetic, so denormals survive DAZ.
PINNATE_INLINE bf16 to_bf16_bits(uint32_t u) {
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40;
  return static_cast<bf16>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

PINNATE_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  const float small = static_cast<float>(static_cast<int32_t>(mantissa)) * 5.9604644775390625e-8f;  // 2^-24
  uint32_t u;
  std::memcpy(&u, &small, 4);
  if (exponent != 0) u = (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  u |= sign;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

#if defined(__AVX512BF16__)

using vf = __m512;
constexpr int kLanes = 16;
PINNATE_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
PINNATE_INLINE void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
PINNATE_INLINE vf vset(float f) { return _mm512_set1_ps(f); }
PINNATE_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PINNATE_INLINE void vadd_product(vf& acc, vf a, vf b) { acc = vfma(a, b, acc); }
PINNATE_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }  // b where either is NaN
PINNATE_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
// `pairs` points at kLanes (low, high) pairs of bf16.
PINNATE_INLINE vf vlow(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
PINNATE_INLINE vf vhigh(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}
PINNATE_INLINE void vstore_bf16(bf16* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
PINNATE_INLINE vf vscale2(vf p, vf n, vf) { return _mm512_scalef_ps(p, n); }

#elif defined(__AVX2__)

using vf = __m256;
constexpr int kLanes = 8;
PINNATE_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
PINNATE_INLINE void vstore(float* p, vf v) { _mm256_storeu_ps(p, v); }
PINNATE_INLINE vf vset(float f) { return _mm256_set1_ps(f); }
PINNATE_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
// acc += a * b. Left to choose, GCC 12 puts the sum where a was, and then has too few of 16 registers: a third of the speed.
PINNATE_INLINE void vadd_product(vf& acc, vf a, vf b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b)); }
// The same for two vectors of weights and the number at x, which takes a register no longer than here: with 12 sums, two
// weights and a mask all others are taken, and a sum that rests on the stack for an instant is a third of the speed.
PINNATE_INLINE void vadd_products(vf (&acc)[2], const float* x, const vf (&w)[2]) {
  vf a;
  __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
          : "+x"(acc[0]), "+x"(acc[1]), "=&x"(a)
          : "m"(*x), "x"(w[0]), "x"(w[1]));
}
PINNATE_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
PINNATE_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
PINNATE_INLINE __m256i vload_pairs(const bf16* pairs) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
}
PINNATE_INLINE vf vlow(const bf16* pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(vload_pairs(pairs), 16)); }
PINNATE_INLINE vf vhigh(const bf16* pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(vload_pairs(pairs), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
PINNATE_INLINE void vstore_bf16(bf16* p, vf v) {  // to_bf16_bits of each
  const __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i words = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
// p * 2^n; `t` is n + 1.5 * 2^23, whose low bits are n as an integer.
PINNATE_INLINE vf vscale2(vf p, vf, vf t) {
  const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
  const __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half), bias = _mm256_set1_epi32(127);
  p = p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  return p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}

#else

using vf = float __attribute__((vector_size(16)));
using vi = int32_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;
PINNATE_INLINE vf vload(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PINNATE_INLINE void vstore(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
PINNATE_INLINE vf vset(float f) { return vf{f, f, f, f}; }
PINNATE_INLINE vf vfma(vf a, vf b, vf c) { return a * b + c; }  // two roundings: -ffp-contract=off
PINNATE_INLINE void vadd_product(vf& acc, vf a, vf b) { acc = vfma(a, b, acc); }
PINNATE_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
PINNATE_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
PINNATE_INLINE vf vlow(const bf16* pairs) {
  vi v;
  std::memcpy(&v, pairs, sizeof v);
  return (vf)(v << 16);
}
PINNATE_INLINE vf vhigh(const bf16* pairs) {
  vi v;
  std::memcpy(&v, pairs, sizeof v);
  return (vf)(v & static_cast<int32_t>(0xffff0000));
}
PINNATE_INLINE void vstore_bf16(bf16* p, vf v) {
  uint32_t u[kLanes];
  std::memcpy(u, &v, sizeof v);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16_bits(u[i]);
}
PINNATE_INLINE vf vscale2(vf p, vf, vf t) {
  const vi n = (vi)t - 0x4b400000, half = n >> 1, rest = n - half;
  return p * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
}

#endif

// acc[v] += *x * w[v]
template <int V>
PINNATE_INLINE void vadd_products(vf (&acc)[V], const float* x, const vf (&w)[V]) {
  const vf a = vset(*x);
  unrolled<V>(PINNATE_EACH(v) { vadd_product(acc[v], a, w[v]); });
}

using vi32 = int32_t __attribute__((vector_size(kLanes * 4)));  // for arithmetic by operators
PINNATE_INLINE vf to_float(vi32 v) { return __builtin_convertvector(v, vf); }

// kLanes bytes as numbers of 0 to 255.
PINNATE_INLINE vi32 load_bytes(const unsigned char* p) {
#if defined(__AVX512BF16__)
  return (vi32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vi32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return vi32{p[0], p[1], p[2], p[3]};
#endif
}

// e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor series of e^r to r^7 (truncation 5e-9), times 2^n.
// Overflows to inf, underflows to 0 (denormal results are flushed under FTZ), keeps NaN.
PINNATE_INLINE vf vexp(vf x) {
  x = vmin(vset(90.0f), vmax(vset(-105.0f), x));
  const vf magic = vset(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf t = vfma(x, vset(1.44269504f), magic), n = t - magic;
  vf r = vfma(n, vset(-0.693359375f), x);  // ln 2 in two parts; n times the first is exact
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.0f / 5040);
  p = vfma(p, r, vset(1.0f / 720));
  p = vfma(p, r, vset(1.0f / 120));
  p = vfma(p, r, vset(1.0f / 24));
  p = vfma(p, r, vset(1.0f / 6));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return vscale2(p, n, t);
}

// x / (1 + e^-x)
PINNATE_INLINE vf vsilu(vf x) { return x / (vset(1.0f) + vexp(-x)); }

}  // namespace pinnate::PINNATE_KERNEL_ISA
