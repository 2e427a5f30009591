// A process with which this one shares memory. However many groups two processes have in common, each maps the heap of
// the other once, and holds one descriptor that tells of its end.
#pragma once

#include <memory>
#include <string>

#include "deepcompile/shm/descriptor.h"
#include "deepcompile/shm/segment.h"

namespace dc::shm {

struct PeerProcess {
  std::shared_ptr<const Segment> heap;
  std::shared_ptr<const Descriptor> end;  // becomes readable when the process ends; null where the system does not tell
};

// Takes what the peer has handed over, and lets go of it where this process has it already. `heap_id` is the peer's
// SharedHeap::id(); `end` may be empty.
PeerProcess sharePeer(const std::string& heap_id, Descriptor heap, Descriptor end);

}  // namespace dc::shm
