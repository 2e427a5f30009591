#include "deepcompile/runtime/runtime.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>

#include "deepcompile/base/environment.h"
#include "deepcompile/base/error.h"
#include "deepcompile/base/log.h"
#include "deepcompile/base/text.h"
#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/device_stream.h"
#include "deepcompile/runtime/host_memory.h"
#include "deepcompile/runtime/z1_executor.h"
#include "deepcompile/runtime/z2_executor.h"

namespace dc {
namespace {

int usableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// For copies from host memory to host memory, which a worker would only move to another core: a worker only on request.
CpuStreamMode copyMode() {
  return Environment::read().cpu_stream == "worker" ? CpuStreamMode::Worker : CpuStreamMode::Inline;
}

bool reducible(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16 ||
         at::isComplexType(dtype);
}

std::shared_ptr<BufferPool> makePool(Communicator& gather, at::Device device) {
  if (c10::Allocator* memory = gather.memoryOfGathers(); memory != nullptr) {
    return std::make_shared<BufferPool>(memory, BufferPool::Keep::ForGood);
  }
  return std::make_shared<BufferPool>(c10::GetAllocator(device.type()));
}

}  // namespace

Runtime::Runtime(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::shared_ptr<Context> context,
                 Channels channels, std::int64_t initial_reduce_bucket_size, int local_ranks, at::Device device,
                 std::function<std::string()> roll_call)
    : process_group_(std::move(process_group)),
      context_(std::move(context)),
      channels_(std::move(channels)),
      bucket_size_(initial_reduce_bucket_size),
      registry_(std::make_shared<DSParamRegistry>()),
      device_(device),
      pool_(makePool(*channels_.gather, device)),
      reduce_buckets_(std::make_shared<DoubleBufferedReduceBucket>(
          initial_reduce_bucket_size, context_->config.double_buffer, device, channels_.reduce)),
      mode_(context_->size == 1 ? CpuStreamMode::Inline
                                : chooseCpuStreamMode(Environment::read().cpu_stream, channels_.gather->spins(),
                                                      local_ranks, at::get_num_threads(), usableCores())),
      roll_call_(std::move(roll_call)),
      watchdog_(makeWatchdog()),
      streams_(makeStreams()),
      host_copies_(std::make_shared<HostCopies>(device_, context_->config.offload_limit)),
      states_(std::make_shared<StateOffload>(device_, streams_.offload, streams_.reload, host_copies_, context_)) {
  if (device_.is_cpu()) {
    keepFreedMemory();
  }
  context_->device_order = !device_.is_cpu();
  context_->unsettled->settleBy([this] { settle(); });
  context_->trace->useDevice(device_);
  if (channels_.control == nullptr) {
    channels_.control = channels_.gather;
  }
  check(!context_->config.symmetric_memory || !device_.is_cpu(),
        "symmetric_memory needs CUDA; leave the key out or set it to false for parameters on CPU");
  check(!context_->config.registered_memory || !device_.is_cpu(),
        "registered_memory needs CUDA; leave the key out or set it to false for parameters on CPU");
  check(context_->config.timeout > 0,
        [&] { return concat("timeout is ", context_->config.timeout, " seconds; it must be above 0"); });
  context_->timeout_changed = [this] { setTimeouts(); };
  setTimeouts();
}

std::shared_ptr<Stream> Runtime::makeStream(const char* name, CpuStreamMode cpu_mode) const {
  return device_.is_cpu() ? makeCpuStream(cpu_mode, name) : makeDeviceStream(device_, name, watchdog_);
}

Streams Runtime::makeStreams() const {
  Streams streams;
  streams.gather = makeStream("gather", mode_);
  streams.reduce = channels_.gather == channels_.reduce ? streams.gather : makeStream("reduce", mode_);
  // The caller may reuse a gradient's memory as soon as reduce_grad has returned, so it is copied in the caller's
  // order.
  streams.copy = device_.is_cpu() ? makeStream("copy", CpuStreamMode::Inline) : makeCallerStream(device_);
  streams.offload = makeStream("offload", copyMode());
  streams.reload = makeStream("reload", copyMode());
  return streams;
}

bool Runtime::hostIsApart() const { return !device_.is_cpu() || Environment::read().offload == "always"; }

std::shared_ptr<Watchdog> Runtime::makeWatchdog() {
  if (device_.is_cpu() || context_->size == 1) {
    return nullptr;
  }
  return std::make_shared<Watchdog>(Watchdog::Callbacks{
      .timeout = [context = context_] { return context->timeout(); },
      .broken = [this]() -> std::optional<std::string> {
        auto broken = channels_.gather->brokenBy();
        return broken ? broken : channels_.reduce->brokenBy();
      },
      .stuck = [this](const std::string& what, const std::string& why) { giveUp(what, why); },
  });
}

void Runtime::giveUp(const std::string& what, const std::string& why) {
  const std::string answer = roll_call_ ? roll_call_() : std::string();
  context_->late_error->setForGood(concat(what, " failed: ", why, answer.empty() ? "" : "; ", answer,
                                          "\nCheck that every rank is alive and runs the same collectives; `timeout` ",
                                          "bounds the wait and `debug` names the ranks that differ"));
  abortChannels();
}

// Aborting a communicator tells its kernels to end and then waits for the whole device, so also for the kernels of the
// other communicator. So both are told to end before either waits.
void Runtime::abortChannels() {
  std::thread other([gather = channels_.gather] {
    try {
      gather->abort();
    } catch (const std::exception& error) {
      log(LogLevel::Warning, concat("while ending the communicator of gathers: ", error.what()));
    }
  });
  try {
    channels_.reduce->abort();
  } catch (const std::exception& error) {
    log(LogLevel::Warning, concat("while ending the communicator of reductions: ", error.what()));
  }
  other.join();
}

void Runtime::setTimeouts() {
  for (const auto& channel : {channels_.gather, channels_.reduce, channels_.control}) {
    channel->setTimeout(context_->timeout());
  }
}

// The parts of the configuration that must be the same on all ranks for their collectives to match, as text.
std::string Runtime::facts() const {
  const Config& config = context_->config;
  return concat("configuration: pre_div_reduce ", config.pre_div_reduce, ", debug ", config.debug,
                ", registered_memory ", config.registered_memory, ", reduce bucket of ", bucket_size_, " elements\n");
}

Runtime::~Runtime() { close(); }

void Runtime::checkOpen() const {
  check(open_, "this runtime was cleaned up (engine.close(), dc.cleanup()); make a new engine, or call dc.init");
}

void Runtime::addParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                       at::Tensor grad_buffer, bool partitioned, std::int64_t offset, bool persistent,
                       const ParamOptions& options) {
  const std::lock_guard lock(context_->mutex);
  checkOpen();
  const std::string quoted = options.name.empty() ? "" : " '" + options.name + "'";
  const std::string label = concat("parameter", quoted, " (id ", ds_id, ", shape [", join_as_str(ds_shape, ", "), "])");
  const auto require = [&](bool ok, auto&&... what) {
    check(ok, [&] { return concat(label, ": ", what..., " (", context_->place, ")"); });
  };
  require(std::all_of(ds_shape.begin(), ds_shape.end(), [](std::int64_t s) { return s >= 0; }),
          "a dimension is negative");
  require(!registry_->hasParam(ds_id), "the id is registered already");
  require(ds_tensor.defined() && ds_tensor.device() == device_, "its tensor is on ",
          ds_tensor.defined() ? ds_tensor.device().str() : "no device", ", and this runtime serves ", device_.str(),
          "; say where the parameters are with dc.init(..., device=...)");
  require(ds_tensor.layout() == at::kStrided, "its tensor is not strided");
  require(ds_tensor.is_contiguous(), "its tensor is not contiguous");
  const auto numel = static_cast<std::int64_t>(productDim(ds_shape));
  const std::int64_t shard = (numel + context_->size - 1) / context_->size;
  if (partitioned) {
    require(ds_tensor.numel() == shard, "the shard has ", ds_tensor.numel(), " elements; ", numel, " elements over ",
            context_->size, " ranks take ", shard, " on each, the last padded");
  } else {
    require(ds_tensor.numel() == numel, "the tensor has ", ds_tensor.numel(), " elements instead of ", numel,
            " (ZeRO-1 and 2 register the whole parameter)");
  }
  if (grad_buffer.defined()) {
    require(grad_buffer.device() == ds_tensor.device(), "its gradient buffer is on ", grad_buffer.device(),
            " and the parameter on ", ds_tensor.device());
    require(grad_buffer.is_contiguous(), "its gradient buffer is not contiguous");
    require(reducible(grad_buffer.scalar_type()), "gradients of dtype ", grad_buffer.scalar_type(),
            " cannot be averaged; the buffer must be floating point or complex");
    if (partitioned) {
      require(grad_buffer.numel() == shard || grad_buffer.numel() == 0, "the gradient buffer has ", grad_buffer.numel(),
              " elements; it must have those of the shard, ", shard, ", or none for a frozen parameter");
    } else {
      require(offset >= 0 && offset + grad_buffer.numel() <= numel, "the gradient buffer holds elements [", offset,
              ", ", offset + grad_buffer.numel(), ") of a gradient of ", numel);
    }
  }
  if (options.reduce_dtype) {
    require(reducible(*options.reduce_dtype), "reduce_dtype ", *options.reduce_dtype,
            " cannot be averaged; it must be floating point or complex");
  }

  registry_->registerParam(ds_id, ds_shape, std::move(ds_tensor), std::move(grad_buffer), partitioned, offset,
                           persistent);
  DSParam& param = registry_->getParam(ds_id);
  param.setName(options.name);
  param.setOffload(streams_.offload, streams_.reload, host_copies_, context_->config.timeout);
  if (options.reduce_dtype) {
    param.setReduceDtype(*options.reduce_dtype);
  }
  std::vector<Slice> owners;
  for (int r = 0; partitioned && r < context_->size; ++r) {
    owners.push_back({r * shard, (r + 1) * shard});
  }
  param.setOwners(std::move(owners));
  agreed_ = false;
}

