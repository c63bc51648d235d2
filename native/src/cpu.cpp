// CPU features by CPUID; a register set counts only if the operating system saves it (XCR0) and, for tiles, lets this process
// use it.
#include "cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pinnate {
namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(unsigned leaf, unsigned sub = 0) {
  Leaf r;
  __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);  // leaves r zero where the leaf does not exist
  return r;
}

uint64_t xcr0() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux saves tiles for the processes that asked for them, and for the threads these start afterwards.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string brand() {
  char text[49] = {};
  if (cpuid(0x80000000u).a < 0x80000004u) return "unknown";
  for (unsigned i = 0; i < 3; ++i) {
    const Leaf r = cpuid(0x80000002u + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  std::string s(text);
  const auto begin = s.find_first_not_of(' '), end = s.find_last_not_of(' ');
  return begin == std::string::npos ? "unknown" : s.substr(begin, end - begin + 1);
}

std::vector<std::string> detect_flags() {
  const Leaf l1 = cpuid(1), l7 = cpuid(7), l71 = cpuid(7, 1), x1 = cpuid(0x80000001u);
  const uint64_t saved = (l1.c >> 27 & 1) ? xcr0() : 0;
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6;
  const bool tiles = (saved & 0x60000) == 0x60000 && (l7.d >> 24 & 1) && tiles_granted();
  struct Bit {
    const char* name;
    unsigned reg;
    int bit;
    bool usable;
  };
  const Bit bits[] = {
      {"sse4_2", l1.c, 20, true},        {"movbe", l1.c, 22, true},         {"abm", x1.c, 5, true},
      {"bmi1", l7.b, 3, true},           {"bmi2", l7.b, 8, true},           {"avx", l1.c, 28, ymm},
      {"f16c", l1.c, 29, ymm},           {"fma", l1.c, 12, ymm},            {"avx2", l7.b, 5, ymm},
      {"avx_vnni", l71.a, 4, ymm},       {"avx512f", l7.b, 16, zmm},        {"avx512dq", l7.b, 17, zmm},
      {"avx512cd", l7.b, 28, zmm},       {"avx512bw", l7.b, 30, zmm},       {"avx512vl", l7.b, 31, zmm},
      {"avx512_vnni", l7.c, 11, zmm},    {"avx512_bf16", l71.a, 5, zmm},    {"amx_bf16", l7.d, 22, tiles},
      {"amx_tile", l7.d, 24, tiles},     {"amx_int8", l7.d, 25, tiles},
  };
  std::vector<std::string> flags;
  for (const Bit& b : bits)
    if (b.usable && (b.reg >> b.bit & 1)) flags.emplace_back(b.name);
  return flags;
}

#else
std::string brand() { return "unknown"; }
std::vector<std::string> detect_flags() { return {}; }
#endif

CpuInfo detect() {
  CpuInfo info;
  info.model = brand();
  info.flags = detect_flags();
  auto all = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) {
      return std::find(info.flags.begin(), info.flags.end(), name) != info.flags.end();
    });
  };
  // The flags each table is compiled with (CMakeLists.txt): x86-64-v3; x86-64-v4 with BF16 and VNNI; that with tiles.
  const bool avx2 = all({"sse4_2", "movbe", "abm", "bmi1", "bmi2", "avx", "f16c", "fma", "avx2"});
  const bool avx512 =
      avx2 && all({"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"});
  if (avx512 && all({"amx_tile", "amx_bf16", "amx_int8"})) info.isas.emplace_back("amx");
  if (avx512) info.isas.emplace_back("avx512");
  if (avx2) info.isas.emplace_back("avx2");
  info.isas.emplace_back("portable");
  return info;
}

}  // namespace

const CpuInfo& cpu_info() {
  static const CpuInfo info = detect();
  return info;
}

bool cpu_runs(const std::string& isa) {
  const auto& isas = cpu_info().isas;
  return std::find(isas.begin(), isas.end(), isa) != isas.end();
}

}  // namespace pinnate
