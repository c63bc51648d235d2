// gemm, packing and dequantisation of every instruction set this CPU runs, against loops in double precision; and the
// determinism contract: the bits of a row do not depend on the rows around it, the tiles, or the threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../src/cpu.h"
#include "check.h"
#include "gemm_data.h"
#include "isa_check.h"
#include "kernel_parts.h"
#include "weights_data.h"

namespace {

using namespace pinnate;
using namespace pinnate::test;

std::mt19937& rng() {
  static std::mt19937 r(7);
  return r;
}

std::vector<KernelTable> tables() {
  std::vector<KernelTable> all;
  for (const std::string& name : cpu_info().isas)
    if (is_wanted(name)) all.push_back(gemm_kernels(name));
  CHECK(!all.empty());
  return all;
}

// What the packed weight holds: bf16-rounded with Act::kBF16.
double weight(const Weights& w, int64_t row, int64_t col, Act act) {
  const float f = w.at(row, col);
  return act == Act::kF32 ? f : from_bf16(to_bf16(f));
}

struct Sum {
  double value, magnitude;  // of x . w, and of the sum of absolute products: the scale of rounding errors
};

Sum dot(const Rows& x, int64_t r, const Weights& w, int64_t row) {
  Sum s{0, 0};
  for (int64_t i = 0; i < x.k; ++i) {
    const double p = x.at(r, i) * weight(w, row, i, x.act);
    s.value += p, s.magnitude += std::fabs(p);
  }
  return s;
}

bool close(double got, double want, double magnitude, bool rounded) {
  const double tolerance = 3e-6 * magnitude + 1e-6 + (rounded ? std::fabs(want) / 256 : 0);
  return std::fabs(got - want) <= tolerance;
}

std::string label(const KernelTable& kt, Act act, const Shape& s, Epilogue e) {
  return std::string(kt.isa) + (act == Act::kF32 ? " f32" : " bf16") + " m" + std::to_string(s.m) + " n" +
         std::to_string(s.n) + " k" + std::to_string(s.k) + " epilogue " + std::to_string(static_cast<int>(e));
}

// Store, add and store-act epilogues, with and without bias, weights stacked from three sources; columns past n untouched.
void test_plain(const KernelTable& kt, ThreadPool& pool, Act act, const Shape& s, Epilogue e, bool with_bias) {
  const int64_t n0 = s.n / 2, n1 = s.n - n0 - s.n / 4, n2 = s.n / 4, ldo = s.n + 3;
  std::vector<Weights> parts;
  for (const int64_t n : {n0, n1, n2})
    if (n > 0) parts.push_back(random_weights(TensorType::kF32, n, s.k, rng(), n % 7 != 0));
  std::vector<SourceMatrix> sources;
  for (const Weights& w : parts) sources.push_back(w.matrix);
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, sources.data(), static_cast<int>(sources.size()), act, false);
  const Rows x = random_rows(rng(), act, s.m, s.k, s.k + s.k % 2 + 5);
  std::vector<float> bias(static_cast<size_t>(s.n));
  for (auto& b : bias) b = static_cast<float>(rng()() % 1000) / 500;
  const bool f32 = e != Epilogue::kStoreAct || act == Act::kF32;
  std::vector<unsigned char> out(static_cast<size_t>(s.m * ldo) * (f32 ? 4 : 2));
  const float before = 0.75f;
  for (size_t i = 0; f32 && i < out.size(); i += 4) std::memcpy(&out[i], &before, 4);
  const std::vector<unsigned char> untouched = out;
  const AlignedBuffer scratch = scratch_for(kt, packed, s.m);
  gemm(kt, pool, {x.data(), x.ldx, s.m, &packed, with_bias ? bias.data() : nullptr, e, out.data(), ldo, scratch.get()});

  bool right = true, kept = true;
  for (int64_t r = 0; r < s.m; ++r) {
    for (int64_t j = 0; j < s.n; ++j) {
      const auto [w, row] = j < n0        ? std::pair(0, j)
                            : j < n0 + n1 ? std::pair(n0 > 0 ? 1 : 0, j - n0)
                                          : std::pair(n0 > 0 ? 2 : 1, j - n0 - n1);
      const Sum sum = dot(x, r, parts[static_cast<size_t>(w)], row);
      const double want = sum.value + (with_bias ? bias[static_cast<size_t>(j)] : 0) + (e == Epilogue::kAddF32 ? before : 0);
      right = right && close(read_out(out, r * ldo + j, f32), want, sum.magnitude, !f32);
    }
    for (int64_t j = s.n; j < ldo; ++j)
      kept = kept && read_out(out, r * ldo + j, f32) == read_out(untouched, r * ldo + j, f32);
  }
  CHECK_IN(right, label(kt, act, s, e).c_str());
  CHECK_IN(kept, label(kt, act, s, e).c_str());
}

