// All ranks mean the same: found out before it can hang or give wrong numbers.
#pragma once

#include <string>
#include <unordered_map>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/registry.h"

namespace dc {

// Proves in one collective, whatever the number of parameters, that the ranks have registered the same parameters and
// graphs, and that their `facts` (lines of text) are the same. Where they have not, every rank throws the same account
// of which rank differs and in what. ZeRO-1 and 2 parameters take a second collective, by which each rank learns who
// owns which slice.
void agreeOnRegistration(Communicator& comm, DSParamRegistry& registry,
                         const std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>>& graphs,
                         const std::string& facts = "");

// Debug mode: throws on every rank unless all are about to run the collective `what`. Nothing for an empty text.
void agreeOnCollective(Communicator& comm, const std::string& what);

}  // namespace dc
