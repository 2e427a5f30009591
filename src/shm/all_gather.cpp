#include <algorithm>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/offers.h"
#include "deepcompile/shm/pipeline.h"
#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {
void allGather(Group& group, Runs from, const RunTable& to, std::uint64_t tag) {
  const int me = group.rank();
  std::int64_t total = 0;
  std::int64_t largest = 0;
  for (int r = 0; r < to.ranks(); ++r) {
    const std::int64_t bytes = bytesOf(to[r]);
    total += bytes;
    largest = std::max(largest, bytes);
  }
  Call call(group, {.kind = Kind::AllGather, .count = total, .tag = mix(tag, to)});
  call.require(to.ranks() == group.size(), [] { return "all_gather needs room for every rank"; });
  call.require(bytesOf(from) == bytesOf(to[me]), [&] {
    return concat("all_gather: ", bytesOf(from), " bytes are given, and there is room for ", bytesOf(to[me]),
                  " of them");
  });
  const bool streaming = total >= group.tuning().streaming_bytes;
  if (group.size() > 1 && largest > group.tuning().one_step_bytes) {
    if (const Offers offers = exchangeOffers(call, group, from)) {
      for (int step = 0; step < group.size(); ++step) {
        const int r = (me + step) % group.size();  // not all from the same rank at once
        Cursor destination(to[r]);
        for (std::size_t i = 0; i < from.size(); ++i) {
          copyInto(destination, offers.at(r, i), from[i].bytes, streaming);
        }
      }
      meetAfterSharing(call);
      return;
    }
  }
  const std::int64_t chunk = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes);
  const std::int64_t slot = std::min(largest, chunk);
  Cursor source(from);
  std::vector<Cursor> destinations;
  destinations.reserve(static_cast<std::size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r) {
    destinations.emplace_back(to[r]);
  }
  pipeline(
      call, chunksFor(largest, chunk), slot,
      [&](std::int64_t, const Turn& turn) {
        std::byte* place = call.stageData(turn);
        source.take(chunk, [&](std::byte* data, std::int64_t bytes) {
          copyInto(destinations[static_cast<std::size_t>(me)], data, bytes, streaming);
          copyBytes(place, data, bytes, call.stagesPastCaches());
          place += bytes;
        });
      },
      [&](std::int64_t, const Turn& turn) {
        for (int r = 0; r < group.size(); ++r) {
          if (r != me) {
            copyInto(destinations[static_cast<std::size_t>(r)], call.staged(r, turn), chunk, streaming);
          }
        }
      });
}

}  // namespace dc::shm
