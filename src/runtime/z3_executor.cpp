#include "deepcompile/runtime/z3_executor.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {

Z3CustomOpExecutor::Z3CustomOpExecutor(std::int64_t graph_id, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                       std::shared_ptr<DSParamRegistry> param_registry,
                                       std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets,
                                       std::vector<std::int64_t> ds_ids, std::shared_ptr<Communicator> comm,
                                       std::shared_ptr<Stream> rs_stream, std::shared_ptr<Stream> copy_stream,
                                       GatherResources gather, bool pre_div_reduce, std::shared_ptr<Context> context)
    : CustomOpExecutor(std::move(process_group), std::move(param_registry), std::move(reduce_buckets),
                       std::move(ds_ids), std::move(comm), std::move(rs_stream), std::move(copy_stream), pre_div_reduce,
                       std::move(context)),
      graph_id_(graph_id),
      gather_(std::move(gather)),
      in_place_(gather_.comm, gather_.stream, context_, param_registry_, ds_ids_) {}

void Z3CustomOpExecutor::startForward() {
  uses_.clear();
  graph_schedule_ = nullptr;  // of a graph that failed
  in_place_.hold(false);
  comm_->placeTensors(nullptr);  // a backward that failed may have left it on
}

void Z3CustomOpExecutor::startBackward(bool update) {
  CustomOpExecutor::startBackward(update);
  uses_.clear();
}

at::Tensor Z3CustomOpExecutor::reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) {
  if (context_->config.debug && !context_->profiling) {
    int& pending = gathered_[ds_id];
    check(pending > 0, [&] {
      return concat("reduce_grad: more reductions than gathers of ", member(ds_id).describe(), " (graph ", graph_id_,
                    ", ", place(), ")");
    });
    --pending;
  }
  const Timeline::Mark entered = context_->timeline->mark();
  const Timeline::Mark mark = context_->recorder->mark();
  const at::ScalarType dtype = grad_tensor.scalar_type();
  at::Tensor result = CustomOpExecutor::reduceGrad(std::move(grad_tensor), ds_id);
  context_->recorder->add(RecordedOp::Kind::Reduce, ds_id, dtype, bytesOf({ds_id, dtype}), true, mark);
  context_->timeline->add(Timeline::Kind::Grad, ds_id, 0, entered);
  if (!context_->profiling) {
    reduced_.insert(ds_id);
  }
  return result;
}

void Z3CustomOpExecutor::endBackward() {
  if (!backwardOpen()) {
    return;
  }
  const Timeline::Mark mark = context_->recorder->mark();
  endCycle();
  CustomOpExecutor::endBackward();
  // What is still being gathered reads the shards that the optimizer is about to change, here or on other ranks.
  if (gather_.comm->readsPeers() && param_updated_ && comm_->size() > 1) {
    runCollective(
        *gather_.stream, [place = place()] { return concat("ending the reads of shards on ", place); },
        [comm = gather_.comm] { comm->endReads(); });
  }
  if (param_updated_) {
    endReads();
  }
  if (unsettled()) {
    // The shards stay as they are, and so nobody has to know when the gathers have read them.
    for (const std::int64_t id : ds_ids_) {
      settleBeforeReads(param_registry_->getParam(id).getDSTensor(), context_->unsettled);
    }
  } else {
    context_->await(gather_.stream->record());
  }
  for (const std::int64_t id : reloading_) {
    param_registry_->getParam(id).getDSTensor();
  }
  reloading_.clear();
  if (param_updated_) {
    gathered_.clear();
  }
  // A forward that was run again in the backward (checkpointing) may have stopped before its releases.
  for (const std::int64_t id : std::exchange(gathered_in_backward_, {}).ids()) {
    drop(id, ReleasedSize::Zero);
  }
  if (!context_->profiling && communicates() && !unsettled()) {
    publishGradients();
  }
  reduced_.clear();
  context_->recorder->add(RecordedOp::Kind::End, -1, at::kFloat, 0, true, mark);
}

void Z3CustomOpExecutor::holdShards(bool hold) {
  in_place_.hold(hold);
  together_gathered_ = false;
  if (gather_.comm->readsPeers()) {
    gather_.comm->holdReads(hold);  // a device's communicator runs in the caller's order
  }
}

void Z3CustomOpExecutor::endReads() {
  for (const std::int64_t id : std::exchange(read_in_place_, {}).ids()) {
    const Wanted wanted{id, param_registry_->getParam(id).getDtype()};  // no other dtype lies there
    const GatheredParam* const copy = param_registry_->findGathered(id, wanted.dtype);
    if (copy != nullptr && copy->in_place && !copy->let_go) {
      forgetCopy(wanted);
    }
  }
  for (auto& [key, stays] : together_) {
    if (std::exchange(stays, false) && --param_registry_->holders(key.first) == 0 &&
        !param_registry_->getParam(key.first).isPersistent()) {
      forgetCopy({key.first, key.second});
    }
  }
  together_gathered_ = false;
  in_place_.end();
}

void Z3CustomOpExecutor::reductionsSettled() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  publishGradients();
}

// The user's view: shard.grad is the averaged gradient, and stays None where no rank had one.
void Z3CustomOpExecutor::publishGradients() {
  for (const std::int64_t id : ds_ids_) {
    const DSParam& param = param_registry_->getParam(id);
    if (!param.trainable() || withoutGradient().contains(id) || (comm_->size() == 1 && !reduced_.contains(id))) {
      continue;
    }
    const at::Tensor& shard = param.getDSTensor();
    if (!shard.requires_grad() || !shard.is_leaf()) {
      continue;
    }
    const at::Tensor& memory = param.gradMemory();
    at::Tensor& published = shard.mutable_grad();
    if (published.defined() && published.is_alias_of(memory) && memory.scalar_type() == shard.scalar_type()) {
      continue;
    }
    const at::Tensor& buffer = param.getGradBuffer();
    at::Tensor gradient = buffer.sizes() == shard.sizes() ? aliasOf(buffer) : memory.view(shard.sizes());
    if (gradient.scalar_type() != shard.scalar_type()) {
      gradient = gradient.to(shard.scalar_type());
    }
    published = gradient;
    param_registry_->getParam(id).notePublished(gradient);
  }
}

void Z3CustomOpExecutor::allowReduction(std::int64_t ds_id) {
  if (context_->config.debug) {
    ++gathered_[ds_id];
  }
}

void Z3CustomOpExecutor::offloadParameter(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (param.isOffloaded()) {
    return;
  }
  endReads();
  context_->await(gather_.stream->record());  // no gather may be reading it
  context_->stats.bytes_offloaded.fetch_add(static_cast<std::int64_t>(param.getDSTensor().nbytes()),
                                            std::memory_order_relaxed);
  param_registry_->offload(ds_id);
}

void Z3CustomOpExecutor::reloadParameter(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (!param.isOffloaded()) {
    return;
  }
  param_registry_->reload(ds_id);
  context_->stats.bytes_reloaded.fetch_add(
      static_cast<std::int64_t>(param.getPaddedNumel() / comm_->size() * c10::elementSize(param.getDtype())),
      std::memory_order_relaxed);
  reloading_.insert(ds_id);
}

}  // namespace dc
