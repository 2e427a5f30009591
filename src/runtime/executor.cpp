#include "deepcompile/runtime/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ScopeExit.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/device_kernels.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {

CustomOpExecutor::CustomOpExecutor(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                   std::shared_ptr<DSParamRegistry> param_registry,
                                   std::shared_ptr<DoubleBufferedReduceBucket> reduce_buckets,
                                   std::vector<std::int64_t> ds_ids, std::shared_ptr<Communicator> comm,
                                   std::shared_ptr<Stream> rs_stream, std::shared_ptr<Stream> copy_stream,
                                   bool pre_div_reduce, std::shared_ptr<Context> context)
    : process_group_(std::move(process_group)),
      param_registry_(std::move(param_registry)),
      reduce_buckets_(std::move(reduce_buckets)),
      ds_ids_(std::move(ds_ids)),
      comm_(std::move(comm)),
      rs_stream_(std::move(rs_stream)),
      copy_stream_(std::move(copy_stream)),
      has_acc_grad_(param_registry_->accumulated()),
      pre_div_reduce_(pre_div_reduce),
      context_(context != nullptr ? std::move(context)
                                  : std::make_shared<Context>(Config(), comm_->rank(), comm_->size())),
      members_(ds_ids_.begin(), ds_ids_.end()) {
  check(members_.size() == ds_ids_.size(),
        [&] { return concat("a graph lists a parameter twice: ids ", join_as_str(ds_ids_, ", ", 200)); });
}

CustomOpExecutor::~CustomOpExecutor() { reduce_buckets_->forget(this); }

const DSParam& CustomOpExecutor::member(std::int64_t ds_id) const {
  if (!hasParam(ds_id)) [[unlikely]] {
    fail(param_registry_->hasParam(ds_id) ? param_registry_->getParam(ds_id).describe()
                                          : concat("parameter id ", ds_id, " (not registered)"),
         " does not belong to this graph, whose ids are [", join_as_str(ds_ids_, ", ", 200), "] (", place(), ")");
  }
  return param_registry_->getParam(ds_id);
}

void CustomOpExecutor::startBackward(bool update) { openBackward(update); }

// Whatever a backward left behind that never ended is dropped; what was accumulated before it stays.
void CustomOpExecutor::abandonBackward() {
  if (!backward_open_) {
    return;
  }
  reduce_tasks_.clear();
  copied_.forget();
  reduced_from_.forget();
  reduce_buckets_->forget(this);
  comm_->placeTensors(nullptr);
  for (const std::int64_t id : newly_accumulated_) {
    has_acc_grad_.erase(id);
  }
  backward_open_ = false;
}

void CustomOpExecutor::placeGradients() {
  if (comm_->size() == 1 || !comm_->takesSeparateTensors() || !sendsTasksOneByOne() || dividesBucket()) {
    return;
  }
  if (gradient_bytes_ == nullptr) {
    std::unordered_set<std::size_t> sizes;
    for (const std::int64_t id : order_->expected()) {
      const DSParam& param = param_registry_->getParam(id);
      sizes.insert(static_cast<std::size_t>(param.numel()) * c10::elementSize(param.getReduceDtype()));
    }
    sizes.erase(0);
    gradient_bytes_ = std::make_shared<const std::unordered_set<std::size_t>>(std::move(sizes));
  }
  comm_->placeTensors(gradient_bytes_);
}

void CustomOpExecutor::noteAutogradTask(std::int64_t task) {
  if (backward_open_ && implicit_ && task != autograd_task_) {
    abandonBackward();  // the backward that opened it ended in an error
  }
  autograd_task_ = task;
}

void CustomOpExecutor::openBackward(bool update) {
  settle();
  abandonBackward();
  // Known from the end of the last backward, not from its start: several graphs start one backward.
  if (param_registry_->updateFollowed()) {
    has_acc_grad_.clear();
  }
  newly_accumulated_.clear();
  param_registry_->setUpdateFollowed(false);
  param_updated_ = update;
  implicit_ = false;
  if (!order_) {
    std::vector<std::int64_t> reversed;
    for (auto id = ds_ids_.rbegin(); id != ds_ids_.rend(); ++id) {
      if (param_registry_->getParam(*id).trainable()) {
        reversed.push_back(*id);
      }
    }
    order_.emplace(std::move(reversed));
    placeFlushes();
  }
  placeGradients();
  order_->begin();
  entered_ = 0;
  present_.clear();
  presence_.clear();
  without_gradient_.clear();
  backward_open_ = true;
}