void Runtime::registerParam(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                            at::Tensor grad_buffer, std::int64_t offset, const ParamOptions& options) {
  addParam(ds_id, ds_shape, std::move(ds_tensor), std::move(grad_buffer), /*partitioned=*/false, offset,
           /*persistent=*/false, options);
}

void Runtime::registerZ3Param(std::int64_t ds_id, const std::vector<std::int64_t>& ds_shape, at::Tensor ds_tensor,
                              at::Tensor grad_buffer, bool persistent, const ParamOptions& options) {
  addParam(ds_id, ds_shape, std::move(ds_tensor), std::move(grad_buffer), /*partitioned=*/true, /*offset=*/0,
           persistent, options);
}

// A graph may be registered before its parameters. Those that are registered already must be of the right stage.
void Runtime::checkGraphIds(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids, bool partitioned) const {
  for (const std::int64_t id : ds_ids) {
    check(!registry_->hasParam(id) || registry_->getParam(id).isPartitioned() == partitioned, [&] {
      return concat("graph ", graph_id, ": ", registry_->getParam(id).describe(), " was registered with ",
                    partitioned ? "register_param (ZeRO-1, 2)" : "register_z3_param",
                    " and cannot be part of a graph of ", partitioned ? "ZeRO-3" : "ZeRO-1 or 2", " (", context_->place,
                    ")");
    });
  }
}

