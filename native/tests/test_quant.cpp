// Quantised weights of every instruction set this CPU runs: what packing keeps, products against exact integer arithmetic in
// double precision, and the determinism contract.
#include <algorithm>
#include <cmath>
#include <limits>
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

constexpr WeightFormat kFormats[] = {WeightFormat::kInt8, WeightFormat::kInt4};

std::mt19937& rng() {
  static std::mt19937 r(11);
  return r;
}

std::vector<KernelTable> tables() {
  std::vector<KernelTable> all;
  for (const std::string& name : cpu_info().isas) {
    if (!is_wanted(name)) continue;
    KernelTable t{};
    t.isa = name == "amx" ? "amx" : name == "avx512" ? "avx512" : name == "avx2" ? "avx2" : "portable";
    add_quant_kernels(t);
    all.push_back(t);
  }
  CHECK(!all.empty());
  return all;
}

std::string label(const KernelTable& kt, WeightFormat f, const std::string& more) {
  return std::string(kt.isa) + (f == WeightFormat::kInt8 ? " int8 " : " int4 ") + more;
}

// Whether rows of `act` stay as they are, and weights are rounded to bf16 instead.
bool keeps(const KernelTable& kt, Act act) { return act == Act::kBF16 && !kt.quantizes_bf16; }

// The rows as the product sees them: each block of 32 rounded to multiples of a 127th (or so) of its largest magnitude, or none.
std::vector<double> rounded(const KernelTable& kt, WeightFormat format, const Rows& x) {
  const float levels = static_cast<float>(format == WeightFormat::kInt8 ? kt.int8_levels : 127);
  std::vector<double> out;
  for (int64_t r = 0; r < x.m; ++r)
    for (int64_t i = 0; i < x.k; ++i) {
      if (keeps(kt, x.act)) {
        out.push_back(x.at(r, i));
        continue;
      }
      float largest = 0;
      for (int64_t j = i / 32 * 32; j < std::min(x.k, i / 32 * 32 + 32); ++j) largest = std::max(largest, static_cast<float>(std::fabs(x.at(r, j))));
      const float step = largest * (1.0f / levels), inverse = largest == 0 ? 0.0f : levels / largest;
      out.push_back(static_cast<double>(std::nearbyintf(static_cast<float>(x.at(r, i)) * inverse)) * static_cast<double>(step));
    }
  return out;
}

// All rows of a packed weight (not swiglu), dequantised: [n, k].
std::vector<float> unpacked(const KernelTable& kt, const PackedWeight& w) {
  std::vector<float> out(static_cast<size_t>(w.n * w.k));
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < w.n; ++i) ids.push_back(i);
  unpack_rows(kt, w, ids.data(), w.n, 1.0f, out.data(), w.k);
  return out;
}

// The same as the product sees them: bf16 (to nearest, halves away from zero) where rows are.
std::vector<float> weights_of(const KernelTable& kt, const PackedWeight& w) {
  std::vector<float> out = unpacked(kt, w);
  for (float& f : out) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    u = keeps(kt, w.act) ? (u + 0x8000) & 0xffff0000 : u;
    std::memcpy(&f, &u, 4);
  }
  return out;
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Blocks that the format holds as they are come back bit for bit, rows in the order asked for, times the scale.
void test_exact(const KernelTable& kt) {
  ThreadPool pool(2);
  const std::pair<TensorType, WeightFormat> kept[] = {
      {TensorType::kQ8_0, WeightFormat::kInt8}, {TensorType::kQ4_0, WeightFormat::kInt4}, {TensorType::kQ4_1, WeightFormat::kInt4}};
  for (const auto& [type, format] : kept) {
    const int64_t n = 131, k = 288, ldo = k + 2;
    const Weights w = random_weights(type, n, k, rng(), true);
    WeightArena arena;
    const PackedWeight packed = pack(kt, pool, arena, &w.matrix, 1, Act::kBF16, false, format);
    CHECK(reinterpret_cast<uintptr_t>(packed.data) % 64 == 0 && packed.panel_bytes % 64 == 0);
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < n; ++i) ids.push_back((i * 37 + 5) % static_cast<int32_t>(n));
    std::vector<float> out(static_cast<size_t>(n * ldo), 42.0f);
    unpack_rows(kt, packed, ids.data(), n, 2.0f, out.data(), ldo);
    bool exact = true;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < k; ++j)
        exact = exact && out[static_cast<size_t>(i * ldo + j)] == 2 * w.at(ids[static_cast<size_t>(i)], j);
      exact = exact && out[static_cast<size_t>(i * ldo + k)] == 42.0f;
    }
    CHECK_IN(exact, label(kt, format, "type " + std::to_string(static_cast<int>(type))).c_str());
  }
}

