#include "deepcompile/runtime/tensor_offload.h"

#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/host_moves.h"

namespace dc {

TensorOffload::TensorOffload(std::shared_ptr<Stream> offload_stream, std::shared_ptr<Stream> reload_stream,
                             std::shared_ptr<HostCopies> copies, std::shared_ptr<Context> context)
    : offload_stream_(std::move(offload_stream)),
      reload_stream_(std::move(reload_stream)),
      copies_(std::move(copies)),
      context_(std::move(context)) {}

TensorOffload::Transfer& TensorOffload::find(const char* operation, std::int64_t id) {
  const auto found = transfers_.find(id);
  check(found != transfers_.end(), [&] {
    return concat(operation, ": no tensor with id ", id, " was offloaded in this graph (", context_->place, ")");
  });
  return found->second;
}

at::Tensor TensorOffload::offload(const at::Tensor& tensor, std::int64_t id) {
  Moved moved = copyToHost(tensor, Holder::Work, *offload_stream_, *copies_, *context_,
                           [id] { return concat("offloading tensor ", id); });
  Transfer& transfer = transfers_[id];
  transfer.device = tensor.device();
  transfer.offloaded = std::move(moved.done);
  transfer.reloading = false;
  return std::move(moved.tensor);
}

void TensorOffload::waitOffload(std::int64_t id) { context_->await(find("wait_offload", id).offloaded); }

at::Tensor TensorOffload::reload(const at::Tensor& host, std::int64_t id) {
  Transfer& transfer = find("reload_tensor", id);
  Moved moved = copyToDevice(host, transfer.device, Holder::Work, transfer.offloaded, *reload_stream_, *context_,
                             [id] { return concat("reloading tensor ", id); });
  transfer.reloaded = std::move(moved.done);
  transfer.reloading = true;
  return std::move(moved.tensor);
}

void TensorOffload::waitReload(std::int64_t id) {
  Transfer& transfer = find("wait_reload", id);
  check(transfer.reloading,
        [&] { return concat("wait_reload: tensor ", id, " is not being reloaded (", context_->place, ")"); });
  context_->await(transfer.reloaded);
}

}  // namespace dc
