// Knows the ranges of a step's integers; computes nothing.
#include "step.h"

#include <stdexcept>
#include <string>

namespace pinnate {
namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("step: ") + what);
}

void in_range(std::span<const int32_t> values, int64_t low, int64_t high, const char* what) {
  for (const int32_t v : values)
    if (v < low || v >= high)
      throw std::out_of_range(std::string("step: ") + what + " " + std::to_string(v) + " is not in [" +
                              std::to_string(low) + ", " + std::to_string(high) + ")");
}

void ascending(std::span<const int32_t> offsets, size_t end, const char* what) {
  bool ok = offsets.front() == 0 && static_cast<size_t>(offsets.back()) == end;
  for (size_t i = 1; i < offsets.size(); ++i) ok = ok && offsets[i - 1] <= offsets[i];
  require(ok, what);
}

bool fits(int64_t start, int64_t length, size_t size) {
  return start >= 0 && length >= 0 && start + length <= static_cast<int64_t>(size);
}

void check_sequences(const Step& s, const StepLimits& limits) {
  const size_t tokens = s.tokens.size(), indices = static_cast<size_t>(s.page_offsets.back());
  for (size_t i = 0; i < s.contexts.size(); ++i) {
    const int64_t rows = s.seq_starts[i + 1] - s.seq_starts[i], context = s.contexts[i];
    const int64_t pages = s.page_offsets[i + 1] - s.page_offsets[i];
    require(rows > 0 && context >= rows, "a context is shorter than its rows");
    require(context <= pages * limits.page_size, "a context needs more pages than its table has");
    if (context > limits.max_position)
      throw std::out_of_range("step: a context of " + std::to_string(context) + " tokens, the model takes " +
                              std::to_string(limits.max_position));
    for (int64_t r = 0; r < rows; ++r) {
      const size_t row = static_cast<size_t>(s.seq_starts[i] + r);
      const int64_t position = context - rows + r;
      const size_t at = static_cast<size_t>(s.page_offsets[i] + position / limits.page_size);
      require(s.positions[row] == position, "positions disagree with contexts");
      for (size_t g = 0; g < static_cast<size_t>(limits.groups); ++g) {
        const int64_t page = s.page_indices[g * indices + at];
        require(page > 0, "a token would be written to the null page");
        require(s.slots[g * tokens + row] == page * limits.page_size + position % limits.page_size,
                "slots disagree with pages");
      }
    }
  }
}

void check_samples(const Step& s, const StepLimits& limits) {
  int32_t previous = 0;
  const int64_t words = (limits.vocab_out + 31) / 32;
  for (const SampleRecord& r : s.samples) {
    require(r.row >= previous && static_cast<size_t>(r.row) < s.logit_rows.size(), "a sample's row is out of order");
    previous = r.row;
    require(fits(r.history_start, int64_t{r.prompt_len} + r.output_len, s.history.size()) && r.prompt_len >= 0 &&
                r.output_len >= 0, "a sample's history is out of range");
    require(fits(r.bias_start, r.bias_len, s.bias_ids.size()), "a sample's bias is out of range");
    require(r.num_top <= 0 || fits(r.top_start, r.num_top, s.out_top_ids.size()), "a sample's top is out of range");
    require(r.mask >= -1 && (int64_t{r.mask} + 1) * words <= static_cast<int64_t>(s.masks.size()),
            "a sample's mask is out of range");
    if (r.target >= limits.vocab_out)
      throw std::out_of_range("step: scored token " + std::to_string(r.target) + " is out of the vocabulary");
  }
}

}  // namespace

void check_step(const Step& s, const StepLimits& limits) {
  const size_t tokens = s.tokens.size(), sequences = s.contexts.size();
  require(tokens > 0 && sequences > 0, "no tokens");
  require(static_cast<int64_t>(tokens) <= limits.max_tokens, "more tokens than the program was built for");
  const size_t groups = static_cast<size_t>(limits.groups);
  require(s.positions.size() == tokens && s.slots.size() == groups * tokens,
          "positions or slots differ in length from tokens");
  require(s.seq_starts.size() == sequences + 1 && s.page_offsets.size() == sequences + 1, "offsets differ in length");
  require(s.bias.size() == s.bias_ids.size() && s.copies.size() % 2 == 0, "bias or copies are not pairs");
  const size_t rows = s.samples.size();
  require(s.out_tokens.size() == rows && s.out_logprobs.size() == rows && s.out_ranks.size() == rows &&
              s.out_top_ids.size() == s.out_top_logprobs.size(), "results differ in length from samples");
  ascending(s.seq_starts, tokens, "seq_starts are not ascending to the number of tokens");
  const size_t indices = s.page_indices.size() / groups;
  require(s.page_indices.size() == groups * indices, "page_indices are not as many for each group");
  ascending(s.page_offsets, indices, "page_offsets are not ascending to the number of pages");
  in_range(s.tokens, 0, limits.vocab_in, "token");
  in_range(s.page_indices.first(indices), 1, limits.num_pages + 1, "page");
  in_range(s.page_indices.subspan(indices), 0, limits.num_pages + 1, "page");
  in_range(s.copies, 1, limits.num_pages + 1, "copied page");
  in_range(s.logit_rows, 0, static_cast<int64_t>(tokens), "logits row");
  in_range(s.history, 0, limits.vocab_out, "history token");
  in_range(s.bias_ids, 0, limits.vocab_out, "biased token");
  check_sequences(s, limits);
  check_samples(s, limits);
}

}  // namespace pinnate
