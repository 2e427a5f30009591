// Builds one schedule for given settings and a given idea of when each slot runs. The planner
// builds several and keeps the best; each build is O(n log n).
#pragma once

#include <span>

#include "deepcompile/plan/memory_tree.h"
#include "deepcompile/plan/schedule.h"
#include "deepcompile/plan/strategies/leeway.h"

namespace dc::plan {

// When the compute stream reaches each position (one more than there are slots), and which uses
// were worth saving.
struct Timeline {
  std::vector<Nanos> reach;
  // By parameter and use (in the order of Usage::uses, all parameters one after the other):
  // thousandths of the gather for this use that delay the step. Empty: all count the same.
  std::vector<std::int32_t> weight;
  std::uint64_t key = 0;  // the same for the same times and weights
};

// Single decisions that a build must take, against its own rules. Empty vectors: none.
struct Overrides {
  enum Choice : std::uint8_t { Free, Yes, No };
  std::vector<Choice> keep;    // by use (as Timeline::weight): the parameter stays from the use before
  std::vector<Choice> join;    // by use: its gather joins the bucket of the gather before
  std::vector<Choice> flush;   // by slot: the bucket of gradients is reduced after it
  std::vector<Choice> settle;  // by slot: all reductions are waited for before it, to give their memory back
};

class ScheduleBuilder {
 public:
  // Throws BudgetError when nothing fits.
  ScheduleBuilder(const Problem& problem, const Settings& settings, const Timeline& timeline,
                  const Overrides& overrides);
  Schedule build();
  // With which other settings the build would decide as it did.
  const Leeway& leeway() const { return leeway_; }
  // Additions to memory and questions about it so far, each of O(log n) at most.
  std::size_t memoryWork() const { return memory_.work(); }

 private:
  struct Gap;
  struct Bucket;

  void planReductions();
  Nanos deferFrom(Index first_update) const;
  void planOffload();
  void offloadStates(bool forced);
  void offloadBuffers(bool forced);
  void offloadShards();
  void requireFit();
  void keepInBlocks();
  void keepGathered();
  std::vector<Gap> gapsToKeep();
  bool keepAll(std::span<const Gap> gaps);
  void keepUntilFull(std::span<const Gap> gaps);
  void keepIfFits(std::span<const Gap> gaps);
  bool staysForGood(Index param);
  void makeResidencies();
  void prefetch();
  std::vector<Bucket> bucketGathers();
  bool fitsBesideReserve(const MemoryTree& memory, Index from, Index to, Bytes bytes);
  static Overrides::Choice choice(const std::vector<Overrides::Choice>& choices, Index at) {
    return choices.empty() ? Overrides::Free : choices[at];
  }
  Index positionAt(Nanos time, Index latest) const;

  const Problem& problem_;
  const StepGraph& graph_;
  const Usage& usage_;
  const Settings& settings_;
  Leeway leeway_;
  const Timeline& timeline_;
  const Overrides& overrides_;
  const Index slots_;
  MemoryTree memory_;
  Schedule schedule_;
  std::vector<char> kept_;        // by use: no gather of its own, the parameter has stayed from the use before
  std::vector<Index> first_gap_;  // parameter -> index of its first use among all uses
};

// Memory by slot that every plan of the graph needs: what is live and the parameters of the slot
// itself.
std::vector<Bytes> leastMemory(const Problem& problem);

}  // namespace dc::plan
