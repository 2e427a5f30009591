#include "deepcompile/plan/memory.h"

#include <algorithm>

namespace dc::plan {
namespace {

// Replays the plan's effects on memory. What is held is kept by kind, so that holders() can name
// it.
class Replay {
 public:
  Replay(const StepGraph& graph, const Usage& usage, const Plan& plan)
      : graph_(graph),

        plan_(plan),
        grad_open_(graph.params.size(), 0),
        freed_grads_(plan.ops, 0),
        freed_copies_(plan.ops, 0) {
    std::vector<std::pair<Index, Index>> pairs;
    for (std::size_t b = 0; b < graph.buffers.size(); ++b) {
      if (usage.buffer_made[b] != kNone) {
        pairs.emplace_back(usage.buffer_last[b], static_cast<Index>(b));
      }
    }
    last_ = Lists(graph.nodes.size(), pairs);
    for (const Param& param : graph.params) {
      shards_ += param.shard;
      accums_ += param.accum;
      states_ += param.state;
    }
    for (const Buffer& buffer : graph.buffers) {
      inputs_ += buffer.input ? buffer.bytes : 0;
    }
    for (const Item& item : plan.start_on_host) {
      kind(item) -= deviceBytes(graph, item);
    }
    for (const Index param : plan.start_gathered) {
      gathered_ += graph.params[param].bytes;
    }
  }

  // Bytes while the instruction is in effect.
  Bytes step(const Instruction& instruction) {
    switch (instruction.kind) {
      case NodeKind::Compute:
      case NodeKind::Optimizer:
        return node(graph_.nodes[instruction.node], instruction.node);
      case NodeKind::Gather:
        for (const Item& item : plan_.itemsOf(instruction)) {
          gathered_ += graph_.stage == 3 ? graph_.params[item.id].bytes : 0;
        }
        break;
      case NodeKind::Release:
        for (const Item& item : plan_.itemsOf(instruction)) {
          (item.kind == ItemKind::Param ? gathered_ : shards_) -= deviceBytes(graph_, item);
        }
        break;
      case NodeKind::Reduce:
        for (const Item& item : plan_.itemsOf(instruction)) {
          freed_grads_[instruction.op] += grad_open_[item.id] ? graph_.params[item.id].grad : 0;
          grad_open_[item.id] = 0;
        }
        break;
      case NodeKind::Offload:
        started_.push_back({instruction.op, &instruction});
        freed_copies_[instruction.op] = static_cast<Index>(started_.size());
        break;
      case NodeKind::Reload:
        for (const Item& item : plan_.itemsOf(instruction)) {
          kind(item) += deviceBytes(graph_, item);
        }
        break;
      case NodeKind::Wait:
        grads_ -= freed_grads_[instruction.op];
        freed_grads_[instruction.op] = 0;
        if (const Index offload = freed_copies_[instruction.op]; offload != 0) {
          for (const Item& item : plan_.itemsOf(*started_[offload - 1].second)) {
            kind(item) -= deviceBytes(graph_, item);
          }
          freed_copies_[instruction.op] = 0;
        }
        break;
    }
    return total();
  }

  Bytes total() const { return shards_ + accums_ + states_ + inputs_ + gathered_ + grads_ + buffers_; }

  std::vector<Holder> holders(Bytes workspace) const {
    return {{"parameter shards", shards_},      {"gradient shards", accums_},
            {"optimizer states", states_},      {"inputs", inputs_},
            {"gathered parameters", gathered_}, {"gradients to be reduced", grads_},
            {"activations", buffers_},          {"workspace", workspace}};
  }

 private:
  Bytes node(const Node& node, Index slot) {
    Bytes transient = node.workspace;
    for (const Index buffer : node.makes) {
      kindOf(buffer) += graph_.buffers[buffer].bytes;
    }
    for (const Index param : node.grads) {
      if (graph_.stage == 1) {
        transient += graph_.params[param].grad;  // added to the accumulator at once
      } else if (grad_open_[param] == 0) {
        grad_open_[param] = 1;
        grads_ += graph_.params[param].grad;
      }
    }
    const Bytes during = total() + transient;
    for (const Index buffer : last_[slot]) {
      kindOf(buffer) -= graph_.buffers[buffer].bytes;
    }
    return during;
  }

  Bytes& kindOf(Index buffer) { return graph_.buffers[buffer].gradient ? accums_ : buffers_; }

  Bytes& kind(const Item& item) {
    return item.kind == ItemKind::State ? states_ : item.kind == ItemKind::Shard ? shards_ : buffers_;
  }

  const StepGraph& graph_;

  const Plan& plan_;
  Bytes shards_ = 0;
  Bytes accums_ = 0;
  Bytes states_ = 0;
  Bytes inputs_ = 0;
  Bytes gathered_ = 0;
  Bytes grads_ = 0;
  Bytes buffers_ = 0;
  std::vector<char> grad_open_;      // a gradient that no reduction has taken yet
  std::vector<Bytes> freed_grads_;   // operation -> bytes that its wait gives back
  std::vector<Index> freed_copies_;  // operation -> 1 + place in started_
  std::vector<std::pair<Index, const Instruction*>> started_;
  Lists last_;  // slot -> buffers that it is the last to read
};

}  // namespace

MemoryProfile memoryProfile(const StepGraph& graph, const Usage& usage, const Plan& plan) {
  MemoryProfile profile;
  profile.at.reserve(plan.instructions.size());
  Replay replay(graph, usage, plan);
  for (const Instruction& instruction : plan.instructions) {
    profile.at.push_back(replay.step(instruction));
    if (profile.peak_at == kNone || profile.at.back() > profile.peak) {
      profile.peak = profile.at.back();
      profile.peak_at = static_cast<Index>(profile.at.size()) - 1;
    }
  }
  return profile;
}

std::vector<Holder> holders(const StepGraph& graph, const Usage& usage, const Plan& plan, Index at) {
  Replay replay(graph, usage, plan);
  std::vector<Holder> result;
  for (Index i = 0; i <= at; ++i) {
    const Bytes during = replay.step(plan.instructions[i]);
    if (i == at) {
      const Bytes after = replay.total();
      result = replay.holders(std::max<Bytes>(during - after, 0));
    }
  }
  std::stable_sort(result.begin(), result.end(), [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  std::erase_if(result, [](const Holder& holder) { return holder.bytes == 0; });
  return result;
}

}  // namespace dc::plan
