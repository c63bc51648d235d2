// What products of every weight format share, included by gemm.cpp and quant.cpp in the namespace of their ISA: the epilogues,
// and where a panel's columns come from.

constexpr int64_t kHalf = kPanel / 2;  // columns; of a swiglu panel, those of gate and those of up

PINNATE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- epilogues: one row of 64 sums -> out ---------------------------------------------------------------------------

// Writes `width` results of one row (swiglu: of as many sums of gate and then as many of up); all columns are there to be read
// and written.
PINNATE_INLINE void finish_row(Epilogue e, Act act, int64_t width, const float* c, const float* bias, void* out) {
  if (e == Epilogue::kSwiGLUAct) {
    for (int64_t j = 0; j < width; j += kLanes) {
      const vf v = vsilu(vload(c + j)) * vload(c + width + j);
      if (act == Act::kF32) vstore(static_cast<float*>(out) + j, v);
      else vstore_bf16(static_cast<bf16*>(out) + j, v);
    }
    return;
  }
  float* f = static_cast<float*>(out);
  for (int64_t j = 0; j < width; j += kLanes) {
    vf v = vload(c + j);
    if (bias != nullptr) v = v + vload(bias + j);
    if (e == Epilogue::kAddF32) v = vload(f + j) + v;
    if (e == Epilogue::kStoreAct && act == Act::kBF16) vstore_bf16(static_cast<bf16*>(out) + j, v);
    else vstore(f + j, v);
  }
}

// Results [column, column + kWidth) of the product, as many as there are, of sums at c, kStride for each row.
template <int64_t kWidth, int64_t kStride = kPanel>
void finish_columns(const GemmArgs& a, int64_t row, int64_t rows, int64_t column, const float* c) {
  const int64_t n = a.epilogue == Epilogue::kSwiGLUAct ? a.w->n / 2 : a.w->n, columns = min64(kWidth, n - column);
  if (columns <= 0) return;
  const size_t size = stores_floats(a.epilogue) || a.w->act == Act::kF32 ? 4 : 2;
  const float* bias = a.bias == nullptr || a.epilogue == Epilogue::kSwiGLUAct ? nullptr : a.bias + column;
  alignas(64) float padded_bias[kWidth], padded_out[kWidth];
  if (columns < kWidth && bias != nullptr) {
    for (int64_t j = 0; j < kWidth; ++j) padded_bias[j] = j < columns ? bias[j] : 0.0f;
    bias = padded_bias;
  }
  for (int64_t r = 0; r < rows; ++r, c += kStride) {
    unsigned char* out = static_cast<unsigned char*>(a.out) + static_cast<size_t>((row + r) * a.ldo + column) * size;
    if (columns == kWidth) {
      finish_row(a.epilogue, a.w->act, kWidth, c, bias, out);
      continue;
    }
    const size_t bytes = static_cast<size_t>(columns) * size;
    std::memset(padded_out, 0, sizeof padded_out);
    if (a.epilogue == Epilogue::kAddF32) std::memcpy(padded_out, out, bytes);
    finish_row(a.epilogue, a.w->act, kWidth, c, bias, padded_out);
    std::memcpy(out, padded_out, bytes);
  }
}

// `c`: 64 sums for each row, of which a.half says which are there.
inline void finish(const GemmArgs& a, int64_t row, int64_t rows, int64_t panel, const float* c) {
  if (a.epilogue == Epilogue::kSwiGLUAct) return finish_columns<kHalf>(a, row, rows, panel * kHalf, c);
  if (a.half < 0) return finish_columns<kPanel>(a, row, rows, panel * kPanel, c);
  const int64_t first = a.half * kHalf;
  finish_columns<kHalf>(a, row, rows, panel * kPanel + first, c + first);
}

// Halves of a panel that a product is asked for: [first, last).
struct Halves {
  int64_t first, last;
};
inline Halves halves_of(const GemmArgs& a) { return a.half < 0 ? Halves{0, 2} : Halves{a.half, a.half + 1}; }

// Where column j of a panel comes from; null for padding.
inline const unsigned char* find_row(const SourceMatrix* sources, int count, const PackedWeight& w, int64_t panel, int64_t j,
                              TensorType& type) {
  int64_t row;
  int i = 0;
  if (w.swiglu) {
    i = j < kHalf ? 0 : 1;
    row = panel * kHalf + j % kHalf;
    if (row >= w.n / 2) return nullptr;
  } else {
    row = panel * kPanel + j;
    if (row >= w.n) return nullptr;
    for (; i < count - 1 && row >= sources[i].rows; ++i) row -= sources[i].rows;
  }
  const SourceMatrix& s = sources[i];
  if (s.row_order != nullptr) row = s.row_order[row];
  type = s.type;
  return s.data + row * stored_bytes(s.type, s.cols);
}
