#include "deepcompile/shm/tuning.h"

#include <algorithm>
#include <array>
#include <vector>

#include "deepcompile/base/environment.h"
#include "deepcompile/base/error.h"
#include "deepcompile/base/last_cache.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/group.h"

namespace dc::shm {
namespace {

constexpr std::int64_t kKiB = 1 << 10;
constexpr auto kBudget = std::chrono::milliseconds(150);  // when it is used up, what has been found so far holds
constexpr int kRounds = 8;

class Measurement {
 public:
  explicit Measurement(Group& group)
      : group_(group), best_(group.tuning()), data_(kLargest), deadline_(Clock::now() + kBudget) {}

  Tuning run() {
    const int ranks = group_.size();
    best_.one_step_bytes = ranks <= 4 ? 16 * kKiB : 4 * kKiB;
    best_.chunk_bytes = std::min(best_.chunk_bytes, group_.layout().slot_bytes);
    // Ranks that take turns on a core measure the scheduler. They may be bound to different numbers of cores.
    if (ranks > 1 && agree(group_.patience().spin.count() > 0 ? 1 : 0) != 0) {
      chooseStaging();
      chooseChunk();
      if (ranks > 2) {
        chooseOneStep();
      }
    }
    return best_;
  }

 private:
  static constexpr std::int64_t kMiddle = 256 << 10;
  // Several of the largest chunks: a message of one or two measures how a pipeline starts.
  static constexpr std::int64_t kLargest = 4 << 20;

  // Which way of staging wins as the machine is now, and what a probe takes: so a probe can tell later when that
  // changes.
  void chooseStaging() {
    Tuning cached = best_;
    cached.one_step_bytes = 0;
    cached.staging = Staging::Cached;
    Tuning past = cached;
    past.staging = Staging::PastCaches;
    const std::vector<double> taken = seconds({past, cached}, kMiddle);
    const double past_seconds = taken[0];
    const double cached_seconds = taken[1];
    const double probe = group_.staging().nanoseconds();
    const double limit = cached_seconds <= past_seconds ? std::max(best_.slow_line_nanoseconds, 2 * probe)
                                                        : std::min(best_.slow_line_nanoseconds, probe / 1.5);
    best_.slow_line_nanoseconds = static_cast<double>(agree(static_cast<std::int64_t>(limit * 1000))) / 1000;
  }

  void chooseChunk() {
    std::vector<Tuning> candidates;
    for (std::int64_t chunk = 64 * kKiB; chunk <= group_.layout().slot_bytes; chunk *= 2) {
      candidates.push_back(best_);
      candidates.back().one_step_bytes = 0;
      candidates.back().chunk_bytes = chunk;
    }
    if (candidates.empty()) {
      return;
    }
    const std::vector<double> taken = seconds(candidates, kLargest);
    const auto best = static_cast<std::size_t>(std::min_element(taken.begin(), taken.end()) - taken.begin());
    best_.chunk_bytes = agree(taken[0] > 0 ? candidates[best].chunk_bytes : best_.chunk_bytes);
  }

  void chooseOneStep() {
    for (std::int64_t bytes = 4 * kKiB; bytes <= 128 * kKiB && inTime(); bytes *= 2) {
      Tuning one = best_;
      one.one_step_bytes = bytes;
      Tuning two = best_;
      two.one_step_bytes = 0;
      const std::vector<double> taken = seconds({one, two}, bytes);
      if (agree(taken[0] < taken[1] ? 1 : 0) == 0) {
        break;
      }
      best_.one_step_bytes = bytes;
    }
  }

  // The best of a few calls with each candidate, as rank 0 sees it. They take turns: how fast cores reach each other's
  // caches changes from one millisecond to another on a virtual machine, and what was measured in a bad one would lose.
  // Zeros where there was no time.
  std::vector<double> seconds(const std::vector<Tuning>& candidates, std::int64_t bytes) {
    std::vector<double> best(candidates.size(), 0);
    for (int round = 0; round <= kRounds && inTime(); ++round) {
      for (std::size_t i = 0; i < candidates.size(); ++i) {
        group_.setTuning(candidates[i]);
        barrier(group_);
        const auto started = Clock::now();
        for (int repeat = 0; repeat < 2; ++repeat) {
          allReduce(group_, data_.data(), data_.data(), bytes / 4, DType::Float32, ReduceOp::Max);
        }
        const double taken = std::chrono::duration<double>(Clock::now() - started).count();
        if (round > 0) {  // the first one warms up
          best[i] = round == 1 ? taken : std::min(best[i], taken);
        }
      }
    }
    return best;
  }

  bool inTime() { return agree(Clock::now() < deadline_ ? 1 : 0) != 0; }

  std::int64_t agree(std::int64_t value) {
    const Run word = {reinterpret_cast<std::byte*>(&value), sizeof(value)};
    broadcast(group_, {&word, 1}, 0);
    return value;
  }

  Group& group_;
  Tuning best_;
  std::vector<std::byte> data_;
  const Clock::time_point deadline_;
};

// What users have set on rank 0 goes before what was measured.
void applyEnvironment(Group& group, Tuning& tuning) {
  const Environment environment = Environment::read();
  std::array<std::int64_t, 3> given = {environment.shm_one_step_bytes, environment.shm_chunk_bytes,
                                       environment.shm_streaming_bytes};
  const Run words = {reinterpret_cast<std::byte*>(given.data()), sizeof(given)};
  broadcast(group, {&words, 1}, 0);
  if (given[0] >= 0) {
    tuning.one_step_bytes = given[0];
  }
  if (given[1] >= 0) {
    tuning.chunk_bytes = std::clamp(given[1], 4 * kKiB, group.layout().slot_bytes);
  }
  if (given[2] >= 0) {
    tuning.streaming_bytes = given[2];
  }
}

}  // namespace

std::int64_t defaultStreamingBytes() {
  static const std::int64_t last_cache = lastCacheBytes();  // asked for with every Tuning that is made
  return std::max<std::int64_t>(last_cache / 4, 4 << 20);
}

void checkTuning(const Tuning& tuning) {
  check(tuning.chunk_bytes >= kLine && tuning.one_step_bytes >= 0 && tuning.streaming_bytes >= 0 &&
            tuning.long_bytes >= 0,
        [&] {
          return concat("thresholds of a shared-memory group: chunks of ", tuning.chunk_bytes, " bytes (at least ",
                        kLine, "), one step up to ", tuning.one_step_bytes, " and streaming from ",
                        tuning.streaming_bytes, " (at least 0)");
        });
}

Tuning measureTuning(Group& group) {
  Tuning tuning = Measurement(group).run();
  applyEnvironment(group, tuning);
  return tuning;
}

}  // namespace dc::shm
