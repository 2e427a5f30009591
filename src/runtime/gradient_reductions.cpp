// Reduces a bucket to the owners of its slices.
#include <limits>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/gradient_reducer.h"

namespace dc {

void GradientReducer::waitForCopies() {
  parts_.reduce_stream->wait(parts_.copy_stream->record(), parts_.context->deadline());
}

void GradientReducer::divideBeforeTheSum(at::ScalarType dtype) {
  if (!dividesBucket() || parts_.comm->size() == 1) {
    return;
  }
  const auto bucket = parts_.buckets->getBuffer(dtype);
  runDetached(
      *parts_.reduce_stream, [] { return "dividing a reduce bucket"; },
      [filled = bucket->getBuffer().narrow(0, 0, bucket->getOffset()), ranks = parts_.comm->size()] {
        filled.div_(ranks);
      });
}

void GradientReducer::cleanUp(at::ScalarType dtype) {
  tasks_[dtype].clear();
  parts_.buckets->swap(dtype, *parts_.reduce_stream);
  parts_.context->stats.buckets_flushed.fetch_add(1, std::memory_order_relaxed);
}

namespace {

// A gradient in a bucket that is being reduced.
struct Reduction {
  std::vector<Slice> owners;
  at::Tensor buffer;  // of this rank's slice
  bool add;           // to what the buffer holds
};

// Runs on the reduce stream, and so do all uses of the memory that it allocates. `presence` has a row per rank;
// `counts` becomes the sum of the rows. Returns the bytes that were reduced.
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

// On a device the host does not read whether a peer had surplus gradients (anySurplus). A sum that lacks a peer's
// surplus must not be used: so the last element of `counts`, which is infinite if a peer had some and else zero, is
// added to it.
void spoilIncomplete(const std::vector<Reduction>& reductions, const at::Tensor& counts) {
  for (const Reduction& one : reductions) {
    if (one.buffer.numel() > 0) {
      one.buffer.narrow(0, 0, 1).add_(counts.narrow(0, counts.numel() - 1, 1));
      return;
    }
  }
}

}  // namespace

// With the gradients the ranks exchange one presence row each: for which parameters the rank had a gradient. See Note
// [Presence] in docs/runtime.md.
void GradientReducer::reduceToOwners(at::ScalarType dtype) {
  auto& tasks = tasks_[dtype];
  if (tasks.empty()) {
    return;
  }
  if (parts_.context->config.sync_before_reduce) {
    parts_.copy_stream->synchronize(parts_.context->deadline());
    parts_.reduce_stream->synchronize(parts_.context->deadline());
  }
  waitForCopies();
  divideBeforeTheSum(dtype);

  const auto sent = std::make_shared<std::vector<at::Tensor>>();
  std::vector<Reduction> reductions;
  std::vector<std::int64_t> ids;
  const auto count = static_cast<std::int64_t>(tasks.size());
  // The last column: whether this rank has surplus gradients (reduceSurplus).
  const at::Tensor presence = at::ones({parts_.comm->size(), count + 1}, at::TensorOptions().dtype(at::kFloat));
  const bool surplus = order_.known() && order_.arrivals().hasSurplus();
  presence.select(1, count).fill_(surplus ? std::numeric_limits<float>::infinity() : 0);
  bool lacking = false;
  for (const ReduceTask& task : tasks) {
    const DSParam& param = parts_.registry->getParam(task.getDSId());
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

  std::uint64_t tag = static_cast<std::uint64_t>(dtype) + 1;
  for (const std::int64_t id : ids) {
    tag = tag * 0x100000001b3ULL + static_cast<std::uint64_t>(id) + 1;
  }
  const std::string what = concat("reducing the gradients of ", ids.size(), " parameters (ids ",
                                  join_as_str(ids, ", ", 100), ", ", dtype, ") on ", place());
  auto counts = std::make_shared<at::Tensor>();
  runCollective(
      *parts_.reduce_stream, [what] { return what; },
      [comm = parts_.comm, sent, reductions = std::move(reductions), presence, counts, op = op(), tag,
       spoil = backward_.phase == Phase::Ending && parts_.context->device_order && !surplus, context = parts_.context,
       first = tasks[0].getDSId(), dtype, on_callers_thread = parts_.reduce_stream->followsCaller(),
       signature =
           parts_.context->config.debug ? concat("reduction of parameters ", join_as_str(ids, ", ")) : std::string()] {
        const std::int64_t began = StepTrace::now();
        const StepTrace::Moment started = context->trace->moment();
        agreeOnCollective(*comm, signature);
        const std::int64_t bytes = reduceParts(*comm, *sent, reductions, presence, *counts, op, tag);
        if (spoil) {
          spoilIncomplete(reductions, *counts);
        }
        context->trace->add({TraceEntry::Kind::Reduction, first, dtype, bytes}, started);
        if (on_callers_thread) {
          context->countWait(began);
        }
      });
  presence_.noteBucket(std::move(ids), counts, lacking);
  cleanUp(dtype);
  if (!parts_.reduce_stream->followsCaller()) {
    reduced_from_.add(parts_.reduce_stream->record(), sent);
    reduced_from_.letGo(*parts_.context, order_.planned().in_flight);
  }
  if (parts_.context->config.sync_after_reduce) {
    parts_.reduce_stream->synchronize(parts_.context->deadline());
  }
}

void GradientReducer::flushAll() {
  for (auto& [dtype, tasks] : tasks_) {
    if (!tasks.empty()) {
      flush(dtype);
    }
  }
}

}  // namespace dc
