// Running a program: one step, instruction by instruction. Cuts rows for the threads; the cut changes no bit of a
// result (the kernels' contract), so it may depend on the sizes at hand.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "program.h"

namespace pinnate {
namespace {

constexpr int64_t kWorthAThread = 8192;  // floats; less is done before another thread has woken

// Denormals are zero while a step runs, as in the pool's threads.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }  // FTZ, DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

void widen(const bf16* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}

}  // namespace

void Program::run(const Step& step) {
  if (!finished_) throw std::invalid_argument("program: run before finish");
  check_step(step, limits_);
  const FlushDenormals guard;
  int64_t used = used_pages_.load(std::memory_order_relaxed);
  for (const int32_t slot : step.slots) used = std::max<int64_t>(used, slot / spec_.page_size);
  used_pages_.store(used, std::memory_order_relaxed);
  copy_pages(step);
  execute({&step, static_cast<int64_t>(step.tokens.size()), nullptr, gemm_scratch_.data()}, false);
  const int64_t rows = static_cast<int64_t>(step.logit_rows.size());
  const int64_t blocks = (rows + spec_.block_rows - 1) / spec_.block_rows;
  size_t next_sample = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
    execute({&step, count, step.logit_rows.data() + first, gemm_scratch_.data()}, true);
    if (step.out_logits != nullptr)
      std::memcpy(step.out_logits + first * limits_.vocab_out, at(logits_),
                  static_cast<size_t>(count * limits_.vocab_out) * sizeof(float));
    if (b == 0 && step.await_masks) step.await_masks();
    sample(step, first, count, next_sample);
  }
}

// In the order given: a copy's source may be the target of an earlier one.
void Program::copy_pages(const Step& step) {
  if (step.copies.empty()) return;
  pool_.parallel_for(static_cast<int64_t>(kv_.size()), [&](int64_t layer, int) {
    const KVPool& pool = kv_[static_cast<size_t>(layer)];
    for (size_t i = 0; i < step.copies.size(); i += 2) {
      const size_t source = static_cast<size_t>(step.copies[i]), target = static_cast<size_t>(step.copies[i + 1]);
      std::memmove(pool.memory.data() + target * pool.page_bytes, pool.memory.data() + source * pool.page_bytes,
                   pool.page_bytes);
    }
  });
}

// With many rows, each run of instructions that work row by row is executed in bands of rows, each on one thread: what one
// instruction leaves for the next, and the sums that a product adds to, stay in that thread's caches.
void Program::execute(const Block& block, bool logits) {
  const int64_t bands = bands_of(block.rows);
  for (const Run& run : runs_) {
    if ((run.begin >= logits_start_) != logits) continue;
    if (!run.by_rows || bands == 1) {
      for (size_t i = run.begin; i < run.end; ++i) std::visit([&](const auto& op) { execute(op, block); }, code_[i]);
      continue;
    }
    pool_.parallel_ranges(bands, 0, [&](int64_t band, int thread) {
      const Block own{block.step, block.rows, block.gather, block.scratch + thread * band_scratch_};
      const int64_t r0 = row_share(block.rows, band, bands, kernels_.gemm_rows);
      const int64_t r1 = row_share(block.rows, band + 1, bands, kernels_.gemm_rows);
      for (size_t i = run.begin; i < run.end; ++i)
        std::visit([&]<class Op>(const Op& op) { if constexpr (kByRows<Op>) rows(op, own, r0, r1); }, code_[i]);
    });
  }
}

// 1: instruction by instruction, all rows on all threads.
int64_t Program::bands_of(int64_t rows) const {
  const int64_t each = (rows + pool_.threads() - 1) / pool_.threads();
  if (band_rows_ == 0 || each < kLeastBand) return 1;
  return pool_.threads() * ((each + band_rows_ - 1) / band_rows_);
}

// All rows of an instruction that works row by row, on all threads where they are worth it.
template <class Op>
void Program::execute(const Op& op, const Block& block) {
  const int64_t wanted = std::min<int64_t>(block.rows * columns(op) / kWorthAThread, pool_.threads() * int64_t{4});
  const int64_t items = std::clamp<int64_t>(wanted, 1, block.rows);
  if (items == 1 || pool_.threads() == 1) return rows(op, block, 0, block.rows);
  pool_.parallel_ranges(items, 0, [&](int64_t i, int) { rows(op, block, block.rows * i / items, block.rows * (i + 1) / items); });
}