void CustomOpExecutor::checkGradient(const DSParam& param, const at::Tensor& grad) const {
  check(param.trainable(), [&] {
    return concat("reduce_grad: ", param.describe(),
                  " is frozen (it was registered without a gradient buffer); after "
                  "requires_grad_(True) call deepcompile.update_trainable(model) on every rank (",
                  place(), ")");
  });
  check(grad.numel() == param.numel(), [&] {
    return concat("reduce_grad: ", param.describe(), " got a gradient of shape [", join_as_str(grad.sizes(), ", "),
                  "], which has ", grad.numel(), " elements instead of ", param.numel(), " (", place(), ")");
  });
  check(at::isFloatingType(grad.scalar_type()) || at::isComplexType(grad.scalar_type()), [&] {
    return concat("reduce_grad: ", param.describe(), " got a gradient of dtype ", grad.scalar_type(),
                  "; only floating-point and complex gradients can be averaged (", place(), ")");
  });
  check(grad.device() == param.getGradBuffer().device(), [&] {
    return concat("reduce_grad: ", param.describe(), " lives on ", param.getGradBuffer().device(),
                  " but its gradient on ", grad.device(), " (", place(), ")");
  });
}

at::Tensor CustomOpExecutor::reduceGivenGrad(at::Tensor grad_tensor, std::int64_t ds_id, bool for_good) {
  given_ = true;
  given_for_good_ = for_good;
  const auto end = c10::make_scope_exit([this] { given_ = given_for_good_ = false; });
  return reduceGrad(std::move(grad_tensor), ds_id);
}

// Nobody reads it, so one serves all gradients of a dtype, which are on one device.
const at::Tensor& CustomOpExecutor::emptyLike(const at::Tensor& grad) {
  at::Tensor& empty = empty_[grad.scalar_type()];
  if (!empty.defined()) {
    empty = tensorOver(c10::DataPtr(nullptr, grad.device()), 0, {0}, grad.scalar_type(), grad.device());
  }
  return empty;
}

at::Tensor CustomOpExecutor::reduceGrad(at::Tensor grad_tensor, std::int64_t ds_id) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& param = member(ds_id);
  checkGradient(param, grad_tensor);
  at::Tensor result = emptyLike(grad_tensor);
  if (context_->profiling) {
    return result;
  }
  if (grad_tensor.layout() != at::kStrided) {
    grad_tensor = grad_tensor.to_dense();
  }
  if (!backward_open_) {
    // No start_backward: the plain loop, where a step follows unless the user keeps the gradients (noteAccumulation).
    openBackward(true);
    implicit_ = true;
  }
  if (!communicates()) {
    accumulateLocally(param, grad_tensor);
    return result;
  }
  if (comm_->size() == 1) {
    // Nothing to agree on with other ranks, so nothing to order.
    enter({ds_id, std::move(grad_tensor), given_, given_for_good_});
    return result;
  }
  std::vector<ArrivedGradient> ready;
  const bool goes_now = order_->goesNow(ds_id);
  if (!goes_now) {
    if (!given_) {
      grad_tensor = grad_tensor.clone();  // the caller may use its memory for something else once this call returns
    }
    context_->stats.gradients_parked.fetch_add(1, std::memory_order_relaxed);
  }
  order_->arrive(ds_id, std::move(grad_tensor), ready);
  if (goes_now) {
    ready[0].given = given_;
  }
  enterInOrder(ready);
  return result;
}

void CustomOpExecutor::accumulateLocally(const DSParam& param, const at::Tensor&) {
  fail("this executor has no place for the gradient of ", param.describe(), " between updates");
}

bool CustomOpExecutor::noteAccumulation(const DSParam& param) {
  const bool accumulated = has_acc_grad_.contains(param.getId());
  bool add = accumulated;
  if (implicit_ && !accumulated && param.isPartitioned()) {
    // The plain loop: as in PyTorch, a gradient that the user has not cleared is added to.
    // Not grad(): a read would settle other graphs first, which takes the lock that is held here.
    const at::Tensor& kept = param.getDSTensor().mutable_grad();
    if (kept.defined()) {
      if (!kept.is_alias_of(param.getGradBuffer()) && !param.isPublished(kept)) {
        param.gradMemory().copy_(kept.reshape({-1}));
      }
      add = true;
    }
  }
  if (!accumulated) {
    newly_accumulated_.push_back(param.getId());
    has_acc_grad_.insert(param.getId());
  }
  return add;
}

