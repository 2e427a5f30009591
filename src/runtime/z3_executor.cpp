#include "deepcompile/runtime/z3_executor.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/device_kernels.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {

Z3CustomOpExecutor::Z3CustomOpExecutor(std::int64_t graph_id, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                       std::shared_ptr<DSParamRegistry> param_registry,
                                       std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets,
                                       std::vector<std::int64_t> ds_ids, std::shared_ptr<Communicator> comm,
                                       std::shared_ptr<Stream> rs_stream, std::shared_ptr<Stream> copy_stream,
                                       GatherResources gather, bool pre_div_reduce, std::shared_ptr<Context> context)
    : CustomOpExecutor(std::move(process_group), std::move(param_registry), std::move(reduce_buckets),
                       std::move(ds_ids), std::move(comm), std::move(rs_stream), std::move(copy_stream), pre_div_reduce,
                       std::move(context)),
      graph_id_(graph_id),
      gather_(std::move(gather)),
      in_place_(gather_.comm, gather_.stream, context_, param_registry_, ds_ids_) {}

void Z3CustomOpExecutor::startForward() {
  uses_.clear();
  in_place_.hold(false);
  comm_->placeTensors(nullptr);  // a backward that failed may have left it on
}

void Z3CustomOpExecutor::startBackward(bool update) {
  CustomOpExecutor::startBackward(update);
  uses_.clear();
}

bool Z3CustomOpExecutor::hasCurrentCopy(const Wanted& wanted) {
  const GatheredParam* copy = param_registry_->findGathered(wanted.id, wanted.dtype);
  return copy != nullptr && param_registry_->isCurrent(wanted.id, *copy);
}

void Z3CustomOpExecutor::hold(std::int64_t ds_id) {
  if (held_.insert(ds_id).second) {
    ++param_registry_->holders(ds_id);
  }
}

namespace {

// A tensor as handOut makes it in debug mode: with a storage that has no memory.
bool isGuard(const at::Tensor& tensor) {
  return !gatherKeyOf(tensor) &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace

// Each caller gets a tensor of its own over the shared storage: autograd hangs its graph on it. In debug mode the
// tensor cannot be read until waitAllgather puts the storage under it.
at::Tensor Z3CustomOpExecutor::handOut(const GatheredParam& copy) const {
  at::Tensor out = aliasOf(copy.tensor);
  if (context_->config.debug && !copy.waited) {
    const auto key = *gatherKeyOf(copy.tensor);
    auto guard =
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), copy.tensor.storage().nbytes(),
                                              c10::DataPtr(nullptr, out.device()), nullptr, false);
    guardStorage(*guard, concat(param_registry_->getParam(key.id).describe(), " is read before wait_allgather (graph ",
                                graph_id_, ", ", place(), ")"));
    out.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(guard)));
  }
  return out;
}

Z3CustomOpExecutor::Launched Z3CustomOpExecutor::prepare(const Wanted& wanted) {
  const DSParam& param = param_registry_->getParam(wanted.id);
  const at::Tensor& shard = param.getDSTensor();
  const std::int64_t padded = param.getPaddedNumel();
  const GatherKey key{graph_id_, wanted.id, wanted.dtype, DSParamRegistry::versionOf(shard), context_->generation};
  if (auto memory = in_place_.find(wanted.id, wanted.dtype); memory != nullptr) {
    context_->stats.gathers_in_place.fetch_add(1, std::memory_order_relaxed);
    const std::int64_t bytes = padded * static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
    return {GatherPart(), makeInPlace(std::move(memory), bytes, key, param.getShape(), context_->recorder)};
  }
  Buffer buffer = gather_.pool->take(padded * static_cast<std::int64_t>(c10::elementSize(wanted.dtype)));
  if (!buffer.free_after.trivial()) {
    gather_.stream->wait(buffer.free_after, context_->deadline());
  }
  GatherPart part{shard.dim() == 1 ? shard : shard.view({-1}),
                  rawTensor(buffer.memory.get(), {padded}, wanted.dtype, shard.device())};
  return {std::move(part),
          makeGathered(gather_.pool, std::move(buffer), key, param.getShape(), shard.device(), context_->recorder)};
}

