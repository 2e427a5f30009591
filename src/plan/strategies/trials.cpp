#include "deepcompile/plan/strategies/trials.h"

namespace dc::plan {
namespace {

// Mixes whole words: these keys stay within a process, and each attempt needs some.
class Key {
 public:
  void add(std::int64_t value) {
    value_ = (value_ ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
    value_ ^= value_ >> 29;
  }
  void add(Index high, Index low) {
    add(static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                                  static_cast<std::uint32_t>(low)));
  }
  template <typename Values>
  void addAll(const Values& values) {
    add(static_cast<std::int64_t>(values.size()));
    for (const auto value : values) {
      add(static_cast<std::int64_t>(value));
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037ull;
};

}  // namespace

std::uint64_t keyOf(const Timeline& timeline) {
  Key key;
  key.addAll(timeline.reach);
  key.addAll(timeline.weight);
  return key.value();
}

std::uint64_t inputsOf(const Problem& problem, const Settings& settings, const Timeline& timeline,
                       const Overrides& overrides) {
  Key key;
  key.add(problem.budget);
  key.add(static_cast<std::int64_t>(timeline.key));
  key.add(settings.stretch);
  key.add(settings.defer > 0 ? settings.defer_after : 0);
  key.add(problem.cost.machine().offload == Offload::Nothing ? 0 : settings.lead);
  for (const auto* choices : {&overrides.keep, &overrides.join, &overrides.flush, &overrides.settle}) {
    key.addAll(*choices);
  }
  return key.value();
}

Nanos Trials::least(std::uint64_t inputs, const Settings& settings) const {
  const auto found = built_.find(inputs);
  if (found == built_.end()) {
    return 0;
  }
  Nanos least = 0;
  for (const Built& built : found->second) {
    if (built.least > least && built.leeway.holds(settings)) {
      least = built.least;
    }
  }
  return least;
}

std::uint64_t keyOf(const Schedule& schedule) {
  Key key;
  key.add(static_cast<std::int64_t>(schedule.residencies.size()));
  for (const Residency& residency : schedule.residencies) {
    key.add(residency.param, residency.launch);
    key.add(residency.first, residency.group);
  }
  key.add(static_cast<std::int64_t>(schedule.reductions.size()));
  for (const Reduction& reduction : schedule.reductions) {
    key.add(reduction.launch, reduction.wait);
    key.addAll(reduction.params);
  }
  key.add(static_cast<std::int64_t>(schedule.moves.size()));
  for (const Move& move : schedule.moves) {
    key.add(static_cast<Index>(move.item.kind), move.item.id);
    key.add(move.offload, move.offloaded);
    key.add(move.reload, move.need);
  }
  key.addAll(schedule.shard_on_host);
  key.addAll(schedule.start_gathered);
  return key.value();
}

}  // namespace dc::plan
