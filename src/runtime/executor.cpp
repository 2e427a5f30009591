#include "deepcompile/runtime/executor.h"

#include <utility>

namespace dc {

CustomOpExecutor::CustomOpExecutor(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                   std::shared_ptr<DSParamRegistry> param_registry,
                                   std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets,
                                   std::vector<std::int64_t> ds_ids, std::shared_ptr<Communicator> comm,
                                   std::shared_ptr<Stream> rs_stream, std::shared_ptr<Stream> copy_stream,
                                   bool pre_div_reduce, std::shared_ptr<Context> context)
    : process_group_(std::move(process_group)),
      param_registry_(std::move(param_registry)),
      reduce_buckets_(std::move(reduce_buckets)),
      ds_ids_(std::move(ds_ids)),
      comm_(std::move(comm)),
      rs_stream_(std::move(rs_stream)),
      copy_stream_(std::move(copy_stream)),
      pre_div_reduce_(pre_div_reduce),
      context_(context != nullptr ? std::move(context)
                                  : std::make_shared<Context>(Config(), comm_->rank(), comm_->size())),
      members_(std::make_shared<const GraphMembers>(param_registry_, ds_ids_, context_->place)),
      reducer_({param_registry_, reduce_buckets_, members_, comm_, rs_stream_, copy_stream_, context_, pre_div_reduce_},
               {[this](at::ScalarType dtype) { flushReduceBucket(dtype); }, [this] { return sendsTasksOneByOne(); },
                [this] { reductionsSettled(); }}),
      reduce_tasks_(reducer_.tasks()),
      has_acc_grad_(param_registry_->accumulated()),
      param_updated_(reducer_.updates()) {}

}  // namespace dc
