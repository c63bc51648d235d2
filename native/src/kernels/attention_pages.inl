// The layout of a page, private to attention.cpp, and what writes a token into it.
//
// A page holds for each KV head a tile of keys, then a tile of values, in the 32-bit lanes of attention_micro.inl:
//   keys   [head_dim / per][page_size]           lanes: neighbours are tokens; a vector is one step of q . k for many tokens
//   values [page_size / per][head_dim, padded]   lanes: neighbours are columns; a vector is one step of p . v for many columns
// with per = 2 (bf16, pairs) or 1 (fp32), columns padded to a multiple of 16. Pages should be 64-byte aligned (speed only).
// With int8 the order is the same and an element is a byte; the scales of the keys, then of the values, float [page_size]
// each, end the head. A block of keys is widened to the lanes above before it is used.

struct Geometry {  // of one layer's pages; bytes unless said otherwise
  int64_t per, steps;               // elements in a lane; lanes of one key
  int64_t columns;                  // of a value row, padded, in lanes
  int64_t key_stride, value_stride;
  int64_t lane;                     // as stored
  int64_t keys, scales, head, page; // keys of a head, keys and values of a head, with the scales, a page

  explicit Geometry(const KVLayout& kv) {
    per = kv.act == Act::kBF16 ? 2 : 1;
    steps = kv.head_dim / per;
    columns = (kv.head_dim + 15) / 16 * 16;
    lane = kv.int8 ? per : 4;
    key_stride = kv.page_size * lane;
    value_stride = columns * lane;
    keys = steps * key_stride;
    scales = keys + kv.page_size / per * value_stride;
    head = scales + (kv.int8 ? 2 * 4 * kv.page_size : 0);
    page = kv.num_kv_heads * head;
  }
};

// Writes one token's key and value of one head. Only that token's bytes are touched: other threads may write its neighbours.
void write_slot(const Geometry& g, int64_t head_dim, const float* k, const float* v, unsigned char* base, int64_t offset,
                bf16* scratch) {
  unsigned char* keys = base + offset * 4;
  unsigned char* values = base + g.keys + offset / g.per * g.value_stride;
  if (g.per == 1) {
    for (int64_t i = 0; i < head_dim; ++i) memcpy(keys + i * g.key_stride, k + i, 4);
    memcpy(values, v, static_cast<size_t>(head_dim) * 4);
    return;
  }
  store_act_row(k, scratch, Act::kBF16, head_dim);
  for (int64_t i = 0; i < g.steps; ++i) memcpy(keys + i * g.key_stride, scratch + 2 * i, 4);
  store_act_row(v, scratch, Act::kBF16, head_dim);
  values += offset % 2 * 2;
  for (int64_t i = 0; i < head_dim; ++i) memcpy(values + i * 4, scratch + i, 2);
}

// x -> bytes; returns the scale. What is not finite makes the scale, and so all that is read back, NaN.
float quantize_row(const float* x, int64_t count, int8_t* bytes) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const float size = fabsf(x[i]);
    finite &= size < INFINITY;
    largest = size > largest ? size : largest;
  }
  const float inverse = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = finite ? x[i] * inverse + kMagic - kMagic : 1.0f;
    bytes[i] = static_cast<int8_t>(rounded < -127.0f ? -127.0f : rounded > 127.0f ? 127.0f : rounded);
  }
  return finite ? largest / 127.0f : NAN;
}

// write_slot with int8.
void write_bytes(const Geometry& g, const KVLayout& kv, const float* k, const float* v, unsigned char* base, int64_t offset,
                 int8_t* scratch) {
  const float key_scale = quantize_row(k, kv.head_dim, scratch);
  unsigned char* keys = base + offset * g.lane;
  for (int64_t i = 0; i < kv.head_dim; ++i) memcpy(keys + i / g.per * g.key_stride + i % g.per, scratch + i, 1);
  const float value_scale = quantize_row(v, kv.head_dim, scratch);
  unsigned char* values = base + g.keys + offset / g.per * g.value_stride + offset % g.per;
  for (int64_t i = 0; i < kv.head_dim; ++i) memcpy(values + i * g.per, scratch + i, 1);
  memcpy(base + g.scales + offset * 4, &key_scale, 4);
  memcpy(base + g.scales + (kv.page_size + offset) * 4, &value_scale, 4);
}
