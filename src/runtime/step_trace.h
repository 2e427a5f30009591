// An append-only log of a step: the program's events and the collectives on the channels, with times.
//
// Measurements for plans, `deepcompile.record()` and traces for Perfetto are views of this log. There may be several
// readers at once; each gets what was logged since it began. Without readers an event costs one relaxed load; else two
// or three moments and an append. On a device a moment is an event of the current stream, converted to nanoseconds when
// a reader stops, so logging never waits for the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace dc {

// An event of a device's stream, whose time is known when the device has passed it.
class DeviceTime;

struct TraceEntry {
  enum class Kind : std::uint8_t {
    // Events of the calling program, in its order.
    Read,         // a parameter is asked for; `launched` lies between the call and the moment when it is readable
    Group,        // one of the parameters that a leaf module asks for at once; all of them have the same start
    Release,      // the memory of a gathered copy went back; an instant
    Gradient,     // a gradient is handed over
    EndBackward,  // the end of a backward, with its waits; `id` is -1
    BeginGraph,   // a compiled graph begins to run; an instant; `id` is -1
    // The channels, from any thread. `id` is the first parameter's, `bytes` are those of all of them.
    Gather,
    Reduction,
  };
  Kind kind = Kind::Read;
  std::int64_t id = -1;
  at::ScalarType dtype = at::kFloat;
  std::int64_t bytes = 0;      // of the whole parameter or gradient
  bool backward = false;       // called in a backward pass
  bool gathers = false;        // a read that found no copy
  int iteration = 0;           // parameters were updated between two iterations
  int micro = 0;               // micro-batch: backwards since the last update
  std::int64_t start = 0;      // nanoseconds of the steady clock
  std::int64_t launched = -1;  // of a read: its gather was started, or its copy found
  std::int64_t end = 0;
};

class StepTrace {
 public:
  // A moment: of the host's clock, or of the current stream of the device.
  struct Moment {
    std::int64_t host = 0;  // 0: nothing is traced
    std::shared_ptr<DeviceTime> device = nullptr;
    explicit operator bool() const { return host != 0 || device != nullptr; }
  };
  // A reader: the place in the log from which it reads. Every start must be followed by a stop or a drop.
  using Reader = std::int64_t;
  // A trace that no reader stops must not grow for ever: beyond this the oldest entries go.
  static constexpr std::size_t kMostEntries = std::size_t{1} << 20;
  struct Taken {
    std::vector<TraceEntry> entries;
    std::int64_t ended = 0;      // when the reader stopped
    bool compiled_code = false;  // compiled code handed over gradients
  };

  StepTrace();
  ~StepTrace();

  static std::int64_t now();

  // From now on moments are those of the device. Before the first reader.
  void useDevice(at::Device device) { device_ = device; }

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // True while a reader wants releases of copies. Then released copies in place are not kept for reuse.
  bool wantsReleases() const { return wants_releases_.load(std::memory_order_relaxed); }
  Reader start(bool releases = false);
  // What was logged since `reader` began. Iterations and micro-batches count from its first entry. On a device it waits
  // for what was launched.
  Taken stop(Reader reader);
  // Removes the reader without waiting.
  void drop(Reader reader);

  // The present moment if there is a reader. On a device: an event recorded on the current stream.
  Moment moment() const;
  // Logs `entry`, which began at `start` and ends now. Does nothing if there was no reader at `start`.
  void add(TraceEntry entry, const Moment& start) { addRead(entry, start, Moment(), -1); }
  // The same for a read, launched at `launched`. `version` of the shard tells iterations apart.
  void addRead(TraceEntry entry, const Moment& start, const Moment& launched, std::int64_t version);
  // From any thread.
  void addInstant(TraceEntry entry);
  void noteCompiledCode();

 private:
  struct Pending {
    TraceEntry entry;
    Moment start;
    Moment launched;
    Moment end;
  };
  void append(TraceEntry entry, Moment start, Moment launched, Moment end);
  void remove(Reader reader);
  void noteReaders();
  std::int64_t timeOf(const Moment& moment, const Moment& base) const;
  Moment matchedClocks() const;

  at::Device device_ = at::kCPU;
  std::atomic<bool> on_{false};
  std::atomic<bool> wants_releases_{false};
  std::mutex mutex_;
  Moment base_;                          // a moment that is known on both clocks
  std::multimap<Reader, bool> readers_;  // and whether they want releases
  std::int64_t first_ = 0;               // place of the oldest entry that is kept
  std::deque<Pending> log_;
  std::int64_t compiled_code_ = -1;                          // the place at which compiled code was seen last
  std::unordered_map<std::int64_t, std::int64_t> versions_;  // of each shard at its last read
  int iteration_ = 0;
  int micro_ = 0;
  bool backward_ = false;  // the program's last event was in a backward: where a release belongs
};

}  // namespace dc
