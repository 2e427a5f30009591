#include <algorithm>

#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

void broadcast(Group& group, Runs data, int root, std::uint64_t tag) {
  checkRoot(group, root);
  const std::int64_t total = bytesOf(data);
  const std::int64_t chunk = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes);
  const std::int64_t slot = std::min(total, chunk);
  Call call(group, {.kind = Kind::Broadcast, .root = root, .count = total, .tag = tag});
  Cursor cursor(data);
  const bool sends = group.rank() == root;
  pipeline(
      call, chunksFor(total, chunk), slot,
      [&](std::int64_t, const Turn& turn) {
        if (sends && group.size() > 1) {
          copyOut(call.stageData(turn), cursor, chunk, call.stagesPastCaches());
        }
      },
      [&](std::int64_t, const Turn& turn) {
        if (!sends) {
          copyInto(cursor, call.staged(root, turn), chunk);
        }
      });
}

}  // namespace dc::shm
