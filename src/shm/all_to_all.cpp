#include <algorithm>
#include <cstring>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {
namespace {

// One turn in which every rank tells how much it sends to whom. Returns the largest of all; throws on all ranks where a
// rank expects something else than what it is sent.
std::int64_t agreeOnSizes(Group& group, Call& call, const RunTable& from, const RunTable& to) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto bytes = static_cast<std::int64_t>(2 * ranks * sizeof(std::int64_t));
  check(bytes <= group.layout().slot_bytes, "all_to_all: too many ranks for the slots of the group");
  std::vector<std::int64_t> sizes(2 * ranks);  // what is sent, what is expected
  for (std::size_t r = 0; r < ranks; ++r) {
    sizes[r] = bytesOf(from[static_cast<int>(r)]);
    sizes[ranks + r] = bytesOf(to[static_cast<int>(r)]);
  }
  const Turn turn = call.nextTurn(bytes);
  std::memcpy(call.stage(turn), sizes.data(), static_cast<std::size_t>(bytes));
  call.post(turn);
  call.awaitPosts(turn);
  std::vector<std::int64_t> all(ranks * 2 * ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    std::memcpy(all.data() + r * 2 * ranks, call.staged(static_cast<int>(r), turn), static_cast<std::size_t>(bytes));
  }
  std::int64_t largest = 0;
  for (std::size_t sender = 0; sender < ranks; ++sender) {
    for (std::size_t reader = 0; reader < ranks; ++reader) {
      const std::int64_t sent = all[sender * 2 * ranks + reader];
      const std::int64_t expected = all[reader * 2 * ranks + ranks + sender];
      check(sent == expected, [&] {
        return concat("all_to_all in group '", group.name(), "': rank ", sender, " sends ", sent, " bytes to rank ",
                      reader, ", which expects ", expected);
      });
      largest = std::max(largest, sent);
    }
  }
  return largest;
}

}  // namespace

void allToAll(Group& group, const RunTable& from, const RunTable& to, std::uint64_t tag) {
  const int me = group.rank();
  const int ranks = group.size();
  Call call(group, {.kind = Kind::AllToAll, .tag = tag});
  call.require(from.ranks() == ranks && to.ranks() == ranks, [] { return "all_to_all needs a part for every rank"; });
  const std::int64_t largest = agreeOnSizes(group, call, from, to);
  const int peers = std::max(ranks - 1, 1);
  const std::int64_t room = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes) / peers;
  const std::int64_t part = std::max<std::int64_t>(std::min(largest, room), 1);
  const std::int64_t slot = part * peers;
  const auto place = [&](int owner, int reader) { return (reader < owner ? reader : reader - 1) * part; };
  std::vector<Cursor> sources;
  std::vector<Cursor> destinations;
  for (int r = 0; r < ranks; ++r) {
    sources.emplace_back(from[r]);
    destinations.emplace_back(to[r]);
  }
  pipeline(
      call, chunksFor(largest, part), slot,
      [&](std::int64_t, const Turn& turn) {
        std::byte* own = call.stageData(turn);
        for (int r = 0; r < ranks; ++r) {
          Cursor& source = sources[static_cast<std::size_t>(r)];
          if (r != me) {
            copyOut(own + place(me, r), source, part, call.stagesPastCaches());
            continue;
          }
          source.take(part, [&](std::byte* data, std::int64_t bytes) {
            copyInto(destinations[static_cast<std::size_t>(me)], data, bytes);
          });
        }
      },
      [&](std::int64_t, const Turn& turn) {
        for (int r = 0; r < ranks; ++r) {
          if (r != me) {
            copyInto(destinations[static_cast<std::size_t>(r)], call.staged(r, turn) + place(r, me), part);
          }
        }
      });
}

}  // namespace dc::shm