namespace {

// Shards are cast before they travel, so that fewer bytes do: straight to their place where the communicator gathers in
// place.
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

Event Z3CustomOpExecutor::start(const std::vector<Wanted>& wanted, const std::vector<Launched>& launched) {
  auto& stats = context_->stats;
  stats.gathers_launched.fetch_add(static_cast<std::int64_t>(wanted.size()), std::memory_order_relaxed);
  if (wanted.size() > 1) {
    stats.gathers_fused.fetch_add(static_cast<std::int64_t>(wanted.size()), std::memory_order_relaxed);
  }
  if (gather_.comm->size() == 1) {
    // Nobody to wait for: a copy in the caller's own order.
    std::vector<CopyPart> copies;
    copies.reserve(launched.size());
    for (const Launched& one : launched) {
      copies.push_back({one.part.full, one.part.shard});
    }
    copyParts(copies);
    return Event();
  }
  std::vector<std::int64_t> ids;
  std::vector<GatherPart> parts;
  std::uint64_t tag = 1;  // ranks that gather other parameters of the same size must not be given each other's
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
  if (context_->config.sync_before_allgather) {
    gather_.stream->synchronize(context_->deadline());
  }
  std::string signature =
      context_->config.debug ? concat("gather of parameters ", join_as_str(ids, ", ")) : std::string();
  auto what = [ids = std::move(ids), label = param_registry_->getParam(wanted[0].id).label(), graph = graph_id_,
               context = context_] {
    return concat("gathering ", ids.size() == 1 ? *label : "parameters " + join_as_str(ids, ", ", 100), " (graph ",
                  graph, ") on ", context->place);
  };
  runCollective(*gather_.stream, std::move(what),
                [comm = gather_.comm, parts = std::move(parts), tag, signature = std::move(signature),
                 context = context_, on_callers_thread = gather_.stream->followsCaller(), first = wanted[0].id] {
                  const std::int64_t began = Timeline::now();
                  const Timeline::Mark started = context->timeline->mark();
                  agreeOnCollective(*comm, signature);
                  comm->allGather(castToTravel(*comm, parts), tag);
                  if (started) {
                    std::int64_t bytes = 0;
                    for (const GatherPart& part : parts) {
                      bytes += static_cast<std::int64_t>(part.full.nbytes());
                    }
                    context->timeline->add(Timeline::Kind::Gather, first, bytes, started);
                  }
                  if (on_callers_thread) {
                    context->countWait(began);
                  }
                });
  Event ready = gather_.stream->record();
  for (const Launched& one : launched) {
    setFreeAfter(one.tensor, ready);
  }
  if (context_->config.sync_after_allgather) {
    context_->await(ready);
  }
  return ready;
}

void Z3CustomOpExecutor::launch(const std::vector<Wanted>& wanted) {
  std::vector<Launched> launched;
  launched.reserve(wanted.size());
  for (const Wanted& one : wanted) {
    // What is there is out of date: its memory first, so that the new copy may use it.
    if (const GatheredParam* old = param_registry_->findGathered(one.id, one.dtype); old != nullptr) {
      releaseStorage(
          old->tensor,
          concat(param_registry_->getParam(one.id).describe(), " was gathered again after its shard had changed"),
          false);
    }
    launched.push_back(prepare(one));
  }
  const Event ready = start(wanted, launched);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    GatheredParam& copy = param_registry_->registerGatheredParam(wanted[i].id, std::move(launched[i].tensor));
    copy.ready = ready;
    copy.waited = context_->config.sync_after_allgather;
    if (!launched[i].part.full.defined()) {
      read_in_place_.push_back(wanted[i]);
    }
  }
}

at::Tensor Z3CustomOpExecutor::allgatherParam(std::int64_t ds_id, std::optional<at::ScalarType> dtype) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  const Wanted wanted{ds_id, dtype.value_or(param.getDtype())};
  if (hasCurrentCopy(wanted)) {
    context_->stats.gathers_reused.fetch_add(1, std::memory_order_relaxed);
  } else {
    launch({wanted});
  }
  hold(ds_id);
  if (backwardOpen()) {
    gathered_in_backward_.insert(ds_id);
  }
  if (context_->config.debug) {
    ++gathered_[ds_id];
  }
  return handOut(*param_registry_->findGathered(ds_id, wanted.dtype));
}

