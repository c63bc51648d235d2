// The gemm and peak parts of the kernel tables, for programs that link those two modules alone.
#pragma once
#include <string>

#include "../src/kernels.h"

namespace pinnate {

#define PINNATE_PARTS(ISA)           \
  namespace ISA {                    \
  void register_gemm(KernelTable&);  \
  void register_peak(KernelTable&);  \
  }
PINNATE_PARTS(portable)
PINNATE_PARTS(avx2)
PINNATE_PARTS(avx512)
#undef PINNATE_PARTS

inline KernelTable kernel_parts(const std::string& isa) {
  KernelTable t{};
  if (isa == "avx512") t.isa = "avx512", avx512::register_gemm(t), avx512::register_peak(t);
  else if (isa == "avx2") t.isa = "avx2", avx2::register_gemm(t), avx2::register_peak(t);
  else t.isa = "portable", portable::register_gemm(t), portable::register_peak(t);
  return t;
}

}  // namespace pinnate
