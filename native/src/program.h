// A model as a flat list of instructions over one arena, and the runner that executes a step of it.
//
// Built once by executor/native/ (weights, then instructions, then finish), then run once a step. Instructions up to
// the first gather work on the T token rows; from there on they run on the R logits rows, in blocks of at most
// block_rows, each followed by the sampling of its rows. Offsets are bytes into the arena; where a buffer lies is the
// plan of the caller.
#pragma once
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "step.h"
#include "thread_pool.h"

namespace pinnate {

struct EmbedOp { int weight; float scale; int64_t out; };
struct GemmOp { int weight, bias; Epilogue epilogue; int64_t x, out; };  // bias -1: none
struct NormOp { bool layer; int weight, bias; float eps; int64_t cols, group, x, out; bool out_f32; };
struct UnaryOp { Unary op; float p; int64_t cols, x, out; };
struct BinaryOp { Binary op; int64_t cols, a, b, out; };
struct ConvertOp { bool to_act; int64_t cols, x, out; };  // f32 -> act or back
struct RopeOp { int table; int64_t cols, head_dim, x, out; };
struct CopyColumnsOp { int64_t cols, out_cols, at, x, out; };
struct QKVOp { int layer, num_heads, q_norm, k_norm; float eps; int table; int64_t x, out; };
struct AttentionOp { int layer, num_heads; float scale; int window; float softcap; int64_t q, out; };
struct GatherOp { int64_t cols, x, out; };
using Instruction = std::variant<EmbedOp, GemmOp, NormOp, UnaryOp, BinaryOp, ConvertOp, RopeOp, CopyColumnsOp, QKVOp,
                                 AttentionOp, GatherOp>;

// Zeroed memory that is committed when it is first touched.
class LazyMemory {
 public:
  LazyMemory() = default;
  LazyMemory(size_t bytes, bool huge_pages);
  ~LazyMemory();
  LazyMemory(LazyMemory&& other) noexcept { *this = std::move(other); }
  LazyMemory& operator=(LazyMemory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  // Makes the range ready to be written; what is there stays. False where the system cannot.
  bool commit(size_t offset, size_t bytes);
  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
};

// A thread takes a band of rows through several instructions where each thread has at least this many ...
constexpr int64_t kLeastBand = 128;
// ... and as many at a time as stay in a core's L2: bytes of the widest rows.
constexpr int64_t kBandBytes = 768 << 10;

struct ProgramSpec {
  Act act;
  int page_size, num_pages;                        // usable pages; page 0 is extra
  std::vector<std::pair<int, int>> kv_layers;      // that share a page: (num_kv_heads, head_dim)
  std::vector<std::pair<int, int>> kv_places;      // of each layer: (group, which of kv_layers); empty: (0, its number)
  int64_t max_tokens, block_rows;                  // rows of the two parts' buffers
  bool kv_int8 = false;                            // as KVLayout::int8
};

class Program {
 public:
  Program(const std::string& isa, int threads, ProgramSpec spec);
  ~Program();

  // Building. Each returns the id that instructions use. Throws std::invalid_argument.
  int add_weight(const std::vector<SourceMatrix>& sources, bool swiglu, WeightFormat format);
  int add_vector(const float* data, int64_t count);
  int add_rope_table(const float* cos, const float* sin, int64_t positions, int64_t pairs);
  void emit(const Instruction& instruction);
  // `logits`: offset of the [block_rows, vocab] floats that are sampled; contexts reach max_position tokens.
  void finish(int64_t arena_bytes, int64_t logits, int64_t vocab, int64_t max_position);

  // One step. Not reentrant. Throws what check_step throws; then nothing has run.
  void run(const Step& step);

  // Pages as bytes, for tiers of KV memory: page after page, each its part of every layer in turn. May run on any thread
  // beside run(): reading a page that a step writes gives torn bytes, writing one that a step reads is the caller's
  // fault. Throws std::out_of_range.
  void read_pages(std::span<const int32_t> pages, unsigned char* out) const;
  void write_pages(std::span<const int32_t> pages, const unsigned char* data);
  int64_t page_bytes() const;

  const char* isa() const { return kernels_.isa; }
  int threads() const { return pool_.threads(); }
  int64_t weight_bytes() const;
  int64_t kv_bytes() const;
  // Of kv_bytes, what the system has given or will give in idle time; grows with use. Any thread may ask.
  int64_t kv_committed_bytes() const;
  int64_t vocab() const { return limits_.vocab_out; }
  int64_t arena_bytes() const { return static_cast<int64_t>(arena_.bytes()); }