void Z3CustomOpExecutor::prefetchParamsFused(const std::vector<std::int64_t>& ds_ids,
                                             const std::optional<std::vector<at::ScalarType>>& dtypes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(!dtypes || dtypes->size() == ds_ids.size(), [&] {
    return concat("prefetch_params_fused: ", dtypes->size(), " dtypes for ", ds_ids.size(), " parameters (graph ",
                  graph_id_, ", ", place(), ")");
  });
  std::vector<Wanted> wanted;
  for (std::size_t i = 0; i < ds_ids.size(); ++i) {
    const DSParam& param = member(ds_ids[i]);
    const Wanted w{ds_ids[i], dtypes ? (*dtypes)[i] : param.getDtype()};
    const bool listed = std::any_of(wanted.begin(), wanted.end(),
                                    [&](const Wanted& other) { return other.id == w.id && other.dtype == w.dtype; });
    if (!listed && !hasCurrentCopy(w)) {
      wanted.push_back(w);
    }
  }
  if (!wanted.empty()) {
    launch(wanted);
  }
  for (const std::int64_t id : ds_ids) {
    hold(id);
  }
}

void Z3CustomOpExecutor::waitAllgather(const at::Tensor& v, std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  auto& copies = param_registry_->gatheredCopies(ds_id);
  check(!copies.empty(), [&] {
    return concat("wait_allgather: ", param.describe(), " is not being gathered (graph ", graph_id_, ", ", place(),
                  ")");
  });
  // A tensor of another dtype than any copy is a dummy: the id decides.
  const bool by_dtype = v.numel() > 0 && param_registry_->findGathered(ds_id, v.scalar_type()) != nullptr;
  for (GatheredParam& copy : copies) {
    if (by_dtype && copy.tensor.scalar_type() != v.scalar_type()) {
      continue;
    }
    if (!copy.waited) {
      context_->await(copy.ready);
      copy.ready = Event();
      copy.waited = true;
    }
    if (context_->config.debug && isGuard(v) && v.sizes() == copy.tensor.sizes()) {
      v.unsafeGetTensorImpl()->set_storage_keep_dtype(copy.tensor.storage());
    }
  }
}

void Z3CustomOpExecutor::releaseParam(std::int64_t ds_id, std::int64_t n_users, ReleasedSize size) {
  const DSParam& param = member(ds_id);
  check(n_users >= 1, [&] {
    return concat("release_param: n_users is ", n_users, " for ", param.describe(), "; it must be at least 1 (graph ",
                  graph_id_, ", ", place(), ")");
  });
  if (context_->profiling) {
    return;
  }
  check(!context_->config.debug || held_.count(ds_id) > 0, [&] {
    return concat("release_param: ", param.describe(),
                  " is not gathered by this graph, or was released by all its users "
                  "already (graph ",
                  graph_id_, ", ", place(), ")");
  });
  if (n_users > 1) {
    Uses& uses = uses_[ds_id];
    if (uses.left == 0) {
      uses = {n_users, n_users};
    }
    check(uses.n_users == n_users, [&] {
      return concat("release_param: ", param.describe(), " is released with n_users=", n_users,
                    " after n_users=", uses.n_users, " in the same pass (graph ", graph_id_, ", ", place(), ")");
    });
    if (--uses.left > 0) {
      return;
    }
  } else if (!uses_.empty()) {
    const auto found = uses_.find(ds_id);
    check(found == uses_.end() || found->second.left == 0, [&] {
      return concat("release_param: ", param.describe(),
                    " is released with n_users=1 after n_users=", found->second.n_users, " in the same pass (graph ",
                    graph_id_, ", ", place(), ")");
    });
  }
  drop(ds_id, size);
}

void Z3CustomOpExecutor::drop(std::int64_t ds_id, ReleasedSize size) {
  if (held_.erase(ds_id) == 0) {
    return;
  }
  if (--param_registry_->holders(ds_id) == 0 && !param_registry_->getParam(ds_id).isPersistent()) {
    freeCopies(ds_id, size);
  }
}

