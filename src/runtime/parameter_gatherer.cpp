// Gathers: memory, in place or from the pool, and the collective.
#include "deepcompile/runtime/parameter_gatherer.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/device_kernels.h"
#include "deepcompile/runtime/device_stream.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {

ParameterGatherer::ParameterGatherer(Parts parts)
    : parts_(std::move(parts)),
      schedule_([registry = parts_.registry](std::int64_t id) { return registry->getParam(id).describe(); },
                concat("graph ", parts_.graph_id, ", ", parts_.context->place)),
      in_place_(parts_.comm, parts_.stream, parts_.context, parts_.registry, parts_.members->ids()) {}

GatherKey ParameterGatherer::keyOf(const Wanted& wanted, const at::Tensor& shard) const {
  return {parts_.graph_id, wanted.id, wanted.dtype, DSParamRegistry::versionOf(shard), parts_.context->generation};
}

at::Tensor ParameterGatherer::overShards(const Wanted& wanted) {
  auto memory = in_place_.find(wanted.id, wanted.dtype);
  if (memory == nullptr) {
    return at::Tensor();
  }
  parts_.context->stats.gathers_in_place.fetch_add(1, std::memory_order_relaxed);
  const DSParam& param = parts_.registry->getParam(wanted.id);
  const at::Tensor& shard = param.getDSTensor();
  const std::int64_t bytes = param.getPaddedNumel() * static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
  return makeInPlace(std::move(memory), bytes, keyOf(wanted, shard), param.getShape(), shard.device(),
                     parts_.context->trace->wantsReleases() ? parts_.context->trace : nullptr);
}

// If the shards have not moved, the old tensor over them is reused, also in a later step, with the shards' new values.
GatheredParam* ParameterGatherer::takeUpAgain(const Wanted& wanted) {
  GatheredParam* const copy = parts_.registry->findGathered(wanted.id, wanted.dtype);
  if (copy == nullptr || !copy->let_go || copy->tensor.storage().use_count() != 1 ||
      in_place_.place(wanted.id, wanted.dtype) != copy->tensor.const_data_ptr() ||
      parts_.context->trace->wantsReleases()) {
    return nullptr;
  }
  const at::Tensor& shard = parts_.registry->getParam(wanted.id).getDSTensor();
  const GatherKey key = keyOf(wanted, shard);
  setGatherKey(copy->tensor, key);
  copy->version = key.version;
  copy->valid = true;
  copy->let_go = false;
  parts_.context->stats.gathers_in_place.fetch_add(1, std::memory_order_relaxed);
  return copy;
}

GatheredParam* ParameterGatherer::readInPlace(const Wanted& wanted, bool traced) {
  GatheredParam* copy = traced && in_place_.holding() ? takeUpAgain(wanted) : nullptr;
  if (copy == nullptr) {
    at::Tensor tensor = overShards(wanted);
    if (!tensor.defined()) {
      return nullptr;
    }
    copy = &parts_.registry->registerGatheredParam(wanted.id, std::move(tensor));
    copy->in_place = true;
  }
  read_in_place_.insert(wanted.id);
  parts_.context->stats.gathers_launched.fetch_add(1, std::memory_order_relaxed);
  return copy;
}

ParameterGatherer::Launched ParameterGatherer::prepare(const Wanted& wanted) {
  if (at::Tensor tensor = overShards(wanted); tensor.defined()) {
    return {GatherPart(), std::move(tensor)};
  }
  const DSParam& param = parts_.registry->getParam(wanted.id);
  const at::Tensor& shard = param.getDSTensor();
  const std::int64_t padded = param.getPaddedNumel();
  Buffer buffer = parts_.pool->take(padded * static_cast<std::int64_t>(c10::elementSize(wanted.dtype)),
                                    currentStream(shard.device()));
  if (!buffer.free_after.trivial()) {
    parts_.stream->wait(buffer.free_after, parts_.context->deadline());
  }
  void* const memory = buffer.memory.get();
  at::Tensor gathered = makeGathered(parts_.pool, std::move(buffer), keyOf(wanted, shard), param.getShape(),
                                     shard.device(), parts_.context->trace);
  if (parts_.comm->size() == 1 && padded == param.numel()) {
    return {{shard, gathered}, gathered};  // one rank: a copy in the caller's order, of any shape
  }
  return {{shard.dim() == 1 ? shard : shard.view({-1}), rawTensor(memory, {padded}, wanted.dtype, shard.device())},
          std::move(gathered)};
}

