// The kernel table: every compute routine, one implementation for each instruction set.
//
// Each file in kernels/ is compiled once for each ISA (PINNATE_KERNEL_ISA = portable | avx2 | avx512 | amx) with that ISA's
// flags, in namespace pinnate::PINNATE_KERNEL_ISA, and fills its part of the table (kernels/register.h). What needs no tile
// registers is the same in amx as in avx512, and taken from there (select.cpp).
//
// Determinism, the contract of every routine here: the bits of an output row depend on that row's inputs alone: not on the
// number of rows in the call, the row's place among them, or the thread that computes it. Reductions (over K, over the
// keys of an attention row, over a vocabulary) run in one fixed order. All routines run with FTZ and DAZ set
// (ThreadPool sets MXCSR in its threads; Program::run sets it in the caller and restores it).
#pragma once
#include <cstddef>
#include <cstdint>

#include "tensor_type.h"

namespace pinnate {

// ---- weights ------------------------------------------------------------------------------------------------------
// A matrix [n, k] packed for gemm. The layout is private to kernels/gemm.cpp (kernels/quant.cpp for the quantised formats)
// of the ISA that packed it. `act` is the type of the rows that enter and leave the product, whatever the format.
// Panels of kPanel output columns; n is padded to whole panels, k to a multiple of 32 in bf16, with zeros.
// With `swiglu`, the matrix is gate [n/2, k] and up [n/2, k] interleaved so that each panel holds 32 gate columns and the
// 32 up columns that belong to them (padded alike).
constexpr int64_t kPanel = 64;
struct PackedWeight {
  int64_t n = 0, k = 0;         // logical sizes (n counts gate and up both, with swiglu)
  Act act = Act::kBF16;
  bool swiglu = false;
  WeightFormat format = WeightFormat::kAct;
  int64_t panels = 0;
  int64_t panel_bytes = 0;
  unsigned char* data = nullptr;  // 64-byte aligned, panels * panel_bytes
};

// One matrix as it lies in its file, rows [n, k] of storage type `type`.
struct SourceMatrix {
  TensorType type;
  const unsigned char* data;
  int64_t rows, cols;
  const int32_t* row_order = nullptr;  // row i is stored at row_order[i]
};

constexpr int64_t kQuantBlock = 32;  // elements of a quantised weight, and of activations, that share a scale

// ---- gemm ---------------------------------------------------------------------------------------------------------
enum class Epilogue : int {
  kStoreF32,   // out (float) = x W^T + bias
  kAddF32,     // out (float) += x W^T + bias   (the residual)
  kStoreAct,   // out (act)   = x W^T + bias
  kSwiGLUAct,  // out (act) [m, n/2] = silu(gate) * up; packed with swiglu; no bias
};
constexpr bool stores_floats(Epilogue e) { return e == Epilogue::kStoreF32 || e == Epilogue::kAddF32; }
struct GemmArgs {
  const void* x;    // act [m, ldx]; columns k..(k rounded up to even) are never read
  int64_t ldx;      // elements
  int64_t m;
  const PackedWeight* w;
  const float* bias;  // [n] or null
  Epilogue epilogue;
  void* out;
  int64_t ldo;      // elements
  unsigned char* scratch = nullptr;  // gemm_scratch bytes (gemm.h), 64-byte aligned
  bool arranged = false;  // a.scratch holds the rows, arranged: x is not read
  int64_t ahead = 0;  // a hint: the thread that computes panel p probably goes on with panel p + ahead (0: unknown)
  int half = -1;      // 0 or 1: only that half of a panel's columns (KernelTable::cuts_panels; not with swiglu); -1: all
};

// ---- rows ---------------------------------------------------------------------------------------------------------
struct NormArgs {  // rms_norm and layer_norm over groups of `group` columns
  const float* x; int64_t ldx;
  const float* weight; const float* bias;  // [group]; bias may be null
  float eps;
  int64_t cols, group;
  void* out; int64_t ldo;
  bool out_f32;  // else act
};

enum class Unary : int { kGeluTanh, kGeluErf, kSoftcap, kScale };
enum class Binary : int { kAdd, kMul, kSwiGLU };

// ---- attention ----------------------------------------------------------------------------------------------------
// One layer's pool: pages of page_bytes each; the layout inside a page is private to kernels/attention.cpp.
// page_size is a multiple of 16. head_dim is any multiple of 2 (padded inside).
// With `int8`, keys and values are kept as int8 with a scale for each token and head, and become `act` again where they are
// read.
struct KVLayout {
  int page_size, num_kv_heads, head_dim;
  Act act;
  bool int8 = false;
};

// q/k norm (optional), rope (optional), then: q -> act rows, k and v -> pages.
struct QKVArgs {
  const float* qkv; int64_t ldx;       // [T, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v, bias included
  int num_heads;
  KVLayout kv;
  const float* q_norm; const float* k_norm; float norm_eps;  // [head_dim] or null
  const float* cos; const float* sin;  // [max_position, rotary/2] tables (attention factor included), or null
  int rotary;                          // rotated columns of a head; 0 with null tables
  const int32_t* positions;            // [T]
  const int32_t* slots;                // [T] page * page_size + offset: where token t's k and v go
  void* q_out; int64_t ldq;            // act [T, num_heads * head_dim]
  unsigned char* pool;                 // this layer's pool
};

struct AttentionArgs {
  const void* q; int64_t ldq;          // act [T, num_heads * head_dim]
  int num_heads;
  KVLayout kv;
  float scale;                         // > 0
  int window;                          // 0: none
  int num_seqs;
  const int32_t* seq_starts;           // [S + 1] rows of each sequence in this step
  const int32_t* contexts;             // [S] tokens of each sequence once this step is done; row r of s has position
                                       // contexts[s] - (seq_starts[s+1] - r)
  const int32_t* page_offsets;         // [S + 1] into page_indices
  const int32_t* page_indices;
  const unsigned char* pool;
  void* out; int64_t ldo;              // act [T, num_heads * head_dim]
  unsigned char* shared;               // attention_shared bytes, of this call alone
  float softcap = 0;                   // > 0: a scaled score s becomes softcap * tanh(s / softcap); 0: none
};

// ---- sampling -----------------------------------------------------------------------------------------------------
struct SampleArgs {  // one row
  const float* logits;    // [vocab]
  int64_t vocab;
  float temperature;      // 0: greedy (lowest id wins ties)
  float top_p, min_p;
  int32_t top_k;          // <= 0: off
  uint64_t seed; uint32_t index; uint32_t position;  // key of the counter-based generator
  float presence, frequency, repetition;
  const int32_t* prompt; int64_t prompt_len;   // history, for penalties; null without
  const int32_t* output; int64_t output_len;
  const int32_t* bias_ids; const float* bias; int64_t bias_len;  // -inf bans a token
  const uint32_t* mask;   // [ceil(vocab / 32)] bit i % 32 of word i / 32 set: token i is allowed; null: all are
  int32_t target;         // >= 0: do not draw, score this token
  int32_t num_top;        // -1: no logprobs; else how many alternatives
  // results
  int32_t token;
  float logprob; int32_t rank;
  int32_t* top_ids; float* top_logprobs;  // [num_top]
};

struct KernelTable {
  const char* isa;

