// What a collective of the `shm` backend returns, and the thread that runs the asynchronous ones.
//
// Operations of one queue run one after the other, in the order in which they were submitted, and their future's
// callbacks with them: an operation that a callback submits runs before the one that is next in the queue, on every
// rank alike.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace dc {

// Completed once, by whoever runs the operation. Callbacks of the future run before wait() returns.
class ShmWork final : public c10d::Work {
 public:
  // `where` is what an error of wait() begins with; `outputs` are the value of the future.
  ShmWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
          std::vector<at::Tensor> outputs, std::uint64_t sequence, std::string where);

  // `timeout` bounds this wait alone; the operation has its own deadline.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

  void complete(std::exception_ptr error, int source = -1);

 private:
  void settle(c10::ivalue::Future& future);

  const std::vector<at::Tensor> outputs_;
  const std::uint64_t sequence_;
  const std::string where_;
  int source_ = -1;

  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when somebody asks for it
  bool settled_ = false;                            // outcome_ is known
  std::exception_ptr outcome_;
};

// One work for several: complete when all are, failed when one has.
c10::intrusive_ptr<c10d::Work> combine(std::vector<c10::intrusive_ptr<c10d::Work>> works);

class WorkQueue : public std::enable_shared_from_this<WorkQueue> {
 public:
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    std::function<void()> body;  // owns what it uses; let go before the work completes
  };

  // Runs the task here and now when nothing is before it and the caller would wait for it anyway (`async` is false), or
  // when a callback submits it; otherwise on the queue's thread, which is started when it is first needed.
  void submit(Task task, bool async);

  // Runs what is queued, then ends the thread. Nothing can be submitted afterwards. Not while holding the interpreter.
  void close();

  // Returns whether all tasks, and their callbacks, have ended within `timeout`.
  bool awaitIdle(std::chrono::milliseconds timeout);

  // For a callback that waits for a task behind its own: runs the tasks of this thread's queue until `done`.
  static void helpUntil(const std::function<bool()>& done);

 private:
  void loop();
  bool runNext();
  static void execute(Task task);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;  // a task is running, here or on the caller's thread
  bool closing_ = false;
  int idle_awaited_ = 0;  // by how many
  std::thread thread_;
};

}  // namespace dc