void Runtime::registerGraphZ1(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids) {
  const std::lock_guard lock(context_->mutex);
  checkGraphIds(graph_id, ds_ids, /*partitioned=*/false);
  addGraph(graph_id, std::make_shared<Z1CustomOpExecutor>(process_group_, registry_, reduce_buckets_, ds_ids,
                                                          channels_.reduce, streams_.reduce, streams_.copy,
                                                          context_->config.pre_div_reduce, context_));
}

void Runtime::registerGraphZ2(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids) {
  const std::lock_guard lock(context_->mutex);
  checkGraphIds(graph_id, ds_ids, /*partitioned=*/false);
  addGraph(graph_id, std::make_shared<Z2CustomOpExecutor>(process_group_, registry_, reduce_buckets_, ds_ids,
                                                          channels_.reduce, streams_.reduce, streams_.copy,
                                                          context_->config.pre_div_reduce, context_));
}

void Runtime::registerGraphZ3(std::int64_t graph_id, const std::vector<std::int64_t>& ds_ids, bool reduce_at_update) {
  const std::lock_guard lock(context_->mutex);
  checkGraphIds(graph_id, ds_ids, /*partitioned=*/true);
  auto executor = std::make_shared<Z3CustomOpExecutor>(
      graph_id, process_group_, registry_, reduce_buckets_, ds_ids, channels_.reduce, streams_.reduce, streams_.copy,
      GatherResources{channels_.gather, streams_.gather, pool_}, context_->config.pre_div_reduce, context_);
  if (reduce_at_update) {
    executor->reduceAtUpdate();
  }
  addGraph(graph_id, std::move(executor));
}

