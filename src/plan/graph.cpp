#include "deepcompile/plan/graph.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

void checkSize(std::int64_t value, const std::string& of, const char* what) {
  check(value >= 0, [&] { return concat(of, ": negative ", what, " ", value); });
  check(value <= kLargest, [&] { return concat(of, ": ", what, " ", value, " is too large"); });
}

void checkIds(const std::vector<Index>& ids, std::size_t count, const Node& node, const char* what) {
  for (const Index id : ids) {
    check(id >= 0 && static_cast<std::size_t>(id) < count,
          [&] { return concat("node '", node.name, "': ", what, " ", id, " does not exist"); });
  }
  std::vector<Index> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  check(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
        [&] { return concat("node '", node.name, "' names the same thing twice in ", what); });
}

void checkParts(const StepGraph& graph) {
  check(graph.world >= 1, [&] { return concat("graph '", graph.name, "': world ", graph.world); });
  check(graph.stage >= 1 && graph.stage <= 3,
        [&] { return concat("graph '", graph.name, "': stage ", graph.stage, "; expected 1, 2 or 3"); });
  for (const Param& param : graph.params) {
    const std::string of = "param '" + param.name + "'";
    checkSize(param.bytes, of, "bytes");
    checkSize(param.shard, of, "shard");
    checkSize(param.grad, of, "grad");
    checkSize(param.accum, of, "accum");
    checkSize(param.state, of, "state");
    // A 16-bit parameter may have a 32-bit master shard, which is padded to a whole element.
    check(graph.world == 1 || param.shard <= 2 * param.bytes + 16, [&] {
      return concat(of, ": the shard (", param.shard, ") is more than twice the parameter (", param.bytes, ")");
    });
  }
  for (std::size_t i = 0; i < graph.buffers.size(); ++i) {
    const Buffer& buffer = graph.buffers[i];
    const std::string of = "buffer '" + buffer.name + "'";
    checkSize(buffer.bytes, of, "bytes");
    check(buffer.alias_buffer < static_cast<Index>(i) && buffer.alias_param < static_cast<Index>(graph.params.size()),
          [&] { return of + " is an alias of something that does not exist yet"; });
    const bool alias = buffer.alias_buffer != kNone || buffer.alias_param != kNone;
    check(!alias || buffer.bytes == 0, [&] { return of + " is an alias and cannot have bytes"; });
  }
}

// Which node makes each buffer (kNone: no node does).
std::vector<Index> makers(const StepGraph& graph) {
  std::vector<Index> maker(graph.buffers.size(), kNone);
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    for (const Index buffer : graph.nodes[n].makes) {
      check(maker[buffer] == kNone, [&] {
        return concat("buffer '", graph.buffers[buffer].name, "' is made by node '", graph.nodes[maker[buffer]].name,
                      "' and again by node '", graph.nodes[n].name, "'");
      });
      check(!graph.buffers[buffer].input, [&] {
        return concat("buffer '", graph.buffers[buffer].name, "' is an input, yet node '", graph.nodes[n].name,
                      "' makes it");
      });
      maker[buffer] = static_cast<Index>(n);
    }
  }
  return maker;
}

void checkNodes(const StepGraph& graph) {
  for (const Node& node : graph.nodes) {
    const std::string of = "node '" + node.name + "'";
    checkSize(node.time, of, "time");
    checkSize(node.workspace, of, "workspace");
    checkIds(node.after, graph.nodes.size(), node, "after");
    checkIds(node.uses, graph.params.size(), node, "uses");
    checkIds(node.grads, graph.params.size(), node, "grads");
    checkIds(node.updates, graph.params.size(), node, "updates");
    checkIds(node.makes, graph.buffers.size(), node, "makes");
    checkIds(node.reads, graph.buffers.size(), node, "reads");
    check(node.kind == NodeKind::Compute || node.kind == NodeKind::Optimizer, [&] {
      return concat(of, " is a ", name(node.kind),
                    " node; a step graph holds compute and optimizer nodes, the planner places the others");
    });
    const bool optimizer = node.kind == NodeKind::Optimizer;
    check(optimizer || node.updates.empty(), [&] { return of + " updates parameters but is no optimizer node"; });
    check(!optimizer || (node.grads.empty() && node.uses.empty()),
          [&] { return of + " is an optimizer node and cannot use gathered parameters or make gradients"; });
    for (const std::vector<Index>* list : {&node.grads, &node.updates}) {
      for (const Index param : *list) {
        check(!graph.params[param].frozen,
              [&] { return concat(of, ": parameter '", graph.params[param].name, "' is frozen"); });
      }
    }
  }
}

