// Integer vectors for quant.cpp: dot products of groups of four bytes, for the instruction set this file is compiled for.
//
// A vector holds kLanes columns, four weights of consecutive k each. Activations are signed bytes in [-127, 127]. Every
// dot product is exact, so all instruction sets agree on it.
#pragma once
#include "gemm_simd.h"

namespace pinnate::PINNATE_KERNEL_ISA {

#if defined(__AVX512VNNI__)

using vi = __m512i;
constexpr int kWeightBias = 128;  // int8 weights are stored as w + 128: the instruction takes unsigned times signed
PINNATE_INLINE vi iset(int32_t i) { return _mm512_set1_epi32(i); }
PINNATE_INLINE vi iload(const unsigned char* p) { return _mm512_load_si512(p); }
PINNATE_INLINE void istore(unsigned char* p, vi v) { _mm512_store_si512(p, v); }
PINNATE_INLINE vi low_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
PINNATE_INLINE vi high_nibbles(vi v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
PINNATE_INLINE vi dot_bytes(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
// Nibbles, in any accumulator that sum_nibbles understands, for up to 32 weights.
PINNATE_INLINE vi dot_nibbles(vi acc, vi w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
PINNATE_INLINE vi sum_nibbles(vi acc) { return acc; }
PINNATE_INLINE vf to_float(vi v) { return _mm512_cvtepi32_ps(v); }
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

#elif defined(__AVX2__)

using vi = __m256i;
constexpr int kWeightBias = 0;
PINNATE_INLINE vi iset(int32_t i) { return _mm256_set1_epi32(i); }
PINNATE_INLINE vi iload(const unsigned char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
PINNATE_INLINE void istore(unsigned char* p, vi v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }
PINNATE_INLINE vi low_nibbles(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
PINNATE_INLINE vi high_nibbles(vi v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
// |w| times x with the sign of w: a pair is at most 2 * 128 * 127, which 16 bits hold.
PINNATE_INLINE vi dot_bytes(vi acc, vi w, vi x) {
  const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Of 32 weights a 16-bit sum takes 16: at most 16 * 15 * 127.
PINNATE_INLINE vi dot_nibbles(vi acc, vi w, vi x) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)); }
PINNATE_INLINE vi sum_nibbles(vi acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
PINNATE_INLINE vf to_float(vi v) { return _mm256_cvtepi32_ps(v); }
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

#else

using vs = int16_t __attribute__((vector_size(16)));
using vu = uint16_t __attribute__((vector_size(16)));
constexpr int kWeightBias = 0;
PINNATE_INLINE vi iset(int32_t i) { return vi{i, i, i, i}; }
PINNATE_INLINE vi iload(const unsigned char* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
PINNATE_INLINE void istore(unsigned char* p, vi v) { std::memcpy(p, &v, sizeof v); }
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
PINNATE_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
PINNATE_INLINE vf load_halves(const unsigned char* p) {
  uint16_t h[kLanes];
  std::memcpy(h, p, sizeof h);
  return vf{half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}

#endif

}  // namespace pinnate::PINNATE_KERNEL_ISA