namespace {

// Casts the shard before the gather, so that fewer bytes are sent; directly into the output if the communicator gathers
// in place.
std::vector<GatherPart> castToTravel(const Communicator& comm, const std::vector<GatherPart>& parts) {
  std::vector<GatherPart> cast;
  std::vector<CopyPart> copies;
  cast.reserve(parts.size());
  for (const GatherPart& part : parts) {
    if (part.shard.scalar_type() == part.full.scalar_type()) {
      cast.push_back(part);
      continue;
    }
    const std::int64_t size = part.shard.numel();
    at::Tensor own =
        comm.gathersInPlace() ? part.full.narrow(0, comm.rank() * size, size) : at::empty({size}, part.full.options());
    copies.push_back({own, part.shard});
    cast.push_back({std::move(own), part.full});
  }
  copyParts(copies);
  return cast;
}

}  // namespace

Event ParameterGatherer::start(std::span<const Wanted> wanted, std::span<const Launched> launched) {
  auto& stats = parts_.context->stats;
  stats.gathers_launched.fetch_add(static_cast<std::int64_t>(wanted.size()), std::memory_order_relaxed);
  if (wanted.size() > 1) {
    stats.gathers_fused.fetch_add(static_cast<std::int64_t>(wanted.size()), std::memory_order_relaxed);
  }
  if (parts_.comm->size() == 1) {
    // One rank: a copy in the caller's own order.
    c10::SmallVector<CopyPart, 1> copies;
    for (const Launched& one : launched) {
      if (one.part.full.defined()) {
        copies.push_back({one.part.full, one.part.shard});
      }
    }
    copyParts({copies.data(), copies.size()});
    return Event();
  }
  std::vector<std::int64_t> ids;
  std::vector<GatherPart> parts;
  std::uint64_t tag = 1;  // of the parameters and dtypes: detects ranks that gather other parameters of the same size
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (launched[i].part.full.defined()) {
      ids.push_back(wanted[i].id);
      tag = tag * 0x100000001b3ULL + static_cast<std::uint64_t>(wanted[i].id) + 1;
      parts.push_back(launched[i].part);
    }
  }
  if (parts.empty()) {
    return Event();  // all of them are read in place
  }
  if (parts_.context->config.sync_before_allgather) {
    parts_.stream->synchronize(parts_.context->deadline());
  }
  std::string signature =
      parts_.context->config.debug ? concat("gather of parameters ", join_as_str(ids, ", ")) : std::string();
  auto what = [ids = std::move(ids), label = parts_.registry->getParam(wanted[0].id).label(), graph = parts_.graph_id,
               context = parts_.context] {
    return concat("gathering ", ids.size() == 1 ? *label : "parameters " + join_as_str(ids, ", ", 100), " (graph ",
                  graph, ") on ", context->place);
  };
  runCollective(
      *parts_.stream, std::move(what),
      [comm = parts_.comm, parts = std::move(parts), tag, signature = std::move(signature), context = parts_.context,
       on_callers_thread = parts_.stream->followsCaller(), first = wanted[0].id, dtype = wanted[0].dtype] {
        const std::int64_t began = StepTrace::now();
        const StepTrace::Moment started = context->trace->moment();
        agreeOnCollective(*comm, signature);
        comm->allGather(castToTravel(*comm, parts), tag);
        if (started) {
          std::int64_t bytes = 0;
          for (const GatherPart& part : parts) {
            bytes += static_cast<std::int64_t>(part.full.nbytes());
          }
          context->trace->add({TraceEntry::Kind::Gather, first, dtype, bytes}, started);
        }
        if (on_callers_thread) {
          context->countWait(began);
        }
      });
  Event ready = parts_.stream->record();
  for (const Launched& one : launched) {
    setFreeAfter(one.tensor, ready);
  }
  if (parts_.context->config.sync_after_allgather) {
    parts_.context->await(ready);
  }
  return ready;
}

void ParameterGatherer::launch(std::span<const Wanted> wanted) {
  std::vector<Wanted> rest;
  if (parts_.context->small_together && in_place_.holding() && parts_.comm->size() > 1) {
    rest.assign(wanted.begin(), wanted.end());
    gatherTogether(rest);
    wanted = rest;
  }
  if (!wanted.empty()) {
    launchNow(wanted);
  }
}

