// Building a program: memory, weights, and the proof that every instruction stays inside the arena and names things
// that exist.
#include "program.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include <sys/mman.h>

namespace pinnate {
namespace {

// Bytes of KV memory that are committed first, and that are committed at once (a huge page).
constexpr int64_t kCommitFirst = int64_t{512} << 20, kCommitPart = int64_t{2} << 20;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("program: ") + what);
}

template <class T>
bool has(const std::vector<T>& things, int id) {
  return id >= 0 && static_cast<size_t>(id) < things.size();
}

}  // namespace

LazyMemory::LazyMemory(size_t bytes, bool huge_pages) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (huge_pages) ::madvise(p, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed only
  data_ = static_cast<unsigned char*>(p);
}

bool LazyMemory::commit(size_t offset, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr size_t kPage = 4096;
  const size_t begin = offset / kPage * kPage, end = std::min((offset + bytes + kPage - 1) / kPage * kPage, bytes_);
  return begin >= end || ::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0;
#else
  (void)offset, (void)bytes;
  return false;
#endif
}

LazyMemory::~LazyMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Program::Program(const std::string& isa, int threads, ProgramSpec spec)
    : kernels_(select_kernels(isa.c_str())), pool_(threads), spec_(std::move(spec)), commits_ahead_(threads > 1) {
  require(spec_.page_size >= 16 && spec_.page_size % 16 == 0, "page_size must be a multiple of 16");
  require(spec_.num_pages >= 1 && spec_.max_tokens >= 1 && spec_.block_rows >= 1, "sizes must be at least 1");
  require((int64_t{spec_.num_pages} + 1) * spec_.page_size <= std::numeric_limits<int32_t>::max(),
          "num_pages * page_size must fit 31 bits");
  for (const auto& [heads, dim] : spec_.kv_layers) {
    require(heads >= 1 && dim >= 2 && dim % 2 == 0, "head_dim must be even, num_kv_heads at least 1");
    const KVLayout layout{spec_.page_size, heads, dim, spec_.act, spec_.kv_int8};
    const size_t page_bytes = kernels_.kv_page_bytes(layout);
    kv_.push_back({layout, page_bytes, LazyMemory(page_bytes * (static_cast<size_t>(spec_.num_pages) + 1), true)});
  }
  attention_scratch_.resize(static_cast<size_t>(threads));
  limits_ = {spec_.max_tokens, std::numeric_limits<int32_t>::max(), 0, 0, spec_.page_size, spec_.num_pages, 1};
  check_places();
}

// Every layer has a slot of its own in the pages of its group; counts the groups.
void Program::check_places() {
  if (spec_.kv_places.empty())
    for (int layer = 0; layer < static_cast<int>(kv_.size()); ++layer) spec_.kv_places.emplace_back(0, layer);
  std::vector<std::pair<int, int>> places = spec_.kv_places;
  std::sort(places.begin(), places.end());
  require(std::adjacent_find(places.begin(), places.end()) == places.end(), "two layers have the same place");
  for (const auto& [group, slot] : places) {
    require(group >= 0 && group <= static_cast<int>(places.size()) && has(kv_, slot), "a layer's place does not exist");
    limits_.groups = std::max<int64_t>(limits_.groups, group + 1);
  }
}

Program::~Program() { pool_.when_idle({}); }

// Pages of each pool that shall be ready, page 0 included: doubled whenever more than half of them are used, since under load
// idle time is rare. Memory thus grows in a few steps, and between them not at all.
int64_t Program::wanted_pages() const {
  const int64_t end = spec_.num_pages + 1, bytes = std::max<int64_t>(page_bytes(), 1);
  const int64_t ready = 2 * (used_pages_.load(std::memory_order_relaxed) + 1);
  int64_t wanted = std::max<int64_t>(kCommitFirst / bytes, 1);
  while (wanted < ready && wanted < end) wanted *= 2;
  return std::min(wanted, end);
}

