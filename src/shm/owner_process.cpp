#include "deepcompile/shm/owner_process.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>

namespace dc::shm {

std::atomic<std::uint32_t> OwnerProcess::forks_{0};

OwnerProcess::OwnerProcess() : pid_(::getpid()) {
  static std::once_flag once;
  std::call_once(once,
                 [] { ::pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); }); });
  made_after_ = forks_.load(std::memory_order_relaxed);
}

}  // namespace dc::shm
