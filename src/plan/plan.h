// A plan: the order in which a rank launches the step's nodes and the communication around them.
// All ranks run the same plan.
//
// What an instruction means, for the runtime, the simulator and the verifier alike:
//   compute N, optimizer N  run on the compute stream, in order.
//   gather OP: P...         starts one fused all-gather on the gather channel, once everything
//   launched before it on the
//                           compute stream has finished. Its buffers are taken here. Under ZeRO-1
//                           and 2 it refreshes the whole parameters after their update and takes no
//                           memory.
//   reduce OP: P...         starts one fused reduction of all gradients of P that no reduction has
//   taken yet; the gradient
//                           buffers are given back at its wait.
//   offload OP, reload OP   copy states, shards or buffers between device and host on channels of
//   their own. The device
//                           memory of an offload is given back at its wait, that of a reload is
//                           taken at its start.
//   wait OP                 the compute stream waits for OP.
//   release P...            gives back gathered parameters (or a shard whose copy on the host is
//   current).
// Memory therefore depends on the order alone, never on timing: a plan that fits, fits at any
// speed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "deepcompile/plan/graph.h"

namespace dc::plan {

enum class ItemKind : std::uint8_t { Param, State, Shard, Buffer };
std::string_view name(ItemKind kind);

struct Item {
  ItemKind kind = ItemKind::Param;
  Index id = kNone;

  bool operator==(const Item&) const = default;
  auto operator<=>(const Item&) const = default;
};

// Why an instruction is where it is; explain.h turns it into words. What a and b mean stands beside
// each.
enum class Why : std::uint8_t {
  Program,        // the graph's own order
  OnDemand,       // gathered right before its use
  NextBlock,      // prefetched one block ahead
  Hoisted,        // moved up until memory was full; a: bytes pending
  Hidden,         // as late as is still hidden; a: duration, b: compute time between launch and use
  Exposed,        // cannot be hidden; a: duration, b: compute time between launch and use
  MemoryBound,    // would start earlier if memory allowed; a: bytes, b: compute time between launch
                  // and use
  NotWorthIt,     // would start earlier, which gains too little for its memory; a and b: as MemoryBound
  NeededNow,      // the wait before the use
  LastUse,        // released after its last use
  NotKept,        // released although used again; a: bytes, b: slots until the next use
  Kept,           // stays gathered to its next use; a: bytes
  BucketFull,     // a reduction bucket reached its size; a: bytes
  BucketEnd,      // nothing more to add; a: bytes
  BesideUpdates,  // held back, to be reduced while parameters are updated that do not need it; a: bytes
  Sunk,           // a wait, put where the work is expected to be done
  ForMemory,      // a wait that gives memory back before it is needed
  LowersPeak,     // a wait that gives memory back so that less is needed at the peak, though there is more
  BeforeUpdate,   // the optimizer needs it
  OverBudget,     // offloaded because the step would not fit; a: bytes
  MakesRoom,      // offloaded so that more can stay gathered; a: bytes
  Returned,       // back to where the step began
  AfterUpdate,    // refreshed after the optimizer
};

struct Reason {
  Why why = Why::Program;
  std::int64_t a = 0;
  std::int64_t b = 0;
};

struct Instruction {
  NodeKind kind = NodeKind::Compute;
  Index node = kNone;  // Compute, Optimizer: the node
  Index op = kNone;    // Gather, Reduce, Offload, Reload: a number of its own from 0; Wait: whom it
                       // waits for
  Index first = 0;     // Gather, Reduce, Offload, Reload, Release: its items
  Index count = 0;

  bool operator==(const Instruction&) const = default;
};

// What it took to make a plan: how often a schedule was built, how many additions to memory and questions about it that
// were, how often a plan was simulated, and how many events those were.
struct Effort {
  std::size_t builds = 0;
  std::size_t memory = 0;
  std::size_t simulations = 0;
  std::size_t events = 0;
};

struct Plan {
  std::string strategy;
  std::string graph;  // the graph's name
  Bytes budget = 0;
  std::vector<Item> start_on_host;    // states and shards that are on the host when a step begins and ends
  std::vector<Index> start_gathered;  // frozen parameters that are gathered when a step begins and ends
  std::vector<Instruction> instructions;
  std::vector<Reason> reasons;  // one for each instruction
  std::vector<Item> items;
  Index ops = 0;
  Effort effort;

  std::span<const Item> itemsOf(const Instruction& instruction) const {
    return {items.data() + instruction.first, static_cast<std::size_t>(instruction.count)};
  }
};

// Appends instructions to a plan.
class PlanWriter {
 public:
  explicit PlanWriter(Plan& plan) : plan_(plan) {}

  void node(const StepGraph& graph, Index slot);
  // Gather, Reduce, Offload or Reload of the items; the number of the operation.
  Index start(NodeKind kind, std::span<const Item> items, Reason reason);
  Index start(NodeKind kind, std::span<const Index> params, Reason reason);
  void wait(Index op, Reason reason);
  void release(Item item, Reason reason);

 private:
  Plan& plan_;
};

// The resource that an instruction runs on; Wait and the nodes run on Compute. Release runs
// nowhere.
Resource resourceOf(NodeKind kind);

// A hash of all that is executed; ranks compare it before they run a plan.
std::string hashOf(const Plan& plan);

// The text form; parsePlan(print(p)) executes the same (reasons are comments and are not read
// back).
std::string print(const StepGraph& graph, const Plan& plan);
Plan parsePlan(std::string_view text, const StepGraph& graph, const std::string& file = "plan");
std::string nameOf(const StepGraph& graph, const Item& item);
Bytes deviceBytes(const StepGraph& graph, const Item& item);

}  // namespace dc::plan
