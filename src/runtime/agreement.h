// Checks that all ranks agree, before a difference could make them hang or compute wrong numbers.
#pragma once

#include <string>
#include <unordered_map>

#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/registry.h"

namespace dc {

// Proves in one collective, whatever the number of parameters, that the ranks have registered the same parameters and
// graphs, and that their `facts` (lines of text: configuration) are the same. If not, every rank throws the same error,
// which names the ranks that differ and the first difference of each. ZeRO-1 and 2 parameters need a second collective,
// in which each rank learns which rank owns which slice.
void agreeOnRegistration(Communicator& comm, DSParamRegistry& registry,
                         const std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>>& graphs,
                         const std::string& facts = "");

// Debug mode: throws on every rank unless all are about to run the collective `what`. Does nothing for an empty text.
void agreeOnCollective(Communicator& comm, const std::string& what);

}  // namespace dc