  // gemm.cpp. Rows that a product computes together, and rows of x that stay in a core's L2 next to a panel.
  int64_t gemm_rows = 1, gemm_row_block = 192;
  // Sizes `w` (n, k, act, swiglu set by the caller) -> fills panels, panel_bytes.
  void (*pack_layout)(PackedWeight& w);
  // Packs panel p: `sources` are stacked along n (qkv: 3 of them; swiglu: exactly {gate, up}).
  void (*pack_panel)(const SourceMatrix* sources, int count, PackedWeight& w, int64_t panel);
  // Rows [m0, m1) of a.x, bf16 -> a.scratch, in the order of their use by a product with a.arranged: whole groups of gemm_rows
  // rows, padded to arranged_block k of arranged_size bytes. m0 is a multiple of gemm_rows. Null: there is no such order.
  void (*arrange_rows)(const GemmArgs& a, int64_t m0, int64_t m1) = nullptr;
  int64_t arranged_block = 32, arranged_size = 2;
  bool arranges_always = false;  // gemm_tile reads rows of bf16 only so, whichever threads compute the product
  bool cuts_panels = false;  // gemm_tile heeds GemmArgs::half for bf16; quant_tile does so in every table
  // Rows [m0, m1) x panel p of the product.
  void (*gemm_tile)(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel);
  // out[i] = row ids[i] of w (not swiglu) as floats, times scale.
  void (*unpack_rows)(const PackedWeight& w, const int32_t* ids, int64_t count, float scale, float* out, int64_t ldo);
  void (*dequantize)(TensorType type, const unsigned char* data, int64_t count, float* out);

