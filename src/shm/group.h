// Ranks that share memory. A group is an ordered channel: all ranks call the same collectives in the same order
// (collectives.h); calls from several threads are served one at a time.
//
// After an error the group is poisoned: every rank's pending and later calls throw the first error. Never a wrong
// number.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "deepcompile/shm/handshake.h"
#include "deepcompile/shm/layout.h"
#include "deepcompile/shm/owner_process.h"
#include "deepcompile/shm/rendezvous.h"
#include "deepcompile/shm/shared_heap.h"
#include "deepcompile/shm/tuning.h"
#include "deepcompile/shm/wait.h"

namespace dc::shm {

struct GroupOptions {
  std::string name = "default";                // in errors
  std::chrono::milliseconds timeout{300'000};  // of every wait
  std::int64_t slot_bytes =
      512 << 10;  // of the most that a rank stages in a turn; a group takes up to 12 of them for each rank
  std::optional<Tuning> tuning;  // measured when not given
};

// One turn of a call: its number, how much every rank stages in it, and where in the ranks' slots it lies (-1: in the
// post).
struct Turn {
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  std::int64_t stage = -1;
  std::int64_t result = -1;
};

// Slots one after the other through an area, from its start again where the rest is too small. By the rule in layout.h
// no slot lies where one of the three before it does. A long message starts again as soon as that lets it, so that its
// slots take less of the last cache, which its tensors do not fit beside: once a slot, and the next two of whatever
// size, fit before the last three.
class SlotArea {
 public:
  SlotArea(std::int64_t begin, std::int64_t largest_slot)
      : begin_(begin), largest_(largest_slot), end_(begin + kSlots * largest_slot) {}
  std::int64_t next(std::int64_t bytes, bool of_long_message) {
    const std::int64_t size = (bytes + kLine - 1) / kLine * kLine;
    const bool again =
        position_ + size > end_ || (of_long_message && std::ranges::min(last_) >= begin_ + size + 2 * largest_);
    const std::int64_t begin = again ? begin_ : position_;
    position_ = begin + size;
    last_ = {last_[1], last_[2], begin};
    return begin;
  }
  std::int64_t end() const { return end_; }

 private:
  std::int64_t begin_;
  std::int64_t largest_;
  std::int64_t end_;
  std::int64_t position_ = begin_;
  std::array<std::int64_t, 3> last_ = {end_, end_, end_};  // where they begin
};

class Group final : private Watch {
 public:
  // Collective. No group, and the reason, where the ranks do not share this host or cannot share memory: the same
  // answer on all ranks. Throws on all ranks when the set-up fails otherwise.
  static std::unique_ptr<Group> open(Rendezvous& rendezvous, int rank, int size, const GroupOptions& options,
                                     std::string& reason);
  // Ranks that are threads of this process; by rank.
  static std::vector<std::unique_ptr<Group>> ofThreads(int size, const GroupOptions& options = {});

  // Tells the peers that this rank has left. What they still have to read stays readable.
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return layout_.ranks; }
  const std::string& name() const { return name_; }
  const Layout& layout() const { return layout_; }
  const Tuning& tuning() const { return tuning_; }
  // All ranks must set the same. Throws where a size makes no sense.
  void setTuning(const Tuning& tuning);
  void setTimeout(std::chrono::milliseconds timeout) { timeout_.store(timeout.count(), std::memory_order_relaxed); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_.load(std::memory_order_relaxed));
  }
  const Patience& patience() const { return patience_; }
  const StagingChoice& staging() const { return staging_; }

  // Where this rank's memory can be taken as it is by its peers.
  SharedHeap& heap() const { return *heap_; }
  // The heap of a rank, in this process's address space.
  std::byte* heapOf(int rank) const { return heap_bases_[static_cast<std::size_t>(rank)]; }

  // Makes every rank's pending and later calls fail with `text`, unless the group has failed already. Nothing in a
  // forked child, which must not speak for the rank.
  void poison(const std::string& text);
  // From the moment at which a rank claims the error: it may be about to go on with memory that peers still use.
  bool poisoned() const { return header().poison.claimed.load(std::memory_order_acquire) != 0; }
  void throwIfPoisoned() const;

  // True when the process of a rank has ended, or the rank has left. Not for the fast path.
  bool gone(int rank) const;
  // "rank 1 (process 77, stopped)"
  std::string describe(int rank) const;

  RankBlock& block(int rank) const;
  std::byte* mailbox(int from, int to) const;

 private:
  friend class Call;
  Group(int rank, Layout layout, Handshake hands, const GroupOptions& options);

  Header& header() const { return *reinterpret_cast<Header*>(memory_->data()); }
  std::byte* slots(int rank) const { return memory_->data() + layout_.slots() + rank * layout_.slotsOfRank(); }
  bool hopeless(Clock::time_point started) override;
  [[noreturn]] void giveUp() override;
  [[noreturn]] void failMismatch(std::uint64_t number);

