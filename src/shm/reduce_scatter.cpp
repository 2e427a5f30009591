#include <algorithm>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/offers.h"
#include "deepcompile/shm/pipeline.h"
#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {
namespace {

// Every rank's part of this rank is at places[r]; the next `bytes` bytes of them are reduced into `to`.
void reduceInto(Cursor& to, std::vector<const std::byte*>& places, std::int64_t bytes, DType dtype, ReduceOp op,
                bool streaming) {
  to.take(bytes, [&](std::byte* data, std::int64_t size) {
    reduceRanks(op, dtype, places, {&data, 1}, size / sizeOf(dtype), {.streaming = streaming});
    for (const std::byte*& place : places) {
      place += size;
    }
  });
}

}  // namespace

void reduceScatter(Group& group, const RunTable& from, Runs to, DType dtype, ReduceOp op, std::uint64_t tag) {
  const int me = group.rank();
  const int ranks = group.size();
  const std::int64_t total = bytesOf(from.all());
  checkReduction(op, dtype, total / sizeOf(dtype));
  std::int64_t largest = 0;
  for (int r = 0; r < from.ranks(); ++r) {
    largest = std::max(largest, bytesOf(from[r]));
  }
  Call call(group, {Kind::ReduceScatter, dtype, op, 1, -1, total / sizeOf(dtype), mix(tag, from)});
  call.require(from.ranks() == ranks, [] { return "reduce_scatter needs a part for every rank"; });
  call.require(bytesOf(from[me]) == bytesOf(to),
               [&] { return concat("reduce_scatter: room for ", bytesOf(to), " bytes of ", bytesOf(from[me])); });
  const bool streaming = total >= group.tuning().streaming_bytes;
  Cursor destination(to);
  std::vector<const std::byte*> places(static_cast<std::size_t>(ranks));
  if (ranks > 1 && largest > group.tuning().one_step_bytes) {
    if (const Offers offers = exchangeOffers(call, group, from.all())) {
      for (std::size_t i = 0; i < from[me].size(); ++i) {
        for (int r = 0; r < ranks; ++r) {
          places[static_cast<std::size_t>(r)] = offers.at(r, from.begin(me) + i);
        }
        reduceInto(destination, places, from[me][i].bytes, dtype, op, streaming);
      }
      meetAfterSharing(call);
      return;
    }
  }
  // A slot holds a part for each peer.
  const int peers = std::max(ranks - 1, 1);
  const std::int64_t room = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes) / peers / kLine * kLine;
  const std::int64_t part = std::clamp((largest + kLine - 1) / kLine * kLine, kLine, std::max(room, kLine));
  const std::int64_t slot = part * peers;
  const auto place = [&](int owner, int reader) { return (reader < owner ? reader : reader - 1) * part; };
  std::vector<Cursor> sources;
  sources.reserve(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    sources.emplace_back(from[r]);
  }
  pipeline(
      call, chunksFor(largest, part), slot,
      [&](std::int64_t, const Turn& turn) {
        std::byte* own = call.stageData(turn);
        for (int r = 0; r < ranks; ++r) {
          if (r != me) {
            copyOut(own + place(me, r), sources[static_cast<std::size_t>(r)], part, call.stagesPastCaches());
          }
        }
      },
      [&](std::int64_t, const Turn& turn) {
        std::int64_t done = 0;
        sources[static_cast<std::size_t>(me)].take(part, [&](std::byte* own, std::int64_t bytes) {
          for (int r = 0; r < ranks; ++r) {
            places[static_cast<std::size_t>(r)] = r == me ? own : call.staged(r, turn) + place(r, me) + done;
          }
          reduceInto(destination, places, bytes, dtype, op, streaming);
          done += bytes;
        });
      });
}

}  // namespace dc::shm