void Runtime::registerGraph(std::int64_t graph_id, std::shared_ptr<CustomOpExecutor> executor) {
  const std::lock_guard lock(context_->mutex);
  addGraph(graph_id, std::move(executor));
}

void Runtime::addGraph(std::int64_t graph_id, std::shared_ptr<CustomOpExecutor> executor) {
  checkOpen();
  GraphTable::global().add(std::make_shared<const Graph>(
      Graph{graph_id, this, executor, dynamic_cast<Z3CustomOpExecutor*>(executor.get()),
            std::make_shared<TensorOffload>(streams_.offload, streams_.reload, host_copies_, context_)}));
  executors_.emplace(graph_id, std::move(executor));
  agreed_ = false;
}

void Runtime::ensureAgreed() {
  if (agreed_) [[likely]] {
    return;
  }
  checkOpen();
  // Runs on this thread while the streams are idle, because an exception on a stream would poison it.
  streams_.gather->synchronize(context_->deadline());
  try {
    agreeOnRegistration(*channels_.control, *registry_, executors_, facts());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail("agreeing on what is registered failed on ", context_->place, ": ", error.what(),
         "\nAll ranks register parameters and graphs at the same point of the program; did this rank do it alone?");
  }
  for (const auto& [graph_id, executor] : executors_) {
    for (const std::int64_t id : executor->getIds()) {
      check(registry_->hasParam(id), [&, graph = graph_id] {
        return concat("graph ", graph, " lists parameter id ", id, ", which is not registered (", context_->place, ")");
      });
    }
  }
  agreed_ = true;
}

void Runtime::setPersistent(std::int64_t ds_id) {
  const std::lock_guard lock(context_->mutex);
  registry_->setPersistent(ds_id, true);
}

void Runtime::setGradBuffer(std::int64_t ds_id, at::Tensor grad_buffer, std::optional<at::ScalarType> reduce_dtype) {
  const std::lock_guard lock(context_->mutex);
  checkOpen();
  DSParam& param = registry_->getParam(ds_id);
  check(param.isPartitioned(), [&] { return concat(param.describe(), " is not sharded (", context_->place, ")"); });
  if (grad_buffer.defined()) {
    const at::Tensor& shard = param.getDSTensor();
    check(grad_buffer.numel() == shard.numel() && grad_buffer.is_contiguous() &&
              grad_buffer.device() == shard.device() && reducible(grad_buffer.scalar_type()),
          [&] {
            return concat(param.describe(), ": a gradient buffer must be contiguous, floating point or complex, on ",
                          shard.device(), " and of ", shard.numel(), " elements (", context_->place, ")");
          });
  }
  for (const auto& [graph_id, executor] : executors_) {
    if (executor->hasParam(ds_id)) {
      executor->reducer().settleAlone();
      executor->reducer().forgetOrder();
    }
  }
  param.setGradBuffer(std::move(grad_buffer));
  if (reduce_dtype && param.trainable()) {
    param.setReduceDtype(*reduce_dtype);
  }
  agreed_ = false;
}

