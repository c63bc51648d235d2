// Every table is whole, and only what this CPU runs can be selected.
#include <stdexcept>
#include <string>

#include "../src/cpu.h"
#include "../src/kernels.h"
#include "check.h"

using namespace pinnate;

namespace {

bool whole(const KernelTable& t) {
  return t.pack_layout && t.pack_panel && t.gemm_tile && t.unpack_rows && t.dequantize && t.rms_norm && t.layer_norm &&
         t.unary && t.binary && t.to_act && t.kv_page_bytes && t.qkv && t.attention_begin && t.attention_shared && t.attention_scratch &&
         t.attention && t.sample && t.peak_flops && t.peak_int8;
}

bool refused(const char* name) {
  try {
    select_kernels(name);
  } catch (const std::invalid_argument& e) {
    return std::string(e.what()).rfind("isa: ", 0) == 0;
  }
  return false;
}

}  // namespace

int main() {
  CHECK(whole(kernels_portable()) && whole(kernels_avx2()) && whole(kernels_avx512()) && whole(kernels_amx()));
  const KernelTable &amx = kernels_amx(), &avx512 = kernels_avx512();
  CHECK(amx.sample == avx512.sample && amx.rms_norm == avx512.rms_norm);  // no tiles in these
  CHECK(amx.gemm_tile != avx512.gemm_tile && amx.quant_tile != avx512.quant_tile && amx.attention != avx512.attention);
  for (const char* isa : {"amx", "avx512", "avx2", "portable"}) {
    if (cpu_runs(isa)) CHECK(std::string(select_kernels(isa).isa) == isa);
    else CHECK(refused(isa));
  }
  CHECK(select_kernels("auto").isa == cpu_info().isas.front());
  CHECK(refused("neon") && refused(""));
  return test::finish("select");
}
