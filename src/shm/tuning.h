// The sizes at which collectives change their way. Measured when a group is set up, and the same on all ranks.
#pragma once

#include <cstdint>

#include "deepcompile/shm/staging.h"

namespace dc::shm {

// What the last cache cannot hold anyway, beside what else is in it.
std::int64_t defaultStreamingBytes();

struct Tuning {
  // An all-reduce of up to so many bytes is done in one step: every rank reads and reduces everything. Longer messages
  // also spend a turn to learn whether all ranks' tensors lie in shared memory.
  std::int64_t one_step_bytes = 16 << 10;
  // What a rank stages in one turn of a longer collective. At least a line (kLine), at most the size of a slot.
  std::int64_t chunk_bytes = 256 << 10;
  // Results of at least so many bytes are written past the caches. May differ between ranks.
  std::int64_t streaming_bytes = defaultStreamingBytes();
  // Tensors of a message of at least so many bytes do not stay in the last cache beside all slots: where data moves
  // once (pipeline.h), fewer are used. The same on all ranks.
  std::int64_t long_bytes = 8 << 20;
  // Adaptive staging goes past the caches when a probe takes longer for a line.
  double slow_line_nanoseconds = 8;
  // May differ between ranks.
  Staging staging = Staging::Adaptive;

  bool operator==(const Tuning&) const = default;
};

// Throws where a size makes no sense.
void checkTuning(const Tuning& tuning);

class Group;

// Collective: measures on the group itself, for a few hundredths of a second. What rank 0 finds holds for all, and so
// do the environment variables of rank 0 (base/environment.h).
Tuning measureTuning(Group& group);

}  // namespace dc::shm