void test_swiglu(const KernelTable& kt, ThreadPool& pool, Act act, const Shape& s) {
  const int64_t half = s.n;  // columns of gate
  const Weights gate = random_weights(TensorType::kF32, half, s.k, rng()), up = random_weights(TensorType::kF32, half, s.k, rng());
  const SourceMatrix sources[2] = {gate.matrix, up.matrix};
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, sources, 2, act, true);
  CHECK(packed.n == 2 * half);
  const Rows x = random_rows(rng(), act, s.m, s.k, s.k);
  const bool f32 = act == Act::kF32;
  std::vector<unsigned char> out(static_cast<size_t>(s.m * half) * act_bytes(act));
  const AlignedBuffer scratch = scratch_for(kt, packed, s.m);
  gemm(kt, pool, {x.data(), x.ldx, s.m, &packed, nullptr, Epilogue::kSwiGLUAct, out.data(), half, scratch.get()});
  bool right = true;
  for (int64_t r = 0; r < s.m; ++r)
    for (int64_t j = 0; j < half; ++j) {
      const Sum g = dot(x, r, gate, j), u = dot(x, r, up, j);
      const double want = g.value / (1 + std::exp(-g.value)) * u.value;
      const double scale = (g.magnitude + 1) * (std::fabs(u.value) + 1) + u.magnitude * (std::fabs(g.value) + 1);
      right = right && close(read_out(out, r * half + j, f32), want, scale, !f32);
    }
  CHECK_IN(right, label(kt, act, s, Epilogue::kSwiGLUAct).c_str());
}

void test_products(const KernelTable& kt) {
  const Shape shapes[] = {{1, 1, 1},    {2, 63, 2},   {3, 64, 33},   {4, 65, 7},    {5, 128, 96},  {6, 130, 31},
                          {7, 70, 64},  {8, 200, 15}, {13, 66, 100}, {25, 129, 65}, {31, 64, 130}, {200, 67, 9},
                          {9, 65, 2500}, {1, 3, 4099}, {101, 5, 2051}};
  ThreadPool pool(2);
  for (const Act act : {Act::kF32, Act::kBF16})
    for (const Shape& s : shapes) {
      test_plain(kt, pool, act, s, Epilogue::kStoreF32, s.m % 2 == 0);
      test_plain(kt, pool, act, s, Epilogue::kAddF32, s.m % 2 == 1);
      test_plain(kt, pool, act, s, Epilogue::kStoreAct, s.n % 2 == 0);
      test_swiglu(kt, pool, act, s);
    }
}

// silu over its whole range: gate = x, up = 1.
void test_silu_range(const KernelTable& kt) {
  ThreadPool pool(1);
  const float gate[2] = {1.0f, 0.0f}, up[2] = {0.0f, 1.0f};  // gate takes x[0], up takes x[1] = 1
  const SourceMatrix sources[2] = {{TensorType::kF32, reinterpret_cast<const unsigned char*>(gate), 1, 2},
                                   {TensorType::kF32, reinterpret_cast<const unsigned char*>(up), 1, 2}};
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, sources, 2, Act::kF32, true);
  double worst = 0;
  for (int i = -9000; i <= 9000; ++i) {
    const float x[2] = {static_cast<float>(i) * 0.01f, 1.0f};
    float out = 0;
    gemm(kt, pool, {x, 2, 1, &packed, nullptr, Epilogue::kSwiGLUAct, &out, 1});
    const double want = x[0] / (1 + std::exp(-static_cast<double>(x[0])));
    if (std::fabs(want) > 1e-36) worst = std::max(worst, std::fabs(out - want) / std::fabs(want));
  }
  CHECK_IN(worst < 4e-7, (std::string(kt.isa) + " silu, relative error " + std::to_string(worst * 1e7) + "e-7").c_str());
  auto silu = [&](float v) {
    const float x[2] = {v, 1.0f};
    float out = 0;
    gemm(kt, pool, {x, 2, 1, &packed, nullptr, Epilogue::kSwiGLUAct, &out, 1});
    return out;
  };
  CHECK(silu(1e30f) == 1e30f);
  CHECK(std::fabs(silu(-1e30f)) < 1e-30f);
  CHECK(std::isnan(silu(std::numeric_limits<float>::quiet_NaN())));
}

