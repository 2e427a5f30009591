// How ranks find out that they share a host, and come to share memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "deepcompile/shm/layout.h"
#include "deepcompile/shm/peer_process.h"
#include "deepcompile/shm/rendezvous.h"
#include "deepcompile/shm/segment.h"
#include "deepcompile/shm/shared_heap.h"

namespace dc::shm {

// What a rank has in hand afterwards.
struct Handshake {
  std::shared_ptr<Segment> group;
  std::shared_ptr<SharedHeap> heap;  // its own
  std::vector<PeerProcess> peers;    // by rank; nothing at its own
};

// The memory of a group, laid out and empty.
Segment makeGroupMemory(const Layout& layout);

// Collective. Nothing when the ranks cannot share memory: they do not share this host, or the system refuses a rank
// shared memory as such; `reason` then says which rank and why, the same on all ranks. Other errors (too little memory,
// a rank that does not come or ends) are thrown on all ranks. When it returns, all ranks have what they need.
std::optional<Handshake> shakeHands(Rendezvous& rendezvous, int rank, const Layout& layout,
                                    std::chrono::milliseconds timeout, std::string& reason);

}  // namespace dc::shm