// One piece of idle time. The first touch of memory can cost more than all arithmetic on the tokens that go there, above all
// in a virtual machine, so pages are committed before they are used; fresh pages come in ascending order (PagePool).
bool Program::commit_ahead() {
  const int64_t end = spec_.num_pages + 1, wanted = wanted_pages();
  if (commit_layer_ == 0) committed_pages_ = std::max(committed_pages_, used_pages_.load(std::memory_order_relaxed));
  if (kv_.empty() || committed_pages_ >= wanted) return false;
  KVPool& pool = kv_[commit_layer_];
  const int64_t part = std::max<int64_t>(1, kCommitPart / static_cast<int64_t>(kv_.front().page_bytes));
  const int64_t count = std::min(part, end - committed_pages_);
  if (!pool.memory.commit(static_cast<size_t>(committed_pages_) * pool.page_bytes,
                          static_cast<size_t>(count) * pool.page_bytes)) {
    committed_pages_ = end;
    commits_ahead_ = false;  // the system does not offer it
    return false;
  }
  if (++commit_layer_ == kv_.size()) commit_layer_ = 0, committed_pages_ += count;
  return true;
}

int Program::add_weight(const std::vector<SourceMatrix>& sources, bool swiglu, WeightFormat format) {
  const int count = static_cast<int>(sources.size());
  weights_.push_back(pack(kernels_, pool_, weight_memory_, sources.data(), count, spec_.act, swiglu, format));
  return static_cast<int>(weights_.size()) - 1;
}

