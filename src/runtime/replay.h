// Follows the planned order of an iteration while the program runs, and says at each read what the plan does there:
// which gathers to start ahead, and whether the copy stays for a later read.
//
// A *variant* is one order in which the program read its parameters, with its plan. All ranks follow the same variants
// from the same point, so what they start is the same as long as their programs read the same. Where a read is not the
// expected one the rank asks all others (`Agree`) before it does anything else: either all of them came to the same
// read at the same place, or that is an error. So a rank never starts a gather that others do not. After an agreed
// difference the cursor goes to another variant that fits what was read so far; else to the place where this variant
// reads the same (the reads between were skipped); else it stays (an additional read). What was not started ahead is
// gathered on demand by whoever reads it.
//
// Not synchronized: the runtime's lock guards it. Knows no tensor; the executor does what it says.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ATen_fwd.h>
#include <c10/core/ScalarType.h>

namespace dc {

struct ReplayKey {
  std::int64_t id = 0;
  at::ScalarType dtype = at::kFloat;
  bool operator==(const ReplayKey&) const = default;
};

// One call of the program that may need a collective.
struct ReplayAccess {
  enum class Kind : std::uint8_t {
    Read,   // a module reads its parameter, or a backward what autograd saved of it
    Group,  // a leaf module asks for all its parameters; the key is the first
  };
  ReplayKey key;
  Kind kind = Kind::Read;
  bool backward = false;
  bool operator==(const ReplayAccess&) const = default;
};

struct PlannedRead {
  ReplayAccess access;
  bool keep = false;                             // the copy stays for a later read
  std::vector<std::vector<ReplayKey>> launches;  // fused gathers to start before this read
};

using ReplayVariant = std::vector<PlannedRead>;

class ReplayFollower {
 public:
  // Every rank calls it with what differed, by name. Throws unless all came with the same.
  using Agree = std::function<void(const std::string& difference)>;
  using NameOf = std::function<std::string(std::int64_t id)>;

  // What the executor is to do before it serves a read.
  struct Step {
    bool followed = false;  // false: not a matter of the plan
    bool keep = false;
    std::vector<ReplayKey> drop;  // copies that nobody will read
    std::vector<std::vector<ReplayKey>> launches;
  };
  // A cycle (forward and backward) that left every variant.
  struct Divergence {
    std::string difference;           // the first one
    std::vector<ReplayAccess> reads;  // all of the cycle
  };

  // `leaves`: parameters that ranks may read or not, as they route; only their Group is followed. `persistent`: stay
  // from update to update; only the first read after an update is followed.
  ReplayFollower(std::vector<ReplayVariant> variants, std::unordered_set<std::int64_t> leaves,
                 std::unordered_set<std::int64_t> persistent, Agree agree, NameOf name_of);

  void addVariant(ReplayVariant variant);
  std::size_t variants() const { return variants_.size(); }
  const std::unordered_set<std::int64_t>& persistent() const { return persistent_; }
  bool isLeaf(std::int64_t id) const { return leaves_.count(id) > 0; }

  // A cycle begins at its first read. `current`: persistent parameters that need no gather in it.
  bool inCycle() const { return in_cycle_; }
  void begin(std::unordered_set<std::int64_t> current);
  Step next(const ReplayAccess& access);
  // The cycle is over; what to drop.
  std::vector<ReplayKey> end();
  // It was given up; what to drop. Agrees on nothing.
  std::vector<ReplayKey> abandon();

  std::int64_t cycles() const { return cycles_; }            // that ended
  std::int64_t divergences() const { return divergences_; }  // of these, left every variant
  std::int64_t switches() const { return switches_; }        // went over to another variant
  std::int64_t dropped() const { return dropped_; }          // copies that were gathered ahead and not read
  std::vector<Divergence> takeDivergences() { return std::exchange(diverged_, {}); }
  // Of the last cycle; empty while it is being followed.
  const std::vector<ReplayAccess>& lastReads() const { return last_reads_; }

 private:
  bool follows(const ReplayAccess& access) const;
  // The first place from `from` on that is to be followed in this cycle.
  std::size_t following(const ReplayVariant& variant, std::size_t from) const;
  // The place behind what was read so far, when the variant begins with it; its size + 1 otherwise.
  std::size_t placeAfterHistory(const ReplayVariant& variant) const;
  // True when it found a variant that begins with all that was read (`whole`: is that and nothing more).
  bool switchVariant(bool whole);
  void noteDivergence(std::string difference);
  std::string describe(const ReplayAccess& access) const;
  std::string differenceAt(const std::string& found) const;
  bool stays(std::int64_t id) const { return leaves_.count(id) > 0 || persistent_.count(id) > 0; }
  // Where `key` is read next from `from` on; the variant's size when it is not.
  std::size_t nextRead(const ReplayKey& key, std::size_t from) const;
  bool launchedBetween(const ReplayKey& key, std::size_t from, std::size_t to) const;
  // Removes from what is there all that the variant does not read from the cursor on without gathering it anew.
  std::vector<ReplayKey> dropUnneeded();
  // Starts what the variant starts between `from` and the cursor, as far as it is read from the cursor on.
  void startLate(std::size_t from, Step& step);
  void serve(Step& step);
  std::vector<ReplayKey> forgetAll();

  std::vector<ReplayVariant> variants_;
  std::vector<std::int64_t> followed_to_the_end_;  // by variant
  const std::unordered_set<std::int64_t> leaves_;
  const std::unordered_set<std::int64_t> persistent_;
  const Agree agree_;
  const NameOf name_of_;

  bool in_cycle_ = false;
  std::size_t variant_ = 0;
  std::size_t cursor_ = 0;
  bool left_ = false;                         // this cycle has left every variant
  std::unordered_set<std::int64_t> settled_;  // persistent parameters that need no gather any more
  std::vector<ReplayAccess> history_;
  std::vector<ReplayAccess> last_reads_;
  std::vector<ReplayKey> live_;  // copies that are there by the plan
  std::vector<Divergence> diverged_;
  std::int64_t cycles_ = 0;
  std::int64_t divergences_ = 0;
  std::int64_t switches_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace dc
