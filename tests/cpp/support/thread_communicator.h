// A communicator over the threads of one process: ranks as threads, for fast tests of what needs several of them.
//
// Ranks meet at each operation, show each other where their tensors are, and leave together. An operation on which the
// ranks do not agree is an error on all of them, every wait has a deadline, and a rank can be told to fail.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/communicator.h"

namespace dc::testing {

// Where the ranks meet. Shared by their communicators.
class MeetingPoint {
 public:
  explicit MeetingPoint(int ranks) : offers_(ranks), operations_(ranks, 0), fails_at_(ranks, -1) {}

  // The rank's operation number `operation` (from 0) throws "rank R was told to fail"; the others are not told.
  void failAt(int rank, int operation) {
    const std::lock_guard lock(mutex_);
    fails_at_[rank] = operation;
  }

  // While closed, operations wait before they begin.
  void close() { setOpen(false); }
  void open() { setOpen(true); }

  void abort(const std::string& why) {
    const std::lock_guard lock(mutex_);
    breakWith(why);
  }

  // The operations so far, as "all_gather 12+4" with the number of elements of each part.
  std::vector<std::string> history() const {
    const std::lock_guard lock(mutex_);
    return history_;
  }

  // Shows `mine` to all ranks and returns what each of them shows, by rank.
  std::vector<const void*> arrive(int rank, const std::string& operation, const void* mine, double timeout) {
    std::unique_lock lock(mutex_);
    const auto deadline = deadlineAfter(timeout);
    await(lock, deadline, rank, operation, [this] { return open_; });
    check(operations_[rank]++ != fails_at_[rank],
          [&] { return concat("rank ", rank, " was told to fail in ", operation); });
    offers_[rank] = {operation, mine};
    meet(lock, deadline, rank, operation);
    std::vector<const void*> all;
    for (const Offer& offer : offers_) {
      if (offer.operation != operation) {
        breakWith(concat("the ranks run different operations: ", operation, " and ", offer.operation));
        fail(*broken_);
      }
      all.push_back(offer.data);
    }
    if (rank == 0) {
      history_.push_back(operation);
    }
    return all;
  }

  // What was shown may be let go when all ranks have come here.
  void leave(int rank, const std::string& operation, double timeout) {
    std::unique_lock lock(mutex_);
    meet(lock, deadlineAfter(timeout), rank, operation);
  }

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Offer {
    std::string operation;
    const void* data = nullptr;
  };

  static Time deadlineAfter(double seconds) {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  }

  void setOpen(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  void breakWith(const std::string& why) {
    if (broken_ == nullptr) {
      broken_ = std::make_unique<std::string>(why);
    }
    changed_.notify_all();
  }

  template <typename Condition>
  void await(std::unique_lock<std::mutex>& lock, Time deadline, int rank, const std::string& operation,
             Condition condition) {
    const bool met = changed_.wait_until(lock, deadline, [&] { return broken_ != nullptr || condition(); });
    if (broken_ == nullptr && !met) {
      breakWith(concat("rank ", rank, " waited too long in ", operation));
    }
    if (broken_ != nullptr) {
      fail(*broken_);
    }
  }

  void meet(std::unique_lock<std::mutex>& lock, Time deadline, int rank, const std::string& operation) {
    const std::uint64_t meeting = meetings_;
    if (++present_ == offers_.size()) {
      present_ = 0;
      ++meetings_;
      changed_.notify_all();
      return;
    }
    await(lock, deadline, rank, operation, [&] { return meetings_ != meeting; });
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;
  std::vector<int> operations_;  // that each rank has begun
  std::vector<int> fails_at_;
  std::vector<std::string> history_;
  std::size_t present_ = 0;
  std::uint64_t meetings_ = 0;
  bool open_ = true;
  std::unique_ptr<std::string> broken_;  // why nothing works any more
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<MeetingPoint> meeting_point, int rank, int size, std::shared_ptr<Traffic> traffic)
      : Communicator(rank, size, std::move(traffic)), meeting_point_(std::move(meeting_point)) {}

  void abort() override { meeting_point_->abort(concat("rank ", rank(), " aborted")); }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override {
    std::string operation = "all_gather ";
    for (const GatherPart& part : parts) {
      operation += concat(&part == &parts[0] ? "" : "+", part.shard.numel());
    }
    together<std::span<const GatherPart>>(operation, parts, [&](const auto& ranks) {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::int64_t count = parts[i].shard.numel();
        for (int r = 0; r < size(); ++r) {
          parts[i].full.narrow(0, r * count, count).copy_((*ranks[r])[i].shard);
        }
      }
    });
  }

  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) override {
    std::string operation = concat("reduce_scatter tag ", tag, " of ");
    for (const ReducePart& part : parts) {
      operation += concat(&part == &parts[0] ? "" : "+", part.send.numel());
    }
    together<std::span<const ReducePart>>(operation, parts, [&](const auto& ranks) {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const Slice own = parts[i].owners[rank()];
        std::vector<at::Tensor> slices;
        for (const auto* other : ranks) {
          slices.push_back((*other)[i].send.narrow(0, own.begin, own.size()));
        }
        parts[i].receive.copy_(total(slices, op));
      }
    });
  }

  void doAllReduce(const at::Tensor& tensor, ReduceOp op) override {
    at::Tensor result;
    together<at::Tensor>(concat("all_reduce ", tensor.numel()), tensor, [&](const auto& ranks) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor* other : ranks) {
        tensors.push_back(*other);
      }
      result = total(tensors, op);
    });
    tensor.copy_(result);
  }

  void doBroadcast(const at::Tensor& tensor, int root) override {
    together<at::Tensor>(concat("broadcast ", tensor.numel()), tensor, [&](const auto& ranks) {
      if (rank() != root) {
        tensor.copy_(*ranks[root]);
      }
    });
  }

  void doBarrier() override {
    together<int>("barrier", rank(), [](const auto&) {});
  }

  std::vector<std::string> doExchange(const std::string& bytes) override {
    std::vector<std::string> all;
    together<std::string>(concat("exchange ", bytes.size()), bytes, [&](const auto& ranks) {
      for (const std::string* other : ranks) {
        all.push_back(*other);
      }
    });
    return all;
  }

 private:
  // In rank order; 16-bit types in fp32 and rounded once. Written apart from the project's own, which it checks.
  static at::Tensor total(const std::vector<at::Tensor>& rows, ReduceOp op) {
    const at::ScalarType dtype = rows[0].scalar_type();
    const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    at::Tensor sum = at::zeros_like(rows[0], rows[0].options().dtype(half ? at::kFloat : dtype));
    for (const at::Tensor& row : rows) {
      sum = sum + row.to(sum.scalar_type());
    }
    if (op == ReduceOp::Average) {
      sum = sum / static_cast<double>(rows.size());
    }
    return sum.to(dtype);
  }

  template <typename Shown, typename Body>
  void together(const std::string& operation, const Shown& mine, Body body) {
    const auto shown = meeting_point_->arrive(rank(), operation, &mine, timeout());
    std::vector<const Shown*> ranks;
    for (const void* other : shown) {
      ranks.push_back(static_cast<const Shown*>(other));
    }
    body(ranks);
    meeting_point_->leave(rank(), operation, timeout());
  }

  const std::shared_ptr<MeetingPoint> meeting_point_;
};

}  // namespace dc::testing
