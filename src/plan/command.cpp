#include "deepcompile/plan/command.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/graph_text.h"
#include "deepcompile/plan/json.h"
#include "deepcompile/plan/models.h"
#include "deepcompile/plan/strategies/schedule_builder.h"
#include "deepcompile/plan/strategy.h"
#include "deepcompile/plan/text.h"
#include "deepcompile/plan/verifier.h"

namespace dc::plan {
namespace {

constexpr const char* kOptions = R"(
Options of both:
  --machine M      a preset or a machine file      (default 8xh100)
  --budget B       memory of a rank: 40GB; 10% leaves 10 % free beyond the least; default: the machine's
  --strategy S     on_demand, per_block, published, planned or auto (default auto)
  --compare        a table of all strategies
  --explain        why each gather, bucket and offload is where it is
  --trace FILE     a Chrome / Perfetto trace of the simulated step
  --html FILE      the explanation as a page, with a picture of the timeline
  --json FILE      everything as JSON ('-': standard output)
Options of simulate:
  --model NAME     llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, gpt2-small or tiny-llama
  --nodes N        nodes of the machine (default 1)
  --world N        ranks (default: nodes x ranks of a node)
  --batch N        sequences per rank and micro-batch (default 1)
  --seq N          tokens of a sequence (default 1024)
  --accumulate N   micro-batches of a step (default 1)
  --stage N        ZeRO stage 1, 2 or 3 (default 3)
  --dtype T        bf16, f16 or f32 (default bf16)
  --no-checkpoint  keep all activations instead of computing them again
  --host-optimizer the host updates the parameters (ZeRO-Offload)
  --graph FILE     also write the step graph

Exit status: 0 done, 2 wrong usage, 3 malformed or impossible input, 4 no plan within the budget, 5 plan refused.
)";

std::string help(const std::string& program) {
  return concat("Plans and simulates sharded training steps.\n\n", "  ", program,
                " plan GRAPH [options]\n      plan the step graph in a file and print the plan\n", "  ", program,
                " simulate --model NAME [options]\n      plan a known model and print what the step would take\n",
                kOptions);
}

// Wrong usage of the command line.
class UsageError : public Error {
 public:
  using Error::Error;
};

struct Options {
  std::map<std::string, std::string> values;
  std::vector<std::string> words;  // what is no option
  bool has(const std::string& name) const { return values.count(name) != 0; }
  std::string get(const std::string& name, const std::string& otherwise) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : found->second;
  }
  int number(const std::string& name, int otherwise) const {
    const std::string text = get(name, std::to_string(otherwise));
    const bool digits =
        !text.empty() && text.size() < 9 && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
    if (!digits || std::stoi(text) < 1) {
      throw UsageError(concat("--", name, " ", text, ": expected a whole number from 1"));
    }
    return std::stoi(text);
  }
};

const std::vector<std::string_view> kWithValue = {"machine", "budget",     "strategy", "trace", "html",
                                                  "json",    "model",      "nodes",    "world", "batch",
                                                  "seq",     "accumulate", "stage",    "dtype", "graph"};
const std::vector<std::string_view> kFlags = {"compare", "explain", "no-checkpoint", "host-optimizer", "help"};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (word == "-h") {
      options.values["help"] = "";
      continue;
    }
    if (!word.starts_with("--")) {
      options.words.push_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (std::ranges::find(kFlags, name) != kFlags.end()) {
      options.values[name] = "";
    } else if (std::ranges::find(kWithValue, name) == kWithValue.end()) {
      std::vector<std::string_view> known = kWithValue;
      known.insert(known.end(), kFlags.begin(), kFlags.end());
      throw UsageError(unknown("option", name, known));
    } else if (equals != std::string::npos) {
      options.values[name] = word.substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      options.values[name] = arguments[++i];
    } else {
      throw UsageError(concat("--", name, " needs a value"));
    }
  }
  return options;
}

std::string readFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  check(file.good(), [&] { return concat(path, ": cannot be read"); });
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void writeFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.flush();
  check(file.good(), [&] { return concat(path, ": cannot be written"); });
}

Machine machineOf(const Options& options) {
  const std::string name = options.get("machine", "8xh100");
  const auto presets = presetNames();
  if (std::ranges::find(presets, name) != presets.end()) {
    return preset(name);
  }
  if (std::ifstream(name).good()) {
    return parseMachine(readFile(name), name);
  }
  throw UsageError(concat(unknown("machine", name, presets), "; a file of that name does not exist either"));
}

// The least memory in which the step fits without offloading: every plan holds at least this.
Bytes leastWithoutOffload(const Problem& problem) {
  Bytes least = problem.usage.resident;
  for (const Bytes bytes : leastMemory(problem)) {
    least = std::max(least, bytes);
  }
  return least;
}