// Each row of a batch is bitwise what it is alone, for every m, cut into tiles in any way, on one thread or several.
void test_determinism(const KernelTable& kt, Act act, int64_t k, Epilogue e) {
  const bool swiglu = e == Epilogue::kSwiGLUAct;
  const int64_t n = 170, rows = 401;  // columns: half of the last panel and a part of the other half
  ThreadPool one(1), two(2), four(4);  // panels that they share evenly, not evenly, and fewer than threads
  const Weights a = random_weights(TensorType::kF32, n, k, rng()), b = random_weights(TensorType::kF32, n, k, rng());
  const SourceMatrix sources[2] = {a.matrix, b.matrix};
  WeightArena arena;
  const PackedWeight packed = pack(kt, two, arena, sources, swiglu ? 2 : 1, act, swiglu);
  const Rows x = random_rows(rng(), act, rows, k, k + 1);
  const size_t size = swiglu ? act_bytes(act) : 4, row_size = static_cast<size_t>(n) * size;
  std::vector<unsigned char> before(static_cast<size_t>(rows) * row_size);  // what kAddF32 adds to
  for (size_t i = 0; i < before.size(); i += 4) {
    const float f = static_cast<float>(i % 977) / 97;
    std::memcpy(&before[i], &f, 4);
  }
  std::vector<unsigned char> alone = before, batch;
  const AlignedBuffer scratch = scratch_for(kt, packed, rows);
  for (int64_t r = 0; r < rows; ++r)
    gemm(kt, one, {x.row(r), x.ldx, 1, &packed, nullptr, e, &alone[static_cast<size_t>(r) * row_size], n, scratch.get()});
  const auto same = [&](int64_t m) { return std::equal(batch.begin(), batch.begin() + m * static_cast<int64_t>(row_size), alone.begin()); };
  bool equal = true;
  for (int64_t m = 1; m <= rows; m += m < 30 ? 1 : m < 75 ? 9 : 163) {
    const auto args = [&] {
      batch = before;
      return GemmArgs{x.data(), x.ldx, m, &packed, nullptr, e, batch.data(), n, scratch.get()};
    };
    for (ThreadPool* pool : {&one, &two, &four}) {
      gemm(kt, *pool, args());
      equal = equal && same(m);
    }
    gemm_alone(kt, args());
    equal = equal && same(m);
  }
  for (const int64_t tile : {1, 2, 5, 11, 64}) {
    batch = before;
    GemmArgs args{x.data(), x.ldx, rows, &packed, nullptr, e, batch.data(), n, scratch.get()};
    args.arranged = kt.arranges_always && act == Act::kBF16;
    if (args.arranged) kt.arrange_rows(args, 0, rows);
    for (int64_t panel = packed.panels - 1; panel >= 0; --panel)
      for (int64_t m0 = 0; m0 < rows; m0 += tile) kt.gemm_tile(args, m0, std::min(rows, m0 + tile), panel);
    equal = equal && same(rows);
  }
  CHECK_IN(equal, label(kt, act, {rows, n, k}, e).c_str());
}

// Bit for bit the definition, on every instruction set; also a count that ends inside a block.
void test_dequantize(const KernelTable& kt) {
  for (const TensorType type : kTypes) {
    const Weights w = random_weights(type, 1, 2560, rng());
    for (const int64_t count : {int64_t{2560}, int64_t{2560 - 131}}) {
      std::vector<float> out(2561, 42.0f);
      kt.dequantize(type, w.bytes.data(), count, out.data());
      bool exact = true;
      for (int64_t i = 0; i < count; ++i) exact = exact && out[static_cast<size_t>(i)] == w.at(0, i);
      CHECK_IN(exact, (std::string(kt.isa) + " type " + std::to_string(static_cast<int>(type))).c_str());
      CHECK(out[static_cast<size_t>(count)] == 42.0f);
    }
  }
  const unsigned char halves[] = {0x01, 0x00, 0xff, 0x83, 0x00, 0x7c, 0x00, 0xfc, 0x00, 0x7e, 0x00, 0x80};
  float out[6];
  kt.dequantize(TensorType::kF16, halves, 6, out);
  CHECK(out[0] == std::ldexp(1.0f, -24) && out[1] == -std::ldexp(1023.0f, -24));
  CHECK(std::isinf(out[2]) && out[2] > 0 && std::isinf(out[3]) && out[3] < 0 && std::isnan(out[4]));
  CHECK(out[5] == 0 && std::signbit(out[5]));
}