// The gradient enters the bucket of its reduction dtype, which is flushed first when there is no room behind its
// contents.
void CustomOpExecutor::enter(const ArrivedGradient& arrived) {
  const DSParam& param = param_registry_->getParam(arrived.id);
  const at::Tensor grad = withLocal(param, arrived.grad);
  if (grad.defined()) {
    present_.insert(arrived.id);
    context_->stats.gradients_reduced.fetch_add(1, std::memory_order_relaxed);
  } else {
    context_->stats.gradients_missing.fetch_add(1, std::memory_order_relaxed);
  }
  if (comm_->size() == 1) {
    // This rank owns everything: straight into the gradient buffer.
    const bool add = noteAccumulation(param);
    if (!grad.defined()) {
      without_gradient_.insert(arrived.id);
      if (!add) {
        param.gradMemory().zero_();
      }
    } else if (add) {
      param.gradMemory().add_(grad.reshape({-1}));
    } else if (arrived.for_good && param.adoptGradMemory(grad)) {
      context_->stats.gradients_in_place.fetch_add(1, std::memory_order_relaxed);
    } else {
      const CopyPart part{param.gradMemory(), grad};
      copyParts({&part, 1});
    }
    return;
  }
  const at::ScalarType dtype = param.getReduceDtype();
  const std::int64_t size = param.getPaddedNumel();
  CustomOpExecutor*& user = reduce_buckets_->user(dtype);
  if (user != nullptr && user != this) {
    user->flushReduceBucket(dtype);
  }
  auto bucket = reduce_buckets_->getBuffer(dtype);
  if (bucket->shouldFlush(size)) {
    flushReduceBucket(dtype);
    bucket = reduce_buckets_->getBuffer(dtype);
  }
  if (bucket->empty()) {
    // Here and not when the one before it was flushed: at the end of a backward nobody needs it.
    copy_stream_->wait(reduce_buckets_->getEvent(dtype), context_->deadline());
    bucket->reserve(planned_size_);
  }
  user = this;
  if (arrived.given && goesAsItIs(param, grad)) {
    bucket->adopt(size);
    reduce_tasks_[dtype].emplace_back(arrived.id, grad, grad.view({-1}));
    context_->stats.gradients_in_place.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  bucket->reserve(size);
  const at::Tensor slice = bucket->allocate(size);
  const auto held = std::make_shared<std::vector<at::Tensor>>(1, grad);
  runDetached(
      *copy_stream_, [label = param.label()] { return "copying the gradient of " + *label; },
      [slice, held, numel = param.numel()] {
        const at::Tensor& source = held->front();
        if (!source.defined()) {
          slice.zero_();
          return;
        }
        const bool padded = slice.numel() > numel;
        const CopyPart part{padded ? slice.narrow(0, 0, numel) : slice, source};
        copyParts({&part, 1});
        if (padded) {
          slice.narrow(0, numel, slice.numel() - numel).zero_();
        }
      });
  reduce_tasks_[dtype].emplace_back(arrived.id, grad, slice).dropGradient();
  if (!copy_stream_->followsCaller()) {
    copied_.add(copy_stream_->record(), held);
    copied_.letGo(*context_, 1);  // the next gradient was computed meanwhile: nobody waits
  }
}

bool CustomOpExecutor::goesAsItIs(const DSParam& param, const at::Tensor& grad) const {
  return comm_->takesSeparateTensors() && sendsTasksOneByOne() && !dividesBucket() && grad.defined() &&
         grad.scalar_type() == param.getReduceDtype() && param.numel() == param.getPaddedNumel() &&
         grad.is_contiguous() && !grad.is_conj() && !grad.is_neg() &&
         // Of gradients that are made where they travel from, one that is not would hold up the rest of its bucket.
         (gradient_bytes_ == nullptr || comm_->travelsAsItLies(grad));
}

void CustomOpExecutor::blockCopyEvents(at::ScalarType) {
  rs_stream_->wait(copy_stream_->record(), context_->deadline());
}

void CustomOpExecutor::applyPreDivision(at::ScalarType scalar_type) {
  if (!dividesBucket() || comm_->size() == 1) {
    return;
  }
  const auto bucket = reduce_buckets_->getBuffer(scalar_type);
  runDetached(
      *rs_stream_, [] { return "dividing a reduce bucket"; },
      [filled = bucket->getBuffer().narrow(0, 0, bucket->getOffset()), ranks = comm_->size()] { filled.div_(ranks); });
}

void CustomOpExecutor::performCleanup(at::ScalarType scalar_type) {
  reduce_tasks_[scalar_type].clear();
  reduce_buckets_->swap(scalar_type, *rs_stream_);
  context_->stats.buckets_flushed.fetch_add(1, std::memory_order_relaxed);
}

namespace {

// A gradient in a bucket on its way to its owners.
struct Reduction {
  std::vector<Slice> owners;
  at::Tensor buffer;  // of this rank's slice
  bool add;           // to what the buffer holds
};

// On the reduce stream: what is allocated here is used here alone. `presence` has a row per rank; `counts` becomes the
// sum of the rows. Returns the bytes that were reduced.
std::int64_t reduceParts(Communicator& comm, const std::vector<at::Tensor>& sent,
                         const std::vector<Reduction>& reductions, const at::Tensor& presence, at::Tensor& counts,
                         ReduceOp op, std::uint64_t tag) {
  const auto options = sent[0].options();
  std::vector<ReducePart> parts;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < reductions.size(); ++i) {
    const Reduction& one = reductions[i];
    const bool in_place = !one.add && one.buffer.scalar_type() == sent[i].scalar_type();
    parts.push_back(
        {sent[i], one.owners,
         in_place ? one.buffer : at::empty({one.owners[static_cast<std::size_t>(comm.rank())].size()}, options)});
    bytes += static_cast<std::int64_t>(sent[i].nbytes());
  }
  const std::int64_t columns = presence.size(1);
  std::vector<Slice> rows;
  for (int r = 0; r < comm.size(); ++r) {
    rows.push_back({r * columns, (r + 1) * columns});
  }
  counts = at::empty({columns}, options);
  const at::Tensor travelling = comm.empty({presence.numel()}, options);
  travelling.copy_(presence.view({-1}), /*non_blocking=*/true);
  parts.push_back({travelling, std::move(rows), counts});
  comm.reduceScatter(parts, op, tag);
  for (std::size_t i = 0; i < reductions.size(); ++i) {
    if (reductions[i].add) {
      reductions[i].buffer.add_(parts[i].receive);
    } else if (!parts[i].receive.is_same(reductions[i].buffer)) {
      reductions[i].buffer.copy_(parts[i].receive);
    }
  }
  return bytes;
}

// Where the host does not read what the others said (anySurplus), a gradient that lacks what a peer had beyond the
// expected ones must not be used: the last of `counts` is zero unless there was such a peer, and infinite then.
void spoilIncomplete(const std::vector<Reduction>& reductions, const at::Tensor& counts) {
  for (const Reduction& one : reductions) {
    if (one.buffer.numel() > 0) {
      one.buffer.narrow(0, 0, 1).add_(counts.narrow(0, counts.numel() - 1, 1));
      return;
    }
  }
}

}  // namespace

