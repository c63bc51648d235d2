// The arrays of one step as they come from Python (executor/forward_batch.py), and the proof that they are in range.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace pinnate {

// One sampling row; the same layout as SAMPLE_DTYPE. Ranges point into the step's flat arrays.
struct SampleRecord {
  int64_t seed;
  int32_t row;  // of the logits rows; ascending over the records
  uint32_t index, position;
  float temperature, top_p, min_p;
  int32_t top_k;
  float presence, frequency, repetition;
  int32_t history_start, prompt_len, output_len;
  int32_t bias_start, bias_len;
  int32_t target;   // >= 0: score this token
  int32_t num_top;  // -1: no log-probabilities
  int32_t top_start;
  int32_t mask;     // row of the step's masks; -1: every token is allowed
  int32_t unused;
};
static_assert(sizeof(SampleRecord) == 88);

// All borrowed for the length of one run. T tokens, S sequences, G groups of layers with P pages in their tables, R logits rows, N sampling rows.
struct Step {
  std::span<const int32_t> tokens, positions, slots;                           // [T], [T], [G T] group by group
  std::span<const int32_t> seq_starts, contexts, page_offsets, page_indices;   // [S + 1], [S], [S + 1], [G P]
  std::span<const int32_t> copies;                                             // [2 C] source, target
  std::span<const int32_t> logit_rows;                                         // [R]
  std::span<const SampleRecord> samples;                                       // [N]
  std::span<const int32_t> history, bias_ids;
  std::span<const float> bias;
  std::span<const uint32_t> masks;        // [M, words of the vocabulary], bit set: the token is allowed
  std::function<void()> await_masks;      // called once before the first row is sampled; then `masks` is complete
  // results
  std::span<int32_t> out_tokens;    // [N]
  std::span<float> out_logprobs;    // [N]
  std::span<int32_t> out_ranks;     // [N]
  std::span<int32_t> out_top_ids;   // alternatives, flat
  std::span<float> out_top_logprobs;
  float* out_logits = nullptr;      // [R, vocab] or null
};

struct StepLimits {
  int64_t max_tokens;
  int64_t vocab_in;      // rows of the embedding
  int64_t vocab_out;     // columns of the logits
  int64_t max_position;  // rows of the rope tables
  int64_t page_size, num_pages;
  int64_t groups;        // of layers with page tables of their own; all but the first may name the null page
};

// Throws std::invalid_argument (shapes) or std::out_of_range (ids, slots, positions): nothing that passes can make a
// kernel touch memory that is not its own.
void check_step(const Step& step, const StepLimits& limits);

}  // namespace pinnate
