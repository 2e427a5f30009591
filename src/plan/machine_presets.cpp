// Machines that are known by name. Link figures are what large collectives reach, not the data
// sheet: NCCL gets about 0.8 of a link (docs/simulator.md has the sources and the calibration).
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/machine.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

constexpr std::string_view kPresets[] = {
    R"(machine 8xh100
devices 8
budget 74GB
inside latency=2us bandwidth=360GB
between latency=6us bandwidth=40GB
to_device latency=10us bandwidth=50GB
to_host latency=10us bandwidth=50GB
slowdown 60
launch 6us
flops 560000000
memory_bandwidth 2800GB
host_update 5GB
)",
    R"(machine 8xh200
devices 8
budget 132GB
inside latency=2us bandwidth=360GB
between latency=6us bandwidth=40GB
to_device latency=10us bandwidth=50GB
to_host latency=10us bandwidth=50GB
slowdown 60
launch 6us
flops 560000000
memory_bandwidth 4000GB
host_update 5GB
)",
    R"(machine 8xa100
devices 8
budget 74GB
inside latency=3us bandwidth=230GB
between latency=8us bandwidth=20GB
to_device latency=10us bandwidth=22GB
to_host latency=10us bandwidth=22GB
slowdown 50
launch 7us
flops 210000000
memory_bandwidth 1600GB
host_update 4GB
)",
    // Both ranks share the device: a collective is a copy through its memory.
    R"(machine 1xh200-2ranks
devices 2
budget 66GB
inside latency=12us bandwidth=900GB
between latency=6us bandwidth=40GB
to_device latency=10us bandwidth=25GB
to_host latency=10us bandwidth=25GB
slowdown 300
launch 8us
flops 280000000
memory_bandwidth 2000GB
host_update 5GB
)",
    // Collectives run on the cores that compute.
    R"(machine 2xcpu
devices 2
budget 8GB
inside latency=3us bandwidth=6GB
between latency=30us bandwidth=1GB
to_device latency=1us bandwidth=8GB
to_host latency=1us bandwidth=8GB
slowdown 500
launch 2us
flops 40000
memory_bandwidth 10GB
host_update 8GB
)",
};

std::string_view nameOf(std::string_view text) {
  const std::size_t begin = text.find(' ') + 1;
  return text.substr(begin, text.find('\n') - begin);
}

}  // namespace

std::vector<std::string_view> presetNames() {
  std::vector<std::string_view> names;
  for (const std::string_view text : kPresets) {
    names.push_back(nameOf(text));
  }
  return names;
}

Machine preset(std::string_view wanted) {
  for (const std::string_view text : kPresets) {
    if (nameOf(text) == wanted) {
      return parseMachine(text, "preset");
    }
  }
  fail(unknown("machine", wanted, presetNames()));
}

}  // namespace dc::plan
