// Quantising blocks of 32 weights, included by quant.cpp in the namespace of its ISA. Single-precision arithmetic in a
// fixed order: every instruction set packs the same numbers.

// One column's block: w = scale * q (q signed) for int8, scale * q + minimum (q in [0, 15]) for int4. Halves.
struct Quantized {
  int8_t q[kQuantBlock];
  uint16_t scale, minimum;
};

// Rounds to nearest even; magnitudes past the largest half become it.
PINNATE_INLINE uint16_t float_to_half(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7bff);
  if (magnitude < 0x38800000) {  // below 2^-14: multiples of 2^-24
    float a;
    std::memcpy(&a, &magnitude, 4);
    a = a * 16777216.0f + 8388608.0f;
    std::memcpy(&u, &a, 4);
    return static_cast<uint16_t>(sign | (u - 0x4b000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10));
}

// Rounds to nearest even; |f| below 2^22.
PINNATE_INLINE int32_t round_to_int(float f) {
  f += 12582912.0f;  // 1.5 * 2^23
  int32_t i;
  std::memcpy(&i, &f, 4);
  return i - 0x4b400000;
}

PINNATE_INLINE float clamp(float f, float low, float high) {
  f = f < low ? low : f;
  return f > high ? high : f;
}

inline void quantize_int8(const float* w, Quantized& out) {
  float most = 0;
  for (int i = 0; i < kQuantBlock; ++i) most = w[i] > most ? w[i] : -w[i] > most ? -w[i] : most;
  out.scale = float_to_half(most * (1.0f / 127));
  if (out.scale < 0x7bff && half_to_float(out.scale) * 127.5f < most) ++out.scale;  // of few bits, rounded down far
  out.minimum = 0;
  const float scale = half_to_float(out.scale), inverse = out.scale == 0 ? 0.0f : 1.0f / scale;
  for (int i = 0; i < kQuantBlock; ++i) out.q[i] = static_cast<int8_t>(round_to_int(clamp(w[i] * inverse, -127, 127)));
}

// The nearest q for a scale and minimum; the sum of squared errors.
inline float fit_int4(const float* w, float scale, float minimum, int8_t* q) {
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  float sums[8] = {};
  for (int i = 0; i < kQuantBlock; i += 8)
    for (int j = 0; j < 8; ++j) {
      const int32_t n = round_to_int(clamp((w[i + j] - minimum) * inverse, 0, 15));
      const float error = scale * static_cast<float>(n) + minimum - w[i + j];
      q[i + j] = static_cast<int8_t>(n);
      sums[j] += error * error;
    }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The scale and minimum of least squared error for given q.
inline bool refit_int4(const float* w, const int8_t* q, float& scale, float& minimum) {
  float sw = 0, sqw = 0;
  int32_t sq = 0, sqq = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    sq += q[i], sqq += q[i] * q[i];
    sw += w[i], sqw += w[i] * static_cast<float>(q[i]);
  }
  const int32_t determinant = kQuantBlock * sqq - sq * sq;
  if (determinant == 0) return false;
  const float inverse = 1.0f / static_cast<float>(determinant);
  scale = (static_cast<float>(kQuantBlock) * sqw - static_cast<float>(sq) * sw) * inverse;
  minimum = (static_cast<float>(sqq) * sw - static_cast<float>(sq) * sqw) * inverse;
  return true;
}

// From lowest to highest in 15 steps, and a few narrower ranges that clip the ends, each refitted: the least squared error.
inline void quantize_int4(const float* w, Quantized& out) {
  float low = w[0], high = w[0];
  for (int i = 1; i < kQuantBlock; ++i) low = w[i] < low ? w[i] : low, high = w[i] > high ? w[i] : high;
  float best = 3.4e38f;
  const auto consider = [&](float scale, float minimum) {
    const uint16_t s = float_to_half(scale), m = float_to_half(minimum);
    int8_t q[kQuantBlock];
    const float error = fit_int4(w, half_to_float(s), half_to_float(m), q);
    if (error >= best) return;
    best = error;
    out.scale = s, out.minimum = m;
    std::memcpy(out.q, q, sizeof q);
  };
  out = {};
  consider((high - low) * (1.0f / 15), low);
  for (int i = 0; i < 4; ++i) {
    const float clipped = 0.5f * static_cast<float>(i);  // steps left out, at both ends together
    float scale = (high - low) / (15 + clipped), minimum = low + scale * clipped * 0.5f;
    int8_t q[kQuantBlock];
    fit_int4(w, scale, minimum, q);
    if (refit_int4(w, q, scale, minimum)) consider(scale, minimum);
  }
}

// Block b of a row whose storage type holds numbers that this format takes over as they are (the scale and minimum of a
// K-block's group are rounded to halves); false for the other types.
inline bool take_block(const unsigned char* row, TensorType type, WeightFormat format, int64_t b, Quantized& out) {
  const auto nibbles = [&](const unsigned char* q) {
    for (int i = 0; i < 16; ++i) out.q[i] = static_cast<int8_t>(q[i] & 15), out.q[i + 16] = static_cast<int8_t>(q[i] >> 4);
  };
  if (format == WeightFormat::kInt8) {
    if (type != TensorType::kQ8_0) return false;
    std::memcpy(&out.scale, row + b * 34, 2);
    std::memcpy(out.q, row + b * 34 + 2, kQuantBlock);
    out.minimum = 0;
    return true;
  }
  if (type == TensorType::kQ4_0) {
    const unsigned char* p = row + b * 18;
    std::memcpy(&out.scale, p, 2);
    out.minimum = float_to_half(-8.0f * half_to_float(out.scale));
    nibbles(p + 2);
    return true;
  }
  if (type == TensorType::kQ4_1) {
    const unsigned char* p = row + b * 20;
    std::memcpy(&out.scale, p, 2), std::memcpy(&out.minimum, p + 2, 2);
    nibbles(p + 4);
    return true;
  }
  if (type != TensorType::kQ4_K) return false;
  const unsigned char* p = row + b / 8 * 144;
  const int g = static_cast<int>(b % 8), shift = g % 2 * 4;
  int scale, minimum;
  k_scale(p + 4, g, scale, minimum);
  out.scale = float_to_half(f16_to_float(p) * static_cast<float>(scale));
  out.minimum = float_to_half(-(f16_to_float(p + 2) * static_cast<float>(minimum)));
  for (int i = 0; i < kQuantBlock; ++i) out.q[i] = static_cast<int8_t>(p[16 + g / 2 * 32 + i] >> shift & 15);
  return true;
}
