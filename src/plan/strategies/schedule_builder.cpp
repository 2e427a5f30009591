#include "deepcompile/plan/strategies/schedule_builder.h"

#include <algorithm>

#include "deepcompile/plan/strategy.h"

namespace dc::plan {

std::vector<Bytes> leastMemory(const Problem& problem) {
  std::vector<Bytes> least = problem.usage.live;
  for (std::size_t slot = 0; slot < least.size(); ++slot) {
    least[slot] += problem.usage.gathered[slot];
  }
  // Persistent parameters stay between their uses.
  for (std::size_t p = 0; p < problem.graph.params.size(); ++p) {
    const auto uses = problem.usage.uses[p];
    if (problem.graph.params[p].persistent && !uses.empty()) {
      for (std::size_t i = 1; i < uses.size(); ++i) {
        for (Index slot = uses[i - 1] + 1; slot < uses[i]; ++slot) {
          least[slot] += problem.graph.params[p].bytes;
        }
      }
    }
  }
  return least;
}

ScheduleBuilder::ScheduleBuilder(const Problem& problem, const Settings& settings, const Timeline& timeline,
                                 const Overrides& overrides)
    : problem_(problem),
      graph_(problem.graph),
      usage_(problem.usage),
      settings_(settings),
      leeway_(settings),
      timeline_(timeline),
      overrides_(overrides),
      slots_(static_cast<Index>(problem.graph.nodes.size())),
      memory_([&] {
        std::vector<Bytes> least = problem.usage.live;
        for (std::size_t slot = 0; slot < least.size(); ++slot) {
          least[slot] += problem.usage.gathered[slot];
        }
        return least;
      }()) {
  first_gap_.resize(graph_.params.size() + 1, 0);
  for (std::size_t p = 0; p < graph_.params.size(); ++p) {
    first_gap_[p + 1] = first_gap_[p] + static_cast<Index>(usage_.uses[p].size());
    if (graph_.params[p].persistent && !usage_.uses[p].empty()) {
      const auto uses = usage_.uses[p];
      for (std::size_t i = 1; i < uses.size(); ++i) {
        memory_.add(uses[i - 1] + 1, uses[i] - 1, graph_.params[p].bytes);
      }
    }
  }
}

Schedule ScheduleBuilder::build() {
  planOffload();
  keepInBlocks();
  planReductions();
  requireFit();
  if (graph_.stage == 3) {
    keepGathered();
    makeResidencies();
    prefetch();
  } else {
    schedule_.residencies = refreshAfterUpdate(problem_, leeway_.exactly(&Settings::gather_bucket));
  }
  return std::move(schedule_);
}

// The latest position, not after `latest`, that the compute stream reaches by `time`.
Index ScheduleBuilder::positionAt(Nanos time, Index latest) const {
  const auto end = timeline_.reach.begin() + latest + 1;
  const auto above = std::upper_bound(timeline_.reach.begin(), end, time);
  return above == timeline_.reach.begin() ? 0 : static_cast<Index>(above - timeline_.reach.begin()) - 1;
}

// Whether there is room for these bytes beside what is reserved for prefetching.
bool ScheduleBuilder::fitsBesideReserve(const MemoryTree& memory, Index from, Index to, Bytes bytes) {
  const Bytes room = problem_.budget - bytes;
  const bool surely = settings_.reserve <= room - memory.atMost();
  return !leeway_.above(&Settings::reserve, room - (surely ? memory.atMost() : memory.max(from, to)));
}

void ScheduleBuilder::requireFit() {
  if (!memory_.within(0, slots_ - 1, problem_.budget)) {
    const Bytes peak = memory_.max(0, slots_ - 1);
    const Index at = memory_.firstAbove(0, slots_ - 1, peak - 1);
    const bool leaves = problem_.cost.machine().offload != Offload::Nothing;
    throw BudgetError(concat("node '", graph_.nodes[at].name, "' needs ", peak, " bytes",
                             leaves ? " when all that can leave has left: " : ": ", usage_.gathered[at],
                             " for the gathered parameters that it uses, ", peak - usage_.gathered[at],
                             " for shards, gradients, activations and workspace"),
                      peak);
  }
}

}  // namespace dc::plan
