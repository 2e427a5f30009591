// Pending reductions: those that a backward within an accumulation has left running.
//
// To settle them is to wait for them and to publish their gradients. The next backward, the end of the accumulation and
// the end of the runtime do so. A program may also read `shard.grad` in between, without any call to the runtime:
// settleBeforeReads makes reads of `.grad` wait for pending reductions.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/core/Tensor.h>

namespace dc {

class Unsettled {
 public:
  // Sets the function that settles. It takes the runtime's lock, so it is called without that lock. Empty once the
  // runtime is closed.
  void settleBy(std::function<void()> how) {
    const std::lock_guard lock(mutex_);
    how_ = std::move(how);
  }

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // Called with the runtime's lock held.
  void setPending(bool pending) { pending_.store(pending, std::memory_order_release); }

  // Waits for pending reductions. Not to be called with the runtime's lock held.
  void settle() {
    if (!pending()) [[likely]] {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (how_) {
      how_();
    }
  }

 private:
  std::atomic<bool> pending_{false};
  std::mutex mutex_;
  std::function<void()> how_;
};

// Makes reads of `shard.grad` settle first. `shard` is a leaf. Calling it again does nothing.
void settleBeforeReads(const at::Tensor& shard, const std::shared_ptr<Unsettled>& unsettled);

}  // namespace dc
