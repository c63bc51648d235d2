// Times the matrix products of one step of a model, by number of rows, against the machine's limits measured in the same
// run. Not a test: prints, asserts nothing.
//
// Usage: bench_gemm [isa] [threads] [repeats] [formats, of bf16,f32,int8,int4] [--models default,1b,8b] [--rows 1,2,...]
//        [--json]
// One line for each model, format and number of rows; with --json one JSON object a line for each product, too ("step" is
// all of them together). The limit of a product is max(operations / peak, bytes of packed weights / read speed); `share`
// is how much of it is reached (int4 has int8's peak, below its own with AVX2). Products are interleaved as in a step, so that
// none finds its weights in a cache. With one thread the time is the thread's CPU time, so that other processes on the machine
// disturb it less.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "../src/cpu.h"
#include "../src/gemm.h"
#include "../src/peaks.h"
#include "bench_clock.h"
#include "kernel_parts.h"

namespace {

using namespace pinnate;

double now_ms(const ThreadPool& pool) { return 1e3 * seconds_now(pool.threads()); }

// Few layers stand for many where they are larger than the caches. The head runs on blocks of rows, as in the engine.
struct Model {
  const char* name;
  int64_t hidden, inner, qkv, heads, vocab;  // `heads`: columns of all query heads; vocab 0: no head
  int layers;
};
constexpr Model kModels[] = {{"default", 576, 1536, 960, 576, 49152, 30},
                             {"1b", 2048, 8192, 3072, 2048, 128256, 2},
                             {"8b", 4096, 14336, 6144, 4096, 0, 1}};
constexpr int64_t kHeadRows = 256;
constexpr double kBudget = 3000;  // ms for one line, once three repeats are done

enum Kind { kQkv, kO, kGateUp, kDown, kHead, kKinds };
constexpr const char* kKindNames[] = {"qkv", "o", "gate_up", "down", "head", "step"};

struct Product {
  Kind kind;
  Epilogue epilogue;
  PackedWeight w;
};

struct Step {
  WeightArena arena;
  std::vector<Product> products;
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

void pack_step(const KernelTable& kt, ThreadPool& pool, const Model& m, Act act, WeightFormat format, Step& step) {
  const auto add = [&](Kind kind, Epilogue e, TensorType type, int64_t n, int64_t k) {
    const bool swiglu = kind == kGateUp;
    const Source source = random_source(type, n, k);
    const SourceMatrix both[2] = {source.matrix, source.matrix};
    step.products.push_back({kind, e, pack(kt, pool, step.arena, both, swiglu ? 2 : 1, act, swiglu, format)});
  };
  for (int i = 0; i < m.layers; ++i) {
    add(kQkv, Epilogue::kStoreF32, TensorType::kQ4_1, m.qkv, m.hidden);
    add(kO, Epilogue::kAddF32, TensorType::kQ4_1, m.hidden, m.heads);
    add(kGateUp, Epilogue::kSwiGLUAct, TensorType::kQ4_1, m.inner, m.hidden);
    add(kDown, Epilogue::kAddF32, TensorType::kQ4_1, m.hidden, m.inner);
  }
  if (m.vocab > 0) add(kHead, Epilogue::kStoreF32, TensorType::kQ8_0, m.vocab, m.hidden);
}

struct Buffers {
  AlignedBuffer x;  // read as f32 too: room for both; aligned as the engine's rows are
  AlignedBuffer out, scratch;
};

double run_product(const KernelTable& kt, ThreadPool& pool, const Product& p, int64_t m, Buffers& b) {
  const double begin = now_ms(pool);
  const int64_t block = p.kind == kHead ? kHeadRows : m, ldo = p.w.swiglu ? p.w.n / 2 : p.w.n;
  for (int64_t r = 0; r < m; r += block)
    gemm(kt, pool,
         {b.x.get(), p.w.k, std::min(block, m - r), &p.w, nullptr, p.epilogue, b.out.get(), ldo, b.scratch.get()});
  return now_ms(pool) - begin;
}

// Medians of the times of each kind of product in a step, and of the whole.
std::vector<double> time_step(const KernelTable& kt, ThreadPool& pool, const Step& step, int64_t m, int repeats,
                              Buffers& b) {
  std::vector<std::vector<double>> times(kKinds + 1);
  const double begin = now_ms(pool);
  for (int i = 0; i <= repeats && (i < 4 || now_ms(pool) - begin < kBudget); ++i) {
    std::vector<double> sum(kKinds + 1, 0.0);
    const double start = now_ms(pool);
    for (const Product& p : step.products) sum[p.kind] += run_product(kt, pool, p, m, b);
    sum[kKinds] = now_ms(pool) - start;
    for (size_t k = 0; k <= kKinds && i > 0; ++k) times[k].push_back(sum[k]);
  }
  std::vector<double> medians;
  for (auto& t : times) {
    std::sort(t.begin(), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  return medians;
}

struct Run {
  const KernelTable& kt;
  int threads, repeats;
  Peaks peaks;
  bool json;
};

void report(const Run& run, const Model& model, const std::string& format, int64_t m, const Step& step,
            const std::vector<double>& ms) {
  const double floats = format == "bf16" ? run.peaks.bf16_gflops : run.peaks.f32_gflops;
  const double peak = format == "bf16" || format == "f32" ? floats : run.peaks.int8_gops;
  std::vector<double> operations(kKinds + 1, 0.0), bytes(kKinds + 1, 0.0);
  for (const Product& p : step.products)
    for (const int k : {static_cast<int>(p.kind), static_cast<int>(kKinds)}) {
      operations[static_cast<size_t>(k)] += 2.0 * static_cast<double>(p.w.n * p.w.k * m);
      bytes[static_cast<size_t>(k)] += static_cast<double>(p.w.panels * p.w.panel_bytes);
    }
  const auto share = [&](size_t k) {
    const double computing = peak > 0 ? operations[k] / peak / 1e6 : 0;
    return std::max(computing, bytes[k] / run.peaks.read_gbs / 1e6) / ms[k];
  };
  for (size_t k = 0; run.json && k <= kKinds; ++k) {
    if (operations[k] == 0) continue;
    std::printf("{\"model\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"format\":\"%s\",\"m\":%ld,\"product\":\"%s\",\"ms\":%.4f,"
                "\"gops\":%.1f,\"weights_gbs\":%.2f,\"peak_gops\":%.1f,\"peak_gbs\":%.2f,\"share\":%.3f}\n",
                model.name, run.kt.isa, run.threads, format.c_str(), static_cast<long>(m), kKindNames[k], ms[k],
                operations[k] / ms[k] / 1e6, bytes[k] / ms[k] / 1e6, peak, run.peaks.read_gbs, share(k));
  }
  std::fflush(stdout);
  if (run.json) return;
  std::printf("%s %s m %4ld  %9.3f ms  %7.1f GOP/s  %5.1f GB/s of weights  share %.2f  (", model.name,
              format.c_str(), static_cast<long>(m), ms[kKinds], operations[kKinds] / ms[kKinds] / 1e6,
              bytes[kKinds] / ms[kKinds] / 1e6, share(kKinds));
  for (size_t k = 0; k < kKinds; ++k)
    if (operations[k] > 0) std::printf("%s%s %.2f", k == 0 ? "" : ", ", kKindNames[k], share(k));
  std::printf(")\n");
  std::fflush(stdout);
}

void bench(const Run& run, const Model& model, const std::string& name, const std::vector<int64_t>& rows) {
  const Act act = name == "f32" ? Act::kF32 : Act::kBF16;
  const WeightFormat format = name == "int8"   ? WeightFormat::kInt8
                              : name == "int4" ? WeightFormat::kInt4
                                               : WeightFormat::kAct;
  ThreadPool pool(run.threads);
  Step step;
  pack_step(run.kt, pool, model, act, format, step);
  const int64_t most = *std::max_element(rows.begin(), rows.end()), widest = std::max(model.inner, model.qkv);
  const int64_t floats = std::max(most * widest, std::min(most, kHeadRows) * model.vocab);
  const int64_t inputs = most * widest * 2;
  int64_t scratch = 0;
  for (const Product& p : step.products) scratch = std::max(scratch, gemm_scratch(run.kt, p.w, most));
  Buffers b{allocate_aligned(static_cast<size_t>(inputs) * 2), allocate_aligned(static_cast<size_t>(floats) * 4),
            allocate_aligned(static_cast<size_t>(scratch))};
  bf16* x = reinterpret_cast<bf16*>(b.x.get());
  for (int64_t i = 0; i < inputs; ++i) x[i] = static_cast<bf16>(0x3c00 + i * 7919 % 512 + (i % 3 == 0 ? 0x8000 : 0));
  std::fill_n(reinterpret_cast<float*>(b.out.get()), floats, 0.0f);
  for (const int64_t m : rows) report(run, model, name, m, step, time_step(run.kt, pool, step, m, run.repeats, b));
}

bool holds(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> plain;
  std::string models = "default", rows_text = "1,2,4,8,12,16,32,64,128,512";
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--json") json = true;
    else if ((arg == "--models" || arg == "--rows") && i + 1 < argc) (arg == "--models" ? models : rows_text) = argv[++i];
    else plain.push_back(arg);
  }
  const auto at = [&](size_t i, const std::string& otherwise) { return i < plain.size() ? plain[i] : otherwise; };
  std::vector<int64_t> rows;
  std::stringstream list(rows_text);
  for (std::string row; std::getline(list, row, ',');) rows.push_back(std::max(1L, std::atol(row.c_str())));
  const int threads = std::atoi(at(1, "2").c_str());
  KernelTable kt = gemm_kernels(at(0, cpu_info().isas.front()));
  add_quant_kernels(kt);
  add_peak_kernels(kt);
  const Run run{kt, threads, std::atoi(at(2, "21").c_str()), measure_peaks(kt, threads, 1.0), json};
  if (!json)
    std::printf("peaks: bf16 %.0f GFLOP/s, f32 %.0f GFLOP/s, int8 %.0f GOP/s, read %.1f GB/s\n", run.peaks.bf16_gflops,
                run.peaks.f32_gflops, run.peaks.int8_gops, run.peaks.read_gbs);
  for (const Model& model : kModels)
    for (const char* name : {"bf16", "f32", "int8", "int4"})
      if (holds(models, model.name) && holds(at(3, "bf16,int8,int4"), name)) bench(run, model, name, rows);
  return 0;
}
