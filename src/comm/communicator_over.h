// A communicator that does some operations in a way of its own and leaves the others to the one below.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deepcompile/comm/communicator.h"

namespace dc {

class CommunicatorOver : public Communicator {
 public:
  // `rest` counts what passes through it on its own.
  CommunicatorOver(std::shared_ptr<Communicator> rest, std::shared_ptr<Traffic> traffic)
      : Communicator(rest->rank(), rest->size(), std::move(traffic)), rest_(std::move(rest)) {}

  bool gathersInPlace() const override { return rest_->gathersInPlace(); }
  bool averageDividesFirst() const override { return rest_->averageDividesFirst(); }
  bool takesSeparateTensors() const override { return rest_->takesSeparateTensors(); }
  bool travelsAsItLies(const at::Tensor& tensor) const override { return rest_->travelsAsItLies(tensor); }
  std::optional<std::string> brokenBy() override { return rest_->brokenBy(); }
  void abort() override { rest_->abort(); }

 protected:
  void doAllGather(std::span<const GatherPart> parts) override { rest().allGather(parts); }
  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) override {
    rest().reduceScatter(parts, op, tag);
  }
  void doAllReduce(const at::Tensor& tensor, ReduceOp op) override { rest().allReduce(tensor, op); }
  void doBroadcast(const at::Tensor& tensor, int root) override { rest().broadcast(tensor, root); }
  void doBarrier() override { rest().barrier(); }
  std::vector<std::string> doExchange(const std::string& bytes) override { return rest().exchange(bytes); }

  Communicator& rest() {
    rest_->setTimeout(timeout());
    return *rest_;
  }

 private:
  const std::shared_ptr<Communicator> rest_;
};

}  // namespace dc
