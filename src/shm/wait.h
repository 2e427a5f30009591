// Waiting for a word that another rank writes: first busily, then yielding the core, then asleep in the kernel. Every
// wait has a deadline and looks after the group's health while it lasts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace dc::shm {

using Clock = std::chrono::steady_clock;

// How long a wait may keep its core before it lets others run, and before it sleeps.
struct Patience {
  std::chrono::nanoseconds spin{};
  std::chrono::nanoseconds yield{};

  // What suits `ranks` ranks on the cores that this process may use: with fewer cores than ranks the one that is waited
  // for may need this very core.
  static Patience forRanks(int ranks);
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// While it lives, a wait of this thread that takes longer than a moment calls `told` first, once: the thread may let go
// of what others need meanwhile (the lock of an interpreter). One at a time for a thread.
class LongWait {
 public:
  using Told = void (*)(void* context);
  LongWait(Told told, void* context);
  ~LongWait();
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // Called by waits.
  static void begins();

 private:
  Told told_;
  void* context_;
};

// Looks after the group's health while a wait lasts.
class Watch {
 public:
  virtual ~Watch() = default;
  // True when waiting has become pointless. The wait then looks at its word a last time: a rank may well have written
  // it and gone.
  virtual bool hopeless(Clock::time_point started) = 0;
  // Throws what `hopeless` found.
  [[noreturn]] virtual void giveUp() = 0;
};

// Returns when `word` >= `least`. `sleepers` is the count that the writer of `word` looks at after each write (see
// `wake`).
void awaitAtLeast(const std::atomic<std::uint64_t>& word, std::uint64_t least, std::atomic<int>& sleepers,
                  const Patience& patience, Watch& watch);

// Writes `value` and wakes those who sleep on the word.
void publish(std::atomic<std::uint64_t>& word, std::uint64_t value, const std::atomic<int>& sleepers);

// Wakes those who sleep on the word, whatever it holds.
void wake(const std::atomic<std::uint64_t>& word);

}  // namespace dc::shm
