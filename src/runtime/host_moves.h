// Copies one tensor between the device and the host, on an offload stream or a reload stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/host_copies.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// A copy in flight: `tensor` may be read after `done`.
struct Moved {
  at::Tensor tensor;
  Event done;
};

// Who keeps the device's memory alive until the copy is done. Work: the stream's work, which frees it when the host
// notices that the event has passed. Caller: the caller, which can free it at once after ordering its stream after
// `done`, however far the device lags behind the host.
enum class Holder { Work, Caller };

// Starts copying `tensor` into host memory. `what` names it in errors.
Moved copyToHost(const at::Tensor& tensor, Holder holder, Stream& stream, HostCopies& copies, Context& context,
                 Stream::Describe what);
// Starts copying `host`, once `ready` has passed, into new memory on `device`, allocated on the caller's stream.
Moved copyToDevice(const at::Tensor& host, at::Device device, Holder holder, const Event& ready, Stream& stream,
                   Context& context, Stream::Describe what);

}  // namespace dc
