// What the simple strategies share: persistent parameters, and the memory relief of last resort.
#pragma once

#include "deepcompile/plan/memory_tree.h"
#include "deepcompile/plan/schedule.h"

namespace dc::plan {

// Turns the residencies of each persistent parameter into one, from its first gather to its last
// use.
void keepPersistent(const Problem& problem, Schedule& schedule);

// Memory by slot of a schedule that moves nothing.
MemoryTree memoryOf(const Problem& problem, const Schedule& schedule);

// Moves optimizer states to the host, in the order of their updates (first in, first out), until
// the schedule's peak is within `limit`: each is reloaded before its update and offloaded after it,
// one at a time. When all of them are not enough, a BudgetError says the least that would do.
void offloadStatesToFit(const Problem& problem, Schedule& schedule, Bytes limit, std::string_view strategy);

}  // namespace dc::plan
