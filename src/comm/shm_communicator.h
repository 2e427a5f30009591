// A communicator over memory that the ranks of one host share. Shards are read where the peers hold them, or through
// slots that stay in cache; nothing is packed.
#pragma once

#include <memory>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/shm/group.h"

namespace dc {

// The group must not be used by anyone else while the communicator lives, or the order of its operations is lost.
std::shared_ptr<Communicator> makeShmCommunicator(std::shared_ptr<shm::Group> group, std::shared_ptr<Traffic> traffic);

}  // namespace dc