  const int rank_;
  const Layout layout_;
  const std::string name_;
  const std::shared_ptr<Segment> memory_;
  const std::shared_ptr<SharedHeap> heap_;
  const std::vector<PeerProcess> peers_;  // by rank; none where the ranks are threads
  std::vector<std::byte*> heap_bases_;    // by rank
  const Patience patience_;
  const OwnerProcess owner_;
  std::atomic<std::int64_t> timeout_;  // milliseconds
  Tuning tuning_;

  std::mutex mutex_;               // one call at a time
  std::uint64_t turn_ = 0;         // the last that this rank has begun
  Meaning meaning_;                // of the call in progress
  int awaited_ = -1;               // the rank that the call in progress waits for
  std::uint64_t last_memory_ = 0;  // what sameMemoryAsLast was asked last
  bool from_end_ = false;          // what beginsAtTheEnd said last
  std::string hopeless_because_;
  SlotArea short_stages_;
  SlotArea stages_;
  SlotArea results_;
  StagingChoice staging_;
};

// One collective call in progress: it holds the group. When it ends by an exception the group is poisoned, because the
// peers may be in the middle of the same call.
class Call {
 public:
  Call(Group& group, const Meaning& meaning);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  int rank() const { return group_.rank_; }
  int ranks() const { return group_.layout_.ranks; }

  // For what a rank finds wrong with its own arguments: the peers, who are about to wait for it, get the same error.
  template <std::invocable Message>
  void require(bool ok, Message&& message) {
    if (!ok) [[unlikely]] {
      refuse(message());
    }
  }

  // Throws when a peer may have gone on without this rank, and changed what this call has read of its memory.
  void throwIfGivenUp() const {
    // A read-modify-write, because it comes after all reads before it.
    group_.header().poison.claimed.fetch_or(0, std::memory_order_acq_rel);
    group_.throwIfPoisoned();
  }

  // All ranks give the same sizes: of what a rank stages for its peers in this turn, and of what it reduces for them;
  // and of all that a rank stages in the call.
  Turn nextTurn(std::int64_t staged_bytes = 0, std::int64_t result_bytes = 0, std::int64_t message_bytes = 0) {
    return {++group_.turn_, staged_bytes, stagePlace(staged_bytes, message_bytes >= group_.tuning_.long_bytes),
            result_bytes == 0 ? -1 : group_.results_.next(result_bytes, false)};
  }

  // Whether this rank asked the same the last time, in this call or before. `memory` tells one piece of it from
  // another.
  bool sameMemoryAsLast(std::uint64_t memory) { return std::exchange(group_.last_memory_, memory) == memory; }

  // Whether a message of many chunks is best worked through from its end, because that is what the caches still hold:
  // whoever filled a tensor wrote its end last. What was `just_used`, by all ranks, begins where the last message
  // ended. All ranks say the same, and so get the same answer. Once in a call.
  bool beginsAtTheEnd(bool just_used) { return group_.from_end_ = !just_used || !group_.from_end_; }

  // Where this rank puts what its peers read in `turn`.
  std::byte* stage(const Turn& turn) const { return at(group_.rank_, turn); }
  // The same for data, with a look at how it is best written.
  std::byte* stageData(const Turn& turn) {
    std::byte* slot = stage(turn);
    if (turn.bytes >= StagingChoice::kLeastBytes) {
      group_.staging_.probe(slot, group_.tuning_.slow_line_nanoseconds);
    }
    return slot;
  }
  // Whether to write it past the caches.
  bool stagesPastCaches() const {
    const Staging staging = group_.tuning_.staging;
    return staging == Staging::Adaptive ? group_.staging_.pastCaches() : staging == Staging::PastCaches;
  }
  // Tells the peers that the stage of `turn` is written.
  void post(const Turn& turn);
  // Returns when every peer has posted `turn`, and meant the same.
  void awaitPosts(const Turn& turn);
  // Where `rank` has put its bytes; valid between awaitPosts(turn) and the post of the turn after the next.
  const std::byte* staged(int rank, const Turn& turn) const { return at(rank, turn); }

  // The second half of a turn, in the same way: every rank's result, valid until the post of the third turn after it.
  std::byte* result(int rank, const Turn& turn) const { return group_.slots(rank) + turn.result; }
  void postResult(const Turn& turn);
  void awaitResult(int rank, const Turn& turn);

 private:
  std::int64_t stagePlace(std::int64_t bytes, bool of_long_message) {
    if (bytes <= kInlineBytes) {
      return -1;
    }
    return bytes <= kShortBytes ? group_.short_stages_.next(bytes, false) : group_.stages_.next(bytes, of_long_message);
  }
  std::byte* at(int rank, const Turn& turn) const {
    return turn.stage < 0 ? group_.block(rank).posts[turn.number % kRing].payload : group_.slots(rank) + turn.stage;
  }
  void await(int rank, const std::atomic<std::uint64_t>& word, std::uint64_t number);
  [[noreturn]] void refuse(const std::string& what);
  static std::unique_lock<std::mutex> hold(Group& group);

  Group& group_;
  const std::unique_lock<std::mutex> lock_;
  const int exceptions_;  // in flight when the call began
};

}  // namespace dc::shm
