// Parts of the kernel tables, for programs that link one or two kernel modules alone.
#pragma once
#include <string>

#include "../src/kernels.h"

namespace pinnate {

#define PINNATE_PARTS(ISA)          \
  namespace ISA {                   \
  void register_gemm(KernelTable&); \
  void register_quant(KernelTable&); \
  void register_peak(KernelTable&); \
  }
PINNATE_PARTS(portable)
PINNATE_PARTS(avx2)
PINNATE_PARTS(avx512)
PINNATE_PARTS(amx)
#undef PINNATE_PARTS

// The table of `isa` with gemm's part filled in.
inline KernelTable gemm_kernels(const std::string& isa) {
  KernelTable t{};
  if (isa == "amx") t.isa = "amx", amx::register_gemm(t);
  else if (isa == "avx512") t.isa = "avx512", avx512::register_gemm(t);
  else if (isa == "avx2") t.isa = "avx2", avx2::register_gemm(t);
  else t.isa = "portable", portable::register_gemm(t);
  return t;
}

// Fills in the part of the quantised formats.
inline void add_quant_kernels(KernelTable& t) {
  const std::string isa = t.isa;
  if (isa == "amx") amx::register_quant(t);
  else if (isa == "avx512") avx512::register_quant(t);
  else if (isa == "avx2") avx2::register_quant(t);
  else portable::register_quant(t);
}

inline void add_peak_kernels(KernelTable& t) {
  const std::string isa = t.isa;
  if (isa == "amx") amx::register_peak(t);
  else if (isa == "avx512") avx512::register_peak(t);
  else if (isa == "avx2") avx2::register_peak(t);
  else portable::register_peak(t);
}

}  // namespace pinnate
