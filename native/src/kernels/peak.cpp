// Peak rates of the multiply-add instructions the kernels use, from registers alone.
#include <chrono>

#include "gemm_simd.h"
#include "register.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace pinnate::PINNATE_KERNEL_ISA {
namespace {

constexpr int kChains = 12;  // independent accumulators: latency times throughput, and within 16 registers
constexpr int64_t kInner = 20000;

// Calls burst() (which does kInner * kChains operations on vectors) until the time is over; returns vector operations.
template <class Burst>
double repeat(double seconds, Burst burst) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  double done = 0;
  do {
    burst();
    done += static_cast<double>(kInner) * kChains;
  } while (std::chrono::steady_clock::now() < end);
  return done;
}

// The compiler must believe that acc is read and changed, or it would hoist or drop the work.
template <class V>
PINNATE_INLINE void keep(V (&acc)[kChains]) {
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+x"(acc[i]));
}

template <class V, class Step>
PINNATE_INLINE void burst(V start, Step step) {
  V acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = start;
  for (int64_t n = 0; n < kInner; ++n) {
    for (int i = 0; i < kChains; ++i) acc[i] = step(acc[i]);
    keep(acc);
  }
}

#if defined(__AMX_BF16__)
// Four independent sums, as the products keep. One burst is kInner * kChains tile operations. The operands are any bf16 numbers
// below 2 (as bytes, any): the unit runs up to a tenth faster on zeros, which no product is made of.
template <class Tile>
double repeat_tiles(double seconds, Tile tile) {
  alignas(64) uint16_t operands[4][kTileBytes / 2];
  uint32_t state = 1;
  for (auto& operand : operands)
    for (uint16_t& number : operand) {
      state = state * 1664525 + 1013904223;
      number = static_cast<uint16_t>(0x3c00 | (state >> 16 & 0x83ff));  // of either sign, so that the sums stay small
    }
  Tiles tiles;
  tiles.configure_rows(kTileGroup);
  zero_tiles<true, 2>();
  before_tile_loads();
  _tile_loadd(4, operands[0], 64);
  _tile_loadd(5, operands[1], 64);
  _tile_loadd(6, operands[2], 64);
  _tile_loadd(7, operands[3], 64);
  return repeat(seconds, [&] {
    for (int64_t n = 0; n < kInner * kChains / 4; ++n) tile();
  });
}
#endif

double peak_flops([[maybe_unused]] Act act, double seconds) {
#if defined(__AMX_BF16__)
  if (act == Act::kBF16)
    return 2 * 16 * 16 * 32 * repeat_tiles(seconds, [] {
             _tile_dpbf16ps(0, 4, 6);
             _tile_dpbf16ps(1, 4, 7);
             _tile_dpbf16ps(2, 5, 6);
             _tile_dpbf16ps(3, 5, 7);
           });
#elif defined(__AVX512BF16__)
  if (act == Act::kBF16) {
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3c00);
    return 64 * repeat(seconds, [&] { burst(_mm512_setzero_ps(), [&](vf c) { return _mm512_dpbf16_ps(c, a, b); }); });
  }
#endif
  const vf a = vset(0.5f), b = vset(0.25f);
  return 2 * kLanes * repeat(seconds, [&] { burst(vset(0.0f), [&](vf c) { return vfma(a, c, b); }); });
}

double peak_int8([[maybe_unused]] double seconds) {
#if defined(__AMX_INT8__)
  return 2 * 16 * 16 * 64 * repeat_tiles(seconds, [] {
           _tile_dpbssd(0, 4, 6);
           _tile_dpbssd(1, 4, 7);
           _tile_dpbssd(2, 5, 6);
           _tile_dpbssd(3, 5, 7);
         });
#elif defined(__AVX512BF16__)
  const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  return 128 * repeat(seconds, [&] {
           burst(_mm512_setzero_si512(), [&](__m512i c) { return _mm512_dpbusd_epi32(c, a, b); });
         });
#elif defined(__AVX2__)
  // What stands for the instruction (quant_avx2.inl): 8 columns and 2 k.
  const __m256i a = _mm256_set1_epi16(1), b = _mm256_set1_epi16(2);
  return 32 * repeat(seconds, [&] {
           burst(_mm256_setzero_si256(), [&](__m256i c) __attribute__((always_inline)) {
             __m256i w = a;
             __asm__ volatile("" : "+x"(w));  // else the product is computed once
             return _mm256_add_epi32(c, _mm256_madd_epi16(w, b));
           });
         });
#else
  return 0;
#endif
}

}  // namespace

void register_peak(KernelTable& t) {
  t.peak_flops = peak_flops;
  t.peak_int8 = peak_int8;
}

}  // namespace pinnate::PINNATE_KERNEL_ISA
