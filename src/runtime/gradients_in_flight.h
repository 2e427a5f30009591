// Keeps whole gradients alive while work on another stream reads them, and frees them early.
//
// A stream's work owns its tensors until its event has passed. On a device the host learns that late: it may be a whole
// backward ahead, so that all gradients of the model would be alive at once. So here the caller's stream waits for the
// work, and the memory is freed at once: whatever uses it next is ordered after the work.
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
  // Shared with the work, which reads the tensors when its function runs: on a device within Stream::run, on a CPU
  // worker before its event passes.
  using Held = std::shared_ptr<std::vector<at::Tensor>>;

  void add(Event done, Held held) { queue_.push_back({std::move(done), std::move(held)}); }
  // Frees the oldest gradients until at most `most` entries are left. Orders the caller after the work that reads them.
  void letGo(Context& context, std::size_t most) {
    while (queue_.size() > most) {
      context.await(queue_.front().done);
      queue_.front().held->clear();
      queue_.pop_front();
    }
  }
  // Drops all entries without waiting. The work keeps its tensors.
  void forget() { queue_.clear(); }

 private:
  struct Entry {
    Event done;
    Held held;
  };
  std::deque<Entry> queue_;
};

}  // namespace dc