// The other types: an error of at most half a step (int8: of a 127th of the block's largest weight; int4: on average, of a
// 15th of its range, and K-blocks of 4 bits almost none).
void test_rounded(const KernelTable& kt) {
  ThreadPool pool(2);
  for (const WeightFormat format : kFormats)
    for (const TensorType type : kTypes) {
      const int64_t n = 70, k = type == TensorType::kF32 || type == TensorType::kBF16 ? 75 : 512;
      const Weights w = random_weights(type, n, k, rng());
      WeightArena arena;
      const PackedWeight packed = pack(kt, pool, arena, &w.matrix, 1, Act::kBF16, false, format);
      const std::vector<float> got = unpacked(kt, packed);
      // 4-bit numbers get the step that fits their levels best in the mean, which may be a longer one.
      const bool levels = type == TensorType::kQ4_0 || type == TensorType::kQ4_1 || type == TensorType::kQ4_K;
      bool near = true;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t b = 0; b < k; b += 32) {
          double low = w.at(i, b), high = low, worst = 0, squares = 0;
          const int64_t end = std::min(k, b + 32);
          for (int64_t j = b; j < end; ++j) {
            const double v = w.at(i, j), error = std::fabs(got[static_cast<size_t>(i * k + j)] - v);
            low = std::min(low, v), high = std::max(high, v), worst = std::max(worst, error), squares += error * error;
          }
          const double largest = std::max(std::fabs(low), std::fabs(high)), step = (high - low) / 15;
          const double halves = largest * 2e-3 + 2e-7;  // rounding of scale and minimum
          if (type == TensorType::kQ4_K && format == WeightFormat::kInt4) near = near && worst <= halves;
          else if (format == WeightFormat::kInt8) near = near && worst <= largest / 254 * (levels ? 1.6 : 1.01) + 4e-6;
          else near = near && std::sqrt(squares / static_cast<double>(end - b)) <= step / 2 + halves && worst <= 2 * step + halves;
        }
      CHECK_IN(near, label(kt, format, "type " + std::to_string(static_cast<int>(type))).c_str());
    }
}

// int4 must do better than plain rounding between the extremes: that one has an error of step / sqrt(12) on random weights.
void test_search_pays(const KernelTable& kt) {
  ThreadPool pool(1);
  const int64_t n = 64, k = 512;
  const Weights w = random_weights(TensorType::kF32, n, k, rng());
  WeightArena arena;
  const std::vector<float> got = unpacked(kt, pack(kt, pool, arena, &w.matrix, 1, Act::kF32, false, WeightFormat::kInt4));
  double squares = 0, plain = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t b = 0; b < k; b += 32) {
      float low = w.at(i, b), high = low;
      for (int64_t j = b; j < b + 32; ++j) low = std::min(low, w.at(i, j)), high = std::max(high, w.at(i, j));
      const double step = (static_cast<double>(high) - low) / 15;
      for (int64_t j = b; j < b + 32; ++j) {
        const double v = w.at(i, j), nearest = low + step * std::nearbyint((v - low) / step);
        plain += (nearest - v) * (nearest - v);
        squares += std::pow(got[static_cast<size_t>(i * k + j)] - v, 2);
      }
    }
  CHECK_IN(squares < 0.93 * plain, label(kt, WeightFormat::kInt4, std::to_string(squares / plain)).c_str());
}

