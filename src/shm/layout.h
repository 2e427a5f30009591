// What lies in the shared memory of a group. Every word has one writer unless said otherwise, and what different ranks
// write is 128 bytes apart: processors fetch lines in pairs.
//
//   Header | RankBlock of rank 0 | ... | RankBlock of rank N-1 | slots of rank 0 | ... | slots of rank N-1 | mailboxes
//
// Collectives proceed in turns, numbered from 1 over the life of the group and the same on all ranks. In its turn a
// rank writes its slot, then its post. Slots and posts form a ring of kRing turns. Why a slot may be written again
// without asking: before a rank writes turn t it has seen every peer's post of turn t - 2, and a peer that posts turn u
// has done reading all stage slots up to u - 2 and all result slots up to u - 3. (pipeline.h keeps both rules.)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "deepcompile/shm/meaning.h"

namespace dc::shm {

inline constexpr std::int64_t kLine = 128;
inline constexpr int kRing = 4;
inline constexpr int kSlots = 6;

// Short messages have an area of their own, which stays in the nearest cache: there latency counts.
inline constexpr std::int64_t kShortBytes = 2048;
inline constexpr std::uint64_t kMagic = 0x6463'7368'6d30'3034;  // changes with the layout and with what travels when

// A message of up to kInlineBytes rides in the post itself, so that one transfer of a line pair brings all of it.
inline constexpr std::int64_t kInlineBytes = 96;

struct alignas(kLine) Post {
  std::atomic<std::uint64_t> turn;  // written last, released
  Meaning meaning;
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Post) == kLine);

// Counts turns; `value` is released. Peers that sleep on a post or a counter of this rank announce themselves in
// `sleepers`.
struct alignas(kLine) Counter {
  std::atomic<std::uint64_t> value;
};

enum class RankState : std::uint32_t { Absent, Present, Left };

struct RankBlock {
  Post posts[kRing];
  Counter reduced;                              // the last turn whose result slot this rank has written
  alignas(kLine) std::atomic<int> sleepers;     // written by peers
  alignas(kLine) std::atomic<RankState> state;  // written by this rank
  std::int64_t pid;
};

// The first error of the group, written by the rank that claims it.
struct alignas(kLine) Poison {
  std::atomic<std::uint32_t> claimed;
  std::atomic<std::uint32_t> set;  // released after `text`
  char text[2040];
};

struct alignas(kLine) Header {
  std::uint64_t magic;
  std::int32_t ranks;
  std::int64_t slot_bytes;
  std::int64_t mailbox_bytes;
  Poison poison;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "waits between processes need lock-free words");

// Where the parts lie, for so many ranks and so large slots.
struct Layout {
  int ranks = 0;
  std::int64_t slot_bytes = 0;     // of the largest stage slot; a multiple of the page size
  std::int64_t mailbox_bytes = 0;  // of one mailbox; there is one for each ordered pair of ranks

  std::int64_t resultBytes() const { return slot_bytes / (ranks > 1 ? ranks - 1 : 1) / kLine * kLine; }
  std::int64_t blocks() const { return sizeof(Header); }
  std::int64_t slots() const { return pages(blocks() + ranks * static_cast<std::int64_t>(sizeof(RankBlock))); }
  std::int64_t slotsOfRank() const { return pages(kSlots * (slot_bytes + resultBytes() + kShortBytes)); }
  std::int64_t mailboxes() const { return slots() + ranks * slotsOfRank(); }
  std::int64_t size() const { return mailboxes() + pages(std::int64_t{ranks} * ranks * mailbox_bytes); }

 private:
  static std::int64_t pages(std::int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }
};

}  // namespace dc::shm
