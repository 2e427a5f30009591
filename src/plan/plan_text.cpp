#include <algorithm>

#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/plan.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

template <typename Things>
NameTable namesOf(const Things& things) {
  NameTable names;
  for (std::size_t i = 0; i < things.size(); ++i) {
    names.emplace(things[i].name, static_cast<Index>(i));
  }
  return names;
}

class PlanParser {
 public:
  PlanParser(std::string_view text, const StepGraph& graph, const std::string& file)
      : in_(text, file),
        graph_(graph),
        params_(namesOf(graph.params)),
        buffers_(namesOf(graph.buffers)),
        nodes_(namesOf(graph.nodes)) {}

  Plan parse() {
    while (in_.nextLine()) {
      line();
    }
    return std::move(plan_);
  }

 private:
  void line() {
    const Word& first = in_.words()[0];
    if (first.text == "plan") {
      plan_.strategy = in_.word(1, "a strategy").text;
      plan_.graph = graph_.name;
      return;
    }
    if (first.text == "budget") {
      plan_.budget = in_.bytes(in_.word(1, "a size"));
      return;
    }
    if (first.text == "start") {
      const Word& where = in_.word(1, "host or gathered");
      if (where.text != "host" && where.text != "gathered") {
        in_.fail(where, unknown("placement", where.text, {"host", "gathered"}));
      }
      const Item thing = item(in_.word(2, "what"));
      if (where.text == "host") {
        plan_.start_on_host.push_back(thing);
      } else {
        plan_.start_gathered.push_back(thing.id);
      }
      return;
    }
    const auto kind = nodeKind(first.text);
    if (!kind) {
      in_.fail(first, unknown("instruction", first.text,
                              {"plan", "budget", "start", "compute", "optimizer", "gather", "reduce", "offload",
                               "reload", "wait", "release"}));
    }
    Instruction instruction;
    instruction.kind = *kind;
    std::size_t at = 1;
    if (*kind == NodeKind::Compute || *kind == NodeKind::Optimizer) {
      instruction.node = find(nodes_, in_.word(at++, "a node"), "node");
    } else if (*kind != NodeKind::Release) {
      const Word& op = in_.word(at++, "an operation");
      const bool wait = *kind == NodeKind::Wait;
      const auto [place, fresh] = ops_.emplace(std::string(op.text), plan_.ops);
      if (wait && fresh) {
        in_.fail(op, concat("nothing named '", op.text, "' was started before this wait"));
      }
      if (!wait && !fresh) {
        in_.fail(op, concat("'", op.text, "' was already started"));
      }
      plan_.ops += fresh ? 1 : 0;
      instruction.op = place->second;
    }
    instruction.first = static_cast<Index>(plan_.items.size());
    for (; at < in_.words().size(); ++at) {
      plan_.items.push_back(item(in_.words()[at]));
      ++instruction.count;
    }
    const bool takes_items = *kind != NodeKind::Compute && *kind != NodeKind::Optimizer && *kind != NodeKind::Wait;
    if (takes_items != (instruction.count > 0)) {
      in_.fail(first, takes_items ? "expected what it works on" : "unexpected words after the name");
    }
    plan_.instructions.push_back(instruction);
    plan_.reasons.emplace_back();
  }

  Item item(const Word& word) {
    for (const auto& [prefix, kind] : {std::pair{std::string_view("state:"), ItemKind::State},
                                       {std::string_view("shard:"), ItemKind::Shard},
                                       {std::string_view("buffer:"), ItemKind::Buffer}}) {
      if (word.text.starts_with(prefix)) {
        const Word rest{word.text.substr(prefix.size()), word.column + static_cast<int>(prefix.size())};
        const bool buffer = kind == ItemKind::Buffer;
        return {kind, find(buffer ? buffers_ : params_, rest, buffer ? "buffer" : "param")};
      }
    }
    return {ItemKind::Param, find(params_, word, "param")};
  }

  Index find(const NameTable& names, const Word& word, std::string_view what) {
    const auto found = names.find(decodeName(word.text));
    if (found == names.end()) {
      std::vector<std::string_view> known;
      for (const auto& [text, id] : names) {
        known.push_back(text);
      }
      std::sort(known.begin(), known.end());
      in_.fail(word, unknown(what, word.text, known));
    }
    return found->second;
  }

  TextReader in_;
  const StepGraph& graph_;
  NameTable params_;
  NameTable buffers_;
  NameTable nodes_;
  NameTable ops_;
  Plan plan_;
};

}  // namespace

namespace {

// A parameter's name stands alone in the text; other items say what they are.
std::string prefixOf(ItemKind kind) { return kind == ItemKind::Param ? "" : concat(name(kind), ":"); }

const std::string& bareName(const StepGraph& graph, const Item& item) {
  return item.kind == ItemKind::Buffer ? graph.buffers[item.id].name : graph.params[item.id].name;
}

// As a plan's text writes it.
std::string wordOf(const StepGraph& graph, const Item& item) {
  return concat(prefixOf(item.kind), encodeName(bareName(graph, item)));
}

}  // namespace

std::string_view name(ItemKind kind) {
  switch (kind) {
    case ItemKind::Param:
      return "param";
    case ItemKind::State:
      return "state";
    case ItemKind::Shard:
      return "shard";
    default:
      return "buffer";
  }
}

std::string nameOf(const StepGraph& graph, const Item& item) {
  return concat(prefixOf(item.kind), bareName(graph, item));
}

Plan parsePlan(std::string_view text, const StepGraph& graph, const std::string& file) {
  return PlanParser(text, graph, file).parse();
}

std::string print(const StepGraph& graph, const Plan& plan) {
  std::string out = concat("plan ", plan.strategy, "\nbudget ", exactBytes(plan.budget), "\n");
  for (const Item& item : plan.start_on_host) {
    out += concat("start host ", wordOf(graph, item), "\n");
  }
  for (const Index param : plan.start_gathered) {
    out += concat("start gathered ", encodeName(graph.params[param].name), "\n");
  }
  std::vector<char> letter(static_cast<std::size_t>(plan.ops), '?');
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& instruction = plan.instructions[i];
    std::string line(name(instruction.kind));
    if (instruction.node != kNone) {
      line += concat(" ", encodeName(graph.nodes[instruction.node].name));
    }
    if (instruction.op != kNone) {
      if (instruction.kind != NodeKind::Wait) {
        letter[instruction.op] = instruction.kind == NodeKind::Reload ? 'l' : line[0];
      }
      line += concat(" ", letter[instruction.op], instruction.op);
    }
    for (const Item& item : plan.itemsOf(instruction)) {
      line += concat(" ", wordOf(graph, item));
    }
    const std::string why = explain(plan.reasons[i]);
    out += line;
    if (!why.empty()) {
      out += concat(std::string(line.size() < 40 ? 40 - line.size() : 1, ' '), " # ", why);
    }
    out += '\n';
  }
  return out;
}

}  // namespace dc::plan
