// What to do at each event of a step: the planner's decisions as a table that the runtime follows.
//
// Parameters are known by the ids that they were registered with, copies by id and dtype. A schedule is data: a new one
// takes effect at the next step, and nothing is compiled for it.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ATen_fwd.h>
#include <c10/core/ScalarType.h>

namespace dc {

// A gathered copy of a parameter.
struct CopyKey {
  std::int64_t id = -1;
  at::ScalarType dtype = at::kFloat;
  bool operator==(const CopyKey&) const = default;
};

// What the program tells the runtime, in program order, at points where a collective may be needed or started.
struct ProgramEvent {
  enum class Kind : std::uint8_t {
    Read,        // a module reads its parameter, or a backward what autograd saved of it
    Group,       // a leaf module asks for all its parameters; the key is the first
    BeginGraph,  // a compiled graph begins to run; no key
  };
  CopyKey key;
  Kind kind = Kind::Read;
  bool backward = false;
  bool operator==(const ProgramEvent&) const = default;
};

// Moves of optimizer states, by parameter; in this order.
struct StateMoves {
  std::vector<std::int64_t> leave = {};  // start D2H
  std::vector<std::int64_t> free = {};   // free the device copy
  std::vector<std::int64_t> fetch = {};  // start H2D
  bool empty() const { return leave.empty() && free.empty() && fetch.empty(); }
  bool operator==(const StateMoves&) const = default;
};

struct ScheduledEvent {
  ProgramEvent event;
  bool keep = false;                               // the copy stays for a later read
  std::vector<std::vector<CopyKey>> gathers = {};  // to start before this event, each list as one collective
  StateMoves moves = {};                           // to do before this event
};

// One order in which the program's events come: those of an iteration from the first read of its forward to the end of
// its backward, or those of one compiled graph, which begin with BeginGraph.
using StepSchedule = std::vector<ScheduledEvent>;

}  // namespace dc