// Constant, zero, very small and very large blocks.
void test_odd_blocks(const KernelTable& kt) {
  ThreadPool pool(1);
  std::vector<float> w(5 * 32, 0.0f);
  for (size_t i = 0; i < 32; ++i) {
    w[i] = 0.375f;
    w[64 + i] = i % 2 == 0 ? 1e-5f : -1e-5f;
    w[96 + i] = i % 2 == 0 ? 3e4f : -3e4f;
    w[128 + i] = i == 7 ? 1.0f : 0.0f;
  }
  const SourceMatrix source{TensorType::kF32, reinterpret_cast<const unsigned char*>(w.data()), 5, 32};
  for (const WeightFormat format : kFormats) {
    WeightArena arena;
    const std::vector<float> got = unpacked(kt, pack(kt, pool, arena, &source, 1, Act::kF32, false, format));
    for (size_t i = 0; i < w.size(); ++i) {
      const double tolerance = i / 32 == 2 ? 2e-6 : std::fabs(w[i]) * 1e-3 + (i / 32 == 4 ? 1e-3 : 0);
      CHECK_IN(std::fabs(got[i] - w[i]) <= tolerance, label(kt, format, std::to_string(i)).c_str());
    }
  }
}

// ---- products -------------------------------------------------------------------------------------------------------

struct Sum {
  double value = 0, magnitude = 0;
};

// Errors are those of float additions alone. A minimum and its scale's products may cancel: int4 sums are of larger numbers.
Sum dot(const std::vector<double>& x, int64_t r, const std::vector<float>& w, int64_t row, int64_t k) {
  Sum s;
  for (int64_t i = 0; i < k; ++i) {
    const double p = x[static_cast<size_t>(r * k + i)] * static_cast<double>(w[static_cast<size_t>(row * k + i)]);
    s.value += p;
    s.magnitude += std::fabs(x[static_cast<size_t>(r * k + i)]);
  }
  return s;
}

bool close(double got, double want, double magnitude, bool f32) {
  return std::fabs(got - want) <= 3e-6 * magnitude + 1e-6 + (f32 ? 0 : std::fabs(want) / 256);
}

// Every plain epilogue, weights stacked from two sources of different types, with and without bias; nothing past n written.
void test_plain(const KernelTable& kt, ThreadPool& pool, WeightFormat format, Act act, const Shape& s, Epilogue e) {
  const int64_t n0 = std::max<int64_t>(1, s.n / 3), ldo = s.n + 3;
  const Weights first = random_weights(TensorType::kF32, n0, s.k, rng(), n0 % 7 != 0);
  const Weights second = random_weights(TensorType::kBF16, s.n - n0, s.k, rng());
  const SourceMatrix sources[2] = {first.matrix, second.matrix};
  WeightArena arena;
  const PackedWeight packed = pack(kt, pool, arena, sources, s.n > n0 ? 2 : 1, act, false, format);
  const std::vector<float> w = weights_of(kt, packed);
  const Rows x = random_rows(rng(), act, s.m, s.k, s.k + 5);
  const std::vector<double> xs = rounded(kt, format, x);
  const bool with_bias = (s.m + static_cast<int64_t>(e)) % 2 == 0, f32 = e != Epilogue::kStoreAct || act == Act::kF32;
  std::vector<float> bias(static_cast<size_t>(s.n));
  for (auto& b : bias) b = static_cast<float>(rng()() % 1000) / 500;
  std::vector<unsigned char> out(static_cast<size_t>(s.m * ldo) * (f32 ? 4 : 2));
  const float before = 0.75f;
  for (size_t i = 0; f32 && i < out.size(); i += 4) std::memcpy(&out[i], &before, 4);
  const std::vector<unsigned char> untouched = out;
  const AlignedBuffer scratch = scratch_for(kt, packed, s.m);
  gemm(kt, pool, {x.row(0), x.ldx, s.m, &packed, with_bias ? bias.data() : nullptr, e, out.data(), ldo, scratch.get()});
  bool right = true, kept = true;
  for (int64_t r = 0; r < s.m; ++r)
    for (int64_t j = 0; j < ldo; ++j) {
      const double got = read_out(out, r * ldo + j, f32);
      if (j >= s.n) {
        kept = kept && got == read_out(untouched, r * ldo + j, f32);
        continue;
      }
      const Sum sum = dot(xs, r, w, j, s.k);
      const double want = sum.value + (with_bias ? bias[static_cast<size_t>(j)] : 0) + (e == Epilogue::kAddF32 ? before : 0);
      right = right && close(got, want, sum.magnitude, f32);
    }
  const std::string name = label(kt, format, s.text() + " epilogue " + std::to_string(static_cast<int>(e)));
  CHECK_IN(right, name.c_str());
  CHECK_IN(kept, name.c_str());
}

