// Register-blocked products for attention.cpp: a left operand (query rows, or softmax weights) times a tile of a KV page.
//
// Keys and values are kept in 32-bit lanes: one float, or a pair of bf16 (even element low, odd element high) that belong to
// neighbouring steps of the reduction. A step of the right operand is a row of lanes. Every accumulator is its own chain over
// the steps, so its bits do not depend on how many rows or vectors are blocked together.
//
// kRows: query rows that are multiplied together at most; tiles_for(rows): the tiles (16 tokens, or 16 columns of values) that
// these are multiplied with together.
//
// Dot<act>: kPer = elements of the reduction in a step; kWords = 32-bit words of the left operand for a step, and how many
// multiply-adds a step takes, each with a part of its lanes.

constexpr int kTile = 16;   // tokens in a tile; a page is whole tiles
constexpr int kBlock = 128; // tokens between two updates of a row's running maximum; blocks start at multiples of it
constexpr int kBlockTiles = kBlock / kTile;
constexpr int kTileVecs = kTile / kWidth;

template <Act A>
struct Dot;

template <>
struct Dot<Act::kF32> {
  static constexpr int kPer = 1, kWords = 1;
  using Right = vf;
  static Right load(const unsigned char* p, int) { return pinnate::PINNATE_KERNEL_ISA::load(reinterpret_cast<const float*>(p)); }
  static Right load_even(const unsigned char* p) { return load(p, 0); }
  static void mac(vf& acc, Right b, const float* a) { add_product(acc, set1(*a), b); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

constexpr int kRows = 6;
constexpr int tiles_for(int) { return 4; }  // 24 accumulators at most

template <>
struct Dot<Act::kBF16> {
  static constexpr int kPer = 2, kWords = 1;
  using Right = __m512i;
  static Right load(const unsigned char* p, int) { return _mm512_loadu_si512(p); }
  static Right load_even(const unsigned char* p) { return _mm512_and_si512(load(p, 0), _mm512_set1_epi32(0xffff)); }
  static void mac(vf& acc, Right b, const float* a) {
    int pair;
    memcpy(&pair, a, 4);
    acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
  }
};

#else

#if defined(__AVX2__) && defined(__FMA__)
constexpr int kRows = 6;
// 12 accumulators of 16 registers at most, and 8 at least: two products are begun in a cycle, and each takes four.
constexpr int tiles_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
using vbits = __m256i;
inline vbits load_bits(const unsigned char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline vf low_half(vbits b) { return _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)); }
inline vf high_half(vbits b) {
  return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
#else
constexpr int kRows = 2;
constexpr int tiles_for(int) { return 1; }
using vbits = vu;
inline vbits load_bits(const unsigned char* p) {
  vbits b;
  memcpy(&b, p, sizeof b);
  return b;
}
inline vf low_half(vbits b) { return (vf)(b << 16); }
inline vf high_half(vbits b) { return (vf)(b & 0xffff0000u); }
#endif

template <>
struct Dot<Act::kBF16> {  // no bf16 arithmetic here: the left operand is kept as floats, two for a step
  static constexpr int kPer = 2, kWords = 2;
  using Right = vf;
  static Right load(const unsigned char* p, int part) { return part == 0 ? low_half(load_bits(p)) : high_half(load_bits(p)); }
  static Right load_even(const unsigned char* p) { return load(p, 0); }
  static void mac(vf& acc, Right b, const float* a) { add_product(acc, set1(*a), b); }
};

#endif

// acc[r][n] += sum over steps of left[r][step] * right[n][step]; ahead(offset of the step) is called in each step. The fewer
// of the two wait in registers for the others.
template <Act A, int R, int N, class F>
[[gnu::always_inline]] inline void multiply(vf (&acc)[R][N], const float* left, int64_t left_stride,
                                            const unsigned char* const (&right)[N], int64_t right_stride, int64_t steps,
                                            const F& ahead) {
  using D = Dot<A>;
  for (int64_t s = 0; s < steps; ++s) {
    ahead(s * right_stride);
    unrolled<D::kWords>(PINNATE_EACH(part) {
      const auto load = [&](int n) __attribute__((always_inline)) { return D::load(right[n] + s * right_stride, part); };
      const float* a = left + s * D::kWords + part;
      if constexpr (R < N) {
        unrolled<N>(PINNATE_EACH(n) {
          const typename D::Right b = load(n);
          unrolled<R>(PINNATE_EACH(r) { D::mac(acc[r][n], b, a + r * left_stride); });
        });
      } else {
        typename D::Right b[N];
        unrolled<N>(PINNATE_EACH(n) { b[n] = load(n); });
        unrolled<R>(PINNATE_EACH(r) {
          unrolled<N>(PINNATE_EACH(n) { D::mac(acc[r][n], b[n], a + r * left_stride); });
        });
      }
    });
  }
}

// To the second cache: what a block works with fills the first.
inline void fetch_ahead(const unsigned char* line) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  __builtin_prefetch(line);  // this table has not been measured with it
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

constexpr auto kNothingAhead = [](int64_t) {};

// Where each tile of a block starts for the KV head at hand.
struct BlockTiles {
  const unsigned char* keys[kBlockTiles];
  const unsigned char* values[kBlockTiles];
};

// s[r][token] = q[r] . key[token] for T tiles from `tiles` on. q rows are q_stride words apart, s rows kBlock floats.
// `next`: null, or T tiles to fetch meanwhile: with few rows to a tile the time goes into waiting for memory, and no hardware
// foresees where the next page lies.
template <Act A, int R, int T>
void score_tiles(const float* q, int64_t q_stride, const unsigned char* const* tiles, const unsigned char* const* next,
                 int64_t key_stride, int64_t steps, float* s) {
  constexpr int N = T * kTileVecs;
  vf acc[R][N];
  const unsigned char* right[N];
  for (int n = 0; n < N; ++n) right[n] = tiles[n / kTileVecs] + (n % kTileVecs) * kWidth * 4;
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { acc[r][n] = set1(0.0f); }); });
  if (next) {
    multiply<A>(acc, q, q_stride, right, key_stride, steps, [=](int64_t offset) {
      for (int t = 0; t < T; ++t) fetch_ahead(next[t] + offset);
    });
  } else {
    multiply<A>(acc, q, q_stride, right, key_stride, steps, kNothingAhead);
  }
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { store(s + r * kBlock + n * kWidth, acc[r][n]); }); });
}

