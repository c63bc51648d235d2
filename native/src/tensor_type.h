// Storage types of weights (GGUF numbering) and activation types.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pinnate {

enum class TensorType : int {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30,
};

// The compute type: of packed weights, of activations entering a GEMM, and of keys and values.
enum class Act : int { kF32 = 0, kBF16 = 1 };

inline size_t act_bytes(Act a) { return a == Act::kF32 ? 4 : 2; }

using bf16 = uint16_t;  // the upper half of a float, rounded to nearest even

}  // namespace pinnate
