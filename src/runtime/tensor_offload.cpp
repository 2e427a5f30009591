#include "deepcompile/runtime/tensor_offload.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/async.h"

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
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor host = copies_->take(tensor, *offload_stream_, context_->deadline());
  Transfer& transfer = transfers_[id];
  transfer.device = tensor.device();
  transfer.reloading = false;
  runDetached(
      *offload_stream_, [id] { return concat("offloading tensor ", id); },
      [to = HostCopies::inFlight(host), tensor] { to.tensor.copy_(tensor, true); });
  transfer.offloaded = offload_stream_->record();
  HostCopies::usedUntil(host, transfer.offloaded);
  context_->stats.bytes_offloaded.fetch_add(static_cast<std::int64_t>(tensor.nbytes()), std::memory_order_relaxed);
  return host;
}

void TensorOffload::waitOffload(std::int64_t id) { context_->await(find("wait_offload", id).offloaded); }

at::Tensor TensorOffload::reload(const at::Tensor& host, std::int64_t id) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Transfer& transfer = find("reload_tensor", id);
  at::Tensor tensor =
      at::empty_like(host, host.options().device(transfer.device).requires_grad(false).pinned_memory(false));
  reload_stream_->wait(transfer.offloaded, context_->deadline());
  runDetached(
      *reload_stream_, [id] { return concat("reloading tensor ", id); },
      [from = HostCopies::inFlight(host), tensor] { tensor.copy_(from.tensor, true); });
  transfer.reloaded = reload_stream_->record();
  HostCopies::usedUntil(host, transfer.reloaded);
  transfer.reloading = true;
  context_->stats.bytes_reloaded.fetch_add(static_cast<std::int64_t>(tensor.nbytes()), std::memory_order_relaxed);
  return tensor;
}

void TensorOffload::waitReload(std::int64_t id) {
  Transfer& transfer = find("wait_reload", id);
  check(transfer.reloading,
        [&] { return concat("wait_reload: tensor ", id, " is not being reloaded (", context_->place, ")"); });
  context_->await(transfer.reloaded);
}

}  // namespace dc
