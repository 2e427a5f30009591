// The books that the verifier keeps while it walks through a plan. Only verifier*.cpp include this.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "deepcompile/plan/verifier.h"

namespace dc::plan::detail {

enum class Place : std::uint8_t { Device, Leaving, Host, Coming, Nowhere };

// What is known of one parameter at one point of the plan.
struct ParamState {
  enum Copy : std::uint8_t { Absent, Flying, Ready } copy = Absent;
  Index gather_op = kNone;
  Index released_at = kNone;
  int gathers = 0;
  bool stale = false;  // ZeRO-1 and 2: updated, and not gathered again yet
  int open = 0;        // contributions that no reduction has taken
  Index open_micro = kNone;
  int contributed = 0;
  int contributions = 0;  // in the whole step
  int flying_reductions = 0;
  Place shard = Place::Device;
  Place state = Place::Device;
  Index shard_op = kNone;
  Index state_op = kNone;
  bool host_copy = false;  // the host holds the current shard
};

struct BufferState {
  Place place = Place::Nowhere;
  Index op = kNone;
  Index last_reader = kNone;  // slot
  bool made = false;
};

struct OpState {
  NodeKind kind = NodeKind::Compute;
  Index instruction = kNone;
  bool waited = false;
  Bytes returns = 0;  // bytes that its wait gives back
};

class Verifier {
 public:
  Verifier(const StepGraph& graph, const Plan& plan) : graph_(graph), plan_(plan) {}
  std::optional<Violation> run();

 private:
  bool refuse(Property property, const std::string& reason);
  const std::string& param(Index id) const { return graph_.params[id].name; }
  const std::string& node(Index id) const { return graph_.nodes[id].name; }
  std::string describe(const Instruction& instruction) const;
  Index root(Index buffer) const;
  bool itemExists(const Item& item) const;
  bool wellFormed();
  void begin();
  void step(const Instruction& in);
  void gather(Index id, Index op);
  void release(const Item& item);
  void reduce(Index id, Index op);
  void offload(const Item& item, Index op);
  void reload(const Item& item, Index op);
  void wait(Index id);
  void use(Index n, Index id, Index view);
  bool needsBuffer(Index n, Index buffer);
  void runNode(Index n);
  void update(Index n, Index id);
  void end();

  const StepGraph& graph_;
  const Plan& plan_;
  std::vector<ParamState> params_;
  std::vector<BufferState> buffers_;
  std::vector<OpState> ops_;
  std::vector<char> ran_;
  std::vector<Index> maker_;
  std::vector<std::vector<Index>> dying_;  // slot -> buffers that nobody reads after it
  Bytes held_ = 0;
  Bytes peak_ = 0;
  Index next_ = 0;
  Index at_ = kNone;
  std::optional<Violation> violation_;
};

}  // namespace dc::plan::detail
