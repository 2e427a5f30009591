// A program of a user's own: an executor that keeps the largest gradient instead of the mean, built
// against the installed package and called through the operators.
#include <deepcompile/deepcompile.h>

#include <algorithm>
#include <iostream>

#include <ATen/Functions.h>
#include <torch/library.h>

namespace {

// All ranks of a group of one.
class Alone final : public dc::Communicator {
 public:
  Alone()
      : Communicator(0, 2, std::make_shared<dc::Traffic>()) {}  // claims two ranks, so that gradients take the bucket
  void abort() override {}

 protected:
  void doAllGather(std::span<const dc::GatherPart>) override { dc::fail("not used here"); }
  void doReduceScatter(std::span<const dc::ReducePart>, dc::ReduceOp, std::uint64_t) override {
    dc::fail("not used here");
  }
  void doAllReduce(const at::Tensor&, dc::ReduceOp) override {}
  void doBroadcast(const at::Tensor&, int) override {}
  void doBarrier() override {}
  std::vector<std::string> doExchange(const std::string& bytes) override { return {bytes, bytes}; }
};

class LargestGradient final : public dc::CustomOpExecutor {
 public:
  using CustomOpExecutor::CustomOpExecutor;

 protected:
  void flushReduceBucket(at::ScalarType scalar_type) override {
    blockCopyEvents(scalar_type);
    applyPreDivision(scalar_type);
    for (const dc::ReduceTask& task : reduce_tasks_[scalar_type]) {
      const dc::DSParam& param = param_registry_->getParam(task.getDSId());
      const dc::Slice own = param.getOwners()[comm_->rank()];
      const at::Tensor part = task.getSendBuf().narrow(0, own.begin, own.size());
      // On the reduce stream, after the division: it may be a thread of its own.
      rs_stream_->run([buffer = param.getGradBuffer(), part] { buffer.copy_(at::maximum(buffer, part)); });
    }
    performCleanup(scalar_type);
  }
};

}  // namespace

int main() {
  auto alone = std::make_shared<Alone>();
  auto context = std::make_shared<dc::Context>(dc::Config(), 0, 2);
  dc::Runtime runtime(nullptr, context, {alone, alone}, 1000, 1);
  const at::Tensor buffer = at::zeros({3});
  runtime.registerZ3Param(0, {6}, at::zeros({3}), buffer, false);
  runtime.registerGraph(5, std::make_shared<LargestGradient>(
                               nullptr, runtime.sharedRegistry(), runtime.reduceBuckets(), std::vector<std::int64_t>{0},
                               alone, runtime.reduceStream(), runtime.copyStream(), /*pre_div_reduce=*/true, context));

  const auto reduce_grad = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("dc::reduce_grad", "")
                               .typed<at::Tensor(const at::Tensor&, std::int64_t, std::int64_t)>();
  const auto end_backward =
      c10::Dispatcher::singleton().findSchemaOrThrow("dc::end_backward", "").typed<void(std::int64_t)>();
  runtime.startBackward(false);
  reduce_grad.call(at::arange(6, at::kFloat), 5, 0);
  reduce_grad.call(at::full({6}, 2.0), 5, 0);
  end_backward.call(5);
  std::cout << dc::tensorToString(buffer) << " " << dc::join_as_str(dc::sizes_to_int_vector(buffer.sizes())) << "\n";
  return 0;
}
