// Who is still there: asked when a collective did not end, for the message.
#pragma once

#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dc {

// A function that tells the others through `store` that this rank has given up, waits a moment for them to say the
// same, and names those that do not: ranks that are dead, stuck, or waiting for something else. To be called once.
std::function<std::string()> makeRollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

}  // namespace dc
