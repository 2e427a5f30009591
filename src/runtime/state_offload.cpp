#include "deepcompile/runtime/state_offload.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "deepcompile/base/error.h"

namespace dc {

StateOffload::StateOffload(at::Device device, std::shared_ptr<Stream> offload_stream,
                           std::shared_ptr<Stream> reload_stream, std::shared_ptr<HostCopies> copies,
                           std::shared_ptr<Context> context)
    : device_(device),
      offload_stream_(std::move(offload_stream)),
      reload_stream_(std::move(reload_stream)),
      copies_(std::move(copies)),
      context_(std::move(context)) {}

void StateOffload::set(std::int64_t id, std::vector<at::Tensor> tensors, std::string name) {
  States before;  // destroyed after the lock is released: freeing the last reference to a Python tensor takes the GIL
  const std::lock_guard lock(context_->mutex);
  const auto found = states_.find(id);
  if (found != states_.end()) {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
    if (std::ranges::equal(found->second.tensors, tensors, same)) {
      return;
    }
    arrive(found->second);
    before = std::move(found->second);
    states_.erase(found);
  }
  if (tensors.empty()) {
    return;
  }
  const auto on_device = [this](const at::Tensor& tensor) { return tensor.device() == device_; };
  const bool here = std::ranges::all_of(tensors, on_device);
  check(here || std::ranges::none_of(tensors, on_device), [&] {
    return concat("the optimizer's states of parameter '", name, "' are on ", tensors.front().device().str(),
                  " and others on ", device_.str(), "; they move together (", context_->place, ")");
  });
  for (const at::Tensor& tensor : tensors) {
    check(tensor.device() == device_ || tensor.device().is_cpu(), [&] {
      return concat("an optimizer's state of parameter '", name, "' is on ", tensor.device().str(),
                    ", which is neither ", device_.str(), " nor the host (", context_->place, ")");
    });
  }
  const Place place = here ? Place::Device : Place::Host;
  states_.emplace(id, States{std::move(name), std::move(tensors), {}, place, Event()});
}

void StateOffload::start(States& states, Place towards) {
  const bool leaving = towards == Place::Leaving;
  try {
    for (const at::Tensor& tensor : states.tensors) {
      const auto what = [verb = leaving ? "offloading" : "reloading", name = states.name] {
        return concat(verb, " the optimizer's states of parameter '", name, "'");
      };
      states.copies.push_back(
          leaving ? copyToHost(tensor, Holder::Caller, *offload_stream_, *copies_, *context_, what)
                  : copyToDevice(tensor, device_, Holder::Caller, states.on_host, *reload_stream_, *context_, what));
    }
  } catch (...) {  // out of memory: the states stay where they are
    drop(states);
    throw;
  }
  states.place = towards;
}

void StateOffload::drop(States& states) {
  for (const Moved& copy : states.copies) {
    context_->await(copy.done);
  }
  states.copies.clear();
}

void StateOffload::arrive(States& states, bool stay) {
  if (states.copies.empty()) {
    return;
  }
  for (const Moved& copy : states.copies) {
    context_->await(copy.done);
  }
  const bool leaving = states.place == Place::Leaving;
  states.on_host = leaving && !stay ? states.copies.back().done : Event();
  if (!(leaving && stay)) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < states.tensors.size(); ++i) {
      states.tensors[i].set_data(states.copies[i].tensor);
    }
  }
  states.copies.clear();
  states.place = leaving && !stay ? Place::Host : Place::Device;
}

void StateOffload::move(const StateMoves& moves) {
  const std::lock_guard lock(context_->mutex);
  moveLocked(moves);
}

void StateOffload::moveLocked(const StateMoves& moves) {
  leave(moves.leave);
  free(moves.free);
  fetch(moves.fetch);
}

void StateOffload::leave(at::IntArrayRef ids) {
  for (const std::int64_t id : ids) {
    const auto found = states_.find(id);
    if (found != states_.end() && found->second.place == Place::Returning) {
      drop(found->second);
      found->second.place = Place::Host;
    } else if (found != states_.end() && found->second.place == Place::Device) {
      start(found->second, Place::Leaving);
    }
  }
}

void StateOffload::free(at::IntArrayRef ids) {
  for (const std::int64_t id : ids) {
    if (const auto found = states_.find(id); found != states_.end() && found->second.place == Place::Leaving) {
      arrive(found->second);
    }
  }
}

void StateOffload::fetch(at::IntArrayRef ids) {
  for (const std::int64_t id : returns_allowed_ ? ids : at::IntArrayRef()) {
    const auto found = states_.find(id);
    if (found != states_.end() && found->second.place == Place::Host) {
      start(found->second, Place::Returning);
    }
  }
}

void StateOffload::allowReturns(bool allowed) {
  const std::lock_guard lock(context_->mutex);
  returns_allowed_ = allowed;
}

void StateOffload::require(at::IntArrayRef ids) {
  const std::lock_guard lock(context_->mutex);
  for (const std::int64_t id : ids) {
    const auto found = states_.find(id);
    if (found == states_.end()) {
      continue;
    }
    if (found->second.place == Place::Host) {
      start(found->second, Place::Returning);
    }
    arrive(found->second, /*stay=*/true);
  }
}

void StateOffload::settle() {
  const std::lock_guard lock(context_->mutex);
  for (auto& [_, states] : states_) {
    arrive(states);
  }
  offload_stream_->synchronize(context_->deadline());
}

std::int64_t StateOffload::bytesAway() const {
  const std::lock_guard lock(context_->mutex);
  std::int64_t bytes = 0;
  for (const auto& [_, states] : states_) {
    if (states.place == Place::Host) {
      for (const at::Tensor& tensor : states.tensors) {
        bytes += static_cast<std::int64_t>(tensor.nbytes());
      }
    }
  }
  return bytes;
}

std::vector<std::int64_t> StateOffload::away() const {
  const std::lock_guard lock(context_->mutex);
  std::vector<std::int64_t> ids;
  for (const auto& [id, states] : states_) {
    if (states.place != Place::Device) {
      ids.push_back(id);
    }
  }
  return ids;
}

}  // namespace dc