void Z3CustomOpExecutor::freeCopies(std::int64_t ds_id, ReleasedSize size) {
  std::string& message = release_messages_[ds_id];
  if (message.empty()) {
    message = concat(param_registry_->getParam(ds_id).describe(),
                     " is read after its storage was freed by release_param (graph ", graph_id_, ", ", place(),
                     "); gather it again, or count this use in n_users");
  }
  for (const GatheredParam& copy : param_registry_->gatheredCopies(ds_id)) {
    if (context_->config.debug) {
      context_->await(copy.ready);  // poisoning what a gather is still writing would be undone
    }
    releaseStorage(copy.tensor, message, context_->config.debug, size);
    context_->stats.releases.fetch_add(1, std::memory_order_relaxed);
  }
  param_registry_->unregisterGatheredParam(ds_id);
}

void Z3CustomOpExecutor::awaitCopy(GatheredParam& copy) {
  if (!copy.waited) {
    context_->await(copy.ready);
    copy.ready = Event();
    copy.waited = true;
  }
}

std::int64_t Z3CustomOpExecutor::bytesOf(const Wanted& wanted) const {
  return param_registry_->getParam(wanted.id).numel() * static_cast<std::int64_t>(c10::elementSize(wanted.dtype));
}

void Z3CustomOpExecutor::record(RecordedOp::Kind kind, const Wanted& wanted, bool backward,
                                const Timeline::Mark& start) {
  if (start) {
    context_->recorder->add(kind, wanted.id, wanted.dtype, bytesOf(wanted), backward, start,
                            DSParamRegistry::versionOf(param_registry_->getParam(wanted.id).getDSTensor()));
  }
}

at::Tensor Z3CustomOpExecutor::gatherShard(std::int64_t ds_id, std::optional<at::ScalarType> dtype, bool keep,
                                           bool backward) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  const Wanted wanted{ds_id, dtype.value_or(param.getDtype())};
  const Timeline::Mark entered = context_->timeline->mark();
  Timeline::Mark mark = context_->recorder->mark();
  const bool planned = followRead({{ds_id, wanted.dtype}, ReplayAccess::Kind::Read, backward}).keep;
  keep = keep || param.isPersistent() || planned;
  const bool found = hasCurrentCopy(wanted);
  if (found) {
    context_->stats.gathers_reused.fetch_add(1, std::memory_order_relaxed);
  } else {
    launch({wanted});
  }
  record(found ? RecordedOp::Kind::Read : RecordedOp::Kind::Gather, wanted, backward, mark);
  mark = context_->recorder->mark();
  GatheredParam& copy = *param_registry_->findGathered(ds_id, wanted.dtype);
  awaitCopy(copy);
  record(RecordedOp::Kind::Wait, wanted, backward, mark);
  at::Tensor tensor = aliasOf(copy.tensor);
  if (!keep) {
    letGo(wanted);
  }
  context_->timeline->add(Timeline::Kind::Take, ds_id, 0, entered);
  return tensor;
}

void Z3CustomOpExecutor::prefetchShards(const std::vector<std::int64_t>& ds_ids,
                                        const std::vector<at::ScalarType>& dtypes, bool backward) {
  if (follower_ != nullptr && !ds_ids.empty() && !follower_->isLeaf(ds_ids[0])) {
    return;  // planned for one compiled graph; what is followed is planned for the whole step
  }
  if (!ds_ids.empty() && dtypes.size() == ds_ids.size()) {
    const Timeline::Mark mark = context_->recorder->mark();
    followRead({{ds_ids[0], dtypes[0]}, ReplayAccess::Kind::Group, backward});
    prefetchParamsFused(ds_ids, dtypes);
    for (std::size_t i = 0; i < ds_ids.size(); ++i) {
      record(RecordedOp::Kind::Prefetch, {ds_ids[i], dtypes[i]}, backward, mark);
    }
    return;
  }
  prefetchParamsFused(ds_ids, dtypes);
}

void Z3CustomOpExecutor::follow(std::shared_ptr<ReplayFollower> follower) {
  if (follower_ != nullptr) {
    dropKeys(follower_->abandon());
  }
  follower_ = std::move(follower);
}

void Z3CustomOpExecutor::endCycle() {
  if (follower_ != nullptr && follower_->inCycle()) {
    dropKeys(follower_->end());
  }
}

// Their memory lives on in the tensors that were handed out.
void Z3CustomOpExecutor::dropKeys(const std::vector<ReplayKey>& keys) {
  for (const ReplayKey& key : keys) {
    letGo({key.id, key.dtype});
  }
}

