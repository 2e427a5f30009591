// The ranks over which torch.ops.deepspeed.inference_all_reduce sums. One group per process, set up once and used by
// every call: so a call costs no lock and no allocation beyond what the engine needs.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deepcompile/shm/group.h"

namespace dc {

class InferenceGroup {
 public:
  // Collective over the store. `process_group` may be null; it serves what shared memory cannot, and is not kept alive.
  // Throws where neither can serve: the ranks do not share memory and there is no process group.
  InferenceGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

  ~InferenceGroup();
  InferenceGroup(const InferenceGroup&) = delete;
  InferenceGroup& operator=(const InferenceGroup&) = delete;

  // None where the ranks do not share a host, or cannot share memory; `apart` says which and why.
  shm::Group* memory() const { return memory_.get(); }
  const std::string& apart() const { return apart_; }

  // The sum over the ranks in a tensor of CPU memory without gaps; false, and nothing done, where shared memory does
  // not serve its type.
  bool allReduceInPlace(const at::Tensor& plain);

  // The sum over the ranks of `from` in `to`, which may be the same tensor. Any strides; same shapes and types.
  void allReduce(const at::Tensor& from, const at::Tensor& to);

 private:
  void overProcessGroup(const at::Tensor& from, const at::Tensor& to);

  std::unique_ptr<shm::Group> memory_;
  std::string apart_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group_;
};

// Replaces the group of this process, or removes it. Waits for calls in progress, which have deadlines.
void setInferenceGroup(std::unique_ptr<InferenceGroup> group);

// Keeps the group for the time of a call. A forked child has none.
class InferenceCall {
 public:
  InferenceCall();
  ~InferenceCall();
  InferenceCall(const InferenceCall&) = delete;
  InferenceCall& operator=(const InferenceCall&) = delete;
  InferenceGroup* group() const { return group_; }
  // Throws, and says what to call first, where there is none.
  InferenceGroup& required() const;

 private:
  InferenceGroup* group_;
};

}  // namespace dc
