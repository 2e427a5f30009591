// The end of a backward that nobody announced.
#pragma once

#include <cstdint>

namespace dc::ops {

// Inside loss.backward(): ends the graph's backward when autograd is done, once. A backward that runs inside another
// (reentrant checkpointing) is part of it: what ends is the outermost. Outside of one it does nothing; the caller then
// ends it with the operator end_backward.
void endWithAutograd(std::int64_t graph_id);

// True inside of an autograd run. Whoever gathers there must ask, so that runs inside this one are known to be.
bool insideAutograd();

// The number of the outermost autograd run that this thread is in; below 0 outside of one.
std::int64_t outermostAutogradTask();

}  // namespace dc::ops
