#include "deepcompile/comm/shm_rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

c10::intrusive_ptr<c10d::Store> ofThisGeneration(c10::intrusive_ptr<c10d::Store> store, int rank) {
  check(store != nullptr, "a shared-memory group needs a store through which its ranks meet");
  const std::int64_t generation = store->add(concat("deepcompile/arrivals/", rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(concat("deepcompile/", generation), std::move(store));
}

}  // namespace

StoreRendezvous::StoreRendezvous(c10::intrusive_ptr<c10d::Store> store, int rank)
    : store_(ofThisGeneration(std::move(store), rank)) {}

void StoreRendezvous::set(const std::string& key, const std::string& value) { store_->set(key, value); }

std::string StoreRendezvous::get(const std::string& key, std::chrono::milliseconds timeout) {
  store_->wait({key}, timeout);
  return store_->get_to_str(key);
}

}  // namespace dc
