#include <algorithm>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

void scatter(Group& group, const RunTable& from, Runs to, int root, std::uint64_t tag) {
  checkRoot(group, root);
  const bool gives = group.rank() == root;
  const int ranks = group.size();
  const std::int64_t total = bytesOf(to);
  const int peers = std::max(ranks - 1, 1);
  const std::int64_t room = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes) / peers;
  const std::int64_t part = std::max<std::int64_t>(std::min(total, room), 1);
  const std::int64_t slot = part * peers;
  const auto place = [&](int reader) { return (reader < root ? reader : reader - 1) * part; };
  Call call(group, {.kind = Kind::Scatter, .root = root, .count = total, .tag = tag});
  call.require(!gives || from.ranks() == ranks, [] { return "scatter needs a part for every rank on the root"; });
  for (int r = 0; gives && r < ranks; ++r) {
    call.require(bytesOf(from[r]) == total, [&] {
      return concat("scatter: ", bytesOf(from[r]), " bytes for rank ", r, ", while the root takes ", total);
    });
  }
  Cursor destination(to);
  std::vector<Cursor> sources;
  for (int r = 0; gives && r < ranks; ++r) {
    sources.emplace_back(from[r]);
  }
  pipeline(
      call, chunksFor(total, part), slot,
      [&](std::int64_t, const Turn& turn) {
        std::byte* own = call.stageData(turn);
        for (int r = 0; gives && r < ranks; ++r) {
          Cursor& source = sources[static_cast<std::size_t>(r)];
          if (r != root) {
            copyOut(own + place(r), source, part, call.stagesPastCaches());
            continue;
          }
          source.take(part, [&](std::byte* data, std::int64_t bytes) { copyInto(destination, data, bytes); });
        }
      },
      [&](std::int64_t, const Turn& turn) {
        if (!gives) {
          copyInto(destination, call.staged(root, turn) + place(group.rank()), part);
        }
      });
}

}  // namespace dc::shm
