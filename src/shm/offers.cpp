#include "deepcompile/shm/offers.h"

#include <cstring>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

namespace {

constexpr std::uint64_t kNoOffer = 0;
constexpr std::int64_t kRoom = 4096;  // bytes; longer lists are not offered

// What a rank says: this, then the offset of every run in its heap.
struct Said {
  std::uint64_t shape;  // kNoOffer: no offsets follow
  std::uint64_t same;   // 1 where the runs are those of its last exchange
};

void hashIn(std::uint64_t& hash, std::uint64_t word) { hash = (hash ^ word) * 1099511628211u; }

// Tells lists of different sizes apart.
std::uint64_t shapeOf(Runs runs) {
  std::uint64_t hash = 14695981039346656037u;
  for (const Run& run : runs) {
    hashIn(hash, static_cast<std::uint64_t>(run.bytes));
  }
  return hash == kNoOffer ? 1 : hash;
}

// Tells memory apart, in this process.
std::uint64_t placeOf(Runs runs) {
  std::uint64_t hash = shapeOf(runs);
  for (const Run& run : runs) {
    hashIn(hash, reinterpret_cast<std::uintptr_t>(run.data));
  }
  return hash;
}

Said saidBy(int rank, const Call& call, const Turn& turn) {
  Said said;
  std::memcpy(&said, call.staged(rank, turn), sizeof(said));
  return said;
}

}  // namespace

Offers exchangeOffers(Call& call, Group& group, Runs runs) {
  // Room for all that may be offered: ranks may differ in the number of runs, but not in the sizes of slots.
  const std::int64_t room = kRoom;
  const Turn turn = call.nextTurn(room);
  std::byte* own = call.stage(turn);
  Said said = {shapeOf(runs), call.sameMemoryAsLast(placeOf(runs)) ? std::uint64_t{1} : 0};
  if (static_cast<std::int64_t>(sizeof(Said) + runs.size() * sizeof(std::int64_t)) > room) {
    said.shape = kNoOffer;
  }
  for (std::size_t i = 0; i < runs.size() && said.shape != kNoOffer; ++i) {
    const std::int64_t offset = group.heap().offsetOf(runs[i].data, runs[i].bytes);
    if (offset < 0) {
      said.shape = kNoOffer;
    }
    std::memcpy(own + sizeof(Said) + i * sizeof(offset), &offset, sizeof(offset));
  }
  std::memcpy(own, &said, sizeof(said));
  call.post(turn);
  call.awaitPosts(turn);

  // Every rank sees the same words, and so decides the same.
  Offers offers;
  const std::uint64_t first = saidBy(0, call, turn).shape;
  bool offered = first != kNoOffer;
  for (int rank = 0; rank < call.ranks(); ++rank) {
    const Said theirs = saidBy(rank, call, turn);
    offers.same_ = offers.same_ && theirs.same != 0;
    offered = offered && theirs.shape == first;
  }
  if (!offered) {
    return offers;
  }
  offers.runs_ = runs.size();
  offers.addresses_.reserve(static_cast<std::size_t>(call.ranks()) * runs.size());
  for (int rank = 0; rank < call.ranks(); ++rank) {
    const std::byte* theirs = call.staged(rank, turn) + sizeof(Said);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      std::int64_t offset = 0;
      std::memcpy(&offset, theirs + i * sizeof(offset), sizeof(offset));
      offers.addresses_.push_back(group.heapOf(rank) + offset);
    }
  }
  return offers;
}

}  // namespace dc::shm
