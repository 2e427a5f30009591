// Builds schedules with different settings, simulates them and keeps the best.
#pragma once

#include <optional>

#include "deepcompile/plan/strategies/trials.h"
#include "deepcompile/plan/strategy.h"

namespace dc::plan {

struct Attempt {
  Settings settings;
  Plan plan;
  Nanos step = 0;
  Timeline input;     // what it was built for
  Timeline timeline;  // as simulated
  Overrides overrides;
};

// When each position is reached if nothing ever waits.
Timeline undisturbed(const StepGraph& graph);

// The problem and the trials must outlive the search.
class Search {
 public:
  Search(const Problem& problem, Trials& trials);

  // True when this became the best.
  bool attempt(const Settings& settings, const Timeline& timeline, const Overrides& overrides = {});
  // Takes over the other search's best if that is better. Both must have one.
  void take(const Search& other);

  int attempts() const { return attempts_; }
  Trials& trials() const { return *trials_; }
  const Timeline& undisturbed() const { return undisturbed_; }
  const std::optional<Attempt>& best() const { return best_; }

 private:
  const Problem& problem_;
  Trials* trials_;
  Timeline undisturbed_;
  int attempts_ = 0;
  std::optional<Attempt> best_;
};

// Turns single decisions, one by one, where that makes the step shorter: what stays gathered, which
// gathers share a bucket, where gradients are flushed. Each try takes one from `left`.
void polish(const Problem& problem, Search& search, std::size_t& left);

// What no single turn improves, two or three turns at once may. The sequence of tries is the same
// in every run.
void kick(const Problem& problem, Search& search, std::size_t& left);

}  // namespace dc::plan
