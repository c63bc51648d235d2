// Storage types of weights (GGUF numbering) and activation types.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pinnate {

enum class TensorType : int {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30,
};

// The compute type: of packed weights, of activations entering a GEMM, and of keys and values.
enum class Act : int { kF32 = 0, kBF16 = 1 };

// How packed weights are stored: in the compute type; as signed bytes with a scale for each 32 of them (w = d q); as 4-bit
// numbers with a scale and a minimum for each 32 (w = d q + m).
enum class WeightFormat : int { kAct = 0, kInt8 = 1, kInt4 = 2 };

inline size_t act_bytes(Act a) { return a == Act::kF32 ? 4 : 2; }

using bf16 = uint16_t;  // the upper half of a float, rounded to nearest even

}  // namespace pinnate
