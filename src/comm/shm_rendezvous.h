// Where the ranks of a shared-memory group meet: a store of PyTorch's.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deepcompile/shm/rendezvous.h"

namespace dc {

// Every rank makes one for each group that it sets up. Counts in the store how often this rank has come, so that a
// second group under the same prefix (after destroy_process_group, say) does not read the keys of the first.
class StoreRendezvous final : public shm::Rendezvous {
 public:
  StoreRendezvous(c10::intrusive_ptr<c10d::Store> store, int rank);

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;  // prefixed with the generation
};

}  // namespace dc
