// The end of a backward: missing gradients, surplus gradients (beyond the expected ones), learning the order, and
// backwards within an accumulation that end without waiting for their reductions.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/gradient_reducer.h"

namespace dc {

void GradientReducer::end() {
  if (!open()) {
    return;
  }
  Context& context = *parts_.context;
  if (context.profiling) {
    abandon();
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  backward_.phase = Phase::Closed;
  parts_.comm->placeTensors(nullptr);
  if (backward_.updates) {
    parts_.registry->setUpdateFollowed(true);
  }
  if (!communicates()) {
    return;
  }
  if (alone()) {
    for (const std::int64_t id : order_.arrivals().expected()) {
      if (!presence_.hasGradient(id)) {
        enter({id, at::Tensor()});  // there may be a local gradient from earlier backwards
      }
    }
  } else {
    std::vector<ArrivedGradient> rest;
    order_.arrivals().finish(rest);
    enterInOrder(rest);
  }
  presence_.noteEnd();
  backward_.phase = Phase::Ending;
  flushAll();
  backward_.phase = Phase::Closed;
  context.endFirstStep();
  if (mayLeaveRunning()) {
    backward_.phase = Phase::Unsettled;
    context.unsettled->setPending(true);
    context.stats.backwards_left_running.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  context.await(parts_.reduce_stream->record());
  copied_.letGo(context, 0);
  reduced_from_.letGo(context, 0);
  if (!alone()) {
    reduceSurplus();
  }
  presence_.read();
  if (!order_.learned() && !alone()) {
    learnOrder();
  }
}

bool GradientReducer::anySurplus(bool mine) {
  if (parts_.context->device_order) {
    // Reading the other ranks' flags would block the host in every backward. So here all ranks must have the same
    // surplus gradients. If one rank alone has some, it waits for the others until the deadline, and the others'
    // gradients are made infinite (spoilIncomplete), so that incomplete sums are not used.
    return mine;
  }
  if (presence_.bucketsSaidOfSurplus()) {
    return presence_.anySurplus();
  }
  bool any = false;
  for (const std::string& other : parts_.comm->exchange(std::string(1, mine ? 'y' : 'n'))) {
    any = any || other == "y";
  }
  return any;
}

// Surplus gradients: some ranks may have them and others not. Whether any rank has some was exchanged with the last
// bucket; only then do the ranks exchange which. The reduce stream is idle.
void GradientReducer::reduceSurplus() {
  std::vector<ArrivedGradient> surplus = order_.arrivals().takeSurplus();
  if (!anySurplus(!surplus.empty())) {
    return;
  }
  backward_.had_surplus = true;
  std::vector<std::int64_t> mine;
  std::map<std::int64_t, std::vector<at::Tensor>> gradients;
  for (ArrivedGradient& arrived : surplus) {
    mine.push_back(arrived.id);
    gradients[arrived.id].push_back(std::move(arrived.grad));
  }
  std::map<std::int64_t, std::size_t> most;
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(std::int64_t));
  for (const std::string& other : parts_.comm->exchangeAny(bytes)) {
    std::map<std::int64_t, std::size_t> counts;
    for (std::size_t i = 0; i < other.size(); i += sizeof(std::int64_t)) {
      std::int64_t id = 0;
      std::memcpy(&id, other.data() + i, sizeof(id));
      most[id] = std::max(most[id], ++counts[id]);
    }
  }
  for (const auto& [id, count] : most) {
    std::vector<at::Tensor>& own = gradients[id];
    own.resize(count);
    for (at::Tensor& gradient : own) {
      enter({id, std::move(gradient)});
    }
  }
  flushAll();
  parts_.context->await(parts_.reduce_stream->record());
}

// Called once: all ranks adopt the order that rank 0 saw, so that later gradients need not be parked.
void GradientReducer::learnOrder() {
  std::string mine;  // only rank 0's matters
  if (parts_.comm->rank() == 0) {
    const auto order = ReductionOrder::learn(order_.arrivals().arrivals(), order_.arrivals().expected());
    mine.assign(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(std::int64_t));
  }
  const std::string agreed = parts_.comm->exchangeAny(mine)[0];  // the reduce stream is idle: end() has waited for it
  std::vector<std::int64_t> order(agreed.size() / sizeof(std::int64_t));
  if (!order.empty()) {  // a graph with nothing trainable
    std::memcpy(order.data(), agreed.data(), agreed.size());
  }
  order_.learn(std::move(order));
  backward_.had_surplus = false;  // of the first backward: the learned order contains repeated gradients
}

void GradientReducer::plan(std::vector<std::vector<std::int64_t>> buckets, std::size_t in_flight) {
  check(in_flight >= 1, [&] { return concat("a plan of reductions lets none of them be under way (", place(), ")"); });
  PlannedReductions planned{std::move(buckets), in_flight};
  for (const auto& bucket : planned.buckets) {
    std::int64_t size = 0;
    for (const std::int64_t id : bucket) {
      size += parts_.members->at(id).getPaddedNumel();
    }
    planned.largest = std::max(planned.largest, size);
  }
  order_.plan(std::move(planned));
}

std::vector<std::int64_t> GradientReducer::order() const {
  return order_.known() ? order_.arrivals().expected() : std::vector<std::int64_t>();
}

void GradientReducer::forgetOrder() {
  check(!open() || backward_.begun_by_gradient,
        [&] { return concat("what is trainable changes in the middle of a backward (", place(), ")"); });
  abandon();  // a backward of the plain loop that is still open has ended in an error
  order_.forget();
  gradient_bytes_.reset();
}

// The last bucket tells the other ranks whether there are surplus gradients; without one the backward must wait. On a
// device a wait does not block the host, so there is nothing to gain.
bool GradientReducer::mayLeaveRunning() const {
  return backward_.settles_later && !backward_.updates && order_.learned() && !backward_.had_surplus && !alone() &&
         !parts_.context->device_order && presence_.bucketsSaidOfSurplus();
}

void GradientReducer::settle() {
  if (!unsettled()) {
    return;
  }
  parts_.context->await(parts_.reduce_stream->record());
  reduceSurplus();
  finishSettling();
}

void GradientReducer::settleAlone() {
  if (!unsettled()) {
    return;
  }
  parts_.context->await(parts_.reduce_stream->record());
  check(!anySurplus(order_.arrivals().hasSurplus()), [&] {
    return concat(
        "gradients are read within an accumulation while some rank has more of them than expected, so they are not "
        "complete (",
        place(), "); read them after the last backward of the accumulation");
  });
  finishSettling();
}

void GradientReducer::finishSettling() {
  backward_.phase = Phase::Closed;
  copied_.letGo(*parts_.context, 0);
  reduced_from_.letGo(*parts_.context, 0);
  presence_.read();
  stage_.settled();
}

void GradientReducer::discard(const std::vector<std::int64_t>& ids) {
  settle();
  for (const std::int64_t id : ids) {
    if (parts_.members->contains(id)) {
      accumulated_.erase(id);
      local_.discard(id);
    }
  }
  if (accumulated_.size() == 0) {
    parts_.registry->setUpdateFollowed(true);  // everything was discarded, so the next reduction overwrites
  }
}

}  // namespace dc
