// One tensor's way between the device and the host, each on a stream of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/host_copies.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// A copy that is being made: `tensor` may be read by whoever is ordered after `done`.
struct Moved {
  at::Tensor tensor;
  Event done;
};

// Who keeps the device's memory until the copy is done: the work itself, which notices late, or the caller, who lets go
// of it when he is ordered after `done`, and so at once, however far the device is behind the host.
enum class Holder { Work, Caller };

// Starts copying `tensor` into host memory. `what` names it in errors.
Moved copyToHost(const at::Tensor& tensor, Holder holder, Stream& stream, HostCopies& copies, Context& context,
                 Stream::Describe what);
// Starts copying `host`, once `ready` has passed, into new memory on `device`, which is taken in the caller's order.
Moved copyToDevice(const at::Tensor& host, at::Device device, Holder holder, const Event& ready, Stream& stream,
                   Context& context, Stream::Describe what);

}  // namespace dc
