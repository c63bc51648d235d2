// Counting checks of a routine that every instruction set has: a failure names the ISA and both values.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace pinnate::test {

// Whether the test is to run it: unless the variable PINNATE_TEST_ISAS names others, with commas between (an emulated machine is
// slow: docs/emulation.md).
inline bool is_wanted(const std::string& isa) {
  const char* names = std::getenv("PINNATE_TEST_ISAS");
  if (names == nullptr) return true;
  std::istringstream all(names);
  for (std::string name; std::getline(all, name, ',');)
    if (name == isa) return true;
  return false;
}

inline int failures = 0, checks = 0;
inline const char* isa = "";  // the one under test

inline void check(bool ok, const char* what, double got = 0, double want = 0) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) std::printf("FAIL %s: %s: got %.9g, want %.9g\n", isa, what, got, want);
}

// Runs test(name, register_function) for each ISA that this CPU has, with denormals flushed as in the program; the
// result is main's exit code.
template <class Test, class Register>
int for_every_isa(const char* name, Test test, Register portable, Register avx2, Register avx512) {
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);  // FTZ, DAZ
  __builtin_cpu_init();
  const auto run = [&](const char* table, bool is_here, Register routines) {
    if (is_here && is_wanted(table)) test(table, routines);
  };
  run("portable", true, portable);
  run("avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), avx2);
  run("avx512", __builtin_cpu_supports("avx512bf16"), avx512);
  std::printf("%s: %d checks, %d failures\n", name, checks, failures);
  return failures != 0 || checks == 0;
}

}  // namespace pinnate::test
