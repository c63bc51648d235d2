// Quantising blocks of 32 weights, included by quant.cpp in the namespace of its ISA. kLanes columns at once, so that no
// sum runs across lanes, with products and sums rounded apart: every instruction set packs the same numbers.

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
  return static_cast<uint16_t>(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10)));
}

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, to even

// The nearest integer in [low, high].
PINNATE_INLINE vf round_clamped(vf v, float low, float high) {
  return (vmin(vset(high), vmax(vset(low), v)) + vset(kMagic)) - vset(kMagic);
}
PINNATE_INLINE vi32 to_ints(vf rounded) { return (vi32)(rounded + vset(kMagic)) - 0x4b400000; }

PINNATE_INLINE void store_words(unsigned char* p, vi32 v) { std::memcpy(p, &v, sizeof v); }

// Each lane rounded to a half, which is written to `halves` and returned as a float.
PINNATE_INLINE vf store_halves(unsigned char* halves, vf v) {
  float f[kLanes];
  vstore(f, v);
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t h = float_to_half(f[i]);
    std::memcpy(halves + 2 * i, &h, 2);
    f[i] = half_to_float(h);
  }
  return vload(f);
}

// The inverse of scales, which are not negative; of zero, something finite.
PINNATE_INLINE vf inverse_of(vf scale) { return vset(1.0f) / vmax(scale, vset(1e-30f)); }

// Blocks of kLanes columns, w [32][kLanes], to packed columns [kLanes][4] of 8 groups at `to`, their scales to `scales`.
// The scale is a 127th of the largest weight.
void pack_int8(const float* w, int32_t bias, unsigned char* to, int64_t group_bytes, unsigned char* scales) {
  vf most = vset(0.0f);
  for (int i = 0; i < kQuantBlock; ++i) most = vmax(most, vmax(vload(w + i * kLanes), -vload(w + i * kLanes)));
  most = most * vset(1.0f / 127);
  vf scale = store_halves(scales, most);
  // A half of few bits may lie far below, and the largest weight would be cut: 2^-24 is their step.
  scale = store_halves(scales, scale * vset(127.5f) < most * vset(127.0f) ? scale + vset(5.9604645e-8f) : scale);
  const vf inverse = inverse_of(scale);
  for (int g = 0; g < 8; ++g) {
    vi32 word{};
    for (int i = 0; i < 4; ++i) {
      const vi32 q = to_ints(round_clamped(vload(w + (g * 4 + i) * kLanes) * inverse, -127, 127)) + bias;
      word |= (q & 255) << 8 * i;
    }
    store_words(to + g * group_bytes, word);
  }
}

struct Int4Fit {
  vf scale, minimum, error;
};

// The scale and minimum of least squared error for the q that a scale and minimum give, and that error.
PINNATE_INLINE Int4Fit refit_int4(const float* w, vf sum, vf scale, vf minimum) {
  vf inverse = inverse_of(scale), sq = vset(0.0f), sqq = sq, sqw = sq;
  for (int i = 0; i < kQuantBlock; ++i) {
    const vf v = vload(w + i * kLanes), q = round_clamped((v - minimum) * inverse, 0, 15);
    sq = sq + q, sqq = sqq + q * q, sqw = sqw + q * v;
  }
  const vf size = vset(static_cast<float>(kQuantBlock)), determinant = size * sqq - sq * sq;  // exact; 0 if all q are equal
  const vf factor = vset(1.0f) / vmax(determinant, vset(1.0f));
  const vf better = vmax(vset(0.0f), (size * sqw - sq * sum) * factor), base = (sqq * sum - sq * sqw) * factor;
  const vf none = vset(0.0f);
  Int4Fit fit{determinant == none ? scale : better, determinant == none ? minimum : base, none};
  inverse = inverse_of(fit.scale);
  for (int i = 0; i < kQuantBlock; ++i) {
    const vf v = vload(w + i * kLanes), q = round_clamped((v - fit.minimum) * inverse, 0, 15);
    const vf error = fit.scale * q + fit.minimum - v;
    fit.error = fit.error + error * error;
  }
  return fit;
}

// Like pack_int8, to 4 groups of nibbles. Tries the range from the lowest weight to the highest in 15 steps, and a few
// narrower ones that cut the ends, each refitted, and takes the least squared error.
void pack_int4(const float* w, unsigned char* to, int64_t group_bytes, unsigned char* scales, unsigned char* minima) {
  vf low = vload(w), high = low, sum = vset(0.0f);
  for (int i = 0; i < kQuantBlock; ++i) {
    const vf v = vload(w + i * kLanes);
    low = vmin(low, v), high = vmax(high, v), sum = sum + v;
  }
  Int4Fit best{vset(0.0f), low, vset(3e38f)};
  for (int i = 0; i < 5; ++i) {
    const float cut = 0.5f * static_cast<float>(i);  // steps, at both ends together
    const vf scale = (high - low) * vset(1.0f / (15 + cut)), minimum = low + scale * vset(0.5f * cut);
    const Int4Fit fit = refit_int4(w, sum, scale, minimum);
    best.scale = fit.error < best.error ? fit.scale : best.scale;
    best.minimum = fit.error < best.error ? fit.minimum : best.minimum;
    best.error = vmin(fit.error, best.error);
  }
  const vf minimum = store_halves(minima, best.minimum), inverse = inverse_of(store_halves(scales, best.scale));
  for (int g = 0; g < 4; ++g) {
    vi32 word{};
    for (int i = 0; i < 4; ++i) {
      const float* at = w + (g * 4 + i) * kLanes;
      const vi32 q = to_ints(round_clamped((vload(at) - minimum) * inverse, 0, 15));
      const vi32 above = to_ints(round_clamped((vload(at + 16 * kLanes) - minimum) * inverse, 0, 15));
      word |= (q | above << 4) << 8 * i;
    }
    store_words(to + g * group_bytes, word);
  }
}