int Program::add_vector(const float* data, int64_t count) {
  vectors_.emplace_back(data, data + count);
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_rope_table(const float* cos, const float* sin, int64_t positions, int64_t pairs) {
  const int64_t count = positions * pairs;
  tables_.push_back({{cos, cos + count}, {sin, sin + count}, positions, pairs});
  return static_cast<int>(tables_.size()) - 1;
}

int64_t Program::weight_bytes() const {
  int64_t bytes = 0;
  for (const auto& w : weights_) bytes += w.panels * w.panel_bytes;
  for (const auto& v : vectors_) bytes += static_cast<int64_t>(v.size() * sizeof(float));
  return bytes;
}

int64_t Program::kv_bytes() const {
  int64_t bytes = 0;
  for (const auto& pool : kv_) bytes += static_cast<int64_t>(pool.memory.bytes());
  return bytes;
}

int64_t Program::kv_committed_bytes() const {
  return (commits_ahead_ ? wanted_pages() : used_pages_.load(std::memory_order_relaxed) + 1) * page_bytes();
}

int64_t Program::page_bytes() const {
  int64_t bytes = 0;
  for (const auto& pool : kv_) bytes += static_cast<int64_t>(pool.page_bytes);
  return bytes;
}

void Program::check_pages(std::span<const int32_t> pages) const {
  for (const int32_t page : pages)
    if (page < 1 || page > spec_.num_pages) throw std::out_of_range("page " + std::to_string(page) + " is out of the pool");
}

void Program::read_pages(std::span<const int32_t> pages, unsigned char* out) const {
  check_pages(pages);
  for (const int32_t page : pages) {
    for (const auto& pool : kv_) {
      std::memcpy(out, pool.memory.data() + static_cast<size_t>(page) * pool.page_bytes, pool.page_bytes);
      out += pool.page_bytes;
    }
  }
}

void Program::write_pages(std::span<const int32_t> pages, const unsigned char* data) {
  check_pages(pages);
  for (const int32_t page : pages) {
    for (const auto& pool : kv_) {
      std::memcpy(pool.memory.data() + static_cast<size_t>(page) * pool.page_bytes, data, pool.page_bytes);
      data += pool.page_bytes;
    }
  }
}

void Program::emit(const Instruction& instruction) {
  require(!finished_, "it is finished");
  if (std::holds_alternative<GatherOp>(instruction) && !in_logits_) {
    in_logits_ = true;
    logits_start_ = code_.size();
  }
  buffers_.emplace_back();
  check(instruction);
  code_.push_back(instruction);
}

// Cuts the instructions into runs that may be executed band by band: of such that work row by row, whose buffers are the same
// or lie apart. Else a band could overwrite rows that another has not read yet.
void Program::find_runs() {
  const auto apart = [](const Buffer& a, const Buffer& b) {
    return (a.begin == b.begin && a.row_bytes == b.row_bytes) || a.end <= b.begin || b.end <= a.begin;
  };
  std::vector<Buffer> held;
  for (size_t i = 0; i < code_.size(); ++i) {
    const std::vector<Buffer>& own = buffers_[i];
    const auto fits = [&](const Buffer& b) {
      return std::all_of(held.begin(), held.end(), [&](const Buffer& h) { return apart(h, b); });
    };
    const bool by_rows = std::visit([]<class Op>(const Op&) { return kByRows<Op>; }, code_[i]);
    if (i == 0 || !by_rows || !runs_.back().by_rows || !std::all_of(own.begin(), own.end(), fits)) {
      runs_.push_back({i, i, by_rows});
      held.clear();
    }
    runs_.back().end = i + 1;
    held.insert(held.end(), own.begin(), own.end());
  }
}

// How many rows a band has, and memory for what products prepare of their rows: of all rows together or of a band in each thread.
void Program::plan_bands() {
  int64_t widest = 1, whole = 0;
  for (const PackedWeight& w : weights_) widest = std::max(widest, w.k);
  const int64_t bytes = widest * static_cast<int64_t>(act_bytes(spec_.act)), unit = kernels_.gemm_rows;
  band_rows_ = kBandBytes / bytes / unit * unit;
  if (band_rows_ < kLeastBand) band_rows_ = 0;
  for (const PackedWeight& w : weights_) {
    whole = std::max(whole, gemm_scratch(kernels_, w, std::max(spec_.max_tokens, spec_.block_rows)));
    band_scratch_ = std::max(band_scratch_, (gemm_scratch(kernels_, w, band_rows_ + unit) + 63) / 64 * 64);
  }
  gemm_scratch_ = LazyMemory(static_cast<size_t>(std::max(whole, pool_.threads() * band_scratch_)), true);
}

// Notes that a buffer of `cols` columns lies at `offset`; it has as many rows as the part of the program it is used in.
void Program::use(int64_t offset, int64_t cols, bool f32) {
  require(offset >= 0 && offset % 64 == 0 && cols >= 1, "a buffer is misplaced");
  const int64_t rows = in_logits_ ? spec_.block_rows : spec_.max_tokens;
  const int64_t bytes = static_cast<int64_t>(f32 ? sizeof(float) : act_bytes(spec_.act));
  extent_ = std::max(extent_, offset + rows * cols * bytes);
  buffers_.back().push_back({offset, offset + rows * cols * bytes, cols * bytes});
}

namespace {
template <class... Fs>
struct Overloaded : Fs... { using Fs::operator()...; };
}  // namespace

void Program::check(const Instruction& instruction) {
  const auto vector_of = [&](int id, int64_t size) {
    require(has(vectors_, id) && vectors_[static_cast<size_t>(id)].size() == static_cast<size_t>(size),
            "a vector is missing or has another size");
  };
  const auto layer_of = [&](int id) -> const KVLayout& {
    require(has(spec_.kv_places, id) && !in_logits_, "attention of a layer that does not exist, or after gather");
    return pool_of(id).layout;
  };
  const auto table_of = [&](int id, int64_t head_dim) {
    require(has(tables_, id) && tables_[static_cast<size_t>(id)].pairs * 2 <= head_dim, "a rope table does not fit");
  };
  std::visit(
      Overloaded{
          [&](const EmbedOp& op) {
            require(has(weights_, op.weight) && !in_logits_, "embedding without a weight, or after gather");
            const PackedWeight& w = weights_[static_cast<size_t>(op.weight)];
            require(!w.swiglu, "embedding of a swiglu weight");
            limits_.vocab_in = std::min(limits_.vocab_in, w.n);
            use(op.out, w.k, true);
          },
          [&](const GemmOp& op) {
            require(has(weights_, op.weight), "gemm without a weight");
            const PackedWeight& w = weights_[static_cast<size_t>(op.weight)];
            const bool swiglu = op.epilogue == Epilogue::kSwiGLUAct;
            require(w.swiglu == swiglu && !(swiglu && op.bias >= 0), "gemm epilogue does not fit its weight");
            if (op.bias >= 0) vector_of(op.bias, w.n);
            use(op.x, w.k, false);
            use(op.out, swiglu ? w.n / 2 : w.n, stores_floats(op.epilogue));
          },
          [&](const NormOp& op) {
            require(op.group >= 1 && op.cols % op.group == 0, "norm groups do not divide the columns");
            vector_of(op.weight, op.group);
            if (op.bias >= 0) vector_of(op.bias, op.group);
            use(op.x, op.cols, true), use(op.out, op.cols, op.out_f32);
          },
          [&](const UnaryOp& op) { use(op.x, op.cols, true), use(op.out, op.cols, true); },
          [&](const BinaryOp& op) {
            use(op.a, op.cols, true), use(op.b, op.cols, true), use(op.out, op.cols, true);
          },
          [&](const ConvertOp& op) { use(op.x, op.cols, op.to_act), use(op.out, op.cols, !op.to_act); },
          [&](const RopeOp& op) {
            require(!in_logits_ && op.head_dim >= 2 && op.cols % op.head_dim == 0, "rope of partial heads");
            table_of(op.table, op.head_dim);
            use(op.x, op.cols, true), use(op.out, op.cols, true);
          },
          [&](const CopyColumnsOp& op) {
            require(op.at >= 0 && op.at + op.cols <= op.out_cols, "copied columns do not fit");
            use(op.x, op.cols, true), use(op.out, op.out_cols, true);
          },
          [&](const QKVOp& op) {
            const KVLayout& kv = layer_of(op.layer);
            require(op.num_heads >= 1 && op.num_heads % kv.num_kv_heads == 0, "heads are not groups of KV heads");
            if (op.q_norm >= 0) vector_of(op.q_norm, kv.head_dim);
            if (op.k_norm >= 0) vector_of(op.k_norm, kv.head_dim);
            if (op.table >= 0) table_of(op.table, kv.head_dim);
            use(op.x, int64_t{op.num_heads + 2 * kv.num_kv_heads} * kv.head_dim, true);
            use(op.out, int64_t{op.num_heads} * kv.head_dim, false);
          },
          [&](const AttentionOp& op) {
            const KVLayout& kv = layer_of(op.layer);
            require(op.num_heads >= 1 && op.num_heads % kv.num_kv_heads == 0, "heads are not groups of KV heads");
            require(op.scale > 0 && op.softcap >= 0, "the scale of attention must be positive, its soft cap not negative");
            const int64_t cols = int64_t{op.num_heads} * kv.head_dim;
            use(op.q, cols, false), use(op.out, cols, false);
          },
          [&](const GatherOp& op) {
            use(op.out, op.cols, true);
            extent_ = std::max(extent_, op.x + spec_.max_tokens * op.cols * static_cast<int64_t>(sizeof(float)));
          },
      },
      instruction);
}

void Program::finish(int64_t arena_bytes, int64_t logits, int64_t vocab, int64_t max_position) {
  require(in_logits_ && !finished_, "it has no gather, or is finished");
  for (const RopeTable& table : tables_) require(table.positions >= max_position, "a rope table is too short");
  use(logits, vocab, true);
  require(extent_ <= arena_bytes, "the arena is smaller than its buffers");
  require(vocab <= std::numeric_limits<int32_t>::max(), "the vocabulary is too large");
  arena_ = LazyMemory(static_cast<size_t>(arena_bytes), true);
  find_runs();
  plan_bands();
  logits_ = logits;
  limits_.vocab_out = vocab;
  limits_.max_position = max_position;
  const size_t scratch = (2 * static_cast<size_t>(vocab) + 64) * sizeof(float);
  for (int t = 0; t < pool_.threads(); ++t) sample_scratch_.emplace_back(scratch, true);
  finished_ = true;
  pool_.when_idle([this] { return commit_ahead(); });
}

}  // namespace pinnate