void Runtime::planReductions(std::int64_t graph_id, std::vector<std::vector<std::int64_t>> buckets,
                             std::size_t in_flight) {
  const std::lock_guard lock(context_->mutex);
  getExecutor<CustomOpExecutor>(graph_id, executors_)->reducer().plan(std::move(buckets), in_flight);
}

void Runtime::startForward() {
  const std::lock_guard lock(context_->mutex);
  ensureAgreed();
  if (ran_forward_) {
    context_->endFirstStep();  // also where there is no backward
  }
  ran_forward_ = true;
  if (context_->device_order) {
    pool_->limitIdle(most_idle_);
  }
  if (update_pending_) {
    for (const std::int64_t id : registry_->getIds()) {
      registry_->setValid(id, false);
    }
    update_pending_ = false;
  }
  for (const auto& [graph_id, executor] : executors_) {
    executor->startForward();
  }
}

void Runtime::holdShards(bool hold) {
  const std::lock_guard lock(context_->mutex);
  for (const auto& [graph_id, executor] : executors_) {
    executor->holdShards(hold);
  }
}

void Runtime::endReads() {
  const std::lock_guard lock(context_->mutex);
  for (const auto& [graph_id, executor] : executors_) {
    executor->endReads();
  }
  context_->await(streams_.gather->record());
}

void Runtime::setOutsideStep(bool outside) {
  const std::lock_guard lock(context_->mutex);
  context_->outside_step = outside;
  setTimeouts();
}

void Runtime::endForward() {
  const std::lock_guard lock(context_->mutex);
  for (const auto& [graph_id, executor] : executors_) {
    executor->endForward();
  }
}

void Runtime::startBackward(bool update, bool settle_later) {
  const std::lock_guard lock(context_->mutex);
  ensureAgreed();
  settleTogether();
  update_pending_ = update_pending_ || update;
  if (context_->device_order) {
    // In the backward gradients need the memory. On a device freeing it is cheap; on a host new pages cost page faults.
    pool_->limitIdle(std::min(most_idle_, BufferPool::kInitialLimit));
  }
  for (const auto& [graph_id, executor] : executors_) {
    executor->reducer().settleLater(settle_later && !update);
    executor->startBackward(update);
  }
}

void Runtime::settleTogether() {
  if (!context_->unsettled->pending()) {
    return;
  }
  std::map<std::int64_t, CustomOpExecutor*> in_order;  // the same order on all ranks: settling may be a collective
  for (const auto& [graph_id, executor] : executors_) {
    in_order[graph_id] = executor.get();
  }
  for (const auto& [graph_id, executor] : in_order) {
    executor->reducer().settle();
  }
  context_->unsettled->setPending(false);
}

void Runtime::settle() {
  const std::lock_guard lock(context_->mutex);
  for (const auto& [graph_id, executor] : executors_) {
    executor->reducer().settleAlone();
  }
  context_->unsettled->setPending(false);
}

void Runtime::freeGathered(std::int64_t ds_id) {
  const DSParam& param = registry_->getParam(ds_id);
  for (const GatheredParam& copy : registry_->gatheredCopies(ds_id)) {
    if (copy.let_go) {
      continue;  // a copy in place: readers may hold it, and its memory is the shards'
    }
    releaseStorage(copy.tensor,
                   concat(param.describe(), " is read after its gathered copy was invalidated (", context_->place,
                          "); gather it again"),
                   context_->config.debug);
  }
  registry_->unregisterGatheredParam(ds_id);
}

void Runtime::invalidateGatheredParam(std::int64_t ds_id) {
  const std::lock_guard lock(context_->mutex);
  freeGathered(ds_id);
}

void Runtime::clearAllGatheredParams() {
  const std::lock_guard lock(context_->mutex);
  for (const std::int64_t id : registry_->getIds()) {
    freeGathered(id);
  }
}