// out[r][columns] += sum over the tokens of `tiles` whole tiles of p[r][token] * value[token], for N vectors of columns that
// start `offset` bytes into a row of values. Ahead: `next` is the block whose values to fetch meanwhile.
template <Act A, int R, int N, bool Ahead>
[[gnu::noinline]] void add_tiles(const float* p, const BlockTiles& block, const BlockTiles* next, int64_t offset, int64_t value_stride,
               int64_t tiles, float* out, int64_t out_stride) {
  using D = Dot<A>;
  constexpr int64_t p_stride = kBlock / D::kPer * D::kWords, steps = kTile / D::kPer;
  vf acc[R][N];
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { acc[r][n] = load(out + r * out_stride + n * kWidth); }); });
  for (int64_t t = 0; t < tiles; ++t) {
    const unsigned char* right[N];
    for (int n = 0; n < N; ++n) right[n] = block.values[t] + offset + n * kWidth * 4;
    const unsigned char* line = Ahead ? next->values[t] + offset : nullptr;
    multiply<A>(acc, p + t * steps * D::kWords, p_stride, right, value_stride, steps, [=](int64_t step) {
      if constexpr (Ahead)
        for (int n = 0; n < N; n += kTileVecs) fetch_ahead(line + step + n * kWidth * 4);
    });
  }
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { store(out + r * out_stride + n * kWidth, acc[r][n]); }); });
}

// The same for the first `tokens` tokens of one tile. What lies in the slots past them is never multiplied.
template <Act A, int R, int N>
void add_part_of_tile(const float* p, const unsigned char* values, int64_t value_stride, int64_t tokens, float* out,
                      int64_t out_stride) {
  using D = Dot<A>;
  constexpr int64_t p_stride = kBlock / D::kPer * D::kWords;
  vf acc[R][N];
  const unsigned char* right[N];
  for (int n = 0; n < N; ++n) right[n] = values + n * kWidth * 4;
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { acc[r][n] = load(out + r * out_stride + n * kWidth); }); });
  multiply<A>(acc, p, p_stride, right, value_stride, tokens / D::kPer, kNothingAhead);
  if (tokens % D::kPer) {
    const int64_t s = tokens / D::kPer;
    unrolled<N>(PINNATE_EACH(n) {
      const typename D::Right b = D::load_even(right[n] + s * value_stride);
      unrolled<R>(PINNATE_EACH(r) { D::mac(acc[r][n], b, p + r * p_stride + s * D::kWords); });
    });
  }
  unrolled<R>(PINNATE_EACH(r) { unrolled<N>(PINNATE_EACH(n) { store(out + r * out_stride + n * kWidth, acc[r][n]); }); });
}

