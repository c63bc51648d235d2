// A minimal test harness: CHECK counts, finish() reports and gives the exit code.
#pragma once
#include <cstdio>

namespace pinnate::test {

struct Counts {
  long checks = 0, failures = 0;
};

inline Counts& counts() {
  static Counts c;
  return c;
}

inline void check(bool ok, const char* what, const char* file, int line, const char* detail) {
  Counts& c = counts();
  ++c.checks;
  if (ok) return;
  if (++c.failures <= 20) std::printf("%s:%d: %s %s\n", file, line, what, detail);
}

inline int finish(const char* name) {
  std::printf("%s: %ld checks, %ld failures\n", name, counts().checks, counts().failures);
  return counts().failures == 0 && counts().checks > 0 ? 0 : 1;
}

}  // namespace pinnate::test

#define CHECK(condition) ::pinnate::test::check((condition), #condition, __FILE__, __LINE__, "")
#define CHECK_IN(condition, detail) ::pinnate::test::check((condition), #condition, __FILE__, __LINE__, detail)
