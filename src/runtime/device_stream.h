// Streams and events of an accelerator, through the interface that PyTorch has for all of them: no CUDA header is
// needed, so these compile everywhere.
//
// The host never blocks: run() enqueues at once, waits are dependencies between streams. What a piece of work captures
// is kept until the device has done it and is let go in a later call on the same stream, so memory needs no
// record_stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/Device.h>

#include "deepcompile/runtime/stream.h"
#include "deepcompile/runtime/watchdog.h"

namespace dc {

// A stream of its own. `watchdog` (may be null) sees that watched work ends.
std::shared_ptr<Stream> makeDeviceStream(at::Device device, std::string name, std::shared_ptr<Watchdog> watchdog);

// Which stream of `device` is current for the caller: a number that is the same for the same stream. 0 on CPU.
std::int64_t currentStream(at::Device device);

// Whatever stream is current for the caller.
std::shared_ptr<Stream> makeCallerStream(at::Device device);

}  // namespace dc
