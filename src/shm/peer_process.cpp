#include "deepcompile/shm/peer_process.h"

#include <map>
#include <mutex>

namespace dc::shm {
namespace {

struct Known {
  std::weak_ptr<const Segment> heap;
  std::weak_ptr<const Descriptor> end;
};

}  // namespace

PeerProcess sharePeer(const std::string& heap_id, Descriptor heap, Descriptor end) {
  static std::mutex mutex;
  static auto* peers = new std::map<std::string, Known>;  // groups may outlive static objects
  const std::lock_guard lock(mutex);
  std::erase_if(*peers, [](const auto& peer) { return peer.second.heap.expired() && peer.second.end.expired(); });
  Known& known = (*peers)[heap_id];
  PeerProcess peer = {known.heap.lock(), known.end.lock()};
  if (!peer.heap) {
    known.heap = peer.heap = std::make_shared<const Segment>(Segment::map(std::move(heap)));
  }
  if (!peer.end && end) {
    known.end = peer.end = std::make_shared<const Descriptor>(std::move(end));
  }
  return peer;
}

}  // namespace dc::shm