ReplayFollower::Step Z3CustomOpExecutor::followRead(const ReplayAccess& access) {
  if (follower_ == nullptr) [[likely]] {
    return {};
  }
  if (!follower_->inCycle()) {
    std::unordered_set<std::int64_t> current;
    for (const std::int64_t id : follower_->persistent()) {
      for (const GatheredParam& copy : param_registry_->gatheredCopies(id)) {
        if (param_registry_->isCurrent(id, copy)) {
          current.insert(id);
        }
      }
    }
    follower_->begin(std::move(current));
  }
  ReplayFollower::Step step = follower_->next(access);
  dropKeys(step.drop);
  for (const auto& launch : step.launches) {
    std::vector<std::int64_t> ids;
    std::vector<at::ScalarType> dtypes;
    for (const ReplayKey& key : launch) {
      ids.push_back(key.id);
      dtypes.push_back(key.dtype);
    }
    prefetchParamsFused(ids, dtypes);
  }
  return step;
}

void Z3CustomOpExecutor::letGo(const Wanted& wanted) {
  int& holders = param_registry_->holders(wanted.id);
  if (held_.erase(wanted.id) > 0) {
    --holders;
  }
  if (holders > 0) {
    return;  // another graph means to read it
  }
  forgetCopy(wanted);
}

void Z3CustomOpExecutor::forgetCopy(const Wanted& wanted) {
  auto& copies = param_registry_->gatheredCopies(wanted.id);
  copies.erase(std::remove_if(copies.begin(), copies.end(),
                              [&](const GatheredParam& copy) { return copy.tensor.scalar_type() == wanted.dtype; }),
               copies.end());
}

at::Tensor Z3CustomOpExecutor::gatherAgain(const GatherKey& key) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check(key.generation == context_->generation, [&] {
    return concat("a backward needs parameter id ", key.id, " of graph ", key.graph_id,
                  " from a runtime that was cleaned up since its forward (", place(), ")");
  });
  const DSParam& param = member(key.id);
  const std::uint32_t version = DSParamRegistry::versionOf(param.getDSTensor());
  check(version == key.version, [&] {
    return concat(param.describe(),
                  " was changed between the forward and the backward that needs it (its shard's version went "
                  "from ",
                  key.version, " to ", version, "); run the backward before the update (", place(), ")");
  });
  const Wanted wanted{key.id, key.dtype};
  const Timeline::Mark entered = context_->timeline->mark();
  Timeline::Mark mark = context_->recorder->mark();
  const ReplayFollower::Step step = followRead({{key.id, key.dtype}, ReplayAccess::Kind::Read, /*backward=*/true});
  at::Tensor tensor;
  const bool found = hasCurrentCopy(wanted);
  if (!found && step.keep) {
    launch({wanted});
  }
  if (found || step.keep) {
    record(found ? RecordedOp::Kind::Read : RecordedOp::Kind::Gather, wanted, true, mark);
    mark = context_->recorder->mark();
    GatheredParam& copy = *param_registry_->findGathered(key.id, key.dtype);
    awaitCopy(copy);
    tensor = aliasOf(copy.tensor);
    if (step.followed && !step.keep && !param.isPersistent()) {
      letGo(wanted);
    }
  } else {
    context_->stats.gathers_in_backward.fetch_add(1, std::memory_order_relaxed);
    const Launched launched = prepare(wanted);
    const Event ready = start({wanted}, {launched});
    record(RecordedOp::Kind::Gather, wanted, true, mark);
    mark = context_->recorder->mark();
    context_->await(ready);
    tensor = launched.tensor;
  }
  record(RecordedOp::Kind::Wait, wanted, true, mark);
  context_->timeline->add(Timeline::Kind::Take, key.id, 0, entered);
  return tensor;
}

at::Tensor Z3CustomOpExecutor::reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) {
  if (context_->config.debug && !context_->profiling) {
    int& pending = gathered_[ds_id];
    check(pending > 0, [&] {
      return concat("reduce_grad: more reductions than gathers of ", member(ds_id).describe(), " (graph ", graph_id_,
                    ", ", place(), ")");
    });
    --pending;
  }
  const Timeline::Mark entered = context_->timeline->mark();
  const Timeline::Mark mark = context_->recorder->mark();
  const at::ScalarType dtype = grad_tensor.scalar_type();
  at::Tensor result = CustomOpExecutor::reduceGrad(std::move(grad_tensor), ds_id);
  context_->recorder->add(RecordedOp::Kind::Reduce, ds_id, dtype, bytesOf({ds_id, dtype}), true, mark);
  context_->timeline->add(Timeline::Kind::Grad, ds_id, 0, entered);
  if (!context_->profiling) {
    reduced_.insert(ds_id);
  }
  return result;
}

