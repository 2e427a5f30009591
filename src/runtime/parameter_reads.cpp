// Reads of parameters by the program, in modules and for what autograd saved: recorded, and following a plan where
// there is one.
#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/parameter_gatherer.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {

std::int64_t ParameterGatherer::bytesOf(const Wanted& wanted) const {
  return parts_.registry->getParam(wanted.id).numel() * static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
}

void ParameterGatherer::traceRead(const Wanted& wanted, bool backward, bool gathers, const StepTrace::Moment& entered,
                                  const StepTrace::Moment& launched) {
  if (entered) {
    parts_.context->trace->addRead(
        {TraceEntry::Kind::Read, wanted.id, wanted.dtype, bytesOf(wanted), backward, gathers}, entered, launched,
        DSParamRegistry::versionOf(parts_.registry->getParam(wanted.id).getDSTensor()));
  }
}

at::Tensor ParameterGatherer::read(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool keep, bool backward,
                                   bool traced) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  const Wanted wanted{ds_id, dtype.value_or(param.getDtype())};
  const StepTrace::Moment entered = parts_.context->trace->moment();
  const bool planned = followRead({{ds_id, wanted.dtype}, ProgramEvent::Kind::Read, backward}, traced).keep;
  keep = keep || param.isPersistent() || planned;
  const bool found = hasCurrentCopy(wanted);
  if (found) {
    parts_.context->stats.gathers_reused.fetch_add(1, std::memory_order_relaxed);
  } else if (readInPlace(wanted, traced) == nullptr) {
    launch(wanted);
  }
  const StepTrace::Moment launched = parts_.context->trace->moment();
  GatheredParam& copy = *parts_.registry->findGathered(ds_id, wanted.dtype);
  awaitCopy(copy);
  traceRead(wanted, backward, !found, entered, launched);
  at::Tensor tensor = aliasOf(copy.tensor);
  if (!keep) {
    letGo(wanted, traced);
  }
  return tensor;
}

void ParameterGatherer::readGroup(const std::vector<std::int64_t>& ds_ids, const std::vector<at::ScalarType>& dtypes,
                                  bool backward) {
  if (!ds_ids.empty() && dtypes.size() == ds_ids.size()) {
    const StepTrace::Moment entered = parts_.context->trace->moment();
    followRead({{ds_ids[0], dtypes[0]}, ProgramEvent::Kind::Group, backward});
    prefetch(ds_ids, dtypes);
    for (std::size_t i = 0; entered && i < ds_ids.size(); ++i) {
      const Wanted wanted{ds_ids[i], dtypes[i]};
      parts_.context->trace->addRead({TraceEntry::Kind::Group, wanted.id, wanted.dtype, bytesOf(wanted), backward},
                                     entered, {},
                                     DSParamRegistry::versionOf(parts_.registry->getParam(wanted.id).getDSTensor()));
    }
    return;
  }
  prefetch(ds_ids, dtypes);
}

void ParameterGatherer::serve(const ScheduledReads::Step& step) {
  dropCopies(step.drop);
  for (const auto& together : step.gathers) {
    prefetchKeys(together);
  }
}

ScheduledReads::Step ParameterGatherer::followRead(const ProgramEvent& event, bool traced) {
  if (schedule_.idle(traced)) [[likely]] {
    return {};
  }
  ScheduledReads::Step step = schedule_.at(event, [this](std::int64_t id) {
    const auto& copies = parts_.registry->gatheredCopies(id);
    return std::any_of(copies.begin(), copies.end(),
                       [&](const GatheredParam& copy) { return !copy.let_go && parts_.registry->isCurrent(id, copy); });
  });
  serve(step);
  return step;
}

at::Tensor ParameterGatherer::readAgain(const GatherKey& key) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(key.generation == parts_.context->generation, [&] {
    return concat("a backward needs parameter id ", key.id, " of graph ", key.graph_id,
                  " from a runtime that was cleaned up since its forward (", parts_.context->place, ")");
  });
  const DSParam& param = member(key.id);
  const std::uint32_t version = DSParamRegistry::versionOf(param.getDSTensor());
  check(version == key.version, [&] {
    return concat(param.describe(),
                  " was changed between the forward and the backward that needs it (its shard's version went "
                  "from ",
                  key.version, " to ", version, "); run the backward before the update (", parts_.context->place, ")");
  });
  const Wanted wanted{key.id, key.dtype};
  const StepTrace::Moment entered = parts_.context->trace->moment();
  const ScheduledReads::Step step = followRead({{key.id, key.dtype}, ProgramEvent::Kind::Read, /*backward=*/true});
  at::Tensor tensor;
  StepTrace::Moment launched;
  const bool found = hasCurrentCopy(wanted);
  if (!found && step.keep) {
    launch(wanted);
  }
  if (found || step.keep) {
    launched = parts_.context->trace->moment();
    GatheredParam& copy = *parts_.registry->findGathered(key.id, key.dtype);
    awaitCopy(copy);
    tensor = aliasOf(copy.tensor);
    if (step.followed && !step.keep && !param.isPersistent()) {
      letGo(wanted);
    }
  } else {
    parts_.context->stats.gathers_in_backward.fetch_add(1, std::memory_order_relaxed);
    const Launched gather = prepare(wanted);
    const Event ready = start({&wanted, 1}, {&gather, 1});
    launched = parts_.context->trace->moment();
    parts_.context->await(ready);
    setFreeAfter(gather.tensor, Event());  // the caller is ordered after it, on the stream that the memory is of
    tensor = gather.tensor;
  }
  traceRead(wanted, true, !found, entered, launched);
  return tensor;
}

}  // namespace dc
