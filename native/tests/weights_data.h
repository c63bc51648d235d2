// Random weights in every storage type, and the definition of each type element by element (not block by block as in
// kernels/dequant.inl).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../src/gemm.h"

namespace pinnate::test {

constexpr TensorType kTypes[] = {TensorType::kF32,  TensorType::kF16,  TensorType::kBF16, TensorType::kQ4_0, TensorType::kQ4_1,
                                 TensorType::kQ5_0, TensorType::kQ8_0, TensorType::kQ4_K, TensorType::kQ5_K, TensorType::kQ6_K};

inline float half_at(const unsigned char* p) {
  const int h = p[0] | p[1] << 8, exponent = h >> 10 & 31, mantissa = h & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>(h & 0x8000 ? -magnitude : magnitude);
}

inline float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float from_bf16(bf16 b) { return from_bits(static_cast<uint32_t>(b) << 16); }

// Round to nearest even by definition: of the two neighbours the nearer, of two as near the even one. Finite f only.
inline bf16 to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t below = u >> 16, rest = u & 0xffff;
  return static_cast<bf16>(rest > 0x8000 || (rest == 0x8000 && (below & 1)) ? below + 1 : below);
}

// 6-bit number `g` (0..7: scales, 8..15: minima) of the 12 bytes of a K-block.
inline int six_bits(const unsigned char* s, int g) {
  const int index = g % 8, high = g / 8;
  if (index < 4) return s[index + 4 * high] & 63;
  const int low = high == 0 ? s[index + 4] & 15 : s[index + 4] >> 4;
  return low | (s[index - 4 + 4 * high] >> 6) << 4;
}

// Element i of a row stored as `type`.
inline float element(TensorType type, const unsigned char* row, int64_t i) {
  const int64_t j = i % 32, e = i % 256;
  auto nibble = [](const unsigned char* q, int64_t at) { return at < 16 ? q[at] & 15 : q[at - 16] >> 4; };
  switch (type) {
    case TensorType::kF32: {
      float f;
      std::memcpy(&f, row + 4 * i, 4);
      return f;
    }
    case TensorType::kF16: return half_at(row + 2 * i);
    case TensorType::kBF16: return from_bf16(static_cast<bf16>(row[2 * i] | row[2 * i + 1] << 8));
    case TensorType::kQ4_0: {
      const unsigned char* b = row + i / 32 * 18;
      return half_at(b) * static_cast<float>(nibble(b + 2, j) - 8);
    }
    case TensorType::kQ4_1: {
      const unsigned char* b = row + i / 32 * 20;
      const float product = half_at(b) * static_cast<float>(nibble(b + 4, j));
      return product + half_at(b + 2);
    }
    case TensorType::kQ5_0: {
      const unsigned char* b = row + i / 32 * 22;
      const int fifth = b[2 + j / 8] >> j % 8 & 1;
      return half_at(b) * static_cast<float>(nibble(b + 6, j) + 16 * fifth - 16);
    }
    case TensorType::kQ8_0: {
      const unsigned char* b = row + i / 32 * 34;
      return half_at(b) * static_cast<float>(static_cast<signed char>(b[2 + j]));
    }
    case TensorType::kQ4_K:
    case TensorType::kQ5_K: {
      const bool five = type == TensorType::kQ5_K;
      const unsigned char* b = row + i / 256 * (five ? 176 : 144);
      const int g = static_cast<int>(e / 32);
      const unsigned char byte = b[(five ? 48 : 16) + e / 64 * 32 + j];
      int q = e / 32 % 2 == 0 ? byte & 15 : byte >> 4;
      if (five && (b[16 + j] >> g & 1)) q += 16;
      const float scale = half_at(b) * static_cast<float>(six_bits(b + 4, g));
      const float minimum = half_at(b + 2) * static_cast<float>(six_bits(b + 4, g + 8));
      const float product = scale * static_cast<float>(q);
      return product - minimum;
    }
    case TensorType::kQ6_K: {
      const unsigned char* b = row + i / 256 * 210;
      const int64_t h = e / 128, quarter = e % 128 / 32;
      const unsigned char low = b[h * 64 + quarter % 2 * 32 + j], high = b[128 + h * 32 + j];
      const int q = (quarter < 2 ? low & 15 : low >> 4) | (high >> quarter * 2 & 3) << 4;
      const float scale = half_at(b + 208) * static_cast<float>(static_cast<signed char>(b[192 + e / 16]));
      return scale * static_cast<float>(q - 32);
    }
  }
  return 0;
}

struct Weights {
  std::vector<unsigned char> bytes;
  std::vector<int32_t> order;
  SourceMatrix matrix;

  float at(int64_t row, int64_t col) const {
    const int64_t stored = order.empty() ? row : order[static_cast<size_t>(row)];
    return element(matrix.type, matrix.data + stored * static_cast<int64_t>(row_bytes(matrix.type, matrix.cols)), col);
  }
};

// Random bytes, but scales that are finite and give weights of about 0.01 to 1.
inline void tame_scales(TensorType type, unsigned char* p, std::mt19937& rng) {
  auto half = [&](unsigned char* at, int exponent) {
    at[1] = static_cast<unsigned char>((rng() & 0x83) | static_cast<unsigned>(exponent << 2));
  };
  switch (type) {
    case TensorType::kQ4_0:
    case TensorType::kQ5_0:
    case TensorType::kQ8_0: half(p, 8); break;
    case TensorType::kQ4_1: half(p, 8), half(p + 2, 11); break;
    case TensorType::kQ4_K:
    case TensorType::kQ5_K: half(p, 4), half(p + 2, 4); break;
    case TensorType::kQ6_K: half(p + 208, 3); break;
    default: break;
  }
}

inline Weights random_weights(TensorType type, int64_t rows, int64_t cols, std::mt19937& rng, bool shuffled = false) {
  Weights w;
  const size_t total = static_cast<size_t>(rows) * row_bytes(type, cols);
  w.bytes.resize(total);
  std::normal_distribution<float> normal(0, 0.3f);
  const bool plain = type == TensorType::kF32 || type == TensorType::kF16 || type == TensorType::kBF16;
  const size_t width = type == TensorType::kF32 ? 4 : 2;
  for (size_t i = 0; plain && i < total; i += width) {
    const float f = normal(rng);
    const bf16 h = type == TensorType::kBF16 ? to_bf16(f) : static_cast<bf16>((rng() & 0x83ff) | (rng() % 12 << 10));
    if (width == 4) std::memcpy(&w.bytes[i], &f, 4);
    else std::memcpy(&w.bytes[i], &h, 2);
  }
  if (!plain) {
    for (auto& b : w.bytes) b = static_cast<unsigned char>(rng());
    const int64_t block = type == TensorType::kQ4_K || type == TensorType::kQ5_K || type == TensorType::kQ6_K ? 256 : 32;
    const size_t size = row_bytes(type, block);
    for (size_t i = 0; i < total; i += size) tame_scales(type, &w.bytes[i], rng);
  }
  for (int64_t r = 0; shuffled && r < rows; ++r) w.order.push_back(static_cast<int32_t>((r * 7 + 3) % rows));
  w.matrix = {type, w.bytes.data(), rows, cols, w.order.empty() ? nullptr : w.order.data()};
  return w;
}

}  // namespace pinnate::test
