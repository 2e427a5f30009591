#include "deepcompile/comm/shm_work.h"

#include <atomic>
#include <utility>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

thread_local WorkQueue* queue_of_this_thread = nullptr;

c10::intrusive_ptr<c10::ivalue::Future> tensorsFuture() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

class CombinedWork final : public c10d::Work {
 public:
  explicit CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const auto& work : works_) {
      if (!work->isCompleted()) {
        return false;
      }
    }
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : works_) {
      if (!work->isSuccess()) {
        return false;
      }
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (at::Tensor& tensor : work->result()) {
        all.push_back(std::move(tensor));
      }
    }
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = tensorsFuture();
    const auto parts = std::make_shared<std::vector<c10::intrusive_ptr<c10::ivalue::Future>>>();
    for (const auto& work : works_) {
      parts->push_back(work->getFuture());
    }
    if (parts->empty()) {
      settle(*future, *parts);
    }
    const auto missing = std::make_shared<std::atomic<std::size_t>>(parts->size());
    for (const auto& part : *parts) {
      part->addCallback([future, missing, parts](c10::ivalue::Future&) {
        if (missing->fetch_sub(1) == 1) {
          settle(*future, *parts);
        }
      });
    }
    return future;
  }

 private:
  // Asks the futures, not the works: those complete after the callbacks of their futures.
  static void settle(c10::ivalue::Future& whole, const std::vector<c10::intrusive_ptr<c10::ivalue::Future>>& parts) {
    std::vector<at::Tensor> all;
    for (const auto& part : parts) {
      if (part->hasError()) {
        whole.setError(part->exception_ptr());
        return;
      }
      for (at::Tensor& tensor : part->value().toTensorVector()) {
        all.push_back(std::move(tensor));
      }
    }
    whole.markCompleted(c10::IValue(std::move(all)));
  }

  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

ShmWork::ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs, std::uint64_t sequence, std::string where)
    : c10d::Work(rank, type, title, inputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      where_(std::move(where)) {}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  WorkQueue::helpUntil([this] { return isCompleted(); });
  std::unique_lock lock(mutex_);
  if (timeout == kNoTimeout) {
    cv_.wait(lock, [&] { return completed_; });
  } else if (!cv_.wait_for(lock, timeout, [&] { return completed_; })) {
    fail(where_, ": not complete after the ", static_cast<double>(timeout.count()) / 1000,
         " s that wait() was given; the operation itself goes on until its own deadline");
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (future_) {
      return future_;
    }
    future = future_ = tensorsFuture();
    if (!settled_) {
      return future;
    }
  }
  settle(*future);
  return future;
}

std::vector<at::Tensor> ShmWork::result() {
  check(isCompleted(),
        [&] { return concat(where_, ": result() before the operation is complete; call wait() first"); });
  return outputs_;
}

int ShmWork::sourceRank() const {
  const std::lock_guard lock(mutex_);
  check(source_ >= 0, [&] { return concat(where_, ": has no source rank (it is no completed receive)"); });
  return source_;
}

void ShmWork::complete(std::exception_ptr error, int source) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    outcome_ = error;
    settled_ = true;
    future = future_;
  }
  if (future) {
    settle(*future);
  }
  {
    const std::lock_guard lock(mutex_);
    source_ = source;
  }
  finish(std::move(error));
}

void ShmWork::settle(c10::ivalue::Future& future) {
  if (outcome_) {
    future.setError(outcome_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

c10::intrusive_ptr<c10d::Work> combine(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  return c10::make_intrusive<CombinedWork>(std::move(works));
}

void WorkQueue::submit(Task task, bool async) {
  if (queue_of_this_thread == this) {
    execute(std::move(task));
    return;
  }
  std::unique_lock lock(mutex_);
  check(!closing_, "the process group has been shut down");
  if (async || busy_ || !tasks_.empty()) {
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) {
      thread_ = std::thread([self = shared_from_this()] { self->loop(); });
    }
    lock.unlock();
    changed_.notify_all();
    return;
  }
  busy_ = true;
  lock.unlock();
  execute(std::move(task));
  lock.lock();
  busy_ = false;
  const bool wanted = !tasks_.empty() || closing_ || idle_awaited_ > 0;
  lock.unlock();
  if (wanted) {
    changed_.notify_all();
  }
}

void WorkQueue::close() {
  std::thread thread;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    thread = std::move(thread_);
    if (queue_of_this_thread != this) {
      // Another caller may be joining the thread already.
      changed_.wait(lock, [&] { return thread.joinable() || (!busy_ && tasks_.empty()); });
    }
  }
  changed_.notify_all();
  if (!thread.joinable()) {
    return;
  }
  if (queue_of_this_thread == this) {
    thread.detach();  // a callback closes its own queue: the thread ends when it returns, and owns the queue until then
  } else {
    thread.join();
  }
}

bool WorkQueue::awaitIdle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  ++idle_awaited_;
  const bool idle = changed_.wait_for(lock, timeout, [&] { return !busy_ && tasks_.empty(); });
  --idle_awaited_;
  return idle;
}

void WorkQueue::helpUntil(const std::function<bool()>& done) {
  while (queue_of_this_thread != nullptr && !done()) {
    if (!queue_of_this_thread->runNext()) {
      return;
    }
  }
}

void WorkQueue::loop() {
  queue_of_this_thread = this;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !busy_ && (!tasks_.empty() || closing_); });
      if (tasks_.empty()) {
        return;
      }
      busy_ = true;
    }
    runNext();
    {
      const std::lock_guard lock(mutex_);
      busy_ = false;
    }
    changed_.notify_all();
  }
}

bool WorkQueue::runNext() {
  Task task;
  {
    const std::lock_guard lock(mutex_);
    if (tasks_.empty()) {
      return false;
    }
    task = std::move(tasks_.front());
    tasks_.pop_front();
  }
  execute(std::move(task));
  return true;
}

void WorkQueue::execute(Task task) {
  std::exception_ptr error;
  try {
    task.body();
  } catch (...) {
    error = std::current_exception();
  }
  task.body = nullptr;
  task.work->complete(std::move(error));
}

}  // namespace dc
