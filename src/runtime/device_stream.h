// Streams and events of an accelerator, through the interface that PyTorch has for all of them: no CUDA header is
// needed, so these compile everywhere.
//
// The host never blocks: run() enqueues at once, and waits are dependencies between streams. What a piece of work
// captures is kept until the device has done it, and is freed by a later call on the same stream. So memory needs no
// record_stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/Device.h>

#include "deepcompile/runtime/stream.h"
#include "deepcompile/runtime/watchdog.h"

namespace dc {

// A new stream of the device. `watchdog` (may be null) enforces the deadlines of runWatched.
std::shared_ptr<Stream> makeDeviceStream(at::Device device, std::string name, std::shared_ptr<Watchdog> watchdog);

// A number that identifies the caller's current stream of `device`. 0 on CPU.
std::int64_t currentStream(at::Device device);

// A stream object for whatever stream is current when it is used.
std::shared_ptr<Stream> makeCallerStream(at::Device device);

}  // namespace dc
