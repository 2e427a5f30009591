#include <algorithm>
#include <vector>

#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"
#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {

void reduce(Group& group, const void* in, void* out, std::int64_t count, DType dtype, ReduceOp op, int root) {
  checkRoot(group, root);
  checkReduction(op, dtype, count);
  const auto* source = static_cast<const std::byte*>(in);
  auto* destination = static_cast<std::byte*>(out);
  const std::int64_t total = count * sizeOf(dtype);
  const std::int64_t chunk = std::min(group.tuning().chunk_bytes, group.layout().slot_bytes) / kLine * kLine;
  const std::int64_t slot = std::min(total, chunk);
  Call call(group, {Kind::Reduce, dtype, op, 1, root, count, 0});
  const auto bytes = [&](std::int64_t piece) { return std::min(chunk, total - piece * chunk); };
  std::vector<const std::byte*> inputs(static_cast<std::size_t>(group.size()));
  pipeline(
      call, chunksFor(total, chunk), slot,
      [&](std::int64_t piece, const Turn& turn) {
        if (group.rank() != root) {
          copyBytes(call.stageData(turn), source + piece * chunk, bytes(piece), call.stagesPastCaches());
        }
      },
      [&](std::int64_t piece, const Turn& turn) {
        if (group.rank() != root) {
          return;
        }
        for (int r = 0; r < group.size(); ++r) {
          inputs[static_cast<std::size_t>(r)] = r == root ? source + piece * chunk : call.staged(r, turn);
        }
        std::byte* result = destination + piece * chunk;
        reduceRanks(op, dtype, inputs, {&result, 1}, bytes(piece) / sizeOf(dtype));
      });
}

}  // namespace dc::shm
