#include "deepcompile/comm/shared_placement.h"

#include <atomic>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/log.h"
#include "deepcompile/comm/shared_tensor.h"
#include "deepcompile/shm/shared_heap.h"

namespace dc {
namespace {

thread_local std::shared_ptr<const SizesInBytes> placed_sizes;

// PyTorch's own allocator at the time when this one was put before it. Set once, before anything is allocated here.
c10::Allocator* ordinary = nullptr;

std::atomic<bool> said_full{false};

// Memory from raw_allocate() comes back through whatever allocator is in place then, so this takes both kinds.
void freeEither(void* memory) {
  if (shm::SharedHeap* heap = shm::SharedHeap::around(memory); heap != nullptr) {
    heap->free(static_cast<std::byte*>(memory));
  } else {
    ordinary->raw_deleter()(memory);
  }
}

class PlacingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (placed_sizes != nullptr && placed_sizes->contains(bytes)) {
      try {
        return sharedAllocator()->allocate(bytes);
      } catch (const Error& error) {
        placed_sizes = nullptr;
        if (!said_full.exchange(true)) {
          log(LogLevel::Warning,
              concat("gradients lie in ordinary memory and are copied before they travel: ", error.what()));
        }
      }
    }
    return ordinary->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freeEither; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { ordinary->copy_data(to, from, bytes); }
};

void putInPlace() {
  static const bool done = [] {
    ordinary = c10::GetCPUAllocator();
    // Never destroyed: tensors may outlive static objects. The priority only has to be no lower than the present one's.
    c10::SetCPUAllocator(new PlacingAllocator, /*priority=*/1);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

void placeShared(std::shared_ptr<const SizesInBytes> sizes) {
  if (sizes != nullptr) {
    putInPlace();
  }
  placed_sizes = std::move(sizes);
}

}  // namespace dc
