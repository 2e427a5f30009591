// Sends and receives. They run beside the collectives, on a thread of their own.
#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/shm_backend.h"
#include "deepcompile/comm/shm_tensors.h"

namespace dc {
namespace {

const at::Tensor& onlyOne(const std::vector<at::Tensor>& tensors, const char* call) {
  check(tensors.size() == 1, [&] { return concat(call, ": ", tensors.size(), " tensors instead of one"); });
  return tensors[0];
}

}  // namespace

shm::Messenger& ShmBackend::messenger() {
  const auto group = this->group();
  const std::lock_guard lock(mutex_);
  if (!messenger_) {
    messenger_ = std::make_unique<shm::Messenger>(group);
    messenger_->setTimeout(Millis(timeout_.load()));
  }
  return *messenger_;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const Request request = {c10d::OpType::SEND, "shm:send", Millis(0), true};
  const at::Tensor& tensor = onlyOne(tensors, request.name());
  checkInput(tensor, tensor.scalar_type(), request.name());
  checkRoot(request.name(), to);
  shm::Messenger& messenger = this->messenger();
  const auto work = makeWork(request, tensors, {});
  const at::Tensor plain = readable(tensor);
  messenger.send(runOf(plain), to, static_cast<std::uint64_t>(tag),
                 [work, plain](std::exception_ptr error, int) { work->complete(std::move(error)); });
  note(work);
  return work;
}

ShmBackend::WorkPtr ShmBackend::receive(const Request& request, Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = onlyOne(tensors, request.name());
  checkOutput(tensor, tensor.scalar_type(), request.name());
  shm::Messenger& messenger = this->messenger();
  const auto work = makeWork(request, {}, tensors);
  const Writable target(tensor, Writable::Contents::Ignore);
  messenger.receive({target.data(), bytesOf(tensor)}, from, static_cast<std::uint64_t>(tag),
                    [work, target](std::exception_ptr error, int source) {
                      if (!error) {
                        try {
                          const at::AutoDispatchBelowADInplaceOrView below_autograd;
                          target.commit();
                        } catch (...) {
                          error = std::current_exception();
                        }
                      }
                      work->complete(std::move(error), source);
                    });
  note(work);
  return work;
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  const Request request = {c10d::OpType::RECV, "shm:recv", Millis(0), true};
  checkRoot(request.name(), from);
  return receive(request, tensors, from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive({c10d::OpType::RECVANYSOURCE, "shm:recv_any_source", Millis(0), true}, tensors, shm::kAnySource, tag);
}

}  // namespace dc