// Beside the gradients travels one more row per rank: who had a gradient at all. See Note [Presence] in
// docs/runtime.md.
void CustomOpExecutor::reduceToOwners(at::ScalarType scalar_type) {
  auto& tasks = reduce_tasks_[scalar_type];
  if (tasks.empty()) {
    return;
  }
  if (context_->config.sync_before_reduce) {
    copy_stream_->synchronize(context_->deadline());
    rs_stream_->synchronize(context_->deadline());
  }
  blockCopyEvents(scalar_type);
  applyPreDivision(scalar_type);

  const auto sent = std::make_shared<std::vector<at::Tensor>>();
  std::vector<Reduction> reductions;
  std::vector<std::int64_t> ids;
  const auto count = static_cast<std::int64_t>(tasks.size());
  // One more column: whether this rank has gradients beyond the expected ones (reduceSurplus).
  const at::Tensor presence = at::ones({comm_->size(), count + 1}, at::TensorOptions().dtype(at::kFloat));
  const bool surplus = order_ && order_->hasSurplus();
  presence.select(1, count).fill_(surplus ? std::numeric_limits<float>::infinity() : 0);
  bool lacking = false;
  for (const ReduceTask& task : tasks) {
    const DSParam& param = param_registry_->getParam(task.getDSId());
    check(!task.changed(), [&] {
      return concat(
          "the gradient of ", param.describe(),
          " was changed in place after the backward gave it and before it was reduced (", place(),
          "); gradients are reduced from where they lie, and those of shards are ready when the backward ends");
    });
    if (!task.hasGradient()) {
      lacking = true;
      presence.select(1, static_cast<std::int64_t>(ids.size())).zero_();
    }
    sent->push_back(task.getSendBuf());
    reductions.push_back({param.getOwners(), param.gradMemory(), noteAccumulation(param)});
    ids.push_back(task.getDSId());
  }

  std::uint64_t tag = static_cast<std::uint64_t>(scalar_type) + 1;
  for (const std::int64_t id : ids) {
    tag = tag * 0x100000001b3ULL + static_cast<std::uint64_t>(id) + 1;
  }
  const std::string what = concat("reducing the gradients of ", ids.size(), " parameters (ids ",
                                  join_as_str(ids, ", ", 100), ", ", scalar_type, ") on ", place());
  auto counts = std::make_shared<at::Tensor>();
  runCollective(
      *rs_stream_, [what] { return what; },
      [comm = comm_, sent, reductions = std::move(reductions), presence, counts, op = getReductionOp(), tag,
       spoil = ending_ && context_->device_order && !surplus, context = context_, first = tasks[0].getDSId(),
       on_callers_thread = rs_stream_->followsCaller(),
       signature =
           context_->config.debug ? concat("reduction of parameters ", join_as_str(ids, ", ")) : std::string()] {
        const std::int64_t began = Timeline::now();
        const Timeline::Mark started = context->timeline->mark();
        agreeOnCollective(*comm, signature);
        const std::int64_t bytes = reduceParts(*comm, *sent, reductions, presence, *counts, op, tag);
        if (spoil) {
          spoilIncomplete(reductions, *counts);
        }
        context->timeline->add(Timeline::Kind::Reduce, first, bytes, started);
        if (on_callers_thread) {
          context->countWait(began);
        }
      });
  last_presence_ = counts;
  if (lacking) {
    presence_.push_back({std::move(ids), counts});
  }
  performCleanup(scalar_type);
  if (!rs_stream_->followsCaller()) {
    reduced_from_.add(rs_stream_->record(), sent);
    reduced_from_.letGo(*context_, reductions_in_flight_);
  }
  if (context_->config.sync_after_reduce) {
    rs_stream_->synchronize(context_->deadline());
  }
}

