#include "deepcompile/shm/offers.h"

#include <cstring>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

namespace {

constexpr std::uint64_t kNoOffer = 0;
constexpr std::int64_t kRoom = 4096;  // bytes; longer lists are not offered

// Tells lists of different sizes apart.
std::uint64_t shapeOf(Runs runs) {
  std::uint64_t hash = 14695981039346656037u;
  for (const Run& run : runs) {
    hash = (hash ^ static_cast<std::uint64_t>(run.bytes)) * 1099511628211u;
  }
  return hash == kNoOffer ? 1 : hash;
}

}  // namespace

Offers exchangeOffers(Call& call, Group& group, Runs runs) {
  // The shape, then the offset of every run in the rank's heap. Room for all that may be offered: ranks may differ in
  // the number of runs, but not in the sizes of slots.
  const std::int64_t room = kRoom;
  const Turn turn = call.nextTurn(room);
  std::byte* own = call.stage(turn);
  std::uint64_t shape = shapeOf(runs);
  if (static_cast<std::int64_t>((runs.size() + 1) * sizeof(std::int64_t)) > room) {
    shape = kNoOffer;
  }
  for (std::size_t i = 0; i < runs.size() && shape != kNoOffer; ++i) {
    const std::int64_t offset = group.heap().offsetOf(runs[i].data, runs[i].bytes);
    if (offset < 0) {
      shape = kNoOffer;
    }
    std::memcpy(own + (i + 1) * sizeof(offset), &offset, sizeof(offset));
  }
  std::memcpy(own, &shape, sizeof(shape));
  call.post(turn);
  call.awaitPosts(turn);

  // Every rank sees the same words, and so decides the same.
  Offers offers;
  std::uint64_t first = kNoOffer;
  std::memcpy(&first, call.staged(0, turn), sizeof(first));
  for (int rank = 0; rank < call.ranks(); ++rank) {
    std::uint64_t theirs = kNoOffer;
    std::memcpy(&theirs, call.staged(rank, turn), sizeof(theirs));
    if (theirs == kNoOffer || theirs != first) {
      return offers;
    }
  }
  offers.runs_ = runs.size();
  offers.addresses_.reserve(static_cast<std::size_t>(call.ranks()) * runs.size());
  for (int rank = 0; rank < call.ranks(); ++rank) {
    const std::byte* theirs = call.staged(rank, turn);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      std::int64_t offset = 0;
      std::memcpy(&offset, theirs + (i + 1) * sizeof(offset), sizeof(offset));
      offers.addresses_.push_back(group.heapOf(rank) + offset);
    }
  }
  return offers;
}

}  // namespace dc::shm
