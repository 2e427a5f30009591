#include <algorithm>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

void gather(Group& group, Runs from, const RunTable& to, int root, std::uint64_t tag) {
  checkRoot(group, root);
  const bool takes = group.rank() == root;
  const std::int64_t total = bytesOf(from);
  const std::int64_t chunk = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes);
  const std::int64_t slot = std::min(total, chunk);
  Call call(group, {.kind = Kind::Gather, .root = root, .count = total, .tag = tag});
  call.require(!takes || to.ranks() == group.size(), [] { return "gather needs room for every rank on the root"; });
  for (int r = 0; takes && r < group.size(); ++r) {
    call.require(bytesOf(to[r]) == total, [&] {
      return concat("gather: room for ", bytesOf(to[r]), " bytes of rank ", r, ", while the root gives ", total);
    });
  }
  Cursor source(from);
  std::vector<Cursor> destinations;
  for (int r = 0; takes && r < group.size(); ++r) {
    destinations.emplace_back(to[r]);
  }
  pipeline(
      call, chunksFor(total, chunk), slot,
      [&](std::int64_t, const Turn& turn) {
        if (!takes) {
          copyOut(call.stageData(turn), source, chunk, call.stagesPastCaches());
          return;
        }
        source.take(chunk, [&](std::byte* data, std::int64_t bytes) {
          copyInto(destinations[static_cast<std::size_t>(root)], data, bytes);
        });
      },
      [&](std::int64_t, const Turn& turn) {
        for (int r = 0; takes && r < group.size(); ++r) {
          if (r != root) {
            copyInto(destinations[static_cast<std::size_t>(r)], call.staged(r, turn), chunk);
          }
        }
      });
}

}  // namespace dc::shm
