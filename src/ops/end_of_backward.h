// The end of a backward that nobody announced.
#pragma once

#include <cstdint>

namespace dc::ops {

// Inside loss.backward(): ends the graph's backward when autograd is done, once. Outside of one it does nothing; the
// caller then ends it with the operator end_backward.
void endWithAutograd(std::int64_t graph_id);

// The number of the autograd run that this thread is in; below 0 outside of one.
std::int64_t currentAutogradTask();

}  // namespace dc::ops
