// Integer vectors for quant.cpp: dot products of groups of four bytes, for the instruction set this file is compiled for.
//
// A vector holds kLanes columns, four weights of consecutive k each. Activations are signed bytes in [-127, 127], or, with
// kWideRows, 16 bits in [-32767, 32767] where weights have 8 bits. Every dot product is exact.
#pragma once
#include "gemm_simd.h"

namespace pinnate::PINNATE_KERNEL_ISA {

#if defined(__AVX512VNNI__)

using vi = __m512i;
constexpr int kWeightBias = 128;  // int8 weights are stored as w + 128: the instruction takes unsigned times signed
constexpr bool kWideRows = false;
PINNATE_INLINE vi iset(int32_t i) { return _mm512_set1_epi32(i); }
PINNATE_INLINE vi iload(const unsigned char* p) { return _mm512_load_si512(p); }
PINNATE_INLINE vi low_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
PINNATE_INLINE vi high_nibbles(vi v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
PINNATE_INLINE vi dot_bytes(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
// Nibbles, in any accumulator that sum_nibbles understands, for up to 32 weights.
PINNATE_INLINE vi dot_nibbles(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
PINNATE_INLINE vi sum_nibbles(vi acc) { return acc; }
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

PINNATE_INLINE vf load_bf16(const bf16* p) {
  const vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
PINNATE_INLINE void store_bytes(unsigned char* p, vi32 v) {  // the low byte of each lane
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((vi)v));
}
PINNATE_INLINE int32_t max_lane(vi32 v) { return _mm512_reduce_max_epi32((vi)v); }
PINNATE_INLINE int32_t sum_lanes(vi32 v) { return _mm512_reduce_add_epi32((vi)v); }

#elif defined(__AVX2__)

using vi = __m256i;
constexpr int kWeightBias = 128;  // so that a mask and a shift make numbers of 16 bits of them
constexpr bool kWideRows = true;
PINNATE_INLINE vi iset(int32_t i) { return _mm256_set1_epi32(i); }
PINNATE_INLINE vi iload(const unsigned char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
PINNATE_INLINE vi low_nibbles(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
PINNATE_INLINE vi high_nibbles(vi v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
// GCC reorders sums of integers: it would compute all products of a block, keep them on the stack and add them last.
PINNATE_INLINE vi in_order(vi sum) {
  __asm__("" : "+x"(sum));
  return sum;
}
// Of 32 weights a 16-bit sum takes 16: at most 16 * 15 * 127.
PINNATE_INLINE vi dot_nibbles(vi acc, vi w, vi x) { return in_order(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x))); }
PINNATE_INLINE vi sum_nibbles(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

PINNATE_INLINE vf load_bf16(const bf16* p) {
  const vi wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PINNATE_INLINE void store_bytes(unsigned char* p, vi32 v) {
  const vi packed = _mm256_shuffle_epi8((vi)v, _mm256_set1_epi32(0x0c080400));
  const int64_t both = _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
  std::memcpy(p, &both, 8);
}
// The low 16 bits of each lane; those of four neighbours as 0, 2, 1, 3.
PINNATE_INLINE void store_wide(unsigned char* p, vi32 v) {
  const vi order = _mm256_setr_epi64x(0x0d0c05040908'0100, 0, 0x0d0c05040908'0100, 0);
  const vi packed = _mm256_shuffle_epi8((vi)v, order);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}
PINNATE_INLINE int32_t max_lane(vi32 v) {
  __m128i a = _mm_max_epi32(_mm256_castsi256_si128((vi)v), _mm256_extracti128_si256((vi)v, 1));
  a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
PINNATE_INLINE int32_t sum_lanes(vi32 v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128((vi)v), _mm256_extracti128_si256((vi)v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

#else

using vs = int16_t __attribute__((vector_size(16)));
using vu = uint16_t __attribute__((vector_size(16)));
constexpr int kWeightBias = 0;
constexpr bool kWideRows = false;
PINNATE_INLINE vi iset(int32_t i) { return vi{i, i, i, i}; }
PINNATE_INLINE vi iload(const unsigned char* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PINNATE_INLINE vi low_nibbles(vi v) { return v & 0x0f0f0f0f; }
PINNATE_INLINE vi high_nibbles(vi v) { return (vi)((vu)v >> 4) & 0x0f0f0f0f; }
// Sums of two products: at most 2 * 128 * 127, which 16 bits hold.
PINNATE_INLINE vs dot_pairs(vi w, vi x) {
  const vs even = ((vs)w << 8 >> 8) * ((vs)x << 8 >> 8), odd = ((vs)w >> 8) * ((vs)x >> 8);
  return even + odd;
}
PINNATE_INLINE vi sum_nibbles(vi acc) { return (acc << 16 >> 16) + (acc >> 16); }
PINNATE_INLINE vi dot_bytes(vi acc, vi w, vi x) { return acc + sum_nibbles((vi)dot_pairs(w, x)); }
PINNATE_INLINE vi dot_nibbles(vi acc, vi w, vi x) { return (vi)((vs)acc + dot_pairs(w, x)); }  // as with AVX2
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  uint16_t h[kLanes];
  std::memcpy(h, p, sizeof h);
  return vf{half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}
PINNATE_INLINE vf load_bf16(const bf16* p) {
  return (vf)(vi{p[0], p[1], p[2], p[3]} << 16);
}
PINNATE_INLINE void store_bytes(unsigned char* p, vi32 v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<unsigned char>(v[i]);
}
PINNATE_INLINE int32_t max_lane(vi32 v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
PINNATE_INLINE int32_t sum_lanes(vi32 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#endif

#if !(defined(__AVX2__) && !defined(__AVX512VNNI__))
PINNATE_INLINE void store_wide(unsigned char*, vi32) {}  // no kWideRows
#endif

}  // namespace pinnate::PINNATE_KERNEL_ISA