void Program::rows(const EmbedOp& op, const Block& block, int64_t r0, int64_t r1) {
  const PackedWeight& w = weights_[static_cast<size_t>(op.weight)];
  unpack_rows(kernels_, w, block.step->tokens.data() + r0, r1 - r0, op.scale, at(op.out) + r0 * w.k, w.k);
}

void Program::execute(const GemmOp& op, const Block& block) { gemm(kernels_, pool_, product(op, block, 0, block.rows)); }

void Program::rows(const GemmOp& op, const Block& block, int64_t r0, int64_t r1) {
  gemm_alone(kernels_, product(op, block, r0, r1));
}

GemmArgs Program::product(const GemmOp& op, const Block& block, int64_t r0, int64_t r1) const {
  const PackedWeight& w = weights_[static_cast<size_t>(op.weight)];
  const int64_t act = static_cast<int64_t>(act_bytes(spec_.act)), ldo = w.swiglu ? w.n / 2 : w.n;
  return {at<unsigned char>(op.x) + r0 * w.k * act, w.k, r1 - r0, &w, vector(op.bias), op.epilogue,
          at<unsigned char>(op.out) + r0 * ldo * (stores_floats(op.epilogue) ? 4 : act), ldo, block.scratch};
}

void Program::rows(const NormOp& op, const Block&, int64_t r0, int64_t r1) {
  const NormArgs args{at(op.x), op.cols, vector(op.weight), vector(op.bias), op.eps,
                      op.cols,  op.group, at<void>(op.out),  op.cols,          op.out_f32};
  (op.layer ? kernels_.layer_norm : kernels_.rms_norm)(args, spec_.act, r0, r1);
}

void Program::rows(const UnaryOp& op, const Block&, int64_t r0, int64_t r1) {
  const int64_t from = r0 * op.cols;
  kernels_.unary(op.op, op.p, at(op.x) + from, at(op.out) + from, (r1 - r0) * op.cols);
}

void Program::rows(const BinaryOp& op, const Block&, int64_t r0, int64_t r1) {
  const int64_t from = r0 * op.cols;
  kernels_.binary(op.op, at(op.a) + from, at(op.b) + from, at(op.out) + from, (r1 - r0) * op.cols);
}

void Program::rows(const ConvertOp& op, const Block&, int64_t r0, int64_t r1) {
  const int64_t bytes = static_cast<int64_t>(act_bytes(spec_.act)), from = r0 * op.cols, count = (r1 - r0) * op.cols;
  if (op.to_act) {
    kernels_.to_act(at(op.x) + from, at<unsigned char>(op.out) + from * bytes, spec_.act, count);
  } else if (spec_.act == Act::kBF16) {
    widen(at<bf16>(op.x) + from, at(op.out) + from, count);
  } else {
    std::memcpy(at(op.out) + from, at(op.x) + from, static_cast<size_t>(count) * sizeof(float));
  }
}

void Program::rows(const RopeOp& op, const Block& block, int64_t r0, int64_t r1) {
  const RopeTable& table = tables_[static_cast<size_t>(op.table)];
  for (int64_t r = r0; r < r1; ++r) {
    const int64_t position = block.step->positions[static_cast<size_t>(r)];
    const float* cos = table.cos.data() + position * table.pairs;
    const float* sin = table.sin.data() + position * table.pairs;
    for (int64_t head = 0; head < op.cols; head += op.head_dim) {
      const float* x = at(op.x) + r * op.cols + head;
      float* out = at(op.out) + r * op.cols + head;
      for (int64_t i = 0; i < table.pairs; ++i) {
        const float low = x[i], high = x[i + table.pairs];
        out[i] = low * cos[i] - high * sin[i];
        out[i + table.pairs] = high * cos[i] + low * sin[i];
      }
      for (int64_t i = 2 * table.pairs; i < op.head_dim; ++i) out[i] = x[i];
    }
  }
}

void Program::rows(const CopyColumnsOp& op, const Block&, int64_t r0, int64_t r1) {
  for (int64_t r = r0; r < r1; ++r)
    std::memcpy(at(op.out) + r * op.out_cols + op.at, at(op.x) + r * op.cols, static_cast<size_t>(op.cols) * sizeof(float));
}