// Gathers the small parameters that are known in one collective, before the others. Small ones that are not known yet
// join them in the next step. All ranks gather the same, so they know the same.
void ParameterGatherer::gatherTogether(std::vector<Wanted>& wanted) {
  if (small_.firstGather()) {
    std::vector<Wanted> small;
    small_.stay([&](const Wanted& key) {
      const bool take = !hasCurrentCopy(key);
      if (take) {
        small.push_back(key);
        ++parts_.registry->holders(key.id);
      }
      return take;
    });
    if (!small.empty()) {
      launchNow(small);
    }
    wanted.erase(std::remove_if(wanted.begin(), wanted.end(), [&](const Wanted& one) { return hasCurrentCopy(one); }),
                 wanted.end());
  }
  for (const Wanted& one : wanted) {
    const std::int64_t bytes = bytesOf(one);
    if (small_.mayNote(bytes) && in_place_.find(one.id, one.dtype) == nullptr) {
      small_.note(one, bytes);
    }
  }
}

void ParameterGatherer::launchNow(std::span<const Wanted> wanted) {
  c10::SmallVector<Launched, 1> launched;
  launched.reserve(wanted.size());
  for (const Wanted& one : wanted) {
    // The existing copy is stale: its memory is freed first, so that the new copy may use it. If the shard's version
    // changed, a tensor that the program still holds raises an error when it is read. If not (the runtime only assumes
    // a change), the program's tensor stays readable.
    if (const GatheredParam* old = parts_.registry->findGathered(one.id, one.dtype); old != nullptr && !old->let_go) {
      const DSParam& param = parts_.registry->getParam(one.id);
      if (old->version == DSParamRegistry::versionOf(param.getDSTensor())) {
        forgetCopy(one);
      } else {
        releaseStorage(old->tensor,
                       concat(param.describe(),
                              " was gathered again after its shard had changed: read it from its module again, or "
                              "clone() it where the old values are wanted"),
                       false);
      }
    }
    launched.push_back(prepare(one));
  }
  const Event ready = start(wanted, {launched.data(), launched.size()});
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    GatheredParam& copy = parts_.registry->registerGatheredParam(wanted[i].id, std::move(launched[i].tensor));
    copy.ready = ready;
    copy.caller = ready.trivial() ? 0 : currentStream(copy.tensor.device());
    if (parts_.context->config.sync_after_allgather) {
      awaitCopy(copy);
    }
    if (!launched[i].part.full.defined()) {
      copy.in_place = true;
      read_in_place_.insert(wanted[i].id);
    }
  }
}

at::Tensor ParameterGatherer::gather(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool backward) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  const Wanted wanted{ds_id, dtype.value_or(param.getDtype())};
  if (hasCurrentCopy(wanted)) {
    parts_.context->stats.gathers_reused.fetch_add(1, std::memory_order_relaxed);
  } else {
    launch(wanted);
  }
  hold(ds_id);
  if (backward) {
    gathered_in_backward_.insert(ds_id);
  }
  return handOut(*parts_.registry->findGathered(ds_id, wanted.dtype));
}

void ParameterGatherer::prefetch(const std::vector<std::int64_t>& ds_ids,
                                 const std::optional<std::vector<at::ScalarType>>& dtypes) {
  check(!dtypes || dtypes->size() == ds_ids.size(), [&] {
    return concat("prefetch_params_fused: ", dtypes->size(), " dtypes for ", ds_ids.size(), " parameters (graph ",
                  parts_.graph_id, ", ", parts_.context->place, ")");
  });
  std::vector<CopyKey> keys;
  for (std::size_t i = 0; i < ds_ids.size(); ++i) {
    const DSParam& param = member(ds_ids[i]);
    keys.push_back({ds_ids[i], dtypes ? (*dtypes)[i] : param.getDtype()});
  }
  prefetchKeys(keys);
}

void ParameterGatherer::prefetchKeys(std::span<const CopyKey> keys) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Wanted> wanted;
  for (const CopyKey& key : keys) {
    member(key.id);  // throws unless it is this graph's
    if (std::find(wanted.begin(), wanted.end(), key) == wanted.end() && !hasCurrentCopy(key)) {
      wanted.push_back(key);
    }
  }
  if (!wanted.empty()) {
    launch(wanted);
  }
  for (const CopyKey& key : keys) {
    hold(key.id);
  }
}

}  // namespace dc
