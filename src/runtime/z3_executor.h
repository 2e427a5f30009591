// ZeRO-3: parameters are sharded, too; they are gathered before their use and released after it.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/parameter_gatherer.h"

namespace dc {

// What ZeRO-3 needs beyond the other stages.
struct GatherResources {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<Stream> stream;
  std::shared_ptr<BufferPool> pool;
};

class Z3CustomOpExecutor : public CustomOpExecutor {
 public:
  Z3CustomOpExecutor(std::int64_t graph_id, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                     std::shared_ptr<DSParamRegistry> param_registry,
                     std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets, std::vector<std::int64_t> ds_ids,
                     std::shared_ptr<Communicator> comm, std::shared_ptr<Stream> rs_stream,
                     std::shared_ptr<Stream> copy_stream, GatherResources gather, bool pre_div_reduce,
                     std::shared_ptr<Context> context = nullptr);

  const char* stageName() const override { return stage_name_; }
  // From now on gradients add up on each rank and are reduced only in the backward before an update. With persistent
  // parameters this is ZeRO-1.
  void reduceAtUpdate();

  void startForward() override;
  void holdShards(bool hold) override { gatherer_.holdShards(hold); }
  void endReads() override { gatherer_.endReads(); }
  void startBackward(bool update) override;
  void endBackward() override;
  at::Tensor reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) override;

  ParameterGatherer& gatherer() { return gatherer_; }
  at::Tensor allgatherParam(std::int64_t ds_id, std::optional<at::ScalarType> dtype);

  // Debug mode: lets the backward of a gather reduce, also when that backward runs several times.
  void allowReduction(std::int64_t ds_id);

 protected:
  void flushReduceBucket(at::ScalarType scalar_type) override { reducer().reduceToOwners(scalar_type); }
  bool sendsTasksOneByOne() const override { return true; }
  void reductionsSettled() override;

 private:
  void publishGradients();

  const char* stage_name_ = "ZeRO-3";
  ParameterGatherer gatherer_;
  std::unordered_map<std::int64_t, int> gathered_;  // debug: gathers that no reduction has answered yet
  IdSet reduced_;                                   // parameters with a reduction in this backward
};

}  // namespace dc
