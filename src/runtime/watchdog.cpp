#include "deepcompile/runtime/watchdog.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "deepcompile/base/error.h"

namespace dc {

Watchdog::Watchdog(Callbacks callbacks) : callbacks_(std::move(callbacks)), thread_([this] { serve(); }) {}

Watchdog::~Watchdog() { stop(); }

void Watchdog::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Watchdog::watch(Event done, Stream::Describe what) {
  const double seconds = callbacks_.timeout();
  const std::lock_guard lock(mutex_);
  if (given_up_) {
    return;
  }
  watched_.push_back({std::move(done), std::move(what), deadlineAfter(Seconds(seconds)), seconds});
}

void Watchdog::serve() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [this] { return stopping_; })) {
    std::optional<std::pair<std::string, std::string>> trouble;
    try {
      trouble = look();
    } catch (const std::exception& error) {  // querying an event of a failed device throws
      trouble.emplace(watched_.empty() ? "work on the device" : watched_.front().what(), error.what());
    }
    if (trouble) {
      given_up_ = true;
      watched_.clear();
      lock.unlock();  // the callback takes time, and callers of watch() must not wait for it
      callbacks_.stuck(trouble->first, trouble->second);
      return;
    }
  }
}

std::optional<std::pair<std::string, std::string>> Watchdog::look() {
  // Work of one stream ends in order, of different streams in any order. So ended work may follow unfinished work.
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), [](const Watched& one) { return one.done.passed(); }),
                 watched_.end());
  if (watched_.empty()) {
    return std::nullopt;
  }
  const Watched& oldest = watched_.front();
  if (auto why = callbacks_.broken()) {
    return std::pair(oldest.what(), *why);
  }
  if (Clock::now() < oldest.deadline) {
    return std::nullopt;
  }
  return std::pair(oldest.what(), concat("it did not end within ", oldest.seconds, " seconds"));
}

}  // namespace dc
