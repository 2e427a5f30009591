#include "deepcompile/comm/shm_backend.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/interpreter.h"
#include "deepcompile/comm/shared_tensor.h"
#include "deepcompile/comm/shm_rendezvous.h"
#include "deepcompile/shm/collectives.h"

namespace dc {
namespace {

// Errors name ranks as the group counts them; so the name of a part of the world says who they are.
std::string nameOf(const c10d::Backend::Options& options, int size) {
  const auto& ranks = options.global_ranks_in_group;
  std::string all;
  bool whole = true;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    whole = whole && ranks[i] == i;
    if (i < 16) {
      all += concat(i == 0 ? "" : ",", ranks[i]);
    }
  }
  const std::string name = options.group_name.empty() ? "default" : options.group_name;
  if (whole || ranks.size() != static_cast<std::size_t>(size)) {
    return name;
  }
  return concat(name, " (global ranks ", all, ranks.size() > 16 ? ",..." : "", ")");
}

std::shared_ptr<shm::Group> openGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                      const std::string& name, std::chrono::milliseconds timeout) {
  StoreRendezvous rendezvous(std::move(store), rank);
  shm::GroupOptions options;
  options.name = name;
  options.timeout = timeout;
  std::string reason;
  std::shared_ptr<shm::Group> group = shm::Group::open(rendezvous, rank, size, options, reason);
  check(group != nullptr, [&] {
    return concat("the backend 'shm' needs memory that all ranks of group '", name, "' share, and ", reason,
                  ". Use gloo for this group: init_process_group(\"gloo\")");
  });
  return group;
}

// Sets the timeout of the group for one operation.
class Deadline {
 public:
  Deadline(shm::Group& group, std::chrono::milliseconds timeout) : group_(group), before_(group.timeout()) {
    group_.setTimeout(timeout);
  }
  ~Deadline() { group_.setTimeout(before_); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  shm::Group& group_;
  const std::chrono::milliseconds before_;
};

// What the end of the process has to see to.
struct Open {
  std::weak_ptr<shm::Group> group;
  std::weak_ptr<WorkQueue> queue;
  pid_t owner;
};

struct OpenBackends {
  std::mutex mutex;
  std::vector<Open> all;
};

OpenBackends& openBackends() {
  static auto* backends = new OpenBackends;  // outlives every thread
  return *backends;
}

}  // namespace

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size),
      options_(std::move(options)),
      name_(nameOf(*options_, size)),
      owner_(::getpid()),
      timeout_(options_->timeout.count()),
      group_(openGroup(std::move(store), rank, size, name_, options_->timeout)),
      queue_(std::make_shared<WorkQueue>()) {
  OpenBackends& backends = openBackends();
  const std::lock_guard lock(backends.mutex);
  std::erase_if(backends.all, [](const Open& open) { return open.group.expired(); });
  backends.all.push_back({group_, queue_, owner_});
}

ShmBackend::~ShmBackend() {
  if (::getpid() != owner_) {
    leaveToParent();
    return;
  }
  const InterpreterReleased others_run;
  close();
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(*options_);  // a copy: split_group changes what it gets
}

void ShmBackend::setTimeout(Millis timeout) {
  timeout_.store(timeout.count());
  const std::lock_guard lock(mutex_);
  if (messenger_) {
    messenger_->setTimeout(timeout);
  }
}

void ShmBackend::shutdown() {
  if (::getpid() == owner_) {
    const InterpreterReleased others_run;
    close();
  }
}

void ShmBackend::abort() {
  if (::getpid() != owner_) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (group_) {
      group_->poison(concat("rank ", getRank(), " has aborted the process group '", name_, "'"));
    }
  }
  shutdown();
}

// In this order: the queue and the messenger use the group.
void ShmBackend::close() {
  queue_->close();
  std::unique_ptr<shm::Messenger> messenger;
  std::shared_ptr<shm::Group> group;
  {
    const std::lock_guard lock(mutex_);
    messenger = std::move(messenger_);
    group = std::move(group_);
  }
  messenger.reset();
}

// A forked child has copies of the objects but none of their threads; they must not be joined, nor speak for the rank.
void ShmBackend::leaveToParent() {
  static_cast<void>(messenger_.release());
  new std::shared_ptr<shm::Group>(std::move(group_));
  new std::shared_ptr<WorkQueue>(std::move(queue_));
}

