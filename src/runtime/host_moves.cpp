#include "deepcompile/runtime/host_moves.h"

#include <cstdint>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/runtime/async.h"
#include "deepcompile/runtime/raw_tensor.h"

namespace dc {
namespace {

at::Tensor asHeldBy(Holder holder, const at::Tensor& tensor) {
  if (holder == Holder::Work) {
    return tensor;
  }
  at::Tensor alias = rawTensor(tensor.data_ptr(), tensor.sizes(), tensor.scalar_type(), tensor.device());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

}  // namespace

Moved copyToHost(const at::Tensor& tensor, Holder holder, Stream& stream, HostCopies& copies, Context& context,
                 Stream::Describe what) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor host = copies.take(tensor, stream, context.deadline());
  runDetached(stream, std::move(what), [to = HostCopies::inFlight(host), from = asHeldBy(holder, tensor)] {
    to.tensor.copy_(from, /*non_blocking=*/true);
  });
  Event done = stream.record();
  HostCopies::usedUntil(host, done);
  context.stats.bytes_offloaded.fetch_add(static_cast<std::int64_t>(tensor.nbytes()), std::memory_order_relaxed);
  return {std::move(host), std::move(done)};
}

Moved copyToDevice(const at::Tensor& host, at::Device device, Holder holder, const Event& ready, Stream& stream,
                   Context& context, Stream::Describe what) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor tensor = at::empty_like(host, host.options().device(device).requires_grad(false).pinned_memory(false));
  stream.wait(ready, context.deadline());
  runDetached(stream, std::move(what), [from = HostCopies::inFlight(host), to = asHeldBy(holder, tensor)] {
    to.copy_(from.tensor, /*non_blocking=*/true);
  });
  Event done = stream.record();
  HostCopies::usedUntil(host, done);
  context.stats.bytes_reloaded.fetch_add(static_cast<std::int64_t>(tensor.nbytes()), std::memory_order_relaxed);
  return {std::move(tensor), std::move(done)};
}

}  // namespace dc
