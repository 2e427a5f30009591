#include "deepcompile/runtime/stream.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/owner_process.h"

namespace dc {
namespace {

// How far a stream has come; outlives the stream through the events that refer to it.
class Progress {
 public:
  explicit Progress(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  // Called for each piece of work in order, by the thread that runs it.
  void perform(const Stream::Work& work) {
    std::exception_ptr error;
    if (!failed()) {
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
    }
    const std::lock_guard lock(mutex_);
    if (error != nullptr && error_ == nullptr) {
      error_ = error;
      failed_at_ = done_ + 1;
    }
    ++done_;
    changed_.notify_all();
  }

  bool failed() const {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }

  bool reached(std::uint64_t count) const {
    const std::lock_guard lock(mutex_);
    return done_ >= count;
  }

  void await(std::uint64_t count, Deadline deadline) const {
    std::unique_lock lock(mutex_);
    const bool reached = changed_.wait_until(lock, deadline, [&] { return done_ >= count; });
    if (error_ != nullptr && failed_at_ <= count) {
      std::rethrow_exception(error_);
    }
    if (!reached) {
      fail("the ", name_, " stream did not finish its work before the deadline; raise `timeout` in the configuration, ",
           "or look for a rank that is stuck or dead");
    }
  }

 private:
  const std::string name_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::uint64_t done_ = 0;
  std::uint64_t failed_at_ = 0;  // valid with error_
  std::exception_ptr error_;
};

class CpuEvent final : public EventState {
 public:
  CpuEvent(std::shared_ptr<const Progress> progress, std::uint64_t count)
      : progress_(std::move(progress)), count_(count) {}

  bool passed() const override { return progress_->reached(count_); }
  void wait(Deadline deadline) const override { progress_->await(count_, deadline); }

 private:
  const std::shared_ptr<const Progress> progress_;
  const std::uint64_t count_;
};

class InlineStream final : public Stream {
 public:
  explicit InlineStream(std::string name) : progress_(std::make_shared<Progress>(std::move(name))) {}

  void run(Work work) override {
    const std::lock_guard lock(order_);
    ++given_;
    progress_->perform(work);
  }

  Event record() override {
    const std::lock_guard lock(order_);
    // All work has run: the event matters only when it carries an error.
    return progress_->failed() ? Event(std::make_shared<CpuEvent>(progress_, given_)) : Event();
  }

  void wait(const Event& event, Deadline deadline) override {
    if (!event.trivial()) {
      run([&] { event.wait(deadline); });
    }
  }

  void synchronize(Deadline deadline) override { record().wait(deadline); }
  bool followsCaller() const override { return true; }

 private:
  std::mutex order_;  // several threads may give work; it runs one at a time
  std::uint64_t given_ = 0;
  const std::shared_ptr<Progress> progress_;
};

class WorkerStream final : public Stream {
 public:
  explicit WorkerStream(std::string name)
      : progress_(std::make_shared<Progress>(std::move(name))), thread_([this] { serve(); }) {}

  ~WorkerStream() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      queue_.clear();  // drops pending work: an owner that needs it synchronizes first
    }
    given_work_.notify_one();
    if (owner_.isThis()) {
      thread_.join();
    } else {
      thread_.detach();  // a forked child has no such thread
    }
  }

  void run(Work work) override {
    check(owner_.isThis(), [&] {
      return concat("the stream '", progress_->name(), "' belongs to process ", owner_.pid(),
                    "; a forked child cannot use the runtime of its parent");
    });
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
      ++given_;
    }
    given_work_.notify_one();
  }

  Event record() override {
    const std::lock_guard lock(mutex_);
    return Event(std::make_shared<CpuEvent>(progress_, given_));
  }

  void wait(const Event& event, Deadline deadline) override {
    if (!event.trivial()) {
      run([event, deadline] { event.wait(deadline); });
    }
  }

  void synchronize(Deadline deadline) override { record().wait(deadline); }

 private:
  void serve() {
    while (true) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        given_work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (stopping_) {
          return;
        }
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      progress_->perform(work);
    }
  }

  std::mutex mutex_;
  std::condition_variable given_work_;
  std::deque<Work> queue_;
  std::uint64_t given_ = 0;
  bool stopping_ = false;
  const shm::OwnerProcess owner_;
  const std::shared_ptr<Progress> progress_;
  std::thread thread_;  // last: starts when everything above stands
};

}  // namespace

std::shared_ptr<Stream> makeCpuStream(CpuStreamMode mode, std::string name) {
  if (mode == CpuStreamMode::Worker) {
    return std::make_shared<WorkerStream>(std::move(name));
  }
  return std::make_shared<InlineStream>(std::move(name));
}

CpuStreamMode chooseCpuStreamMode(const std::string& wanted, bool spins, int local_ranks, int compute_threads,
                                  int usable_cores) {
  if (wanted == "inline") {
    return CpuStreamMode::Inline;
  }
  if (wanted == "worker") {
    return CpuStreamMode::Worker;
  }
  const bool core_to_spare = usable_cores >= local_ranks * (compute_threads + 1);
  return !spins || core_to_spare ? CpuStreamMode::Worker : CpuStreamMode::Inline;
}

}  // namespace dc
