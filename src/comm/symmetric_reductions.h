// Reductions through memory that all ranks can read: each rank stages what its peers own, the ranks meet on the device,
// and each sums its own part from all of them. Sums are in rank order, in fp32 with one rounding: the bits of the CPU.
//
// Everything else, types that the kernels do not know, and sizes at which that was faster when the communicator was
// made, go to `rest`: so from three ranks on 16-bit sums may be rounded otherwise in another run.
#pragma once

#include <memory>
#include <string>

#include "deepcompile/comm/communicator.h"

namespace dc {

// A collective. `group_name` is that of a process group of torch.distributed.
std::shared_ptr<Communicator> makeSymmetricReductions(const std::string& group_name, std::shared_ptr<Communicator> rest,
                                                      int device, double timeout, std::shared_ptr<Traffic> traffic);

}  // namespace dc
