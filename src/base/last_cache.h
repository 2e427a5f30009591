// The size of the last cache that a core reaches, as the kernel tells it.
#pragma once

#include <cstdint>
#include <string>

namespace dc {

// Bytes of the largest data cache listed in the directory (the "cache" directory of a core in sysfs); 0 if none is.
std::int64_t largestCacheIn(const std::string& directory);

// Of the core that the calling thread runs on. Not sysconf's answer where it can be had otherwise: that one adds up the
// caches of all cores' groups of a processor which has several, and no core fills another group's. 0 if nobody tells.
std::int64_t lastCacheBytes();

}  // namespace dc