Bytes budgetOf(const Options& options, const Problem& problem, const Machine& machine) {
  const std::string text = options.get("budget", "device");
  if (text == "device") {
    return machine.budget;
  }
  if (text.ends_with('%')) {
    // Only a whole number of percent from -90 to 90 makes sense here.
    const std::string digits = text.substr(0, text.size() - 1);
    const bool negative = digits.starts_with('-');
    const std::string bare = digits.substr(negative ? 1 : 0);
    if (bare.empty() || bare.size() > 2 || !std::ranges::all_of(bare, [](char c) { return c >= '0' && c <= '9'; })) {
      throw UsageError(concat("--budget ", text, ": expected a size or a percentage such as 10%"));
    }
    const int percent = std::stoi(bare);
    const Bytes least = leastWithoutOffload(problem);
    return negative ? mulDiv(least, 100 - percent, 100) : mulDivUp(least, 100, 100 - percent);
  }
  try {
    TextReader reader(text, "--budget");
    reader.nextLine();
    return reader.bytes(reader.word(0, "a size"));
  } catch (const ParseError& error) {
    throw UsageError(error.what());
  }
}

std::string seconds(Nanos nanos) { return roundNanos(nanos); }

std::string pad(std::string text, std::size_t width, bool left = false) {
  // Count what is seen: the texts here are ASCII.
  if (text.size() < width) {
    text.insert(left ? text.begin() + static_cast<std::ptrdiff_t>(text.size()) : text.begin(), width - text.size(),
                ' ');
  }
  return text;
}

std::string ratio(Nanos a, Nanos b) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", static_cast<double>(a) / static_cast<double>(std::max<Nanos>(b, 1)));
  return text.data();
}

std::string compare(const Problem& problem, bool json) {
  const Nanos bound = lowerBound(problem.graph, problem.usage, problem.cost, problem.budget).best;
  std::string table = concat(pad("strategy", 10, true), pad("step", 10), pad("x bound", 9), pad("gather exp.", 13),
                             pad("reduce exp.", 13), pad("copies exp.", 13), pad("peak", 10), "\n");
  Json rows;
  rows.beginObject().key("lower_bound_ns").value(bound).key("budget_bytes").value(problem.budget);
  rows.key("strategies").beginArray();
  for (const std::string_view name : {"on_demand", "per_block", "published", "planned"}) {
    table += pad(std::string(name), 10, true);
    rows.beginObject().key("strategy").value(name);
    try {
      const Plan plan = makeStrategy(name)->plan(problem);
      requireValid(problem.graph, plan);
      const Report made = report(problem.graph, problem.usage, problem.cost, plan);
      const auto exposed = [&](Resource resource) { return made.run.exposed[static_cast<std::size_t>(resource)]; };
      const Nanos copies = exposed(Resource::HostToDevice) + exposed(Resource::DeviceToHost);
      table += pad(seconds(made.run.step), 10) + pad(ratio(made.run.step, bound), 9) +
               pad(seconds(exposed(Resource::Gather)), 13) + pad(seconds(exposed(Resource::Reduce)), 13) +
               pad(seconds(copies), 13) + pad(roundBytes(made.memory.peak), 10) + "\n";
      rows.key("step_ns").value(made.run.step).key("gather_exposed_ns").value(exposed(Resource::Gather));
      rows.key("reduce_exposed_ns").value(exposed(Resource::Reduce)).key("copies_exposed_ns").value(copies);
      Nanos links = 0;
      for (const Instruction& in : plan.instructions) {
        if (in.kind == NodeKind::Gather || in.kind == NodeKind::Reduce) {
          links += durationOf(problem.graph, problem.cost, plan, in);
        }
      }
      rows.key("links_ns").value(links).key("peak_bytes").value(made.memory.peak).key("hash").value(hashOf(plan));
    } catch (const BudgetError& error) {
      table += concat("  does not fit: needs ", roundBytes(error.least), "\n");
      rows.key("least_bytes").value(error.least);
    }
    rows.endObject();
  }
  Nanos compute = 0;
  for (const Node& node : problem.graph.nodes) {
    compute += node.time;
  }
  rows.endArray()
      .key("compute_ns")
      .value(compute)
      .key("nodes")
      .value(static_cast<std::int64_t>(problem.graph.nodes.size()));
  rows.endObject();
  table += concat(pad("bound", 10, true), pad(seconds(bound), 10), "\n");
  return json ? rows.text() + "\n" : table;
}

