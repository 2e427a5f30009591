// Collectives that bring the ranks' tensors together, as bytes of any type.
#include <numeric>
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/shm_backend.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

using Contents = Writable::Contents;
using Tensors = ShmBackend::Tensors;

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

std::vector<shm::Run> runsOf(const Tensors& plain) {
  std::vector<shm::Run> runs;
  for (const at::Tensor& tensor : plain) {
    runs.push_back(runOf(tensor));
  }
  return runs;
}

Tensors readables(const Tensors& tensors) {
  Tensors plain;
  for (const at::Tensor& tensor : tensors) {
    plain.push_back(readable(tensor));
  }
  return plain;
}

std::uint64_t tagOf(const Tensors& tensors) {
  std::uint64_t tag = 0;
  for (const at::Tensor& tensor : tensors) {
    tag = tag * 31 + dc::tagOf(tensor.scalar_type());
  }
  return tag;
}

// The tensors of `lists[i][r]`, in the order of a table: rank by rank.
class WritableTable {
 public:
  explicit WritableTable(const std::vector<Tensors>& lists) {
    for (std::size_t rank = 0; !lists.empty() && rank < lists[0].size(); ++rank) {
      for (const Tensors& list : lists) {
        tensors_.emplace_back(list[rank], Contents::Ignore);
        runs_.add(tensors_.back().data(), bytesOf(list[rank]));
      }
      runs_.endRank();
    }
  }
  const shm::RunTable& runs() const { return runs_; }
  void commit() const {
    for (const Writable& tensor : tensors_) {
      tensor.commit();
    }
  }

 private:
  std::vector<Writable> tensors_;
  shm::RunTable runs_;
};

}  // namespace

// Ranks may give different sizes, as long as all agree on them.
ShmBackend::WorkPtr ShmBackend::gatherTables(const Request& request, std::vector<Tensors>& outputs, Tensors& inputs) {
  check(outputs.size() == inputs.size() && !inputs.empty(), [&] {
    return concat(request.name(), ": ", outputs.size(), " lists of outputs for ", inputs.size(), " inputs");
  });
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::ScalarType dtype = inputs[i].scalar_type();
    checkInput(inputs[i], dtype, request.name());
    check(outputs[i].size() == static_cast<std::size_t>(getSize()),
          [&] { return concat(request.name(), ": ", outputs[i].size(), " outputs for ", getSize(), " ranks"); });
    for (const at::Tensor& output : outputs[i]) {
      checkOutput(output, dtype, request.name());
    }
    const at::Tensor& own = outputs[i][static_cast<std::size_t>(getRank())];
    check(own.numel() == inputs[i].numel(), [&] {
      return concat(request.name(), ": rank ", getRank(), " gives ", inputs[i].numel(), " elements and has room for ",
                    own.numel());
    });
  }
  return submit(request, inputs, flatten(outputs), [outputs, inputs](shm::Group& group) {
    const Tensors plain = readables(inputs);
    const WritableTable to(outputs);
    shm::allGather(group, runsOf(plain), to.runs(), tagOf(inputs));
    to.commit();
  });
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  return gatherTables({c10d::OpType::ALLGATHER, "shm:all_gather", opts.timeout, opts.asyncOp}, outputs, inputs);
}

// One list of outputs for each rank here, unlike in allgather.
ShmBackend::WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  const Request request = {c10d::OpType::ALLGATHER_COALESCED, "shm:all_gather_coalesced", opts.timeout, opts.asyncOp};
  check(outputs.size() == static_cast<std::size_t>(getSize()),
        [&] { return concat(request.name(), ": ", outputs.size(), " lists of outputs for ", getSize(), " ranks"); });
  std::vector<Tensors> by_input(inputs.size());
  for (const Tensors& list : outputs) {
    check(list.size() == inputs.size(),
          [&] { return concat(request.name(), ": ", list.size(), " outputs for ", inputs.size(), " inputs"); });
    for (std::size_t i = 0; i < list.size(); ++i) {
      by_input[i].push_back(list[i]);
    }
  }
  return gatherTables(request, by_input, inputs);
}

ShmBackend::WorkPtr ShmBackend::gatherTensors(const Request& request, Tensors& outputs, Tensors& inputs) {
  check(outputs.size() == inputs.size(),
        [&] { return concat(request.name(), ": ", outputs.size(), " outputs for ", inputs.size(), " inputs"); });
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    checkInput(inputs[i], inputs[i].scalar_type(), request.name());
    checkOutput(outputs[i], inputs[i].scalar_type(), request.name());
    check(outputs[i].numel() == inputs[i].numel() * getSize(), [&] {
      return concat(request.name(), ": an output of ", outputs[i].numel(), " elements for ", getSize(),
                    " ranks with inputs of ", inputs[i].numel());
    });
  }
  return submit(request, inputs, outputs, [outputs, inputs](shm::Group& group) {
    const Tensors plain = readables(inputs);
    std::vector<Writable> results;
    for (const at::Tensor& output : outputs) {
      results.emplace_back(output, Contents::Ignore);
    }
    shm::RunTable to;
    for (int r = 0; r < group.size(); ++r) {
      for (std::size_t i = 0; i < results.size(); ++i) {
        to.add(results[i].data() + r * bytesOf(inputs[i]), bytesOf(inputs[i]));
      }
      to.endRank();
    }
    shm::allGather(group, runsOf(plain), to, tagOf(inputs));
    for (const Writable& result : results) {
      result.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& opts) {
  Tensors outputs = {output};
  Tensors inputs = {input};
  return gatherTensors({c10d::OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor", opts.timeout, opts.asyncOp},
                       outputs, inputs);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& opts) {
  return gatherTensors({c10d::OpType::COALESCED, "shm:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp},
                       outputs, inputs);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& opts) {
  const Request request = {c10d::OpType::GATHER, "shm:gather", opts.timeout, opts.asyncOp};
  checkRoot(request.name(), opts.rootRank);
  check(inputs.size() == 1, [&] { return concat(request.name(), ": ", inputs.size(), " inputs instead of one"); });
  checkInput(inputs[0], inputs[0].scalar_type(), request.name());
  const auto root = static_cast<int>(opts.rootRank);
  if (getRank() == root) {
    check(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(getSize()),
          [&] { return concat(request.name(), ": the root needs one list of ", getSize(), " outputs"); });
    for (const at::Tensor& output : outputs[0]) {
      checkOutput(output, inputs[0].scalar_type(), request.name());
    }
  } else {
    check(outputs.empty() || outputs[0].empty(),
          [&] { return concat(request.name(), ": outputs on rank ", getRank(), ", which is not the root"); });
  }
  return submit(request, inputs, flatten(outputs), [outputs, inputs, root](shm::Group& group) {
    const at::Tensor plain = readable(inputs[0]);
    const WritableTable to(outputs);
    const shm::Run from = runOf(plain);
    shm::gather(group, {&from, 1}, to.runs(), root, tagOf(inputs));
    to.commit();
  });
}

}  // namespace dc