void Z3CustomOpExecutor::endBackward() {
  if (!backwardOpen()) {
    return;
  }
  const Timeline::Mark mark = context_->recorder->mark();
  endCycle();
  CustomOpExecutor::endBackward();
  // What is still being gathered reads the shards that the optimizer is about to change, here or on other ranks.
  if (gather_.comm->readsPeers() && param_updated_ && comm_->size() > 1) {
    runCollective(
        *gather_.stream, [place = place()] { return concat("ending the reads of shards on ", place); },
        [comm = gather_.comm] { comm->endReads(); });
  }
  if (param_updated_) {
    endReads();
  }
  if (unsettled()) {
    // The shards stay as they are, and so nobody has to know when the gathers have read them.
    for (const std::int64_t id : ds_ids_) {
      settleBeforeReads(param_registry_->getParam(id).getDSTensor(), context_->unsettled);
    }
  } else {
    context_->await(gather_.stream->record());
  }
  for (const std::int64_t id : reloading_) {
    param_registry_->getParam(id).getDSTensor();
  }
  reloading_.clear();
  if (param_updated_) {
    gathered_.clear();
  }
  // A forward that was run again in the backward (checkpointing) may have stopped before its releases.
  for (const std::int64_t id : std::exchange(gathered_in_backward_, {})) {
    drop(id, ReleasedSize::Zero);
  }
  if (!context_->profiling && communicates() && !unsettled()) {
    publishGradients();
  }
  reduced_.clear();
  context_->recorder->add(RecordedOp::Kind::End, -1, at::kFloat, 0, true, mark);
}

void Z3CustomOpExecutor::endReads() {
  for (const Wanted& wanted : std::exchange(read_in_place_, {})) {
    forgetCopy(wanted);
  }
  in_place_.end();
}

void Z3CustomOpExecutor::reductionsSettled() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  publishGradients();
}

// The user's view: shard.grad is the averaged gradient, and stays None where no rank had one.
void Z3CustomOpExecutor::publishGradients() {
  for (const std::int64_t id : ds_ids_) {
    const DSParam& param = param_registry_->getParam(id);
    if (!param.trainable() || withoutGradient().count(id) > 0 || (comm_->size() == 1 && reduced_.count(id) == 0)) {
      continue;
    }
    const at::Tensor& shard = param.getDSTensor();
    if (!shard.requires_grad() || !shard.is_leaf()) {
      continue;
    }
    at::Tensor gradient = param.getGradBuffer().view(shard.sizes());
    if (gradient.scalar_type() != shard.scalar_type()) {
      gradient = gradient.to(shard.scalar_type());
    }
    at::Tensor& published = shard.mutable_grad();
    if (!published.defined() || !published.is_alias_of(gradient)) {
      published = gradient;
      param_registry_->getParam(id).notePublished(gradient);
    }
  }
}

void Z3CustomOpExecutor::allowReduction(std::int64_t ds_id) {
  if (context_->config.debug) {
    ++gathered_[ds_id];
  }
}

void Z3CustomOpExecutor::offloadParameter(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (param.isOffloaded()) {
    return;
  }
  endReads();
  context_->await(gather_.stream->record());  // no gather may be reading it
  context_->stats.bytes_offloaded.fetch_add(static_cast<std::int64_t>(param.getDSTensor().nbytes()),
                                            std::memory_order_relaxed);
  param_registry_->offload(ds_id);
}

void Z3CustomOpExecutor::reloadParameter(std::int64_t ds_id) {
  const DSParam& param = member(ds_id);
  if (!param.isOffloaded()) {
    return;
  }
  param_registry_->reload(ds_id);
  context_->stats.bytes_reloaded.fetch_add(
      static_cast<std::int64_t>(param.getPaddedNumel() / comm_->size() * c10::elementSize(param.getDtype())),
      std::memory_order_relaxed);
  reloading_.insert(ds_id);
}

}  // namespace dc
