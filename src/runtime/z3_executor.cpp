#include "deepcompile/runtime/z3_executor.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
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
      gatherer_({graph_id, param_registry_, members(), std::move(gather.comm), std::move(gather.stream),
                 std::move(gather.pool), context_}) {}

void Z3CustomOpExecutor::reduceAtUpdate() {
  stage_name_ = "ZeRO-3 that reduces before updates";
  reducer().travel(GradientsTravel::BeforeAnUpdate);
}

void Z3CustomOpExecutor::startForward() {
  gatherer_.beginForward();
  comm_->placeTensors(nullptr);  // a backward that failed may have left it on
}

void Z3CustomOpExecutor::startBackward(bool update) {
  CustomOpExecutor::startBackward(update);
  gatherer_.beginBackward();
}

at::Tensor Z3CustomOpExecutor::reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) {
  if (context_->config.debug && !context_->profiling) {
    int& pending = gathered_[ds_id];
    check(pending > 0, [&] {
      return concat("reduce_grad: more reductions than gathers of ", members()->at(ds_id).describe(), " (graph ",
                    gatherer_.graphId(), ", ", place(), ")");
    });
    --pending;
  }
  const StepTrace::Moment entered = context_->trace->moment();
  const at::ScalarType dtype = grad_tensor.scalar_type();
  at::Tensor result = CustomOpExecutor::reduceGrad(std::move(grad_tensor), ds_id);
  if (entered) {
    context_->trace->add({TraceEntry::Kind::Gradient, ds_id, dtype, gatherer_.bytesOf({ds_id, dtype}), true}, entered);
  }
  if (!context_->profiling) {
    reduced_.insert(ds_id);
  }
  return result;
}

void Z3CustomOpExecutor::endBackward() {
  if (!reducer().open()) {
    return;
  }
  const StepTrace::Moment entered = context_->trace->moment();
  gatherer_.endCycle();
  CustomOpExecutor::endBackward();
  const bool unsettled = reducer().unsettled();
  gatherer_.endBackward(param_updated_, unsettled);
  if (param_updated_) {
    gathered_.clear();
  }
  if (!context_->profiling && reducer().communicates() && !unsettled) {
    publishGradients();
  }
  reduced_.clear();
  context_->trace->add({TraceEntry::Kind::EndBackward, -1, at::kFloat, 0, true}, entered);
}

void Z3CustomOpExecutor::reductionsSettled() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  publishGradients();
}

// Sets shard.grad to the averaged gradient; it stays None if no rank had a gradient.
void Z3CustomOpExecutor::publishGradients() {
  for (const std::int64_t id : ds_ids_) {
    const DSParam& param = param_registry_->getParam(id);
    if (!param.trainable() || reducer().withoutGradient().contains(id) ||
        (comm_->size() == 1 && !reduced_.contains(id))) {
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

at::Tensor Z3CustomOpExecutor::allgatherParam(std::int64_t ds_id, std::optional<at::ScalarType> dtype) {
  at::Tensor gathered = gatherer_.gather(ds_id, dtype, reducer().open());
  allowReduction(ds_id);
  return gathered;
}

void Z3CustomOpExecutor::allowReduction(std::int64_t ds_id) {
  if (context_->config.debug) {
    ++gathered_[ds_id];
  }
}

}  // namespace dc
