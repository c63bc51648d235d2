// Decoding of the storage types to floats, included by gemm.cpp in the namespace of its ISA. Every value is a chain of
// single-precision multiplications and additions in the order of the format's definition (ggml's block formats), so that
// all instruction sets and the Python definition (weights/dequantize.py) agree to the bit. The common types are vectors by hand:
// loops of 16 bytes GCC 12 unrolls before it looks for vectors.

PINNATE_INLINE float f16_to_float(const unsigned char* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

// 32 elements: scale d, nibbles q; d * (q - 8).
PINNATE_INLINE void decode_q4_0(const unsigned char* b, float* out) {
  const float d = f16_to_float(b);
  for (int i = 0; i < 16; i += kLanes) {
    const vi32 q = load_bytes(b + 2 + i);
    vstore(out + i, vset(d) * to_float((q & 15) - 8));
    vstore(out + i + 16, vset(d) * to_float((q >> 4) - 8));
  }
}

// 32 elements: scale d, minimum m, nibbles q; d * q + m.
PINNATE_INLINE void decode_q4_1(const unsigned char* b, float* out) {
  const float d = f16_to_float(b), m = f16_to_float(b + 2);
  for (int i = 0; i < 16; i += kLanes) {
    const vi32 q = load_bytes(b + 4 + i);
    vstore(out + i, vset(d) * to_float(q & 15) + vset(m));
    vstore(out + i + 16, vset(d) * to_float(q >> 4) + vset(m));
  }
}

// 32 elements: scale d, 32 fifth bits, nibbles q; d * (q - 16).
PINNATE_INLINE void decode_q5_0(const unsigned char* b, float* out) {
  const float d = f16_to_float(b);
  uint32_t fifth;
  std::memcpy(&fifth, b + 2, 4);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(((b[6 + i] & 15) | static_cast<int>(fifth >> i & 1) << 4) - 16);
    out[i + 16] = d * static_cast<float>(((b[6 + i] >> 4) | static_cast<int>(fifth >> (i + 16) & 1) << 4) - 16);
  }
}

// 32 elements: scale d, signed bytes q; d * q.
PINNATE_INLINE void decode_q8_0(const unsigned char* b, float* out) {
  const float d = f16_to_float(b);
  for (int i = 0; i < 32; i += kLanes)
    vstore(out + i, vset(d) * to_float(load_bytes(b + 2 + i) << 24 >> 24));
}

// Group g of 8 in a K-block: 6-bit scale and minimum, packed into 12 bytes.
PINNATE_INLINE void k_scale(const unsigned char* s, int g, int& scale, int& minimum) {
  if (g < 4) {
    scale = s[g] & 63, minimum = s[g + 4] & 63;
  } else {
    scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4, minimum = s[g + 4] >> 4 | (s[g] >> 6) << 4;
  }
}

// 256 elements: d, dmin, 8 groups of 32 with scale and minimum, nibbles q (a fifth bit from qh for Q5_K);
// (d * scale) * q - dmin * minimum.
template <bool kFive>
PINNATE_INLINE void decode_q45_k(const unsigned char* b, float* out) {
  const float d = f16_to_float(b), dmin = f16_to_float(b + 2);
  const unsigned char* qh = b + 16;
  const unsigned char* qs = kFive ? b + 48 : b + 16;
  for (int g = 0; g < 8; ++g) {
    int scale, minimum;
    k_scale(b + 4, g, scale, minimum);
    const float a = d * static_cast<float>(scale), m = dmin * static_cast<float>(minimum);
    const unsigned char* q = qs + g / 2 * 32;
    const int shift = g % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      int v = q[i] >> shift & 15;
      if (kFive) v |= (qh[i] >> g & 1) << 4;
      out[g * 32 + i] = a * static_cast<float>(v) - m;
    }
  }
}

// 256 elements: 4 low bits ql, 2 high bits qh, 16 signed scales, d; (d * scale) * (q - 32).
PINNATE_INLINE void decode_q6_k(const unsigned char* b, float* out) {
  const float d = f16_to_float(b + 208);
  for (int half = 0; half < 2; ++half) {
    const unsigned char* ql = b + half * 64;
    const unsigned char* qh = b + 128 + half * 32;
    const int8_t* scales = reinterpret_cast<const int8_t*>(b + 192 + half * 8);
    for (int quarter = 0; quarter < 4; ++quarter) {
      const unsigned char* low = ql + quarter % 2 * 32;
      const int shift = quarter / 2 * 4;
      float* o = out + half * 128 + quarter * 32;
      for (int part = 0; part < 2; ++part) {
        const float a = d * static_cast<float>(scales[quarter * 2 + part]);
        for (int i = part * 16; i < part * 16 + 16; ++i) {
          const int v = (low[i] >> shift & 15) | (qh[i] >> quarter * 2 & 3) << 4;
          o[i] = a * static_cast<float>(v - 32);
        }
      }
    }
  }
}

// Whole blocks by `decode`; a last part of a block through a buffer.
template <int kElements, int kBytes, class Decode>
PINNATE_INLINE void decode_blocks(const unsigned char* data, int64_t count, float* out, Decode decode) {
  int64_t i = 0;
  for (; i + kElements <= count; i += kElements, data += kBytes) decode(data, out + i);
  if (i == count) return;
  float block[kElements];
  decode(data, block);
  std::memcpy(out + i, block, static_cast<size_t>(count - i) * sizeof(float));
}

static void dequantize(TensorType type, const unsigned char* data, int64_t count, float* out) {
  switch (type) {
    case TensorType::kF32: std::memcpy(out, data, static_cast<size_t>(count) * 4); return;
    case TensorType::kF16:
      for (int64_t i = 0; i < count; ++i) out[i] = f16_to_float(data + 2 * i);
      return;
    case TensorType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        uint16_t h;
        std::memcpy(&h, data + 2 * i, 2);
        const uint32_t u = static_cast<uint32_t>(h) << 16;
        std::memcpy(out + i, &u, 4);
      }
      return;
    case TensorType::kQ4_0: decode_blocks<32, 18>(data, count, out, decode_q4_0); return;
    case TensorType::kQ4_1: decode_blocks<32, 20>(data, count, out, decode_q4_1); return;
    case TensorType::kQ5_0: decode_blocks<32, 22>(data, count, out, decode_q5_0); return;
    case TensorType::kQ8_0: decode_blocks<32, 34>(data, count, out, decode_q8_0); return;
    case TensorType::kQ4_K: decode_blocks<256, 144>(data, count, out, decode_q45_k<false>); return;
    case TensorType::kQ5_K: decode_blocks<256, 176>(data, count, out, decode_q45_k<true>); return;
    case TensorType::kQ6_K: decode_blocks<256, 210>(data, count, out, decode_q6_k); return;
  }
}

// Bytes of `cols` elements (whole blocks).
PINNATE_INLINE int64_t stored_bytes(TensorType type, int64_t cols) {
  switch (type) {
    case TensorType::kF32: return cols * 4;
    case TensorType::kF16:
    case TensorType::kBF16: return cols * 2;
    case TensorType::kQ4_0: return cols / 32 * 18;
    case TensorType::kQ4_1: return cols / 32 * 20;
    case TensorType::kQ5_0: return cols / 32 * 22;
    case TensorType::kQ8_0: return cols / 32 * 34;
    case TensorType::kQ4_K: return cols / 256 * 144;
    case TensorType::kQ5_K: return cols / 256 * 176;
    case TensorType::kQ6_K: return cols / 256 * 210;
  }
  return 0;
}
