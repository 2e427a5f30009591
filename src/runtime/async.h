// Work for streams that handles tensors.
#pragma once

#include <concepts>
#include <exception>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// Runs `work` on `stream` below autograd. What it throws is reported as "<what()> failed: ...".
template <std::invocable What, typename Work>
void runDetached(Stream& stream, What what, Work work) {
  stream.run([what = std::move(what), work = std::move(work)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      work();
    } catch (const std::exception& error) {
      fail(what(), " failed: ", error.what(),
           "\nCheck that every rank is alive and runs the same collectives; `timeout` bounds the wait and `debug` "
           "names ",
           "the ranks that differ");
    }
  });
}

}  // namespace dc