 private:
  struct RopeTable {
    std::vector<float> cos, sin;
    int64_t positions, pairs;
  };
  struct KVPool {
    KVLayout layout;
    size_t page_bytes;
    LazyMemory memory;
  };
  struct Block {  // what the instructions of one pass work on
    const Step* step;
    int64_t rows;
    const int32_t* gather;  // [rows] token rows, in the logits part
    unsigned char* scratch; // of a product
  };

  struct Buffer {  // bytes of the arena
    int64_t begin, end, row_bytes;
  };
  struct Run {
    size_t begin, end;  // instructions
    bool by_rows;       // may be executed in bands of rows
  };

  void check_places();
  void find_runs();
  void plan_bands();
  void check(const Instruction& instruction);
  void use(int64_t offset, int64_t cols, bool f32);
  const float* vector(int id) const { return id < 0 ? nullptr : vectors_[static_cast<size_t>(id)].data(); }
  int group_of(int layer) const { return spec_.kv_places[static_cast<size_t>(layer)].first; }
  const KVPool& pool_of(int layer) const {
    return kv_[static_cast<size_t>(spec_.kv_places[static_cast<size_t>(layer)].second)];
  }
  template <class T = float>
  T* at(int64_t offset) const { return reinterpret_cast<T*>(arena_.data() + offset); }

  void check_pages(std::span<const int32_t> pages) const;
  int64_t wanted_pages() const;
  bool commit_ahead();
  void copy_pages(const Step& step);
  void execute(const Block& block, bool logits);
  int64_t bands_of(int64_t rows) const;
  template <class Op>
  void execute(const Op& op, const Block& block);
  void execute(const GemmOp& op, const Block& block);
  void execute(const AttentionOp& op, const Block& block);
  void execute(const GatherOp& op, const Block& block);

  // Rows [r0, r1) of an instruction that computes a row from that row alone (and, of QKVOp, writes to that token's slot).
  template <class Op>
  static constexpr bool kByRows = !std::is_same_v<Op, AttentionOp> && !std::is_same_v<Op, GatherOp>;
  void rows(const EmbedOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const GemmOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const NormOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const UnaryOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const BinaryOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const ConvertOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const RopeOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const CopyColumnsOp& op, const Block& block, int64_t r0, int64_t r1);
  void rows(const QKVOp& op, const Block& block, int64_t r0, int64_t r1);
  template <class Op>
  int64_t columns(const Op& op) const { return op.cols; }
  int64_t columns(const EmbedOp& op) const { return weights_[static_cast<size_t>(op.weight)].k; }
  int64_t columns(const QKVOp& op) const {
    const KVLayout& kv = pool_of(op.layer).layout;
    return (op.num_heads + int64_t{2} * kv.num_kv_heads) * kv.head_dim;
  }
  GemmArgs product(const GemmOp& op, const Block& block, int64_t r0, int64_t r1) const;

  void sample(const Step& step, int64_t first_row, int64_t rows, size_t& next);
  void sample_one(const Step& step, size_t n, int64_t first_row, float* scratch);

  const KernelTable& kernels_;
  ThreadPool pool_;
  ProgramSpec spec_;
  WeightArena weight_memory_;
  std::vector<PackedWeight> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<RopeTable> tables_;
  std::vector<KVPool> kv_;
  std::vector<Instruction> code_;
  size_t logits_start_ = 0;  // first instruction of the logits part
  bool in_logits_ = false, finished_ = false;
  int64_t extent_ = 0;       // bytes of arena that the instructions use
  std::vector<std::vector<Buffer>> buffers_;  // of each instruction
  std::vector<Run> runs_;                     // all instructions, in order
  StepLimits limits_{};
  LazyMemory arena_, gemm_scratch_;
  int64_t band_rows_ = 0;     // at most; 0 where rows are too long for a band that is worth reading all weights for
  int64_t band_scratch_ = 0;  // bytes of gemm_scratch_ for each thread
  int64_t logits_ = 0;
  std::atomic<int64_t> used_pages_{0};  // the highest page that a step has written
  int64_t committed_pages_ = 0;  // of the idle thread: all pools are committed up to here ...
  size_t commit_layer_ = 0;      // ... and the pools before this one a part further
  std::atomic<bool> commits_ahead_;  // whether idle time does so at all
  std::vector<LazyMemory> sample_scratch_;      // one for each thread
  std::vector<AlignedBuffer> attention_scratch_;
  AlignedBuffer attention_shared_;
  size_t attention_scratch_bytes_ = 0, attention_shared_bytes_ = 0;
};

}  // namespace pinnate
