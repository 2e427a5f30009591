#include <algorithm>

#include "deepcompile/plan/strategies/schedule_search.h"

namespace dc::plan {

void polish(const Problem& problem, Search& search, std::size_t& left) {
  const std::size_t slots = problem.graph.nodes.size();
  std::size_t uses = 0;
  for (std::size_t p = 0; p < problem.graph.params.size(); ++p) {
    uses += problem.usage.uses[p].size();
  }
  Overrides trial = search.best()->overrides;
  trial.keep.resize(uses, Overrides::Free);
  trial.join.resize(uses, Overrides::Free);
  trial.flush.resize(slots, Overrides::Free);
  trial.settle.resize(slots, Overrides::Free);
  bool improved = true;
  while (improved && left > 0) {
    improved = false;
    for (auto* choices : {&trial.keep, &trial.join, &trial.flush, &trial.settle}) {
      for (std::size_t i = 0; i < choices->size() && left > 0; ++i) {
        if (choices == &trial.flush && problem.graph.nodes[i].grads.empty()) {
          continue;
        }
        const Overrides::Choice before = (*choices)[i];
        for (const Overrides::Choice other : {Overrides::Yes, Overrides::No, Overrides::Free}) {
          if (other == before || left == 0) {
            continue;
          }
          --left;
          (*choices)[i] = other;
          const Settings settings = search.best()->settings;
          const Timeline timeline = search.best()->input;
          if (search.attempt(settings, timeline, trial)) {
            improved = true;
            break;
          }
          (*choices)[i] = before;
        }
      }
    }
  }
}

void kick(const Problem& problem, Search& search, std::size_t& left) {
  std::uint64_t random = 88172645463325252ull;
  const auto below = [&](std::size_t bound) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<std::size_t>(random % bound);
  };
  while (left > 0) {
    Overrides trial = search.best()->overrides;
    if (trial.keep.empty() || trial.flush.empty()) {
      return;
    }
    for (std::size_t turns = 2 + below(3); turns > 0; --turns) {
      std::vector<Overrides::Choice>* choices[] = {&trial.keep, &trial.join, &trial.flush, &trial.settle};
      std::vector<Overrides::Choice>& list = *choices[below(4)];
      list[below(list.size())] = static_cast<Overrides::Choice>(below(3));
    }
    Search second(problem, search.trials());
    const Settings settings = search.best()->settings;
    --left;
    second.attempt(settings, search.best()->input, trial);
    if (second.best()) {
      polish(problem, second, left);
      search.take(second);
    }
  }
}

}  // namespace dc::plan
