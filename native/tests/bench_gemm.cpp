// Times all matrix products of one step of SmolLM2-135M, by number of rows. Not a test: prints, asserts nothing.
// Usage: bench_gemm [isa] [threads] [repeats] [formats, of bf16,f32,int8,int4]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../src/cpu.h"
#include "../src/gemm.h"
#include "../src/peaks.h"
#include "kernel_parts.h"

namespace {

using namespace pinnate;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point t) { return std::chrono::duration<double, std::milli>(Clock::now() - t).count(); }

struct Layer {
  PackedWeight qkv, o, gate_up, down;
};

struct Source {
  std::vector<unsigned char> bytes;
  SourceMatrix matrix;
};

Source random_source(TensorType type, int64_t rows, int64_t cols) {
  Source s;
  s.bytes.resize(static_cast<size_t>(rows) * row_bytes(type, cols));
  uint32_t state = 1;
  for (auto& b : s.bytes) b = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
  const size_t block = type == TensorType::kQ8_0 ? 34 : 20;
  for (size_t i = 0; i + 4 <= s.bytes.size(); i += block) {  // small scales, or the sums overflow
    s.bytes[i + 1] = 0x20;
    if (block == 20) s.bytes[i + 3] = 0xa8;
  }
  s.matrix = {type, s.bytes.data(), rows, cols};
  return s;
}

struct Step {
  WeightArena arena;
  std::vector<Layer> layers;
  PackedWeight vocab;
};

constexpr int64_t kHidden = 576, kInner = 1536, kQkv = 960, kVocab = 49152, kMaxRows = 512;

Step pack_model(const KernelTable& kt, ThreadPool& pool, Act act, WeightFormat format) {
  const auto q41 = TensorType::kQ4_1;
  const Source q = random_source(q41, 576, kHidden), kv = random_source(q41, 192, kHidden);
  const Source o = random_source(q41, kHidden, 576), gate = random_source(q41, kInner, kHidden);
  const Source down = random_source(q41, kHidden, kInner), vocab = random_source(TensorType::kQ8_0, kVocab, kHidden);
  const SourceMatrix qkv[3] = {q.matrix, kv.matrix, kv.matrix}, gate_up[2] = {gate.matrix, gate.matrix};
  const auto begin = Clock::now();
  Step s;
  for (int i = 0; i < 30; ++i) {
    Layer l;
    l.qkv = pack(kt, pool, s.arena, qkv, 3, act, false, format);
    l.o = pack(kt, pool, s.arena, &o.matrix, 1, act, false, format);
    l.gate_up = pack(kt, pool, s.arena, gate_up, 2, act, true, format);
    l.down = pack(kt, pool, s.arena, &down.matrix, 1, act, false, format);
    s.layers.push_back(std::move(l));
  }
  s.vocab = pack(kt, pool, s.arena, &vocab.matrix, 1, act, false, format);
  std::printf("packed in %.0f ms\n", ms_since(begin));
  return s;
}

void run_step(const KernelTable& kt, ThreadPool& pool, const Step& s, int64_t m, const void* x, void* out,
              unsigned char* scratch) {
  auto call = [&](const PackedWeight& w, int64_t ldx, Epilogue e, int64_t ldo) {
    gemm(kt, pool, {x, ldx, m, &w, nullptr, e, out, ldo, scratch});
  };
  for (const Layer& l : s.layers) {
    call(l.qkv, kHidden, Epilogue::kStoreF32, kQkv);
    call(l.o, kHidden, Epilogue::kAddF32, kHidden);
    call(l.gate_up, kHidden, Epilogue::kSwiGLUAct, kInner);
    call(l.down, kInner, Epilogue::kAddF32, kHidden);
  }
  call(s.vocab, kHidden, Epilogue::kStoreF32, kVocab);
}

int64_t packed_bytes(const Step& s) {
  const auto bytes = [](const PackedWeight& w) { return w.panels * w.panel_bytes; };
  int64_t sum = bytes(s.vocab);
  for (const Layer& l : s.layers) sum += bytes(l.qkv) + bytes(l.o) + bytes(l.gate_up) + bytes(l.down);
  return sum;
}

void bench(const KernelTable& kt, int threads, const std::string& name, int repeats) {
  const Act act = name == "f32" ? Act::kF32 : Act::kBF16;
  const WeightFormat format = name == "int8"   ? WeightFormat::kInt8
                              : name == "int4" ? WeightFormat::kInt4
                                               : WeightFormat::kAct;
  std::printf("%s %s, %d threads\n", kt.isa, name.c_str(), threads);
  ThreadPool pool(threads);
  const Step step = pack_model(kt, pool, act, format);
  double weights = static_cast<double>(kVocab * kHidden);
  weights += 30.0 * static_cast<double>(kHidden * (kQkv + kHidden + 3 * kInner));
  const AlignedBuffer scratch = allocate_aligned(static_cast<size_t>(kMaxRows * quantized_row_bytes(kInner)));
  std::vector<float> x(static_cast<size_t>(kMaxRows * kInner), 0.0f), out(static_cast<size_t>(kMaxRows * kVocab));
  for (const int64_t m : {1, 2, 4, 8, 12, 16, 32, 64, 128, 512}) {
    std::vector<double> times;
    for (int i = 0; i <= (m > 64 ? std::min(repeats, 7) : repeats); ++i) {
      std::fill(out.begin(), out.begin() + kMaxRows * kInner, 0.0f);
      const auto begin = Clock::now();
      run_step(kt, pool, step, m, x.data(), out.data(), scratch.get());
      if (i > 0) times.push_back(ms_since(begin));
    }
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2];
    std::printf("m %4ld  median %8.2f ms  best %8.2f ms  %7.1f GOP/s  %5.1f GB/s of weights\n", static_cast<long>(m), ms,
                times[0], 2 * weights * static_cast<double>(m) / ms / 1e6,
                static_cast<double>(packed_bytes(step)) / ms / 1e6);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string isa = argc > 1 ? argv[1] : cpu_info().isas.front();
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2, repeats = argc > 3 ? std::atoi(argv[3]) : 21;
  KernelTable kt = gemm_kernels(isa);
  add_quant_kernels(kt);
  add_peak_kernels(kt);
  const Peaks peaks = measure_peaks(kt, threads, 1.0);
  std::printf("peaks: bf16 %.0f GFLOP/s, f32 %.0f GFLOP/s, int8 %.0f GOP/s, read %.1f GB/s\n", peaks.bf16_gflops,
              peaks.f32_gflops, peaks.int8_gops, peaks.read_gbs);
  const std::string formats = argc > 4 ? argv[4] : "bf16,int8,int4";
  for (const char* name : {"bf16", "f32", "int8", "int4"})
    if (formats.find(name) != std::string::npos) bench(kt, threads, name, repeats);
  return 0;
}