CommandResult planAndPrint(const Options& options, const StepGraph& graph, const Machine& machine, bool print_plan) {
  CommandResult result;
  const Usage usage(graph);
  const CostModel cost(machine, graph.world);
  Problem problem{graph, usage, cost, 0};
  problem.budget = budgetOf(options, problem, machine);
  const std::string title = concat(graph.name, " on ", graph.world, " ranks of ", machine.name, ", ZeRO-", graph.stage,
                                   ", ", graph.nodes.size(), " nodes, budget ", roundBytes(problem.budget), "\n");
  const std::string json = options.get("json", "");
  if (options.has("compare")) {
    if (json == "-") {
      result.out = compare(problem, true);
      return result;
    }
    result.out = title + compare(problem, false);
    if (!json.empty()) {
      writeFile(json, compare(problem, true));
    }
    return result;
  }
  const Plan plan = makeStrategy(options.get("strategy", "auto"))->plan(problem);
  if (const auto violation = verify(graph, plan)) {
    result.status = kRefused;
    result.error = concat("the plan is refused (", name(violation->property), "): ", violation->reason, "\n");
    return result;
  }
  const Report made = report(graph, usage, cost, plan);
  if (json == "-") {
    result.out = reportJson(graph, usage, cost, plan, made) + "\n";
    return result;
  }
  if (!json.empty()) {
    writeFile(json, reportJson(graph, usage, cost, plan, made) + "\n");
  }
  if (options.has("html")) {
    writeFile(options.get("html", ""), explainHtml(graph, usage, cost, plan, made, 200));
  }
  if (options.has("trace")) {
    writeFile(options.get("trace", ""), traceJson(graph, plan, made));
  }
  if (options.has("explain")) {
    result.out = title + explainPlan(graph, usage, cost, plan, made, 40);
  } else if (print_plan) {
    result.out = print(graph, plan);
  } else {
    result.out = title + explainPlan(graph, usage, cost, plan, made, 0);
  }
  return result;
}

CommandResult planCommand(const Options& options) {
  if (options.words.size() != 2) {
    throw UsageError("plan needs one graph file: plan GRAPH [options]");
  }
  const StepGraph graph = parseGraph(readFile(options.words[1]), options.words[1]);
  return planAndPrint(options, graph, machineOf(options), true);
}

CommandResult simulateCommand(const Options& options) {
  if (options.words.size() != 1 || !options.has("model")) {
    throw UsageError("simulate needs a model: simulate --model llama3-8b [options]");
  }
  const Machine machine = machineOf(options);
  ModelOptions model;
  model.world = options.number("world", options.number("nodes", 1) * machine.devices);
  model.batch = options.number("batch", 1);
  model.sequence = options.number("seq", 1024);
  model.accumulate = options.number("accumulate", 1);
  model.stage = options.number("stage", 3);
  model.checkpoint = !options.has("no-checkpoint");
  model.host_optimizer = options.has("host-optimizer");
  const auto type = dtype(options.get("dtype", "bf16"));
  if (!type) {
    throw UsageError(unknown("dtype", options.get("dtype", ""), {"bf16", "f16", "f32"}));
  }
  model.dtype = *type;
  const StepGraph graph = makeModel(options.get("model", ""), model, machine);
  if (options.has("graph")) {
    writeFile(options.get("graph", ""), print(graph));
  }
  return planAndPrint(options, graph, machine, false);
}

// With a space before it, where it is a command that there is.
std::string verbOf(const std::vector<std::string>& arguments) {
  const bool known = !arguments.empty() && (arguments[0] == "plan" || arguments[0] == "simulate");
  return known ? " " + arguments[0] : "";
}

}  // namespace

CommandResult runCommand(const std::vector<std::string>& arguments, const std::string& program) {
  CommandResult result;
  try {
    const Options options = parse(arguments);
    if (options.has("help") || (!options.words.empty() && options.words[0] == "help")) {
      result.out = help(program);
      return result;
    }
    const std::string verb = options.words.empty() ? "" : options.words[0];
    if (verb == "plan") {
      return planCommand(options);
    }
    if (verb == "simulate") {
      return simulateCommand(options);
    }
    throw UsageError(verb.empty() ? "expected plan or simulate"
                                  : unknown("command", verb, {"plan", "simulate", "help"}));
  } catch (const UsageError& error) {
    result.status = kBadUsage;
    result.error = concat("deepcompile: ", error.what(), "\nTry '", program, verbOf(arguments), " --help'.\n");
  } catch (const BudgetError& error) {
    result.status = kDoesNotFit;
    result.error = concat("deepcompile: ", error.what(), "\n");
  } catch (const Error& error) {
    result.status = kBadInput;
    result.error = concat("deepcompile: ", error.what(), "\n");
  }
  return result;
}

}  // namespace dc::plan