void Runtime::reset() {
  settle();
  forgetGraphs();
}

void Runtime::forgetGraphs() {
  const std::lock_guard lock(context_->mutex);
  context_->unsettled->setPending(false);
  for (const auto& [graph_id, executor] : executors_) {
    GraphTable::global().remove(graph_id);
  }
  executors_.clear();
  for (const std::int64_t id : registry_->getIds()) {
    freeGathered(id);
    registry_->holders(id) = 0;
  }
  agreed_ = false;
}

void Runtime::gatherSmallTogether(bool together) {
  const std::lock_guard lock(context_->mutex);
  context_->small_together = together;
}

void Runtime::limitIdleMemory(std::int64_t bytes) {
  check(bytes >= 0, [&] { return concat("limit_idle_memory: ", bytes, " bytes; give at least 0"); });
  const std::lock_guard lock(context_->mutex);
  most_idle_ = bytes;
  pool_->limitIdle(bytes);
}

void Runtime::discardGradients(const std::vector<std::int64_t>& ds_ids) {
  const std::lock_guard lock(context_->mutex);
  checkOpen();
  settleTogether();
  for (const auto& [graph_id, executor] : executors_) {
    executor->reducer().discard(ds_ids);
  }
}

void Runtime::letGradientsGo() {
  const std::lock_guard lock(context_->mutex);
  checkOpen();
  if (!registry_->updateFollowed()) {
    return;  // later backwards add to them
  }
  for (const std::int64_t id : registry_->getIds()) {
    const DSParam& param = registry_->getParam(id);
    if (param.isPartitioned() && !param.isOffloaded() && !param.getDSTensor().mutable_grad().defined()) {
      param.letGradMemoryGo();
    }
  }
}

void Runtime::sumOverRanks(const at::Tensor& tensor) {
  const std::lock_guard lock(context_->mutex);
  checkOpen();
  context_->late_error->raise();
  check(tensor.device() == device_ && tensor.is_contiguous(), [&] {
    return concat("sum_over_ranks: the tensor must be contiguous and on ", device_.str(), " (", context_->place, ")");
  });
  if (context_->size == 1) {
    return;
  }
  runCollective(
      *streams_.reduce, [place = context_->place] { return concat("a sum over the ranks on ", place); },
      [comm = channels_.reduce, tensor] { comm->allReduce(tensor, ReduceOp::Sum); });
  context_->await(streams_.reduce->record());
}

void Runtime::close() {
  if (!open_) {
    return;
  }
  try {
    settle();
  } catch (const std::exception& error) {
    log(LogLevel::Warning, concat("while cleaning up ", context_->place, ": ", error.what()));
  }
  context_->unsettled->settleBy(nullptr);
  forgetGraphs();
  for (const auto& stream : {streams_.gather, streams_.reduce, streams_.offload, streams_.reload}) {
    try {
      stream->synchronize(context_->deadline());
    } catch (const std::exception& error) {
      log(LogLevel::Warning, concat("while cleaning up ", context_->place, ": ", error.what()));
      if (context_->device_order) {  // work that hangs on a device would block every later wait
        abortChannels();
      }
    }
  }
  if (watchdog_ != nullptr) {
    watchdog_->stop();
  }
  const std::lock_guard lock(context_->mutex);
  open_ = false;
  context_->timeout_changed = nullptr;
  pool_->trim();
  reduce_buckets_->clear();
  channels_.reduce->trim();
}

namespace {

std::mutex default_mutex;
std::shared_ptr<Runtime>& defaultSlot() {
  static std::shared_ptr<Runtime> runtime;
  return runtime;
}

}  // namespace

std::shared_ptr<Runtime> defaultRuntime() {
  const std::lock_guard lock(default_mutex);
  return defaultSlot();
}

void setDefaultRuntime(std::shared_ptr<Runtime> runtime) {
  const std::lock_guard lock(default_mutex);
  defaultSlot() = std::move(runtime);
}

}  // namespace dc
