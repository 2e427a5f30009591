// A gradient's way into its bucket.
#include "deepcompile/runtime/gradient_reducer.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/device_kernels.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {

GradientReducer::GradientReducer(Parts parts, Stage stage)
    : parts_(std::move(parts)), stage_(std::move(stage)), accumulated_(parts_.registry->accumulated()) {}

GradientReducer::~GradientReducer() { parts_.buckets->forget(this); }

// Drops the state of a backward that never ended. What was accumulated before it stays.
void GradientReducer::abandon() {
  if (!open()) {
    return;
  }
  tasks_.clear();
  copied_.forget();
  reduced_from_.forget();
  parts_.buckets->forget(this);
  parts_.comm->placeTensors(nullptr);
  for (const std::int64_t id : backward_.newly_accumulated) {
    accumulated_.erase(id);
  }
  backward_.phase = Phase::Closed;
}

void GradientReducer::placeGradients() {
  backward_.reduces_tasks_as_they_lie =
      parts_.comm->takesSeparateTensors() && stage_.sends_tasks_one_by_one() && !dividesBucket();
  if (alone() || !backward_.reduces_tasks_as_they_lie) {
    return;
  }
  if (gradient_bytes_ == nullptr) {
    std::unordered_set<std::size_t> sizes;
    for (const std::int64_t id : order_.arrivals().expected()) {
      sizes.insert(static_cast<std::size_t>(param(id).numel()) * c10::elementSize(param(id).getReduceDtype()));
    }
    sizes.erase(0);
    gradient_bytes_ = std::make_shared<const std::unordered_set<std::size_t>>(std::move(sizes));
  }
  parts_.comm->placeTensors(gradient_bytes_);
}

void GradientReducer::noteAutogradTask(std::int64_t task) {
  if (open() && backward_.begun_by_gradient && task != backward_.autograd_task) {
    abandon();  // the backward of the earlier autograd run ended in an error
  }
  backward_.autograd_task = task;
}

void GradientReducer::begin(bool update) {
  settle();
  abandon();
  // Known from the end of the last backward, not from its start: several graphs start one backward.
  if (parts_.registry->updateFollowed()) {
    accumulated_.clear();
  }
  parts_.registry->setUpdateFollowed(false);
  backward_.newly_accumulated.clear();
  backward_.updates = update;
  backward_.begun_by_gradient = false;
  if (!order_.known()) {
    std::vector<std::int64_t> reversed;
    const std::vector<std::int64_t>& ids = parts_.members->ids();
    std::copy_if(ids.rbegin(), ids.rend(), std::back_inserter(reversed),
                 [this](std::int64_t id) { return param(id).trainable(); });
    order_.expect(std::move(reversed));
  }
  placeGradients();
  order_.begin();
  presence_.begin();
  backward_.phase = Phase::Open;
}

void GradientReducer::checkGradient(const DSParam& param, const at::Tensor& grad) const {
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

// The empty tensor is never read, so one is shared by all gradients of a dtype (which are all on one device).
const at::Tensor& GradientReducer::emptyLike(const at::Tensor& grad) {
  at::Tensor& empty = empty_[grad.scalar_type()];
  if (!empty.defined()) {
    empty = tensorOver(c10::DataPtr(nullptr, grad.device()), 0, {0}, grad.scalar_type(), grad.device());
  }
  return empty;
}

at::Tensor GradientReducer::take(at::Tensor grad, std::int64_t id, GradientMemory memory) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const DSParam& of = parts_.members->at(id);
  checkGradient(of, grad);
  at::Tensor result = emptyLike(grad);
  if (parts_.context->profiling) {
    return result;
  }
  if (grad.layout() != at::kStrided) {
    grad = grad.to_dense();
  }
  if (!open()) {
    // No start_backward was called: the plain loop. An optimizer step is assumed to follow; if the user keeps the
    // gradients instead, noteAccumulation finds them.
    begin(true);
    backward_.begun_by_gradient = true;
  }
  if (!communicates()) {
    local_.add(of, grad);
    return result;
  }
  const bool donated = memory != GradientMemory::Borrowed;
  if (alone()) {
    // With one rank the order does not matter.
    enter({id, std::move(grad), donated, memory == GradientMemory::DonatedForGood});
    return result;
  }
  std::vector<ArrivedGradient> ready;
  const bool goes_now = order_.arrivals().goesNow(id);
  if (!goes_now) {
    if (!donated) {
      grad = grad.clone();  // the caller may use its memory for something else once this call returns
    }
    parts_.context->stats.gradients_parked.fetch_add(1, std::memory_order_relaxed);
  }
  order_.arrivals().arrive(id, std::move(grad), ready);
  if (goes_now) {
    ready[0].given = donated;
  }
  enterInOrder(ready);
  return result;
}

bool GradientReducer::noteAccumulation(const DSParam& param) {
  const bool accumulated = accumulated_.contains(param.getId());
  bool add = accumulated;
  if (backward_.begun_by_gradient && !accumulated && param.isPartitioned()) {
    // The plain loop: as in PyTorch, adds to a gradient that the user has not cleared. Not read by grad(), which
    // settles other graphs first and so takes the lock that is held here.
    const at::Tensor& kept = param.getDSTensor().mutable_grad();
    if (kept.defined()) {
      if (!kept.is_alias_of(param.getGradBuffer()) && !param.isPublished(kept)) {
        param.gradMemory().copy_(kept.reshape({-1}));
      }
      add = true;
    }
  }
  if (!accumulated) {
    backward_.newly_accumulated.push_back(param.getId());
    accumulated_.insert(param.getId());
  }
  return add;
}

