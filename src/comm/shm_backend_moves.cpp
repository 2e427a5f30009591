// Collectives that spread tensors, or exchange them, as bytes of any type; and barriers.
#include <utility>

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/shm_backend.h"
#include "deepcompile/comm/shm_tensors.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

using Contents = Writable::Contents;

// Cuts contiguous memory along the first dimension: by `splits`, or evenly where there are none.
void addSplits(shm::RunTable& table, const std::byte* data, const at::Tensor& tensor,
               const std::vector<std::int64_t>& splits, int ranks) {
  std::int64_t row = static_cast<std::int64_t>(tensor.element_size());
  for (std::int64_t dim = 1; dim < tensor.dim(); ++dim) {
    row *= tensor.size(dim);
  }
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t rows = splits.empty() ? tensor.size(0) / ranks : splits[static_cast<std::size_t>(r)];
    table.add(data, rows * row);
    table.endRank();
    data += rows * row;
  }
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Request request = {c10d::OpType::BROADCAST, "shm:broadcast", opts.timeout, opts.asyncOp};
  checkRoot(request.name(), opts.rootRank);
  const auto root = static_cast<int>(opts.rootRank);
  for (const at::Tensor& tensor : tensors) {
    if (getRank() == root) {
      checkInput(tensor, tensor.scalar_type(), request.name());
    } else {
      checkOutput(tensor, tensor.scalar_type(), request.name());
    }
  }
  return submit(request, tensors, tensors, [tensors, root](shm::Group& group) {
    const bool gives = group.rank() == root;
    Tensors plain;
    std::vector<Writable> results;
    std::vector<shm::Run> runs;
    for (const at::Tensor& tensor : tensors) {
      if (gives) {
        plain.push_back(readable(tensor));
        runs.push_back(runOf(plain.back()));
      } else {
        results.emplace_back(tensor, Contents::Ignore);
        runs.push_back({results.back().data(), bytesOf(tensor)});
      }
    }
    shm::broadcast(group, runs, root, tagOf(tensors[0].scalar_type()));
    for (const Writable& result : results) {
      result.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& opts) {
  const Request request = {c10d::OpType::SCATTER, "shm:scatter", opts.timeout, opts.asyncOp};
  checkRoot(request.name(), opts.rootRank);
  const auto root = static_cast<int>(opts.rootRank);
  check(outputs.size() == 1, [&] { return concat(request.name(), ": ", outputs.size(), " outputs instead of one"); });
  checkOutput(outputs[0], outputs[0].scalar_type(), request.name());
  Tensors parts;
  if (getRank() == root) {
    check(inputs.size() == 1 && inputs[0].size() == static_cast<std::size_t>(getSize()),
          [&] { return concat(request.name(), ": the root needs one list of ", getSize(), " inputs"); });
    parts = inputs[0];
    for (const at::Tensor& input : parts) {
      checkInput(input, outputs[0].scalar_type(), request.name());
    }
  } else {
    check(inputs.empty() || inputs[0].empty(),
          [&] { return concat(request.name(), ": inputs on rank ", getRank(), ", which is not the root"); });
  }
  return submit(request, parts, outputs, [output = outputs[0], parts, root](shm::Group& group) {
    Tensors plain;
    shm::RunTable from;
    for (const at::Tensor& part : parts) {
      plain.push_back(readable(part));
      from.add(plain.back().const_data_ptr(), bytesOf(part));
      from.endRank();
    }
    const Writable result(output, Contents::Ignore);
    const shm::Run to = {result.data(), bytesOf(output)};
    shm::scatter(group, from, {&to, 1}, root, tagOf(output.scalar_type()));
    result.commit();
  });
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& opts) {
  const Request request = {c10d::OpType::ALLTOALL_BASE, "shm:all_to_all_single", opts.timeout, opts.asyncOp};
  checkInput(input, input.scalar_type(), request.name());
  checkOutput(output, input.scalar_type(), request.name());
  c10d::checkSplitSizes(input_splits, input, getSize());
  c10d::checkSplitSizes(output_splits, output, getSize());
  return submit(request, {input}, {output}, [output, input, output_splits, input_splits](shm::Group& group) {
    const at::Tensor plain = readable(input);
    const Writable result(output, Contents::Ignore);
    shm::RunTable from;
    shm::RunTable to;
    addSplits(from, static_cast<const std::byte*>(plain.const_data_ptr()), input, input_splits, group.size());
    addSplits(to, result.data(), output, output_splits, group.size());
    shm::allToAll(group, from, to, tagOf(output.scalar_type()));
    result.commit();
  });
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Request request = {c10d::OpType::ALLTOALL, "shm:all_to_all", opts.timeout, opts.asyncOp};
  const auto ranks = static_cast<std::size_t>(getSize());
  check(outputs.size() == ranks && inputs.size() == ranks, [&] {
    return concat(request.name(), ": ", inputs.size(), " inputs and ", outputs.size(), " outputs for ", ranks,
                  " ranks");
  });
  for (std::size_t r = 0; r < ranks; ++r) {
    checkInput(inputs[r], inputs[0].scalar_type(), request.name());
    checkOutput(outputs[r], inputs[0].scalar_type(), request.name());
  }
  return submit(request, inputs, outputs, [outputs, inputs](shm::Group& group) {
    Tensors plain;
    std::vector<Writable> results;
    shm::RunTable from;
    shm::RunTable to;
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      plain.push_back(readable(inputs[r]));
      from.add(plain.back().const_data_ptr(), bytesOf(inputs[r]));
      from.endRank();
      results.emplace_back(outputs[r], Contents::Ignore);
      to.add(results.back().data(), bytesOf(outputs[r]));
      to.endRank();
    }
    shm::allToAll(group, from, to, tagOf(outputs[0].scalar_type()));
    for (const Writable& result : results) {
      result.commit();
    }
  });
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  return submit({c10d::OpType::BARRIER, "shm:barrier", opts.timeout, opts.asyncOp}, {}, {},
                [](shm::Group& group) { shm::barrier(group); });
}

// Every wait of the engine names all ranks that are missing.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  submit({c10d::OpType::BARRIER, "shm:monitored_barrier", opts.timeout, false}, {}, {}, [](shm::Group& group) {
    shm::barrier(group);
  })->wait();
}

}  // namespace dc
