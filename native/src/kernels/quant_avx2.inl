// The micro kernel for 16 registers, included by quant.cpp in the namespace of its ISA. They hold the dot products of one
// block; the sums of floats rest in c, and all columns of a block are done before the next, so weights are read as a stream.
//
// Rows that meet weights of 8 bits keep 16: vpmaddubsw with two signed bytes needs |w| and a sign for each row, and then
// vpmaddwd, so that bytes that become numbers of 16 bits once for all rows take as many instructions. 4 k of a row are the
// pairs that a mask and a shift make of four weights: [k0, k2], [k1, k3].
//
// What bounds it is the number of instructions (about 3.4 in a cycle): of about 46 for 32 k of a row and 8 columns in int8, 32
// are dot products, 3 the sum of floats, the others loads and stores; in int4 16 of 31.
template <int R, int V>
PINNATE_INLINE void dot_wide(vi (&dot)[R][V], const unsigned char* w, const unsigned char* x, int64_t ldx) {
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g, w += kGroupBytes, x += 8)
    unrolled<2>(PINNATE_EACH(part) {
      vi b[V];
      unrolled<V>(PINNATE_EACH(v) {
        const vi bytes = iload(w + v * kLanes * 4);
        b[v] = part == 0 ? _mm256_and_si256(bytes, _mm256_set1_epi16(255)) : _mm256_srli_epi16(bytes, 8);
      });
      unrolled<R>(PINNATE_EACH(r) {
        const vi a = iset(load_int(x + r * ldx + part * 4));
        unrolled<V>(PINNATE_EACH(v) { dot[r][v] = in_order(_mm256_add_epi32(dot[r][v], _mm256_madd_epi16(b[v], a))); });
      });
    });
}

template <int R, WeightFormat F>
void micro(const Slice& s, float* c) {
  constexpr int V = kVectors<R>;
  const unsigned char *w = s.w, *x = s.x, *ahead = s.ahead;
  const int64_t blocks = s.blocks, lines = s.lines, ldx = s.ldx;
  for (int r = 0; s.first && r < R; ++r)
    for (int64_t column = 0; column < kHalf; column += kLanes) vstore(c + r * kPanel + column, vset(0.0f));
  for (int64_t b = 0; b < blocks; ++b, w += unit_bytes(F), x += row_block_bytes(F)) {
    __asm__ volatile("" ::: "memory");  // else GCC keeps a second copy of the sums on the stack
    for (int64_t line = lines; line > 0; --line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 1
    for (int64_t column = 0; column < kHalf; column += V * kLanes) {
      vi dot[R][V] = {};
      if constexpr (F == WeightFormat::kInt8) {
        unrolled<R>(PINNATE_EACH(r) {
          unrolled<V>(PINNATE_EACH(v) { dot[r][v] = iset(load_int(x + r * ldx + integer_bytes(F) + 4)); });
        });
        dot_wide(dot, w + column * 4, x, ldx);
      } else {
        dot_block<R, V, F>(dot, w + column * 4, x, ldx);
      }
      vf scale[V], minimum[V];
      for (int v = 0; v < V; ++v) {
        const unsigned char* at = w + data_bytes(F) + (column + v * kLanes) * 2;
        scale[v] = load_halves(at);
        if constexpr (F != WeightFormat::kInt8) minimum[v] = load_halves(at + kHalf * 2);
      }
      for (int r = 0; r < R; ++r) {
        const unsigned char* of_row = x + r * ldx + integer_bytes(F);
        const vf row_scale = vset(load_float(of_row)), row_sum = vset(load_float(of_row + 4));
        for (int v = 0; v < V; ++v) {
          const vi sum = F == WeightFormat::kInt8 ? dot[r][v] : sum_nibbles(dot[r][v]);
          float* at = c + r * kPanel + column + v * kLanes;
          vf acc = vfma(to_float((vi32)sum), scale[v] * row_scale, vload(at));
          if constexpr (F != WeightFormat::kInt8) acc = vfma(minimum[v], row_sum, acc);
          vstore(at, acc);
        }
      }
    }
  }
}