void Program::rows(const QKVOp& op, const Block& block, int64_t r0, int64_t r1) {
  const KVPool& pool = pool_of(op.layer);
  QKVArgs a{};
  a.qkv = at(op.x), a.ldx = columns(op), a.num_heads = op.num_heads, a.kv = pool.layout;
  a.q_norm = vector(op.q_norm), a.k_norm = vector(op.k_norm), a.norm_eps = op.eps;
  if (op.table >= 0) {
    const RopeTable& table = tables_[static_cast<size_t>(op.table)];
    a.cos = table.cos.data(), a.sin = table.sin.data(), a.rotary = static_cast<int>(2 * table.pairs);
  }
  a.positions = block.step->positions.data();
  a.slots = block.step->slots.data() + static_cast<size_t>(group_of(op.layer)) * block.step->tokens.size();
  a.q_out = at<void>(op.out), a.ldq = op.num_heads * int64_t{pool.layout.head_dim}, a.pool = pool.memory.data();
  kernels_.qkv(a, r0, r1);
}

void Program::execute(const AttentionOp& op, const Block& block) {
  const KVPool& pool = pool_of(op.layer);
  const Step& step = *block.step;
  AttentionArgs a{};
  a.q = at<void>(op.q), a.ldq = op.num_heads * int64_t{pool.layout.head_dim}, a.num_heads = op.num_heads;
  a.kv = pool.layout, a.scale = op.scale, a.window = op.window, a.softcap = op.softcap;
  a.num_seqs = static_cast<int>(step.contexts.size());
  a.seq_starts = step.seq_starts.data(), a.contexts = step.contexts.data();
  a.page_offsets = step.page_offsets.data();
  a.page_indices = step.page_indices.data() + group_of(op.layer) * int64_t{step.page_offsets.back()};
  a.pool = pool.memory.data(), a.out = at<void>(op.out), a.ldo = a.ldq;
  const size_t bytes = kernels_.attention_scratch(a);
  if (bytes > attention_scratch_bytes_) {
    for (auto& scratch : attention_scratch_) scratch = allocate_aligned(bytes);
    attention_scratch_bytes_ = bytes;
  }
  const size_t shared = kernels_.attention_shared(a);
  if (shared > attention_shared_bytes_) {
    attention_shared_ = allocate_aligned(shared);
    attention_shared_bytes_ = shared;
  }
  a.shared = attention_shared_.get();
  pool_.parallel_for(kernels_.attention_begin(a), [&](int64_t item, int thread) {
    kernels_.attention(a, item, attention_scratch_[static_cast<size_t>(thread)].get());
  });
}

void Program::execute(const GatherOp& op, const Block& block) {
  for (int64_t r = 0; r < block.rows; ++r)
    std::memcpy(at(op.out) + r * op.cols, at(op.x) + block.gather[r] * op.cols,
                static_cast<size_t>(op.cols) * sizeof(float));
}

// The records whose rows are in [first_row, first_row + rows); `next` is the first of them and moves behind the last.
void Program::sample(const Step& step, int64_t first_row, int64_t rows, size_t& next) {
  const size_t begin = next;
  while (next < step.samples.size() && step.samples[next].row < first_row + rows) ++next;
  pool_.parallel_for(static_cast<int64_t>(next - begin), [&](int64_t i, int thread) {
    const size_t n = begin + static_cast<size_t>(i);
    sample_one(step, n, first_row, reinterpret_cast<float*>(sample_scratch_[static_cast<size_t>(thread)].data()));
  });
}

void Program::sample_one(const Step& step, size_t n, int64_t first_row, float* scratch) {
  const SampleRecord& r = step.samples[n];
  SampleArgs a{};
  a.vocab = limits_.vocab_out;
  a.logits = at(logits_) + (r.row - first_row) * a.vocab;
  a.temperature = r.temperature, a.top_p = r.top_p, a.min_p = r.min_p, a.top_k = r.top_k;
  a.seed = static_cast<uint64_t>(r.seed), a.index = r.index, a.position = r.position;
  a.presence = r.presence, a.frequency = r.frequency, a.repetition = r.repetition;
  a.prompt = step.history.data() + r.history_start, a.prompt_len = r.prompt_len;
  a.output = a.prompt + r.prompt_len, a.output_len = r.output_len;
  a.bias_ids = step.bias_ids.data() + r.bias_start, a.bias = step.bias.data() + r.bias_start, a.bias_len = r.bias_len;
  a.target = r.target, a.num_top = r.num_top;
  if (r.mask >= 0) a.mask = step.masks.data() + r.mask * ((a.vocab + 31) / 32);
  if (r.num_top > 0) {
    a.top_ids = step.out_top_ids.data() + r.top_start;
    a.top_logprobs = step.out_top_logprobs.data() + r.top_start;
  }
  kernels_.sample(a, scratch);
  step.out_tokens[n] = a.token, step.out_logprobs[n] = a.logprob, step.out_ranks[n] = a.rank;
}

}  // namespace pinnate