c10d::ErrorType ShmBackend::getError() {
  const std::lock_guard lock(mutex_);
  return group_ && group_->poisoned() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

std::shared_ptr<shm::Group> ShmBackend::group() const {
  check(::getpid() == owner_, [&] {
    return concat("the process group '", name_, "' belongs to process ", owner_,
                  "; a forked child cannot use it, only a group of its own");
  });
  const std::lock_guard lock(mutex_);
  check(group_ != nullptr, [&] { return concat("the process group '", name_, "' has been shut down"); });
  return group_;
}

void ShmBackend::checkRoot(const char* call, std::int64_t root) const {
  check(root >= 0 && root < getSize(),
        [&] { return concat(call, ": root ", root, " is no rank of group '", name_, "' of ", getSize(), " ranks"); });
}

c10::intrusive_ptr<ShmWork> ShmBackend::makeWork(const Request& request, const Tensors& inputs, Tensors outputs) {
  const std::uint64_t sequence = sequence_.fetch_add(1) + 1;
  return c10::make_intrusive<ShmWork>(
      getRank(), request.type, request.title, inputs, std::move(outputs), sequence,
      concat("rank ", getRank(), ", ", request.name(), " number ", sequence, " in group '", name_, "'"));
}

ShmBackend::WorkPtr ShmBackend::submit(const Request& request, const Tensors& inputs, Tensors outputs, Body body) {
  auto group = this->group();
  auto work = makeWork(request, inputs, std::move(outputs));
  const Millis timeout(request.timeout.count() > 0 ? request.timeout.count() : timeout_.load());
  queue_->submit({work,
                  [group = std::move(group), timeout, body = std::move(body)] {
                    const Deadline deadline(*group, timeout);
                    // Raw memory is written, and copies of results are ours to make in any mode of the caller's.
                    const at::AutoDispatchBelowADInplaceOrView below_autograd;
                    body(*group);
                  }},
                 request.async);
  note(work);
  return work;
}

void ShmBackend::note(const WorkPtr& work) {
  const std::lock_guard lock(mutex_);
  if (coalesced_) {
    coalesced_->push_back(work);
  }
}

void ShmBackend::startCoalescing() {
  const std::lock_guard lock(mutex_);
  check(!coalesced_, [&] { return concat("startCoalescing twice in group '", name_, "'"); });
  coalesced_.emplace();
}

ShmBackend::WorkPtr ShmBackend::endCoalescing() {
  const std::lock_guard lock(mutex_);
  check(coalesced_.has_value(), [&] { return concat("endCoalescing without startCoalescing in group '", name_, "'"); });
  auto works = std::move(*coalesced_);
  coalesced_.reset();
  return works.size() == 1 ? works[0] : combine(std::move(works));
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) {
    return nullptr;
  }
  auto part = c10::make_intrusive<Options>("shm", options ? options->timeout : Millis(timeout_.load()));
  part->group_name = options && !options->group_name.empty() ? options->group_name : concat(name_, ":split");
  const auto& global = options_->global_ranks_in_group;
  std::string members;  // parts that are split off at the same time may get one store
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    part->global_ranks_in_group.push_back(index < global.size() ? global[index] : index);
    members += concat(rank, ",");
  }
  auto meeting = c10::make_intrusive<c10d::PrefixStore>(concat("ranks/", members), store);
  return c10::make_intrusive<ShmBackend>(std::move(meeting), static_cast<int>(own - ranks.begin()),
                                         static_cast<int>(ranks.size()), std::move(part));
}

void closeShmBackends(std::chrono::milliseconds grace) {
  std::vector<Open> all;
  {
    OpenBackends& backends = openBackends();
    const std::lock_guard lock(backends.mutex);
    all = std::move(backends.all);
  }
  const auto deadline = std::chrono::steady_clock::now() + grace;
  for (const Open& open : all) {
    const auto group = open.group.lock();
    const auto queue = open.queue.lock();
    if (!group || !queue || open.owner != ::getpid()) {
      continue;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (!queue->awaitIdle(std::max(left, std::chrono::milliseconds(0)))) {
      group->poison(concat("rank ", group->rank(), " ends with operations of group '", group->name(), "' pending"));
    }
    queue->close();
  }
}

std::shared_ptr<c10::Allocator> ShmBackend::getMemAllocator() { return sharedAllocator(); }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  return emptyShared({size}, c10::typeMetaToScalarType(options.dtype()));
}

}  // namespace dc
