// A communicator over any c10d backend that has all-gather, all-to-all, all-reduce, broadcast and barrier.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "deepcompile/comm/communicator.h"

namespace dc {

// The backend must not be used by anyone else while the communicator lives, or the order of its operations is lost.
std::shared_ptr<Communicator> makeC10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend,
                                                   std::shared_ptr<Traffic> traffic);

}  // namespace dc
