#include "deepcompile/comm/inference_group.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/shm_rendezvous.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

using Contents = Writable::Contents;

std::atomic<InferenceGroup*> current{nullptr};
std::atomic<int> calls{0};           // in progress
std::atomic<bool> replacing{false};  // somebody waits for them to end
std::atomic<bool> forked{false};     // this is a child of the process that had the group

// The child's copy must not speak for the rank; it is left alone.
void forgetInChild() {
  if (current.exchange(nullptr) != nullptr) {
    forked.store(true);
  }
  calls.store(0);
  replacing.store(false);
}

}  // namespace

InferenceGroup::InferenceGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout,
                               const c10::intrusive_ptr<c10d::ProcessGroup>& process_group)
    : process_group_(process_group) {
  StoreRendezvous rendezvous(std::move(store), rank);
  shm::GroupOptions options;
  options.name = "inference";
  options.timeout = timeout;
  memory_ = shm::Group::open(rendezvous, rank, size, options, apart_);
  check(memory_ != nullptr || process_group != nullptr, [&] {
    return concat("dc.initialize: ", apart_,
                  ", and there is no process group to serve ranks that share no memory: call init_distributed or "
                  "torch.distributed.init_process_group first");
  });
}

InferenceGroup::~InferenceGroup() = default;

bool InferenceGroup::allReduceInPlace(const at::Tensor& plain) {
  const auto dtype = engineType(plain.scalar_type());
  if (!memory_ || !dtype) {
    return false;
  }
  void* data = plain.mutable_data_ptr();
  shm::allReduce(*memory_, data, data, plain.numel(), *dtype, shm::ReduceOp::Sum);
  if (!plain.is_inference()) {
    plain.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

void InferenceGroup::allReduce(const at::Tensor& from, const at::Tensor& to) {
  const auto dtype = engineType(from.scalar_type());
  if (!memory_ || !dtype) {
    overProcessGroup(from, to);
    return;
  }
  if (isPlain(from) && isPlain(to)) {
    shm::allReduce(*memory_, from.const_data_ptr(), to.mutable_data_ptr(), from.numel(), *dtype, shm::ReduceOp::Sum);
    return;
  }
  const at::Tensor plain = readable(from);
  const Writable result(to, Contents::Ignore);
  shm::allReduce(*memory_, plain.const_data_ptr(), result.data(), from.numel(), *dtype, shm::ReduceOp::Sum);
  result.commit();
}

void InferenceGroup::overProcessGroup(const at::Tensor& from, const at::Tensor& to) {
  const auto process_group = process_group_.lock();
  check(process_group != nullptr, [&] {
    return concat("inference_all_reduce: shared memory has no sum of ", c10::toString(from.scalar_type()),
                  " tensors, and there is no process group that could serve instead: call init_distributed or "
                  "torch.distributed.init_process_group before dc.initialize");
  });
  const at::Tensor sum = readable(from).clone();
  std::vector<at::Tensor> tensors = {sum.is_complex() ? at::view_as_real(sum) : sum};
  process_group->allreduce(tensors)->wait();
  to.copy_(sum);
}

void setInferenceGroup(std::unique_ptr<InferenceGroup> group) {
  static std::mutex mutex;
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, &forgetInChild); });
  const std::lock_guard lock(mutex);
  forked.store(false);
  const std::unique_ptr<InferenceGroup> before(current.exchange(group.release()));
  if (!before) {
    return;
  }
  replacing.store(true);
  for (int n = calls.load(); n != 0; n = calls.load()) {
    calls.wait(n);
  }
  replacing.store(false);
}

// Announces itself before it looks; whoever replaces the group looks for calls after it has done so.
InferenceCall::InferenceCall() {
  calls.fetch_add(1);
  group_ = current.load();
}

InferenceCall::~InferenceCall() {
  calls.fetch_sub(1);
  if (replacing.load()) [[unlikely]] {
    calls.notify_all();
  }
}

InferenceGroup& InferenceCall::required() const {
  check(group_ != nullptr, [] {
    return forked.load()
               ? "inference_all_reduce in a forked child: the group belongs to its parent process"
               : "inference_all_reduce: no group yet; call init_distributed() or dc.initialize(size, rank) on "
                 "every rank first";
  });
  return *group_;
}

}  // namespace dc
