// The shape of every collective that moves data once: each rank stages chunk c while its peers still read chunk c - 1.
// Keeps the rules of layout.h by which slots are used again.
#pragma once

#include <cstdint>

#include "deepcompile/shm/group.h"

namespace dc::shm {

// In every turn a rank stages `bytes` bytes. stage(chunk, turn) writes this rank's slot; consume(chunk, turn) reads the
// peers'. At least one chunk, also for no data: that is how the ranks learn that they mean the same.
template <typename Stage, typename Consume>
void pipeline(Call& call, std::int64_t chunks, std::int64_t bytes, Stage&& stage, Consume&& consume) {
  const auto next = [&] { return call.nextTurn(bytes, 0, chunks * bytes); };
  Turn turn = next();
  stage(std::int64_t{0}, turn);
  call.post(turn);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Turn current = turn;
    if (chunk + 1 < chunks) {
      turn = next();
      stage(chunk + 1, turn);
      call.post(turn);
    }
    call.awaitPosts(current);
    consume(chunk, current);
  }
}

// A turn without data.
inline void meet(Call& call) {
  const Turn turn = call.nextTurn();
  call.post(turn);
  call.awaitPosts(turn);
}

// Ends a call in which ranks used one another's tensors, so that no rank changes its own while others still do. A rank
// that gave up on this one in the meantime has told so before it went on to change its tensors: what was read of them
// counts only if it has not.
inline void meetAfterSharing(Call& call) {
  call.throwIfGivenUp();
  meet(call);
}

inline std::int64_t chunksFor(std::int64_t bytes, std::int64_t chunk_bytes) {
  return bytes <= chunk_bytes ? 1 : (bytes + chunk_bytes - 1) / chunk_bytes;
}

}  // namespace dc::shm
