// Each kernels/*.cpp is compiled once per ISA and defines its register_* in that ISA's namespace.
#pragma once
#include "../kernels.h"
#ifndef PINNATE_KERNEL_ISA
#error "compile with -DPINNATE_KERNEL_ISA=portable|avx2|avx512|amx"
#endif
namespace pinnate::PINNATE_KERNEL_ISA {
void register_gemm(KernelTable& t);
void register_quant(KernelTable& t);
void register_rows(KernelTable& t);
void register_attention(KernelTable& t);
void register_sample(KernelTable& t);
void register_peak(KernelTable& t);
}  // namespace pinnate::PINNATE_KERNEL_ISA
