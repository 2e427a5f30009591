#include "deepcompile/shm/tuning.h"

#include <unistd.h>

#include <algorithm>

#include "deepcompile/shm/group.h"

namespace dc::shm {

std::int64_t defaultStreamingBytes() {
  const std::int64_t last_cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return std::max<std::int64_t>(last_cache / 4, 4 << 20);
}

Tuning measureTuning(Group& group) { return group.tuning(); }

}  // namespace dc::shm
