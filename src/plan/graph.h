// The step graph: forward, backward and optimizer of all micro-batches of one training step, before
// any communication is placed. It says what each node computes with, makes and reads; the planner
// decides when parameters are gathered, gradients reduced and memory moved.
#pragma once

#include <string>
#include <vector>

#include "deepcompile/plan/types.h"

namespace dc::plan {

// A parameter and what a rank holds of it all the time.
struct Param {
  std::string name;
  Bytes bytes = 0;  // the whole (gathered) parameter
  Bytes shard = 0;  // this rank's part; the whole parameter under ZeRO-1 and 2
  Bytes grad = 0;   // one whole gradient, before it is reduced
  Bytes accum = 0;  // where reduced gradients add up: a shard, or the whole gradient under ZeRO-1
  Bytes state = 0;  // optimizer states
  Dtype dtype = Dtype::BF16;
  bool persistent = false;  // gathered at most once in a step, released only after its last use
  bool frozen = false;      // has no gradient and is never updated, so that a gathered copy stays valid

  bool operator==(const Param&) const = default;
};

// Memory that a node makes and others read. It lives from its maker to its last reader, through any
// of its aliases.
struct Buffer {
  std::string name;
  Bytes bytes = 0;
  Index alias_buffer = kNone;  // a view of another buffer: holds no bytes of its own
  Index alias_param = kNone;   // a view of a gathered parameter: reading it is a use of the parameter
  bool input = false;          // there from the start of the step, held to its end
  bool gradient = false;       // where reduced gradients add up, taken when there are some; stays on the device

  bool operator==(const Buffer&) const = default;
};

struct Node {
  std::string name;
  NodeKind kind = NodeKind::Compute;  // Compute or Optimizer
  Phase phase = Phase::Forward;
  Index micro = 0;                  // micro-batch
  Index block = 0;                  // repeated part of the model (a layer); what per-block prefetching goes by
  Nanos time = 0;                   // on the device, with nothing else running
  Bytes workspace = 0;              // held while the node runs
  std::vector<Index> after = {};    // nodes that must come first, beside those that make what this one reads
  std::vector<Index> uses = {};     // parameters, gathered
  std::vector<Index> grads = {};    // parameters whose gradient this node contributes to
  std::vector<Index> updates = {};  // parameters that this optimizer node updates
  std::vector<Index> makes = {};    // buffers
  std::vector<Index> reads = {};    // buffers

  bool operator==(const Node&) const = default;
};

struct StepGraph {
  std::string name = "step";
  int world = 1;
  int stage = 3;
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Node> nodes;  // after validate(): each after all that it needs; this is the order of execution

  bool operator==(const StepGraph&) const = default;
};

// Checks the graph and puts its nodes into an order that respects every dependency, keeping the
// given order where it can. An error names the node and the reason: a cycle (with its nodes), a
// buffer without a maker, a size below zero, ...
void validate(StepGraph& graph);

// A hash of all that the graph says; equal on all ranks that hold the same graph.
std::string hashOf(const StepGraph& graph);

// The buffer behind a chain of aliases (itself when it is no alias).
Index baseBuffer(const StepGraph& graph, Index buffer);
// The parameter that a buffer is a view of, or kNone.
Index viewedParam(const StepGraph& graph, Index buffer);

}  // namespace dc::plan
