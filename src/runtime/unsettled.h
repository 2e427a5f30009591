// Reductions that a backward within an accumulation has left running, and the reads of gradients that have to wait for
// them.
//
// The next backward, the end of the accumulation and the end of the runtime settle them by themselves. A program may
// also look at `shard.grad` in between, which no call announces: settleBeforeReads gives a shard the knowledge to
// settle first.
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
  // `how` takes the runtime's lock and waits; it is called without that lock. Empty: there is nobody to ask any more.
  void settleBy(std::function<void()> how) {
    const std::lock_guard lock(mutex_);
    how_ = std::move(how);
  }

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // Lock of the runtime held.
  void setPending(bool pending) { pending_.store(pending, std::memory_order_release); }

  // Waits for what is pending. Not with the runtime's lock held.
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

// From now on reading `shard.grad` settles first. `shard` is a leaf; once is enough.
void settleBeforeReads(const at::Tensor& shard, const std::shared_ptr<Unsettled>& unsettled);

}  // namespace dc
