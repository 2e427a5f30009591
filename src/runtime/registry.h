// All parameters of one runtime and their gathered copies. Not synchronized: the runtime's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/ids.h"
#include "deepcompile/runtime/param.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// One gathered copy of a parameter, in one dtype.
struct GatheredParam {
  at::Tensor tensor;          // true shape
  Event ready;                // passes when the gather is complete
  std::int64_t caller = 0;    // the stream that its memory was taken on (currentStream)
  bool waited = false;        // a caller was ordered after `ready`
  bool valid = true;          // the shard has not changed since
  std::uint32_t version = 0;  // of the shard, when it was gathered
  bool in_place = false;      // its memory is the shards themselves
  bool let_go = false;        // released. Only copies in place, which cost nothing, stay registered then, for reuse
};

class DSParamRegistry {
 public:
  void registerParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                     at::Tensor grad_buffer, bool partitioned, std::int64_t offset, bool persistent);

  bool hasParam(std::int64_t ds_id) const { return entries_.find(ds_id) != nullptr; }
  const DSParam& getParam(std::int64_t ds_id) const { return entry(ds_id).param; }
  DSParam& getParam(std::int64_t ds_id) { return entry(ds_id).param; }
  // The parameter whose shard lies where `shard` does; an error when there is none. Empty shards cannot be told apart.
  std::int64_t idOf(const at::Tensor& shard) const;
  // In order of registration.
  const std::vector<std::int64_t>& getIds() const { return ids_; }
  void setPersistent(std::int64_t ds_id, bool persistent) { entry(ds_id).param.setPersistent(persistent); }
  // Copies in place become invalid.
  void offload(std::int64_t ds_id);
  void reload(std::int64_t ds_id) { entry(ds_id).param.reload(); }

  // Gathered copies, at most one per dtype. A new copy replaces the one of the same dtype.
  GatheredParam& registerGatheredParam(std::int64_t ds_id, at::Tensor ds_tensor);
  void unregisterGatheredParam(std::int64_t ds_id);
  // Whether there is a copy that was not released.
  bool hasGatheredParam(std::int64_t ds_id) const;
  const at::Tensor& getGatheredParam(std::int64_t ds_id) const;
  GatheredParam* findGathered(std::int64_t ds_id, at::ScalarType dtype);
  std::vector<GatheredParam>& gatheredCopies(std::int64_t ds_id) { return entry(ds_id).gathered; }

  // Validity of all copies of a parameter; false where there is none.
  void setValid(std::int64_t ds_id, bool valid);
  bool isValid(std::int64_t ds_id) const;
  // True if the shard has not changed since `copy` was gathered, and the copy was not invalidated.
  bool isCurrent(std::int64_t ds_id, const GatheredParam& copy) const;
  static std::uint32_t versionOf(const at::Tensor& shard);

  // How many graphs need the gathered copies of a parameter to stay.
  int& holders(std::int64_t ds_id) { return entry(ds_id).holders; }

  // Parameters whose grad_buffer holds gradients that later reductions must add to.
  IdSet& accumulated() { return accumulated_; }
  // True when an optimizer step followed the last backward, so that the next reduction overwrites.
  bool updateFollowed() const { return update_followed_; }
  void setUpdateFollowed(bool followed) { update_followed_ = followed; }

 private:
  struct Entry {
    DSParam param;
    std::vector<GatheredParam> gathered;
    int holders = 0;
  };
  Entry& entry(std::int64_t ds_id) const {
    Entry* const found = entries_.find(ds_id);
    if (found == nullptr) [[unlikely]] {
      failUnknown(ds_id);
    }
    return *found;
  }
  [[noreturn]] void failUnknown(std::int64_t ds_id) const;

  using Place = std::pair<const void*, std::int64_t>;  // storage and offset
  static Place placeOf(const at::Tensor& shard);

  IdMap<Entry> entries_;
  // The place's storage is held weakly: its address is not used for another storage while the registry compares with
  // it.
  struct Placed {
    std::int64_t id;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  struct HashOfPlace {
    std::size_t operator()(const Place& place) const {
      return std::hash<const void*>()(place.first) ^ (static_cast<std::size_t>(place.second) * 0x9e3779b97f4a7c15ULL);
    }
  };
  std::unordered_map<Place, Placed, HashOfPlace> ids_by_place_;
  std::vector<std::int64_t> ids_;
  IdSet accumulated_;
  bool update_followed_ = true;
};

}  // namespace dc
