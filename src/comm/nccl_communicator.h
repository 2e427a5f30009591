// Collectives of CUDA tensors over NCCL, on a communicator of our own. Every call enqueues on the current CUDA stream
// and returns; errors of what was enqueued are heard through brokenBy(), and abort() ends what hangs.
//
// Gathers move bytes and may be in place. Reductions divide first for ReduceOp::Average and add in NCCL's order: the
// same bits on every run with the same ranks and sizes, not those of the CPU's sum in rank order.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deepcompile/comm/communicator.h"

namespace dc {

// A collective of `size` ranks that meet at `store`; all must arrive within `timeout` seconds. `device` is the index of
// this rank's GPU. Ranks may share one where NCCL allows it. `registered`: results of gathers lie in memory that NCCL
// writes to directly (nccl_memory.h).
std::shared_ptr<Communicator> makeNcclCommunicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   int device, double timeout, std::shared_ptr<Traffic> traffic,
                                                   bool registered = false);

}  // namespace dc
