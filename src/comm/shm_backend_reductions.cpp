// Collectives that reduce.
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/shm_backend.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

using Contents = Writable::Contents;

}  // namespace

ShmBackend::WorkPtr ShmBackend::reduceAll(const Request& request, Tensors& tensors, const c10d::ReduceOp& op) {
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    checkOutput(tensor, tensor.scalar_type(), request.name());
    reductions.push_back(reductionOf(tensor.scalar_type(), op, request.name()));
  }
  return submit(request, tensors, tensors, [tensors, reductions = std::move(reductions)](shm::Group& group) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Writable tensor(tensors[i], Contents::Keep);
      shm::allReduce(group, tensor.data(), tensor.data(), tensors[i].numel() * reductions[i].factor,
                     reductions[i].dtype, reductions[i].op);
      tensor.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return reduceAll({c10d::OpType::ALLREDUCE, "shm:all_reduce", opts.timeout, opts.asyncOp}, tensors, opts.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return reduceAll({c10d::OpType::ALLREDUCE_COALESCED, "shm:all_reduce_coalesced", opts.timeout, opts.asyncOp}, tensors,
                   opts.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Request request = {c10d::OpType::REDUCE, "shm:reduce", opts.timeout, opts.asyncOp};
  checkRoot(request.name(), opts.rootRank);
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    checkOutput(tensor, tensor.scalar_type(), request.name());
    reductions.push_back(reductionOf(tensor.scalar_type(), opts.reduceOp, request.name()));
  }
  return submit(
      request, tensors, tensors,
      [tensors, reductions = std::move(reductions), root = static_cast<int>(opts.rootRank)](shm::Group& group) {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          const Writable tensor(tensors[i], Contents::Keep);
          shm::reduce(group, tensor.data(), tensor.data(), tensors[i].numel() * reductions[i].factor,
                      reductions[i].dtype, reductions[i].op, root);
          if (group.rank() == root) {
            tensor.commit();
          }
        }
      });
}

// Ranks may own parts of different sizes, as long as all agree on them.
ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& opts) {
  const Request request = {c10d::OpType::REDUCE_SCATTER, "shm:reduce_scatter", opts.timeout, opts.asyncOp};
  check(outputs.size() == inputs.size(), [&] {
    return concat(request.name(), ": ", outputs.size(), " outputs for ", inputs.size(), " lists of inputs");
  });
  std::vector<Reduction> reductions;
  Tensors flat;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checkOutput(outputs[i], outputs[i].scalar_type(), request.name());
    reductions.push_back(reductionOf(outputs[i].scalar_type(), opts.reduceOp, request.name()));
    check(inputs[i].size() == static_cast<std::size_t>(getSize()),
          [&] { return concat(request.name(), ": ", inputs[i].size(), " inputs for ", getSize(), " ranks"); });
    for (const at::Tensor& input : inputs[i]) {
      checkInput(input, outputs[i].scalar_type(), request.name());
      flat.push_back(input);
    }
    const at::Tensor& own = inputs[i][static_cast<std::size_t>(getRank())];
    check(own.numel() == outputs[i].numel(), [&] {
      return concat(request.name(), ": the input for rank ", getRank(), " has ", own.numel(), " elements, the output ",
                    outputs[i].numel());
    });
  }
  return submit(request, flat, outputs, [outputs, inputs, reductions = std::move(reductions)](shm::Group& group) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      shm::RunTable from;
      Tensors plain;
      for (const at::Tensor& input : inputs[i]) {
        plain.push_back(readable(input));
        from.add(plain.back().const_data_ptr(), bytesOf(plain.back()));
        from.endRank();
      }
      const Writable output(outputs[i], Contents::Ignore);
      const shm::Run to = runOf(output.plain());
      shm::reduceScatter(group, from, {&to, 1}, reductions[i].dtype, reductions[i].op);
      output.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::scatterReduced(const Request& request, Tensors& outputs, Tensors& inputs,
                                               const c10d::ReduceOp& op) {
  check(outputs.size() == inputs.size(),
        [&] { return concat(request.name(), ": ", outputs.size(), " outputs for ", inputs.size(), " inputs"); });
  std::vector<Reduction> reductions;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checkOutput(outputs[i], outputs[i].scalar_type(), request.name());
    checkInput(inputs[i], outputs[i].scalar_type(), request.name());
    reductions.push_back(reductionOf(outputs[i].scalar_type(), op, request.name()));
    check(inputs[i].numel() == outputs[i].numel() * getSize(), [&] {
      return concat(request.name(), ": an input of ", inputs[i].numel(), " elements for ", getSize(),
                    " ranks and an output of ", outputs[i].numel());
    });
  }
  return submit(request, inputs, outputs, [outputs, inputs, reductions = std::move(reductions)](shm::Group& group) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor input = readable(inputs[i]);
      const Writable output(outputs[i], Contents::Ignore);
      const std::int64_t bytes = bytesOf(outputs[i]);
      const auto* begin = static_cast<const std::byte*>(input.const_data_ptr());
      shm::RunTable from;
      for (int r = 0; r < group.size(); ++r) {
        from.add(begin + r * bytes, bytes);
        from.endRank();
      }
      const shm::Run to = runOf(output.plain());
      shm::reduceScatter(group, from, {&to, 1}, reductions[i].dtype, reductions[i].op);
      output.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& opts) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return scatterReduced({c10d::OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor", opts.timeout, opts.asyncOp},
                        outputs, inputs, opts.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& opts) {
  // The type of its own for this call is newer than PyTorch 2.11.
  return scatterReduced({c10d::OpType::COALESCED, "shm:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp},
                        outputs, inputs, opts.reduceOp);
}

}  // namespace dc
