// Assembles the kernel tables from the modules' parts and picks one. Knows every module's name and no kernel.
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "kernels.h"

#define PINNATE_PARTS(ISA)                  \
  namespace ISA {                           \
  void register_gemm(KernelTable& t);       \
  void register_quant(KernelTable& t);      \
  void register_rows(KernelTable& t);       \
  void register_attention(KernelTable& t);  \
  void register_sample(KernelTable& t);     \
  void register_peak(KernelTable& t);       \
  }

// ISA of the table, and of the parts of it that use no tile registers.
#define PINNATE_TABLE(ISA, ROWS)            \
  const KernelTable& kernels_##ISA() {      \
    static const KernelTable table = [] {   \
      KernelTable t{};                      \
      t.isa = #ISA;                         \
      ISA::register_gemm(t);                \
      ISA::register_quant(t);               \
      ROWS::register_rows(t);               \
      ISA::register_attention(t);          \
      ROWS::register_sample(t);             \
      ISA::register_peak(t);                \
      return t;                             \
    }();                                    \
    return table;                           \
  }

namespace pinnate {

PINNATE_PARTS(portable)
PINNATE_PARTS(avx2)
PINNATE_PARTS(avx512)
PINNATE_PARTS(amx)

PINNATE_TABLE(portable, portable)
PINNATE_TABLE(avx2, avx2)
PINNATE_TABLE(avx512, avx512)
PINNATE_TABLE(amx, avx512)

const KernelTable& select_kernels(const char* name) {
  const std::string wanted = name;
  const std::string isa = wanted == "auto" ? cpu_info().isas.front() : wanted;
  if (isa != "amx" && isa != "avx512" && isa != "avx2" && isa != "portable")
    throw std::invalid_argument("isa: '" + isa + "' is not one of auto, amx, avx512, avx2, portable");
  if (!cpu_runs(isa)) throw std::invalid_argument("isa: this CPU (" + cpu_info().model + ") cannot run " + isa);
  if (isa == "amx") return kernels_amx();
  return isa == "avx512" ? kernels_avx512() : isa == "avx2" ? kernels_avx2() : kernels_portable();
}

}  // namespace pinnate
