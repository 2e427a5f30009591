#include "deepcompile/runtime/registry.h"

#include <algorithm>
#include <utility>

#include "deepcompile/base/error.h"

namespace dc {

void DSParamRegistry::registerParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                                    at::Tensor grad_buffer, bool partitioned, std::int64_t offset, bool persistent) {
  check(!hasParam(ds_id), [&] { return concat(getParam(ds_id).describe(), " is registered already"); });
  if (grad_buffer.defined()) {
    grad_buffer.zero_();
  }
  if (ds_tensor.numel() > 0) {
    ids_by_place_.emplace(placeOf(ds_tensor), Placed{ds_id, ds_tensor.storage().getWeakStorageImpl()});
  }
  entries_.put(ds_id, Entry{DSParam(ds_id, ds_shape, std::move(ds_tensor), std::move(grad_buffer), partitioned, offset,
                                    persistent),
                            {},
                            0});
  ids_.push_back(ds_id);
}

DSParamRegistry::Place DSParamRegistry::placeOf(const at::Tensor& shard) {
  return {shard.storage().unsafeGetStorageImpl(), shard.storage_offset()};
}

std::int64_t DSParamRegistry::idOf(const at::Tensor& shard) const {
  const auto found = ids_by_place_.find(placeOf(shard));
  check(found != ids_by_place_.end(), [&] {
    const auto same =
        std::find_if(ids_.begin(), ids_.end(), [&](std::int64_t id) { return entry(id).param.isShard(shard); });
    return concat(
        same == ids_.end() ? "a parameter" : entry(*same).param.describe(), ": a tensor of ", shard.numel(),
        " elements of dtype ", shard.scalar_type(),
        " stands where its shard was registered, but is not that shard. Was the sharded model "
        "copied, moved or cast, or other memory put under a parameter (param.data = ...)? Do the former before "
        "it is sharded, and in place of the latter copy into the shard (param.copy_(...) under no_grad)");
  });
  return found->second.id;
}

void DSParamRegistry::failUnknown(std::int64_t ds_id) const {
  fail("no parameter with id ", ds_id, " is registered; ", ids_.size(),
       " parameters are. Register it with register_param (ZeRO-1, 2) or register_z3_param (ZeRO-3)");
}

GatheredParam& DSParamRegistry::registerGatheredParam(std::int64_t ds_id, at::Tensor ds_tensor) {
  Entry& e = entry(ds_id);
  const at::ScalarType dtype = ds_tensor.scalar_type();
  const std::uint32_t version = e.param.isOffloaded() ? 0 : versionOf(e.param.getDSTensor());
  GatheredParam copy;
  copy.tensor = std::move(ds_tensor);
  copy.version = version;
  const auto same = std::find_if(e.gathered.begin(), e.gathered.end(),
                                 [&](const GatheredParam& g) { return g.tensor.scalar_type() == dtype; });
  if (same != e.gathered.end()) {
    *same = std::move(copy);
    return *same;
  }
  return e.gathered.emplace_back(std::move(copy));
}

void DSParamRegistry::offload(std::int64_t ds_id) {
  Entry& e = entry(ds_id);
  std::erase_if(e.gathered, [](const GatheredParam& copy) { return copy.in_place; });
  e.param.offload();
}

bool DSParamRegistry::hasGatheredParam(std::int64_t ds_id) const {
  const auto& copies = entry(ds_id).gathered;
  return std::any_of(copies.begin(), copies.end(), [](const GatheredParam& copy) { return !copy.let_go; });
}

void DSParamRegistry::unregisterGatheredParam(std::int64_t ds_id) { entry(ds_id).gathered.clear(); }

const at::Tensor& DSParamRegistry::getGatheredParam(std::int64_t ds_id) const {
  const Entry& e = entry(ds_id);
  const auto last = std::find_if(e.gathered.rbegin(), e.gathered.rend(), [](const auto& copy) { return !copy.let_go; });
  check(last != e.gathered.rend(), [&] { return concat(e.param.describe(), " is not gathered"); });
  return last->tensor;
}

GatheredParam* DSParamRegistry::findGathered(std::int64_t ds_id, at::ScalarType dtype) {
  for (GatheredParam& copy : entry(ds_id).gathered) {
    if (copy.tensor.scalar_type() == dtype) {
      return &copy;
    }
  }
  return nullptr;
}

void DSParamRegistry::setValid(std::int64_t ds_id, bool valid) {
  for (GatheredParam& copy : entry(ds_id).gathered) {
    copy.valid = valid;
  }
}

bool DSParamRegistry::isValid(std::int64_t ds_id) const {
  const auto& copies = entry(ds_id).gathered;
  return hasGatheredParam(ds_id) && std::all_of(copies.begin(), copies.end(), [&](const GatheredParam& copy) {
           return copy.let_go || isCurrent(ds_id, copy);
         });
}

bool DSParamRegistry::isCurrent(std::int64_t ds_id, const GatheredParam& copy) const {
  const DSParam& param = entry(ds_id).param;
  return copy.valid && (param.isOffloaded() || copy.version == versionOf(param.getDSTensor()));
}

// Tensors made under inference mode have no version and cannot be changed in place by autograd-aware code.
std::uint32_t DSParamRegistry::versionOf(const at::Tensor& shard) {
  return shard.is_inference() ? 0 : static_cast<std::uint32_t>(shard._version());
}

}  // namespace dc
