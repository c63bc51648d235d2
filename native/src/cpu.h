// What this CPU (and its operating system) can run.
#pragma once
#include <string>
#include <vector>

namespace pinnate {

struct CpuInfo {
  std::string model;               // brand string, "unknown" without one
  std::vector<std::string> flags;  // those the kernels care about, by their /proc/cpuinfo names
  std::vector<std::string> isas;   // kernel tables that run here, best first; "portable" is always last
};

const CpuInfo& cpu_info();
bool cpu_runs(const std::string& isa);

}  // namespace pinnate