  // quant.cpp: the same for weights of a quantised format.
  void (*quant_layout)(PackedWeight& w);
  void (*quant_pack_panel)(const SourceMatrix* sources, int count, PackedWeight& w, int64_t panel);
  void (*quant_unpack_rows)(const PackedWeight& w, const int32_t* ids, int64_t count, float scale, float* out, int64_t ldo);
  // Rows [m0, m1) of a.x -> a.scratch as signed integers, with a scale for each row and 32 columns.
  void (*quantize_rows)(const GemmArgs& a, int64_t m0, int64_t m1);
  int64_t (*quantized_row_bytes)(const PackedWeight& w);
  int int8_levels = 127;  // of rows for a product with 8-bit weights; of all others: 127
  void (*quant_tile)(const GemmArgs& a, int64_t m0, int64_t m1, int64_t panel);  // reads the rows in a.scratch
  bool quantizes_bf16 = true;  // else quant_tile reads rows of bf16 in a.x as they are, and rounds weights to bf16

  // rows.cpp, rows [r0, r1)
  void (*rms_norm)(const NormArgs& a, Act act, int64_t r0, int64_t r1);
  void (*layer_norm)(const NormArgs& a, Act act, int64_t r0, int64_t r1);
  void (*unary)(Unary op, float p, const float* x, float* out, int64_t count);
  void (*binary)(Binary op, const float* a, const float* b, float* out, int64_t count);
  void (*to_act)(const float* x, void* out, Act act, int64_t count);

  // attention.cpp
  size_t (*kv_page_bytes)(const KVLayout& kv);
  void (*qkv)(const QKVArgs& a, int64_t r0, int64_t r1);  // two rows of one call may share a page (disjoint slots)
  // One attention call: attention_begin cuts the work into items, which do not depend on the number of threads, and returns
  // how many there are; then attention computes each item once, in any order, on any thread.
  size_t (*attention_scratch)(const AttentionArgs& a);   // bytes each thread needs
  size_t (*attention_shared)(const AttentionArgs& a);    // bytes a.shared needs; does not read it
  int64_t (*attention_begin)(const AttentionArgs& a);
  void (*attention)(const AttentionArgs& a, int64_t item, unsigned char* scratch);

  // sample.cpp
  void (*sample)(SampleArgs& a, float* scratch);  // scratch: 2 * vocab floats + 64

  // peak.cpp: the machine's limits. Runs about `seconds`; returns operations done (flops or int8 ops).
  double (*peak_flops)(Act act, double seconds);
  double (*peak_int8)(double seconds);  // 0 with portable
};

const KernelTable& kernels_portable();
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
const KernelTable& kernels_amx();

// Best table this CPU can run, or the one named ("auto", "amx", "avx512", "avx2", "portable").
// Throws std::invalid_argument where the CPU lacks it (avx512 needs F, BW, VL, DQ, VNNI and BF16; amx needs these, AMX-TILE,
// AMX-BF16, AMX-INT8 and an operating system that grants tiles to the process).
const KernelTable& select_kernels(const char* name);

}  // namespace pinnate