// Whether the format takes over the numbers of a storage type as they are (the scale and minimum of a K-block's group are
// rounded to halves); int8 holds 4-bit numbers on a grid that fits them (see widen).
inline bool takes(WeightFormat format, TensorType type) {
  const bool four_bits = type == TensorType::kQ4_0 || type == TensorType::kQ4_1 || type == TensorType::kQ4_K;
  return four_bits || (format == WeightFormat::kInt8 && type == TensorType::kQ8_0);
}

// A 4-bit block as int8. Its numbers are 16 levels d q + m. Steps of d / i meet the distances of the levels exactly, so all
// miss the grid by the same; of a few i (and the plain 127th of the largest level) the one of least squared error leaves
// well below half the error of rounding to the plain step alone.
inline void widen(Quantized& block) {
  constexpr int kTried = 6;
  constexpr float kReach = 127.49f;  // steps that still round to 127
  const float d = half_to_float(block.scale), m = half_to_float(block.minimum), size = d < 0 ? -d : d;
  float levels[16], most = 0;
  for (int j = 0; j < 16; ++j) levels[j] = d * static_cast<float>(j) + m;
  for (const float level : levels) most = level > most ? level : -level > most ? -level : most;
  const int last = most > 0 ? static_cast<int>(kReach * size / most) : 0;  // at most 17: the levels span 15 d
  float best = 3e38f, step = 0;
  const auto consider = [&](uint16_t half) {
    const float s = half_to_float(half), inverse = s > 0 ? 1.0f / s : 0.0f;
    if (s * kReach < most) return;
    float errors[16];
    for (int j = 0; j < 16; ++j) {
      const float error = ((levels[j] * inverse + kMagic) - kMagic) * s - levels[j];
      errors[j] = error * error;
    }
    for (int width = 8; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) errors[j] += errors[j + width];
    if (errors[0] >= best) return;
    best = errors[0], step = s, block.scale = half;
  };
  const uint16_t plain = float_to_half(most * (1.0f / 127));
  consider(half_to_float(plain) * kReach < most && plain < 0x7bff ? plain + 1 : plain);
  for (int i = last; i > 0 && i > last - kTried; --i) consider(float_to_half(size / static_cast<float>(i)));
  const float inverse = step > 0 ? 1.0f / step : 0.0f;
  int8_t numbers[16];
  for (int j = 0; j < 16; ++j) numbers[j] = static_cast<int8_t>(static_cast<int>((levels[j] * inverse + kMagic) - kMagic));
  for (int8_t& q : block.q) q = numbers[q];
}

// Block b of a row of such a type.
inline void take_block(const unsigned char* row, TensorType type, int64_t b, Quantized& out) {
  const auto nibbles = [&](const unsigned char* q) {
    for (int i = 0; i < 16; ++i) out.q[i] = static_cast<int8_t>(q[i] & 15), out.q[i + 16] = static_cast<int8_t>(q[i] >> 4);
  };
  if (type == TensorType::kQ8_0) {
    std::memcpy(&out.scale, row + b * 34, 2);
    std::memcpy(out.q, row + b * 34 + 2, kQuantBlock);
    out.minimum = 0;
    return;
  }
  if (type == TensorType::kQ4_0) {
    const unsigned char* p = row + b * 18;
    std::memcpy(&out.scale, p, 2);
    out.minimum = float_to_half(-8.0f * half_to_float(out.scale));
    nibbles(p + 2);
    return;
  }
  if (type == TensorType::kQ4_1) {
    const unsigned char* p = row + b * 20;
    std::memcpy(&out.scale, p, 2), std::memcpy(&out.minimum, p + 2, 2);
    nibbles(p + 4);
    return;
  }
  const unsigned char* p = row + b / 8 * 144;
  const int g = static_cast<int>(b % 8), shift = g % 2 * 4;
  int scale, minimum;
  k_scale(p + 4, g, scale, minimum);
  out.scale = float_to_half(f16_to_float(p) * static_cast<float>(scale));
  out.minimum = float_to_half(-(f16_to_float(p + 2) * static_cast<float>(minimum)));
  for (int i = 0; i < kQuantBlock; ++i) out.q[i] = static_cast<int8_t>(p[16 + g / 2 * 32 + i] >> shift & 15);
}
