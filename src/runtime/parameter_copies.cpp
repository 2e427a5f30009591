// Copies of parameters: returning them to readers, waiting for them, releasing them.
#include <algorithm>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/device_stream.h"
#include "deepcompile/runtime/parameter_gatherer.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {

bool ParameterGatherer::hasCurrentCopy(const Wanted& wanted) {
  const GatheredParam* copy = parts_.registry->findGathered(wanted.id, wanted.dtype);
  return copy != nullptr && !copy->let_go && parts_.registry->isCurrent(wanted.id, *copy);
}

void ParameterGatherer::hold(std::int64_t ds_id) {
  if (held_.insert(ds_id)) {
    ++parts_.registry->holders(ds_id);
  }
}

namespace {

// A tensor as handOut makes it in debug mode: with a storage that has no memory.
bool isGuard(const at::Tensor& tensor) {
  return !gatherKeyOf(tensor) &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace

// Each caller gets its own tensor over the shared storage, because autograd attaches a graph to it. In debug mode the
// tensor cannot be read until waitAllgather gives it the storage.
at::Tensor ParameterGatherer::handOut(const GatheredParam& copy) const {
  at::Tensor out = aliasOf(copy.tensor);
  if (parts_.context->config.debug && !copy.waited) {
    const auto key = *gatherKeyOf(copy.tensor);
    auto guard =
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), copy.tensor.storage().nbytes(),
                                              c10::DataPtr(nullptr, out.device()), nullptr, false);
    guardStorage(*guard, concat(parts_.registry->getParam(key.id).describe(), " is read before wait_allgather (graph ",
                                parts_.graph_id, ", ", parts_.context->place, ")"));
    out.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(guard)));
  }
  return out;
}

void ParameterGatherer::wait(const at::Tensor& v, std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  auto& copies = parts_.registry->gatheredCopies(ds_id);
  check(parts_.registry->hasGatheredParam(ds_id), [&] {
    return concat("wait_allgather: ", param.describe(), " is not being gathered (graph ", parts_.graph_id, ", ",
                  parts_.context->place, ")");
  });
  // A tensor of another dtype than any copy is a dummy: the id decides.
  const bool by_dtype = v.numel() > 0 && parts_.registry->findGathered(ds_id, v.scalar_type()) != nullptr;
  for (GatheredParam& copy : copies) {
    if (copy.let_go) {
      continue;
    }
    if (by_dtype && copy.tensor.scalar_type() != v.scalar_type()) {
      continue;
    }
    awaitCopy(copy);
    if (parts_.context->config.debug && isGuard(v) && v.sizes() == copy.tensor.sizes()) {
      v.unsafeGetTensorImpl()->set_storage_keep_dtype(copy.tensor.storage());
    }
  }
}

void ParameterGatherer::release(std::int64_t ds_id, std::int64_t n_users, ReleasedSize size) {
  const DSParam& param = member(ds_id);
  check(n_users >= 1, [&] {
    return concat("release_param: n_users is ", n_users, " for ", param.describe(), "; it must be at least 1 (graph ",
                  parts_.graph_id, ", ", parts_.context->place, ")");
  });
  if (parts_.context->profiling) {
    return;
  }
  check(!parts_.context->config.debug || held_.contains(ds_id), [&] {
    return concat("release_param: ", param.describe(),
                  " is not gathered by this graph, or was released by all its users "
                  "already (graph ",
                  parts_.graph_id, ", ", parts_.context->place, ")");
  });
  if (n_users > 1) {
    Uses& uses = uses_[ds_id];
    if (uses.left == 0) {
      uses = {n_users, n_users};
    }
    check(uses.n_users == n_users, [&] {
      return concat("release_param: ", param.describe(), " is released with n_users=", n_users,
                    " after n_users=", uses.n_users, " in the same pass (graph ", parts_.graph_id, ", ",
                    parts_.context->place, ")");
    });
    if (--uses.left > 0) {
      return;
    }
  } else if (!uses_.empty()) {
    const auto found = uses_.find(ds_id);
    check(found == uses_.end() || found->second.left == 0, [&] {
      return concat("release_param: ", param.describe(),
                    " is released with n_users=1 after n_users=", found->second.n_users, " in the same pass (graph ",
                    parts_.graph_id, ", ", parts_.context->place, ")");
    });
  }
  drop(ds_id, size);
}

void ParameterGatherer::drop(std::int64_t ds_id, ReleasedSize size) {
  if (!held_.erase(ds_id)) {
    return;
  }
  if (--parts_.registry->holders(ds_id) == 0 && !parts_.registry->getParam(ds_id).isPersistent()) {
    freeCopies(ds_id, size);
  }
}

void ParameterGatherer::freeCopies(std::int64_t ds_id, ReleasedSize size) {
  const std::string* message = release_messages_.find(ds_id);
  if (message == nullptr) {
    message = &release_messages_.put(
        ds_id, concat(parts_.registry->getParam(ds_id).describe(),
                      " is read after its storage was freed by release_param (graph ", parts_.graph_id, ", ",
                      parts_.context->place, "); gather it again, or count this use in n_users"));
  }
  for (const GatheredParam& copy : parts_.registry->gatheredCopies(ds_id)) {
    if (copy.let_go) {
      continue;  // a copy in place: the shards stay valid
    }
    if (parts_.context->config.debug) {
      parts_.context->await(copy.ready);  // else the gather in flight would overwrite the NaNs of debug mode
    }
    releaseStorage(copy.tensor, *message, parts_.context->config.debug, size);
    parts_.context->stats.releases.fetch_add(1, std::memory_order_relaxed);
  }
  parts_.registry->unregisterGatheredParam(ds_id);
}

// Waiting also orders the caller's stream. If the memory was allocated on that stream, a released copy can then be
// freed at once, and need not wait until the host, which may be a whole pass ahead of the device, sees that the gather
// ended.
void ParameterGatherer::awaitCopy(GatheredParam& copy) {
  if (copy.waited) {
    return;
  }
  if (!copy.ready.trivial()) {
    parts_.context->await(copy.ready);
    if (currentStream(copy.tensor.device()) == copy.caller) {
      setFreeAfter(copy.tensor, Event());
    }
    copy.ready = Event();
  }
  copy.waited = true;
}

// The copies' memory lives as long as tensors that were returned to readers.
void ParameterGatherer::dropCopies(const std::vector<CopyKey>& keys) {
  for (const CopyKey& key : keys) {
    letGo(key);
  }
}

void ParameterGatherer::letGo(const Wanted& wanted, bool traced) {
  int& holders = parts_.registry->holders(wanted.id);
  if (held_.erase(wanted.id)) {
    --holders;
  }
  if (holders > 0) {
    return;  // another graph still needs it
  }
  GatheredParam* const copy = parts_.registry->findGathered(wanted.id, wanted.dtype);
  // A trace must log when the last tensor dies, so with a trace the copy is not kept for reuse.
  if (traced && copy != nullptr && copy->in_place && in_place_.holding() && !parts_.context->trace->wantsReleases()) {
    copy->let_go = true;
    return;
  }
  forgetCopy(wanted);
}

void ParameterGatherer::forgetCopy(const Wanted& wanted) {
  auto& copies = parts_.registry->gatheredCopies(wanted.id);
  copies.erase(std::remove_if(copies.begin(), copies.end(),
                              [&](const GatheredParam& copy) { return copy.tensor.scalar_type() == wanted.dtype; }),
               copies.end());
}

}  // namespace dc
