// The decisions of a strategy, by slot, and how they become a plan. "At position k" means between
// slot k-1 and slot k; position n (the number of nodes) is the end of the step.
#pragma once

#include <vector>

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/plan.h"
#include "deepcompile/plan/usage.h"

namespace dc::plan {

// What a strategy works on. The references must outlive it.
struct Problem {
  const StepGraph& graph;
  const Usage& usage;
  const CostModel& cost;
  Bytes budget;
};

// A parameter is gathered at `launch`, used from slot `first` to slot `last`, and then released.
struct Residency {
  Index param = kNone;
  Index launch = 0;
  Index first = 0;
  Index last = 0;
  Index group = kNone;  // residencies of one group are one collective; all have the same launch
  Reason reason;
  Reason release_reason;
};

// Gradients that are reduced together, from `launch` to `wait`.
struct Reduction {
  std::vector<Index> params;
  Index launch = 0;
  Index wait = 0;
  Reason reason;
  Reason wait_reason;
};

// States: reloaded, used by the optimizer at slot `need`, offloaded again. Buffers: offloaded,
// reloaded, read at `need`.
struct Move {
  Item item;
  Index offload = 0;
  Index offloaded = 0;  // position of the offload's wait
  Index reload = 0;
  Index need = 0;  // the reload is waited for before this slot
  Reason reason;
};

struct Schedule {
  std::vector<Residency> residencies;
  std::vector<Reduction> reductions;
  std::vector<Move> moves;
  std::vector<char> shard_on_host;    // by parameter; empty: none
  std::vector<Index> start_gathered;  // frozen parameters that are never released
};

// Writes the schedule as a plan. At a position: reductions and offloads start, then waits give
// memory back, then reloads and gathers take it, then the waits that the slot needs, the slot, and
// releases.
Plan emit(const Problem& problem, const Schedule& schedule, std::string_view strategy);

// Gradients in buckets of at least `bucket` bytes, each reduced after its last contribution and
// waited for when the one `depth` buckets later starts (at the latest before its update).
// Micro-batches are not mixed; ZeRO-1 reduces at the end.
std::vector<Reduction> bucketReductions(const Problem& problem, Bytes bucket, std::size_t depth);

// ZeRO-1 and 2: whole parameters are gathered again after their update, in buckets of at least
// `bucket` bytes.
std::vector<Residency> refreshAfterUpdate(const Problem& problem, Bytes bucket);

// Memory by slot that the reductions hold beyond the slots that made the gradients, added to
// `memory`.
class MemoryTree;
void holdGradients(const Problem& problem, const std::vector<Reduction>& reductions, MemoryTree& memory);

}  // namespace dc::plan
