#include "deepcompile/runtime/step_trace.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "deepcompile/base/error.h"

namespace dc {

class DeviceTime {
 public:
  explicit DeviceTime(at::Device device) : device_(device), guard_(device.type()) {
    // BACKEND_DEFAULT: an event that keeps its time.
    guard_.record(&handle_, guard_.getStream(device), device.index(), c10::EventFlag::BACKEND_DEFAULT);
  }
  ~DeviceTime() { guard_.destroyEvent(handle_, device_.index()); }
  DeviceTime(const DeviceTime&) = delete;
  DeviceTime& operator=(const DeviceTime&) = delete;

  void await() const { guard_.synchronizeEvent(handle_); }
  std::int64_t nanosecondsSince(const DeviceTime& earlier) const {
    return static_cast<std::int64_t>(guard_.elapsedTime(earlier.handle_, handle_, device_.index()) * 1e6);
  }

 private:
  const at::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  void* handle_ = nullptr;
};

namespace {

bool isOfTheProgram(TraceEntry::Kind kind) {
  return kind != TraceEntry::Kind::Gather && kind != TraceEntry::Kind::Reduction;
}

}  // namespace

StepTrace::StepTrace() = default;
StepTrace::~StepTrace() = default;

std::int64_t StepTrace::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Matches the two clocks. The host thread may be descheduled between the event and its look at the clock, so of a few
// tries the quickest counts.
StepTrace::Moment StepTrace::matchedClocks() const {
  Moment matched;
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::int64_t before = now();
    auto moment = std::make_shared<DeviceTime>(device_);
    moment->await();
    const std::int64_t after = now();
    if (after - before < shortest) {
      shortest = after - before;
      matched = {after, std::move(moment)};
    }
  }
  return matched;
}

StepTrace::Reader StepTrace::start(bool releases) {
  const std::lock_guard lock(mutex_);
  if (readers_.empty()) {
    if (!device_.is_cpu()) {
      base_ = matchedClocks();
    }
    versions_.clear();
    iteration_ = 0;
    micro_ = 0;
    backward_ = false;
  }
  const Reader reader = first_ + static_cast<Reader>(log_.size());
  readers_.emplace(reader, releases);
  noteReaders();
  return reader;
}

void StepTrace::noteReaders() {
  on_.store(!readers_.empty(), std::memory_order_relaxed);
  const bool any = std::any_of(readers_.begin(), readers_.end(), [](const auto& reader) { return reader.second; });
  wants_releases_.store(any, std::memory_order_relaxed);
}

void StepTrace::remove(Reader reader) {
  const auto found = readers_.find(reader);
  check(found != readers_.end(), "a trace is stopped that was not started, or twice");
  readers_.erase(found);
  noteReaders();
  const Reader end = first_ + static_cast<Reader>(log_.size());
  const Reader oldest = readers_.empty() ? end : std::max(first_, readers_.begin()->first);
  log_.erase(log_.begin(), log_.begin() + static_cast<std::ptrdiff_t>(oldest - first_));
  first_ = oldest;
}

StepTrace::Taken StepTrace::stop(Reader reader) {
  const Moment ended = moment();
  std::vector<Pending> pending;
  Moment base;
  Taken taken;
  {
    const std::lock_guard lock(mutex_);
    if (readers_.count(reader) > 0) {
      pending.assign(log_.begin() + static_cast<std::ptrdiff_t>(std::max(first_, reader) - first_), log_.end());
    }
    base = base_;
    taken.compiled_code = compiled_code_ >= reader;
    remove(reader);
  }
  taken.ended = timeOf(ended, base);
  taken.entries.reserve(pending.size());
  const TraceEntry first = pending.empty() ? TraceEntry() : pending.front().entry;
  for (const Pending& one : pending) {
    TraceEntry entry = one.entry;
    entry.micro -= entry.iteration == first.iteration ? first.micro : 0;
    entry.iteration -= first.iteration;
    entry.start = timeOf(one.start, base);
    entry.end = timeOf(one.end, base);
    entry.launched = one.launched ? timeOf(one.launched, base) : -1;
    taken.entries.push_back(entry);
  }
  return taken;
}

void StepTrace::drop(Reader reader) {
  const std::lock_guard lock(mutex_);
  remove(reader);
}

StepTrace::Moment StepTrace::moment() const {
  if (!on()) {
    return {};
  }
  if (device_.is_cpu()) {
    return {now()};
  }
  return {0, std::make_shared<DeviceTime>(device_)};
}

std::int64_t StepTrace::timeOf(const Moment& moment, const Moment& base) const {
  if (moment.device == nullptr) {
    return moment.host;
  }
  moment.device->await();
  return base.host + moment.device->nanosecondsSince(*base.device);
}

void StepTrace::append(TraceEntry entry, Moment start, Moment launched, Moment end) {
  if (readers_.empty()) {
    return;
  }
  if (log_.size() == kMostEntries) {
    log_.pop_front();
    ++first_;
  }
  entry.iteration = iteration_;
  entry.micro = micro_;
  log_.push_back({entry, std::move(start), std::move(launched), std::move(end)});
}

void StepTrace::addRead(TraceEntry entry, const Moment& start, const Moment& launched, std::int64_t version) {
  if (!start) {
    return;
  }
  Moment end = moment();
  if (!end) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (version >= 0) {
    const auto [known, first] = versions_.emplace(entry.id, version);
    if (!first && known->second != version) {
      // Updates change all shards before the next read: the first changed one starts the iteration.
      if (micro_ > 0) {
        ++iteration_;
        micro_ = 0;
      }
      versions_.clear();
      versions_.emplace(entry.id, version);
    }
  }
  if (isOfTheProgram(entry.kind)) {
    backward_ = entry.backward;
  }
  append(entry, start, launched, std::move(end));
  if (entry.kind == TraceEntry::Kind::EndBackward) {
    ++micro_;
    backward_ = false;
  }
}

void StepTrace::addInstant(TraceEntry entry) {
  if (entry.kind == TraceEntry::Kind::Release && !wantsReleases()) {
    return;
  }
  const Moment at = moment();
  if (!at) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (entry.kind == TraceEntry::Kind::Release) {
    entry.backward = backward_;
  }
  append(entry, at, {}, at);
}

void StepTrace::noteCompiledCode() {
  if (on()) {
    const std::lock_guard lock(mutex_);
    compiled_code_ = first_ + static_cast<Reader>(log_.size());
  }
}

}  // namespace dc