void checkSums(const StepGraph& graph) {
  Wide time = 0;
  Wide bytes = 0;
  for (const Node& node : graph.nodes) {
    time += node.time;
    bytes += node.workspace;
    for (const Index param : node.grads) {
      bytes += graph.params[param].grad;
    }
    for (const Index param : node.uses) {
      bytes += graph.params[param].bytes;
    }
  }
  for (const Param& param : graph.params) {
    bytes += param.bytes + param.shard + param.grad + param.accum + param.state;
  }
  for (const Buffer& buffer : graph.buffers) {
    bytes += buffer.bytes;
  }
  const Wide most = Wide{1} << 60;
  check(time < most && bytes < most,
        [&] { return concat("graph '", graph.name, "': times or sizes add up to more than 2^60"); });
}

[[noreturn]] void failCycle(const StepGraph& graph, const std::vector<std::vector<Index>>& needs,
                            const std::vector<Index>& open) {
  // Every open node needs an open node, so walking along the needs must come back to a node already
  // seen.
  std::vector<Index> seen_at(graph.nodes.size(), kNone);
  std::vector<Index> path;
  Index node = 0;
  for (Index i = 0; i < static_cast<Index>(open.size()); ++i) {
    if (open[i] > 0) {
      node = i;
      break;
    }
  }
  while (seen_at[node] == kNone) {
    seen_at[node] = static_cast<Index>(path.size());
    path.push_back(node);
    node = *std::find_if(needs[node].begin(), needs[node].end(), [&](Index n) { return open[n] > 0; });
  }
  std::string text = "the graph has a cycle: '" + graph.nodes[node].name + "'";
  for (std::size_t i = seen_at[node] + 1; i < path.size(); ++i) {
    text += " needs '" + graph.nodes[path[i]].name + "',";
    text += " which";
  }
  fail(text, " needs '", graph.nodes[node].name, "'");
}

}  // namespace

Index baseBuffer(const StepGraph& graph, Index buffer) {
  while (graph.buffers[buffer].alias_buffer != kNone) {
    buffer = graph.buffers[buffer].alias_buffer;
  }
  return buffer;
}

Index viewedParam(const StepGraph& graph, Index buffer) { return graph.buffers[baseBuffer(graph, buffer)].alias_param; }

void validate(StepGraph& graph) {
  checkParts(graph);
  checkNodes(graph);
  checkSums(graph);
  const std::vector<Index> maker = makers(graph);
  const std::size_t count = graph.nodes.size();
  std::vector<std::vector<Index>> needs(count);
  std::vector<std::vector<Index>> needed_by(count);
  std::vector<Index> open(count, 0);
  for (std::size_t n = 0; n < count; ++n) {
    const Node& node = graph.nodes[n];
    needs[n] = node.after;
    for (const std::vector<Index>* list : {&node.reads, &node.makes}) {
      for (const Index buffer : *list) {
        const bool read = list == &node.reads;
        const Index base = baseBuffer(graph, buffer);
        const Buffer& root = graph.buffers[base];
        check(!read || maker[base] != kNone || root.input || root.alias_param != kNone, [&] {
          return concat("node '", node.name, "' reads buffer '", graph.buffers[buffer].name, "', which no node makes",
                        base == buffer ? "" : concat(" (it is a view of '", root.name, "')"));
        });
        for (const Index source : {maker[buffer], maker[base]}) {
          if (source != kNone && (read || source != static_cast<Index>(n))) {
            needs[n].push_back(source);
          }
        }
      }
    }
    std::sort(needs[n].begin(), needs[n].end());
    needs[n].erase(std::unique(needs[n].begin(), needs[n].end()), needs[n].end());
    for (const Index source : needs[n]) {
      needed_by[source].push_back(static_cast<Index>(n));
      ++open[n];
    }
  }
  std::priority_queue<Index, std::vector<Index>, std::greater<>> ready;
  for (std::size_t n = 0; n < count; ++n) {
    if (open[n] == 0) {
      ready.push(static_cast<Index>(n));
    }
  }
  std::vector<Index> order;
  order.reserve(count);
  while (!ready.empty()) {
    const Index n = ready.top();
    ready.pop();
    order.push_back(n);
    for (const Index next : needed_by[n]) {
      if (--open[next] == 0) {
        ready.push(next);
      }
    }
  }
  if (order.size() < count) {
    failCycle(graph, needs, open);
  }
  if (std::is_sorted(order.begin(), order.end())) {
    return;
  }
  std::vector<Index> place(count);
  std::vector<Node> nodes(count);
  for (std::size_t i = 0; i < count; ++i) {
    place[order[i]] = static_cast<Index>(i);
  }
  for (std::size_t i = 0; i < count; ++i) {
    nodes[i] = std::move(graph.nodes[order[i]]);
    for (Index& source : nodes[i].after) {
      source = place[source];
    }
  }
  graph.nodes = std::move(nodes);
}

std::string hashOf(const StepGraph& graph) {
  Hash hash;
  hash.add(print(graph));
  return hash.hex();
}

}  // namespace dc::plan