void test_swiglu(const KernelTable& kt, ThreadPool& pool, WeightFormat format, Act act, const Shape& s) {
  const Weights gate = random_weights(TensorType::kF32, s.n, s.k, rng()), up = random_weights(TensorType::kF32, s.n, s.k, rng());
  const SourceMatrix sources[2] = {gate.matrix, up.matrix};
  WeightArena arena;
  const std::vector<float> g = weights_of(kt, pack(kt, pool, arena, sources, 1, act, false, format));
  const std::vector<float> u = weights_of(kt, pack(kt, pool, arena, sources + 1, 1, act, false, format));
  const PackedWeight packed = pack(kt, pool, arena, sources, 2, act, true, format);
  const Rows x = random_rows(rng(), act, s.m, s.k, s.k);
  const std::vector<double> xs = rounded(kt, format, x);
  const bool f32 = act == Act::kF32;
  std::vector<unsigned char> out(static_cast<size_t>(s.m * s.n) * act_bytes(act));
  const AlignedBuffer scratch = scratch_for(kt, packed, s.m);
  gemm(kt, pool, {x.row(0), x.ldx, s.m, &packed, nullptr, Epilogue::kSwiGLUAct, out.data(), s.n, scratch.get()});
  bool right = true;
  for (int64_t r = 0; r < s.m; ++r)
    for (int64_t j = 0; j < s.n; ++j) {
      const Sum a = dot(xs, r, g, j, s.k), b = dot(xs, r, u, j, s.k);
      const double want = a.value / (1 + std::exp(-a.value)) * b.value;
      const double scale = (a.magnitude + 1) * (std::fabs(b.value) + 1) + b.magnitude * (std::fabs(a.value) + 1);
      right = right && close(read_out(out, r * s.n + j, f32), want, scale, f32);
    }
  CHECK_IN(right, label(kt, format, "swiglu " + s.text()).c_str());
}

void test_products(const KernelTable& kt) {
  const Shape shapes[] = {{1, 1, 1},   {2, 63, 31},  {3, 64, 32},  {4, 65, 33},   {5, 129, 96},  {6, 31, 64},   {7, 70, 64},
                          {13, 66, 100}, {25, 33, 65}, {101, 40, 700}, {9, 65, 1500}, {1, 3, 2055}, {31, 97, 641}};
  ThreadPool pool(2);
  for (const WeightFormat format : kFormats)
    for (const Act act : {Act::kF32, Act::kBF16})
      for (const Shape& s : shapes) {
        for (const Epilogue e : {Epilogue::kStoreF32, Epilogue::kAddF32, Epilogue::kStoreAct}) test_plain(kt, pool, format, act, s, e);
        test_swiglu(kt, pool, format, act, s);
      }
}