void GradientReducer::enterInOrder(const std::vector<ArrivedGradient>& arrived) {
  for (const ArrivedGradient& one : arrived) {
    enter(one);
    if (order_.entered()) {
      flushAll();
    }
  }
}

// With one rank the gradient goes straight into the gradient buffer.
void GradientReducer::enterAlone(const DSParam& param, const at::Tensor& grad, bool for_good) {
  const bool add = noteAccumulation(param);
  if (!grad.defined()) {
    presence_.noteWithout(param.getId());
    if (!add) {
      param.gradMemory().zero_();
    }
  } else if (add) {
    param.gradMemory().add_(grad.reshape({-1}));
  } else if (for_good && param.adoptGradMemory(grad)) {
    parts_.context->stats.gradients_in_place.fetch_add(1, std::memory_order_relaxed);
  } else {
    const CopyPart part{param.gradMemory(), grad};
    copyParts({&part, 1});
  }
}

// The gradient enters the bucket of its reduction dtype, which is flushed first when there is no room behind its
// contents.
void GradientReducer::enter(const ArrivedGradient& arrived) {
  const DSParam& param = this->param(arrived.id);
  Stats& stats = parts_.context->stats;
  const at::Tensor grad = travel_ == GradientsTravel::BeforeAnUpdate ? local_.take(param, arrived.grad) : arrived.grad;
  if (grad.defined()) {
    presence_.noteGradient(arrived.id);
    stats.gradients_reduced.fetch_add(1, std::memory_order_relaxed);
  } else {
    stats.gradients_missing.fetch_add(1, std::memory_order_relaxed);
  }
  if (alone()) {
    enterAlone(param, grad, arrived.for_good);
    return;
  }
  const at::ScalarType dtype = param.getReduceDtype();
  const std::int64_t size = param.getPaddedNumel();
  GradientReducer*& user = parts_.buckets->user(dtype);
  if (user != nullptr && user != this) {
    user->flush(dtype);
  }
  auto bucket = parts_.buckets->getBuffer(dtype);
  if (bucket->shouldFlush(size)) {
    flush(dtype);
    bucket = parts_.buckets->getBuffer(dtype);
  }
  if (bucket->empty()) {
    // The wait is here and not after the previous flush, because after the last flush of a backward nothing is copied.
    parts_.copy_stream->wait(parts_.buckets->getEvent(dtype), parts_.context->deadline());
    bucket->reserve(order_.planned().largest);
  }
  user = this;
  if (arrived.given && travelsAsItIs(param, grad)) {
    bucket->adopt(size);
    tasks_[dtype].emplace_back(arrived.id, grad, grad.view({-1}));
    stats.gradients_in_place.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  copyIntoBucket(param, grad, *bucket);
}

void GradientReducer::copyIntoBucket(const DSParam& param, const at::Tensor& grad, ReduceBucket& bucket) {
  const std::int64_t size = param.getPaddedNumel();
  bucket.reserve(size);
  const at::Tensor slice = bucket.allocate(size);
  const auto held = std::make_shared<std::vector<at::Tensor>>(1, grad);
  runDetached(
      *parts_.copy_stream, [label = param.label()] { return "copying the gradient of " + *label; },
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
  tasks_[param.getReduceDtype()].emplace_back(param.getId(), grad, slice).dropGradient();
  if (!parts_.copy_stream->followsCaller()) {
    copied_.add(parts_.copy_stream->record(), held);
    copied_.letGo(*parts_.context, 1);  // frees the gradient before; its copy overlapped the compute since, so no wait
  }
}

bool GradientReducer::travelsAsItIs(const DSParam& param, const at::Tensor& grad) const {
  return backward_.reduces_tasks_as_they_lie && grad.defined() && grad.scalar_type() == param.getReduceDtype() &&
         param.numel() == param.getPaddedNumel() && grad.is_contiguous() && !grad.is_conj() && !grad.is_neg() &&
         // If most gradients are in shared memory, one that is not would delay its whole bucket by staging.
         (gradient_bytes_ == nullptr || parts_.comm->travelsAsItLies(grad));
}

std::string GradientReducer::describe() const {
  constexpr std::array<const char*, 4> kPhases = {"no backward is open", "a backward is open", "a backward is ending",
                                                  "a backward has ended and its reductions run"};
  std::size_t waiting = 0;
  for (const auto& [dtype, tasks] : tasks_) {
    waiting += tasks.size();
  }
  return concat(kPhases[static_cast<std::size_t>(backward_.phase)],
                backward_.begun_by_gradient ? " (begun by a gradient)" : "",
                backward_.updates ? ", an update follows" : ", within an accumulation", "; ", waiting,
                " gradients in buckets; order ", order_.learned() ? "learned" : "not learned", "; ",
                order_.planned().buckets.size(), " planned buckets");
}

}  // namespace dc
