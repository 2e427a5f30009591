// Whole gradients that work on another stream still reads, and when their memory may go.
//
// A stream's work owns what it touches until its event has passed. On a device the host learns that late: it may be a
// whole backward ahead, and every gradient of the model would be there at once. So here the caller's stream is put
// behind the work instead, and the memory let go of: whatever it is used for next comes after.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class GradientsInFlight {
 public:
  // Shared with the work, which reads the tensors when it runs. On a device that is within the call that gives it to
  // the stream, on a CPU's worker before its event passes.
  using Held = std::shared_ptr<std::vector<at::Tensor>>;

  void add(Event done, Held held) { queue_.push_back({std::move(done), std::move(held)}); }
  // Orders the caller after the oldest until no more than `most` are left.
  void letGo(Context& context, std::size_t most) {
    while (queue_.size() > most) {
      context.await(queue_.front().done);
      queue_.front().held->clear();
      queue_.pop_front();
    }
  }
  // The work keeps what it owns.
  void forget() { queue_.clear(); }

 private:
  struct Entry {
    Event done;
    Held held;
  };
  std::deque<Entry> queue_;
};

}  // namespace dc
