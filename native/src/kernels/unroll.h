// Loops that are unrolled before the compiler decides what lives in memory: an array that is indexed by the loop's variable
// stays in registers. A loop that the compiler unrolls by itself does not do: it does so too late.
#pragma once

namespace pinnate::PINNATE_KERNEL_ISA {

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

// f(0), ..., f(N - 1), with the index as a constant.
template <int N, int I = 0, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unrolled<N, I + 1>(f);
  }
}
#define PINNATE_EACH(i) [&](auto i) __attribute__((always_inline))

}  // namespace pinnate::PINNATE_KERNEL_ISA
