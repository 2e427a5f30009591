// How ranks find out that they share a host, and come to share memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deepcompile/shm/layout.h"
#include "deepcompile/shm/rendezvous.h"
#include "deepcompile/shm/segment.h"

namespace dc::shm {

// What a rank has in hand afterwards. By rank: the heaps, and descriptors that become readable when a rank's process
// ends (empty ones where the system has none).
struct Handshake {
  std::shared_ptr<Segment> group;
  std::vector<Descriptor> heaps;
  std::vector<Descriptor> processes;
};

// The memory of a group, laid out and empty.
Segment makeGroupMemory(const Layout& layout);

// Collective. `heap` is the descriptor of this rank's own heap. Nothing when the ranks do not all share this host:
// `reason` then says which rank does not, the same on all ranks. Errors (too little memory, a rank that does not come)
// are thrown on all ranks.
std::optional<Handshake> shakeHands(Rendezvous& rendezvous, int rank, const Layout& layout, int heap,
                                    std::chrono::milliseconds timeout, std::string& reason);

}  // namespace dc::shm