// The extreme bytes of both operands, everywhere: sums of 16 bits must not saturate. (Rows of bf16 take other ways.)
void test_extremes(const KernelTable& kt) {
  ThreadPool pool(1);
  const int64_t n = 64, k = 64;
  for (const WeightFormat format : kFormats) {
    const bool bytes = format == WeightFormat::kInt8;
    const size_t block = bytes ? 34 : 20;
    std::vector<unsigned char> w(static_cast<size_t>(n * k / 32) * block);
    for (size_t i = 0; i < w.size(); i += block) {
      std::fill_n(&w[i], block, static_cast<unsigned char>(bytes ? 0x80 : 0xff));
      w[i] = 0, w[i + 1] = 0x3c;  // 1.0
      if (!bytes) w[i + 2] = 0, w[i + 3] = 0;
    }
    const SourceMatrix source{bytes ? TensorType::kQ8_0 : TensorType::kQ4_1, w.data(), n, k};
    WeightArena arena;
    for (const Act act : {Act::kF32, Act::kBF16}) {
      const PackedWeight packed = pack(kt, pool, arena, &source, 1, act, false, format);
      const AlignedBuffer scratch = scratch_for(kt, packed, 24);
      for (const float value : {127.0f, -127.0f})
        for (const int64_t m : {1, 6, 24}) {  // 24: the way of many rows
          Rows x{act, m, k, k, {}, {}};
          x.f32.assign(static_cast<size_t>(m * k), value), x.b16.assign(static_cast<size_t>(m * k), to_bf16(value));
          std::vector<float> out(static_cast<size_t>(m * n));
          gemm(kt, pool, {x.data(), k, m, &packed, nullptr, Epilogue::kStoreF32, out.data(), n, scratch.get()});
          const float want = (bytes ? -128.0f : 15.0f) * value * static_cast<float>(k);
          const bool all = std::all_of(out.begin(), out.end(), [&](float f) { return std::fabs(f - want) <= 1e-6f * std::fabs(want); });
          CHECK_IN(all, label(kt, format, "m" + std::to_string(m) + " " + std::to_string(out[0])).c_str());
        }
    }
  }
}

// A NaN or an infinity in a row makes that row's results NaN and no other's; a row of tiny numbers counts as zeros.
void test_special_rows(const KernelTable& kt) {
  ThreadPool pool(1);
  const int64_t n = 40, k = 70;
  const Weights w = random_weights(TensorType::kF32, n, k, rng());
  for (const WeightFormat format : kFormats) {
    WeightArena arena;
    const PackedWeight packed = pack(kt, pool, arena, &w.matrix, 1, Act::kF32, false, format);
    Rows x = random_rows(rng(), Act::kF32, 4, k, k);
    x.f32[static_cast<size_t>(k + 33)] = std::numeric_limits<float>::quiet_NaN();
    x.f32[static_cast<size_t>(2 * k + 69)] = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < k; ++i) x.f32[static_cast<size_t>(3 * k + i)] = 1e-37f;
    std::vector<float> out(static_cast<size_t>(4 * n));
    const AlignedBuffer scratch = scratch_for(kt, packed, 4);
    gemm(kt, pool, {x.row(0), k, 4, &packed, nullptr, Epilogue::kStoreF32, out.data(), n, scratch.get()});
    for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
      CHECK(std::isfinite(out[j]) && std::isnan(out[static_cast<size_t>(n) + j]));
      CHECK(std::isnan(out[static_cast<size_t>(2 * n) + j]) && out[static_cast<size_t>(3 * n) + j] == 0);
    }
  }
}