// ---- int8 ---------------------------------------------------------------------------------------------------------

inline vf load_int8(const unsigned char* p) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  int8_t b[kWidth];
  memcpy(b, p, sizeof b);
  return vf{static_cast<float>(b[0]), static_cast<float>(b[1]), static_cast<float>(b[2]), static_cast<float>(b[3])};
#endif
}

// out[i] = bytes[i] * scales[i % Period], as elements of A. Period is a multiple of 16 and divides `count`.
template <Act A, int Period>
[[gnu::always_inline]] inline void widen_row(const unsigned char* bytes, const float* scales, int64_t count, unsigned char* out) {
  vf factors[Period / kWidth];
  for (int j = 0; j < Period / kWidth; ++j) factors[j] = load(scales + j * kWidth);
  for (int64_t i = 0; i < count; i += Period)
    for (int j = 0; j < Period; j += kWidth) {
      const vf v = load_int8(bytes + i + j) * factors[j / kWidth];
      if constexpr (A == Act::kBF16) {
        store_bf16(reinterpret_cast<bf16*>(out) + i + j, v);
      } else {
        store(reinterpret_cast<float*>(out) + i + j, v);
      }
    }
}

// ---- softmax weights ----------------------------------------------------------------------------------------------

// Weights<A>(scale, reference)(score) = e^((score - reference) * scale): 0 at -inf, also where the reference is -FLT_MAX.
template <Act A>
struct Weights {
  vf unit, reference;
  Weights(float scale, float relative_to) : unit(set1(scale)), reference(set1(relative_to)) {}
  vf operator()(vf score) const { return exp((score - reference) * unit); }
};

#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
// 2^x = 2^floor(x) p(x - floor(x)), p a minimax polynomial fitted for this file (relative error 8e-8). What rounding
// reference * scale loses is one factor for all weights of the row. (A polynomial of degree 3, relative error 7.5e-5, a 26th
// of what rounding to bf16 may lose, is not good enough: it raised the error of log-probabilities from 0.035 to 0.041, for
// 1 to 3 % of this kernel's time.)
template <>
struct Weights<Act::kBF16> {
  vf unit, offset;
  Weights(float scale, float relative_to)
      : unit(set1(scale * 1.44269504f)), offset(min(set1(0.0f) - set1(relative_to) * unit, set1(FLT_MAX))) {}
  vf operator()(vf score) const {
    constexpr float kP[] = {1.86713017e-3f, 9.01702978e-3f, 5.57999127e-2f, 2.40164444e-1f, 6.93151295e-1f, 1.0f};
    const vf x = fma(score, unit, offset);
    return _mm512_scalef_ps(polynomial(_mm512_reduce_ps(x, 0x09), kP), x);
  }
};
#elif defined(__AVX2__) && defined(__FMA__)
// The same. p is in [1, 2), and its exponent takes the integer part: at -127, where p is 1, that gives +0; what is between that
// and -126 is subnormal, which is zero here.
template <>
struct Weights<Act::kBF16> {
  vf unit, offset;
  Weights(float scale, float relative_to)
      : unit(set1(scale * 1.44269504f)), offset(min(set1(0.0f) - set1(relative_to) * unit, set1(FLT_MAX))) {}
  vf operator()(vf score) const {
    constexpr float kP[] = {1.86713017e-3f, 9.01702978e-3f, 5.57999127e-2f, 2.40164444e-1f, 6.93151295e-1f, 1.0f};
    const vf x = max(set1(-127.0f), fma(score, unit, offset)), whole = _mm256_floor_ps(x);
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(polynomial(x - whole, kP)), exponent));
  }
};
#endif

// Stores the weights of two tiles as a left operand of Dot<A>. Both go together because a bf16 vector holds two; `w` has
// 2 * kTileVecs vectors.
template <Act A>
inline void store_weights(const vf* w, float* p) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if constexpr (A == Act::kBF16) return _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
#endif
  for (int n = 0; n < 2 * kTileVecs; ++n) store(p + n * kWidth, w[n]);
}

// sum, by lanes, and the weights that were stored in the `words` words at p, a multiple of kWidth.
template <Act A>
inline vf add_weights(const float* p, int64_t words, vf sum) {
  for (int64_t i = 0; i < words; i += kWidth) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if constexpr (A == Act::kBF16) {
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(p + i), (__m512bh)_mm512_set1_epi32(0x3f803f80));
      continue;
    }
#endif
    sum = sum + load(p + i);
  }
  return sum;
}
