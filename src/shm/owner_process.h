// Which process made a thing. A forked child has copies of its parent's objects, but the memory and the ranks that they
// speak for are still the parent's.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace dc::shm {

class OwnerProcess {
 public:
  OwnerProcess();
  // False in a forked child. Costs no system call.
  bool isThis() const { return forks_.load(std::memory_order_relaxed) == made_after_; }
  pid_t pid() const { return pid_; }

 private:
  static std::atomic<std::uint32_t> forks_;  // between the first process that came here and this one
  std::uint32_t made_after_;
  pid_t pid_;
};

}  // namespace dc::shm