// Each row of a batch is bitwise what it is alone, for every m, cut into tiles in any way, on any number of threads.
void test_determinism(const KernelTable& kt, WeightFormat format, Act act, int64_t k, bool swiglu) {
  const int64_t n = 150, rows = 401;
  ThreadPool one(1), two(2), four(4);  // panels that they share evenly, not evenly, and fewer than threads
  const Weights a = random_weights(TensorType::kF32, n, k, rng()), b = random_weights(TensorType::kF32, n, k, rng());
  const SourceMatrix sources[2] = {a.matrix, b.matrix};
  WeightArena arena;
  const PackedWeight packed = pack(kt, two, arena, sources, swiglu ? 2 : 1, act, swiglu, format);
  const Rows x = random_rows(rng(), act, rows, k, k + 1);
  const Epilogue e = swiglu ? Epilogue::kSwiGLUAct : Epilogue::kStoreF32;
  const size_t row_size = static_cast<size_t>(n) * (swiglu ? act_bytes(act) : 4);
  std::vector<unsigned char> alone(static_cast<size_t>(rows) * row_size), batch(alone.size());
  const AlignedBuffer scratch = scratch_for(kt, packed, rows);
  for (int64_t r = 0; r < rows; ++r)
    gemm(kt, one, {x.row(r), x.ldx, 1, &packed, nullptr, e, &alone[static_cast<size_t>(r) * row_size], n, scratch.get()});
  const auto same = [&](int64_t m) { return std::equal(batch.begin(), batch.begin() + m * static_cast<int64_t>(row_size), alone.begin()); };
  bool equal = true;
  for (int64_t m = 1; m <= rows; m += m < 30 ? 1 : m < 75 ? 9 : 163)
    for (ThreadPool* pool : {&one, &two, &four}) {
      std::fill(batch.begin(), batch.end(), static_cast<unsigned char>(0xee));
      gemm(kt, *pool, {x.row(0), x.ldx, m, &packed, nullptr, e, batch.data(), n, scratch.get()});
      equal = equal && same(m);
      gemm_alone(kt, {x.row(0), x.ldx, m, &packed, nullptr, e, batch.data(), n, scratch.get()});
      equal = equal && same(m);
    }
  const GemmArgs args{x.row(0), x.ldx, rows, &packed, nullptr, e, batch.data(), n, scratch.get()};
  if (!keeps(kt, act)) kt.quantize_rows(args, 0, rows);
  for (const int64_t tile : {1, 2, 5, 11, 64}) {
    std::fill(batch.begin(), batch.end(), static_cast<unsigned char>(0xee));
    for (int64_t panel = packed.panels - 1; panel >= 0; --panel)
      for (int64_t m0 = 0; m0 < rows; m0 += tile) kt.quant_tile(args, m0, std::min(rows, m0 + tile), panel);
    equal = equal && same(rows);
  }
  CHECK_IN(equal, label(kt, format, "k" + std::to_string(k)).c_str());
}

// All instruction sets hold the same weights, and products of rounded rows differ by the rounding of float sums alone.
void test_agreement(const std::vector<KernelTable>& all) {
  ThreadPool pool(1);
  const int64_t n = 70, k = 200, m = 15;
  const Weights w = random_weights(TensorType::kF32, n, k, rng());
  const Rows x = random_rows(rng(), Act::kBF16, m, k, k);
  for (const WeightFormat format : kFormats) {
    std::vector<float> weights, products;
    for (const KernelTable& kt : all) {
      WeightArena arena;
      const PackedWeight packed = pack(kt, pool, arena, &w.matrix, 1, Act::kBF16, false, format);
      std::vector<float> out(static_cast<size_t>(m * n));
      const AlignedBuffer scratch = scratch_for(kt, packed, m);
      gemm(kt, pool, {x.row(0), k, m, &packed, nullptr, Epilogue::kStoreF32, out.data(), n, scratch.get()});
      const std::vector<float> held = unpacked(kt, packed);
      if (weights.empty()) weights = held;
      CHECK_IN(weights == held, label(kt, format, "weights").c_str());
      const int levels = format == WeightFormat::kInt8 ? kt.int8_levels : 127;
      if (!kt.quantizes_bf16 || levels != 127) continue;  // test_plain knows what it should give
      if (products.empty()) products = out;
      bool near = true;
      for (size_t i = 0; i < out.size(); ++i) near = near && std::fabs(out[i] - products[i]) <= 1e-4f;
      CHECK_IN(near, label(kt, format, "products").c_str());
    }
  }
}

}  // namespace

int main() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // as in the engine
#endif
  const std::vector<KernelTable> all = tables();
  for (const KernelTable& kt : all) {
    test_exact(kt);
    test_rounded(kt);
    test_search_pays(kt);
    test_odd_blocks(kt);
    test_products(kt);
    test_extremes(kt);
    test_special_rows(kt);
    for (const WeightFormat format : kFormats) {
      test_determinism(kt, format, Act::kF32, 97, false);
      test_determinism(kt, format, Act::kBF16, 1400, false);
      test_determinism(kt, format, Act::kBF16, 97, true);
    }
  }
  test_agreement(all);
  return finish("quant");
}
