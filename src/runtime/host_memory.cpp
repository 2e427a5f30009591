#include "deepcompile/runtime/host_memory.h"

#include <cstdlib>
#include <string_view>

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include "deepcompile/base/environment.h"

namespace dc {
namespace {

bool userHasChosen() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr || std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr ||
         (tunables != nullptr && std::string_view(tunables).find("glibc.malloc") != std::string_view::npos) ||
         Environment::read().malloc == "unchanged";
}

}  // namespace

void keepFreedMemory() {
#if defined(__GLIBC__) && defined(M_TRIM_THRESHOLD)
  constexpr int kLargestInHeap = 32 << 20;  // larger blocks are mapped and unmapped one by one
  if (!userHasChosen()) {
    mallopt(M_MMAP_THRESHOLD, kLargestInHeap);
    mallopt(M_TRIM_THRESHOLD, 2 * kLargestInHeap);
  }
#endif
}

}  // namespace dc