// Packing keeps every weight of every storage type: read back they are the bf16-rounded (or exact) values.
void test_pack_and_unpack(const KernelTable& kt) {
  ThreadPool pool(2);
  for (const TensorType type : kTypes)
    for (const Act act : {Act::kF32, Act::kBF16}) {
      const int64_t n = 131, k = type == TensorType::kF32 || type == TensorType::kF16 ? 37 : 512, ldo = k + 2;
      const Weights w = random_weights(type, n, k, rng(), true);
      WeightArena arena;
      const PackedWeight packed = pack(kt, pool, arena, &w.matrix, 1, act, false);
      CHECK(reinterpret_cast<uintptr_t>(packed.data) % 64 == 0);
      std::vector<int32_t> ids;
      for (int32_t i = 0; i < n; ++i) ids.push_back((i * 37 + 5) % static_cast<int32_t>(n));
      std::vector<float> out(static_cast<size_t>(n * ldo), 42.0f);
      kt.unpack_rows(packed, ids.data(), n, 2.0f, out.data(), ldo);
      bool exact = true;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < k; ++j)
          exact = exact && out[static_cast<size_t>(i * ldo + j)] ==
                               static_cast<float>(2 * weight(w, ids[static_cast<size_t>(i)], j, act));
        exact = exact && out[static_cast<size_t>(i * ldo + k)] == 42.0f;
      }
      CHECK_IN(exact, (std::string(kt.isa) + " type " + std::to_string(static_cast<int>(type))).c_str());
    }
}

void test_rounding(const KernelTable& kt) {
  ThreadPool pool(1);
  const uint32_t bits[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f817fff, 0xbf808000, 0x7f7fffff, 0x7f800000, 0x00000000};
  const uint32_t want[] = {0x3f800000, 0x3f820000, 0x3f810000, 0x3f810000, 0xbf800000, 0x7f800000, 0x7f800000, 0x00000000};
  const SourceMatrix source{TensorType::kF32, reinterpret_cast<const unsigned char*>(bits), 1, 8};
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, &source, 1, Act::kBF16, false);
  const int32_t id = 0;
  float out[8];
  kt.unpack_rows(packed, &id, 1, 1.0f, out, 8);
  for (int i = 0; i < 8; ++i) CHECK_IN(out[i] == from_bits(want[i]), std::to_string(i).c_str());
}

// Sums of two numbers as rows of bf16: ties to even, past the largest to infinity, NaN stays NaN.
void test_stored_rounding(const KernelTable& kt) {
  ThreadPool pool(1);
  const float inf = std::numeric_limits<float>::infinity(), most = from_bf16(0x7f7f);
  const float sums[][2] = {{1, 0x1p-8f}, {1, 0x1.8p-7f}, {1, -0x1p-9f}, {-1, -0x1p-8f}, {most, 0x1p119f}, {most, 0x1p120f}, {inf, 1}, {inf, -inf}};
  std::vector<float> w(140, 1.0f);
  const SourceMatrix source{TensorType::kF32, reinterpret_cast<const unsigned char*>(w.data()), 70, 2};
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, &source, 1, Act::kBF16, false);
  const AlignedBuffer scratch = scratch_for(kt, packed, 1);
  for (const auto& pair : sums) {
    const bf16 x[2] = {to_bf16(pair[0]), to_bf16(pair[1])};
    bf16 out[70];
    gemm(kt, pool, {x, 2, 1, &packed, nullptr, Epilogue::kStoreAct, out, 70, scratch.get()});
    const float want = from_bf16(to_bf16(pair[0] + pair[1]));
    for (const bf16 got : out) CHECK(std::isnan(want) ? std::isnan(from_bf16(got)) : from_bf16(got) == want);
  }
}

void test_refusals(const KernelTable& kt) {
  ThreadPool pool(1);
  const Weights a = random_weights(TensorType::kF32, 4, 8, rng()), b = random_weights(TensorType::kF32, 4, 6, rng()),
                c = random_weights(TensorType::kF32, 5, 8, rng());
  auto refused = [&](std::vector<SourceMatrix> s, bool swiglu) {
    try {
      WeightArena arena;
      pack(kt, pool, arena, s.data(), static_cast<int>(s.size()), Act::kBF16, swiglu);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused({a.matrix, c.matrix}, false));
  CHECK(refused({}, false));
  CHECK(refused({a.matrix, b.matrix}, false));
  CHECK(refused({a.matrix}, true));
  CHECK(refused({a.matrix, c.matrix}, true));
  SourceMatrix ragged = a.matrix;
  ragged.type = TensorType::kQ4_1;
  CHECK(refused({ragged}, false));
  ragged.type = static_cast<TensorType>(99);
  CHECK(refused({ragged}, false));
}

}  // namespace

int main() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // as in the engine
#endif
  for (const KernelTable& kt : tables()) {
    test_products(kt);
    test_silu_range(kt);
    for (const Act act : {Act::kF32, Act::kBF16}) {
      for (const Epilogue e : {Epilogue::kStoreF32, Epilogue::kAddF32, Epilogue::kSwiGLUAct})
        for (const int64_t k : {97, 2200}) test_determinism(kt, act, k, e);
    }
    test_dequantize(kt);
    test_pack_and_unpack(kt);
    test_rounding(kt);
    test_stored_rounding(kt);
    test_refusals(kt);
  }
  return finish("gemm");
}
