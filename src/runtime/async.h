// Runs work that uses tensors on streams.
#pragma once

#include <concepts>
#include <exception>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// Wraps `work` to run below autograd, and to turn exceptions into "<what()> failed: ...".
template <std::invocable What, typename Work>
Stream::Work detached(What what, Work work) {
  return [what = std::move(what), work = std::move(work)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      work();
    } catch (const std::exception& error) {
      fail(what(), " failed: ", error.what(),
           "\nCheck that every rank is alive and runs the same collectives; `timeout` bounds the wait and `debug` "
           "names the ranks that differ. Where data takes the ranks through other modules (mixture of experts), name "
           "those in config key 'zero_optimization.leaf_modules'");
    }
  };
}

template <std::invocable What, typename Work>
void runDetached(Stream& stream, What what, Work work) {
  stream.run(detached(std::move(what), std::move(work)));
}

// The same for collectives, which have a deadline: see Stream::runWatched.
template <std::invocable What, typename Work>
void runCollective(Stream& stream, What what, Work work) {
  Stream::Work wrapped = detached(what, std::move(work));
  stream.runWatched(std::move(wrapped), std::move(what));
}

}  // namespace dc