void CustomOpExecutor::flushAllReduceBuckets() {
  for (auto& [scalar_type, tasks] : reduce_tasks_) {
    if (!tasks.empty()) {
      flushReduceBucket(scalar_type);
    }
  }
}

void CustomOpExecutor::endBackward() {
  if (!backward_open_) {
    return;
  }
  if (context_->profiling) {
    abandonBackward();
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  backward_open_ = false;
  comm_->placeTensors(nullptr);
  if (param_updated_) {
    param_registry_->setUpdateFollowed(true);
  }
  if (!communicates()) {
    return;
  }
  std::vector<ArrivedGradient> rest;
  if (comm_->size() > 1) {
    order_->finish(rest);
  } else {
    for (const std::int64_t id : order_->expected()) {
      if (!present_.contains(id)) {
        rest.push_back({id, at::Tensor()});  // it may still have a gradient that was kept from earlier backwards
      }
    }
  }
  if (comm_->size() > 1) {
    enterInOrder(rest);
  } else {
    for (const ArrivedGradient& arrived : rest) {
      enter(arrived);
    }
  }
  last_presence_.reset();
  ending_ = true;
  flushAllReduceBuckets();
  ending_ = false;
  context_->endFirstStep();
  if (mayLeaveRunning()) {
    unsettled_ = true;
    context_->unsettled->setPending(true);
    context_->stats.backwards_left_running.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  context_->await(rs_stream_->record());
  copied_.letGo(*context_, 0);
  reduced_from_.letGo(*context_, 0);
  if (comm_->size() > 1) {
    reduceSurplus();
  }
  readPresence();
  if (!order_learned_ && comm_->size() > 1) {
    learnOrder();
  }
}

}  // namespace dc
