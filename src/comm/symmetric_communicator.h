// Gathers that read the shards where the peers keep them, without a send: a barrier on the device, then copies.
//
// Shards must come from empty(). A gather of others, and everything that is not a gather, goes to `rest`. A rank reads
// its peers' shards until its next barrier, so nobody may change a shard before endReads(), which all ranks call.
#pragma once

#include <memory>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/comm/symmetric_heap.h"

namespace dc {

std::shared_ptr<Communicator> makeSymmetricCommunicator(std::shared_ptr<SymmetricHeap> heap,
                                                        std::shared_ptr<Communicator> rest, int device,
                                                        std::shared_ptr<Traffic> traffic);

}  // namespace dc
