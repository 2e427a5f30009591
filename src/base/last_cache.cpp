#include "deepcompile/base/last_cache.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

// "32768K", "105M".
std::int64_t parseSize(std::istream& text) {
  std::int64_t number = 0;
  char unit = ' ';
  if (!(text >> number) || number < 0) {
    return 0;
  }
  text >> unit;
  return unit == 'K' ? number << 10 : unit == 'M' ? number << 20 : unit == 'G' ? number << 30 : number;
}

}  // namespace

std::int64_t largestCacheIn(const std::string& directory) {
  std::int64_t largest = 0;
  for (int index = 0;; ++index) {
    const std::string cache = concat(directory, "/index", index);
    std::ifstream size(cache + "/size");
    if (!size) {
      return largest;
    }
    std::string type;
    std::ifstream(cache + "/type") >> type;
    if (type != "Instruction") {
      largest = std::max(largest, parseSize(size));
    }
  }
}

std::int64_t lastCacheBytes() {
  const int core = std::max(0, ::sched_getcpu());
  const std::int64_t told = largestCacheIn(concat("/sys/devices/system/cpu/cpu", core, "/cache"));
  return told > 0 ? told : std::max<std::int64_t>(0, ::sysconf(_SC_LEVEL3_CACHE_SIZE));
}

}  // namespace dc
