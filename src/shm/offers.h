// Tensors that lie in shared memory are offered to the peers as they are. One turn tells every rank where the others'
// lie, and whether all of them have seen theirs before.
#pragma once

#include <cstdint>
#include <vector>

#include "deepcompile/shm/group.h"
#include "deepcompile/shm/runs.h"

namespace dc::shm {

class Offers {
 public:
  // True when every rank has offered all of its runs.
  explicit operator bool() const { return !addresses_.empty(); }
  // True when every rank gave the memory that it gave in its last exchange. There need be no offers for that.
  bool sameAsLast() const { return same_; }
  // Run `index` of `rank`, in this process's address space.
  std::byte* at(int rank, std::size_t index) const {
    return addresses_[static_cast<std::size_t>(rank) * runs_ + index];
  }

 private:
  friend Offers exchangeOffers(Call& call, Group& group, Runs runs);
  bool same_ = true;
  std::size_t runs_ = 0;
  std::vector<std::byte*> addresses_;
};

// One turn. There are offers when all ranks give runs of the same sizes and all of them lie in shared memory. The
// caller then ends with `meetAfterSharing`.
Offers exchangeOffers(Call& call, Group& group, Runs runs);

}  // namespace dc::shm
