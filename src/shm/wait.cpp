#include "deepcompile/shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <ctime>
#include <utility>

namespace dc::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int kSpinsPerLook = 64;                        // of the clock
constexpr nanoseconds kShortestSleep = milliseconds(2);  // before peers are looked after again
constexpr nanoseconds kLongestSleep = milliseconds(50);

// The half of the word that changes from one turn to the next; a futex is 32 bits wide.
const std::uint32_t* lowHalf(const std::atomic<std::uint64_t>& word) {
  static_assert(sizeof(std::atomic<std::uint64_t>) == 8);
  const auto* halves = reinterpret_cast<const std::uint32_t*>(&word);
  return std::endian::native == std::endian::little ? halves : halves + 1;
}

// Shared, not private: the ranks are different processes.
void futexWait(const std::atomic<std::uint64_t>& word, std::uint64_t seen, nanoseconds most) {
  timespec limit = {};
  limit.tv_sec = most.count() / 1'000'000'000;
  limit.tv_nsec = most.count() % 1'000'000'000;
  // Whatever it returns, the caller reads the word again.
  ::syscall(SYS_futex, lowHalf(word), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
}

// Announces a sleeper for as long as it lives.
class Sleeper {
 public:
  explicit Sleeper(std::atomic<int>& sleepers) : sleepers_(sleepers) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { sleepers_.fetch_sub(1, std::memory_order_relaxed); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<int>& sleepers_;
};

thread_local LongWait* long_wait = nullptr;

}  // namespace

LongWait::LongWait(Told told, void* context) : told_(told), context_(context) { long_wait = this; }
LongWait::~LongWait() { long_wait = nullptr; }

void LongWait::begins() {
  if (long_wait != nullptr && long_wait->told_ != nullptr) {
    std::exchange(long_wait->told_, nullptr)(long_wait->context_);
  }
}

Patience Patience::forRanks(int ranks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  // A rank pinned to one core says nothing of its peers; take the machine's cores then.
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (ranks <= (cores > 1 ? cores : online)) {
    return {std::chrono::microseconds(40), std::chrono::microseconds(200)};
  }
  return {nanoseconds(0), std::chrono::microseconds(30)};
}

void awaitAtLeast(const std::atomic<std::uint64_t>& word, std::uint64_t least, std::atomic<int>& sleepers,
                  const Patience& patience, Watch& watch) {
  // Peers are mostly a moment away: no clock before the first few looks have failed.
  for (int spin = 0; spin < kSpinsPerLook; ++spin) {
    if (word.load(std::memory_order_acquire) >= least) {
      return;
    }
    relax();
  }
  LongWait::begins();
  const auto started = Clock::now();
  for (auto now = started; now - started < patience.spin; now = Clock::now()) {
    for (int spin = 0; spin < kSpinsPerLook; ++spin) {
      if (word.load(std::memory_order_acquire) >= least) {
        return;
      }
      relax();
    }
  }
  const auto yielding = Clock::now();
  for (auto now = yielding; now - yielding < patience.yield; now = Clock::now()) {
    if (word.load(std::memory_order_acquire) >= least) {
      return;
    }
    ::sched_yield();
  }
  // From here on nobody counts microseconds. The sleeper announces itself before it looks a last time, the writer
  // writes before it looks for sleepers, and both are sequentially consistent: one of them sees the other.
  nanoseconds sleep = kShortestSleep;
  for (;;) {
    {
      const Sleeper announced(sleepers);
      const std::uint64_t seen = word.load(std::memory_order_seq_cst);
      if (seen >= least) {
        return;
      }
      futexWait(word, seen, sleep);
    }
    const bool hopeless = watch.hopeless(started);
    if (word.load(std::memory_order_acquire) >= least) {
      return;
    }
    if (hopeless) {
      watch.giveUp();
    }
    sleep = std::min(sleep * 2, kLongestSleep);
  }
}

void publish(std::atomic<std::uint64_t>& word, std::uint64_t value, const std::atomic<int>& sleepers) {
  word.store(value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) [[unlikely]] {
    wake(word);
  }
}

void wake(const std::atomic<std::uint64_t>& word) {
  ::syscall(SYS_futex, lowHalf(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace dc::shm
