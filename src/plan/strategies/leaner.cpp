#include "deepcompile/plan/strategies/leaner.h"

#include <algorithm>
#include <span>

#include "deepcompile/plan/memory.h"
#include "deepcompile/plan/strategies/settings_search.h"

namespace dc::plan {
namespace {

// A plan made for less memory than there is says so: nothing was refused for lack of it.
void saveByChoice(std::span<Reason> reasons) {
  for (Reason& reason : reasons) {
    if (reason.why == Why::MemoryBound) {
      reason.why = Why::NotWorthIt;
    } else if (reason.why == Why::ForMemory) {
      reason.why = Why::LowersPeak;
    }
  }
}

}  // namespace

// Memory follows from the budget: what does not fit is gathered again, or later. So the search is for the least budget
// under which the step is still short enough, by halving. Whether a budget is enough is answered by a few builds, from
// the settings that were good with more memory.
Plan leaner(const Problem& problem, const Attempt& found, Nanos limit, Trials& trials) {
  const std::vector<Bytes> needs = leastMemory(problem);
  Plan best = found.plan;
  Bytes high = memoryProfile(problem.graph, problem.usage, best).peak;
  const bool leaves = problem.cost.machine().offload != Offload::Nothing;
  Bytes low = leaves || needs.empty() ? 0 : *std::max_element(needs.begin(), needs.end()) - 1;
  // Large graphs get fewer attempts, so that planning stays a matter of a second or two.
  std::size_t left = std::min<std::size_t>(400000 / (problem.graph.nodes.size() + 1), 400);
  constexpr int kAttempts = 40;
  Attempt start = found;
  while (left > 0 && high - low > std::max<Bytes>(high / 128, 1)) {
    const Bytes middle = low + (high - low) / 2;
    const Problem other{problem.graph, problem.usage, problem.cost, middle};
    const Facts facts(other);
    Search search(other, trials);
    const auto enough = [&] { return search.best() && search.best()->step <= limit; };
    const auto attempt = [&](const Settings& settings, const Timeline& timeline, const Overrides& overrides) {
      if (!enough() && left > 0) {
        --left;
        search.attempt(settings, timeline, overrides);
      }
    };
    attempt(start.settings, start.input, start.overrides);
    attempt(start.settings, start.timeline, {});
    Settings lean = start.settings;
    lean.reserve = facts.largest;
    lean.pending = facts.most_grads;
    attempt(lean, search.undisturbed(), {});
    attempt(lean, start.timeline, {});
    if (!enough() && search.best() && left > 0) {
      const int before = search.attempts();
      climb(other, facts, search, before + static_cast<int>(std::min<std::size_t>(kAttempts, left)));
      left -= std::min<std::size_t>(left, static_cast<std::size_t>(search.attempts() - before));
    }
    if (!enough()) {
      low = middle;
      continue;
    }
    start = *search.best();
    best = start.plan;
    best.budget = problem.budget;
    saveByChoice(best.reasons);
    high = std::min(middle, memoryProfile(problem.graph, problem.usage, best).peak);
  }
  return best;
}

}  // namespace dc::plan
