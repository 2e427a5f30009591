#include <algorithm>
#include <array>
#include <cstdio>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/json.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

std::string percent(std::int64_t part, std::int64_t whole) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%",
                whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text.data();
}

std::string itemsText(const StepGraph& graph, const Plan& plan, const Instruction& in) {
  std::string text;
  const auto items = plan.itemsOf(in);
  for (std::size_t i = 0; i < items.size() && i < 4; ++i) {
    text += concat(i > 0 ? " " : "", nameOf(graph, items[i]));
  }
  return items.size() > 4 ? text + concat(" and ", items.size() - 4, " more") : text;
}

bool isCollectiveOrCopy(NodeKind kind) {
  return kind == NodeKind::Gather || kind == NodeKind::Reduce || kind == NodeKind::Offload || kind == NodeKind::Reload;
}

// What a lower bound is set by.
std::string binding(const LowerBound& bound) {
  if (bound.best == bound.compute) {
    return "compute";
  }
  if (bound.best == bound.launches) {
    return "launches";
  }
  if (bound.best == bound.critical) {
    return "the critical path";
  }
  return bound.best == bound.windows ? "compute and links, pass by pass" : "the links";
}

}  // namespace

Report report(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan) {
  return {simulate(graph, cost, plan), memoryProfile(graph, usage, plan), lowerBound(graph, usage, cost, plan.budget)};
}

std::string explainPlan(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                        const Report& report, std::size_t most) {
  const Simulation& run = report.run;
  std::string out = concat("plan '", plan.strategy, "' for '", graph.name, "' on ", cost.machine().name, ", ",
                           graph.world, " ranks, hash ", hashOf(plan), "\n");
  out += concat("step ", roundNanos(run.step), "; no plan can take less than ", roundNanos(report.bound.best), " (",
                binding(report.bound), "), so at most ", percent(run.step - report.bound.best, run.step), " is left\n");
  for (int r = 0; r < kResources; ++r) {
    const auto resource = static_cast<Resource>(r);
    if (run.busy[r] == 0 && run.exposed[r] == 0) {
      continue;
    }
    out += concat("  ", name(resource), ": busy ", roundNanos(run.busy[r]), " (", percent(run.busy[r], run.step), ")");
    out += resource == Resource::Compute ? "\n" : concat(", exposed ", roundNanos(run.exposed[r]), "\n");
  }
  if (run.host_bound > 0) {
    out += concat("  waiting for launches: ", roundNanos(run.host_bound), "\n");
  }
  const Index at = report.memory.peak_at;
  out += concat("memory: peak ", roundBytes(report.memory.peak), " of ", roundBytes(plan.budget), " (",
                percent(report.memory.peak, plan.budget), ")");
  if (at != kNone) {
    const Instruction& in = plan.instructions[at];
    out += concat(" at ", name(in.kind), " ", in.node != kNone ? graph.nodes[in.node].name : itemsText(graph, plan, in),
                  "\n");
    for (const Holder& holder : holders(graph, usage, plan, at)) {
      out += concat("  ", holder.what, ": ", roundBytes(holder.bytes), "\n");
    }
  }
  // The operations that cost the most come first: these are the ones to understand.
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    if (isCollectiveOrCopy(plan.instructions[i].kind)) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return run.stall[plan.instructions[a].op] > run.stall[plan.instructions[b].op];
  });
  out += concat("decisions, the most exposed first (", std::min(most, order.size()), " of ", order.size(), "):\n");
  order.resize(std::min(most, order.size()));
  for (const std::size_t i : order) {
    const Instruction& in = plan.instructions[i];
    const std::string why = explain(plan.reasons[i]);
    out += concat("  ", name(in.kind), " ", itemsText(graph, plan, in), ": ", roundNanos(run.end[i] - run.start[i]),
                  " from ", roundNanos(run.start[i]), ", exposed ", roundNanos(run.stall[in.op]),
                  why.empty() ? "" : concat("; ", why), "\n");
  }
  Bytes kept = 0;
  Bytes again = 0;
  Index released = 0;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    if (plan.reasons[i].why == Why::NotKept) {
      again += plan.reasons[i].a;
      ++released;
    }
  }
  for (const Index param : plan.start_gathered) {
    kept += graph.params[param].bytes;
  }
  out += concat("released although used again: ", released, " times, ", roundBytes(again), " are gathered again");
  out += kept > 0 ? concat("; ", roundBytes(kept), " of frozen parameters stay gathered for good\n") : "\n";
  return out;
}

std::string reportJson(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                       const Report& report) {
  Json json;
  json.beginObject();
  json.key("strategy").value(plan.strategy).key("graph").value(graph.name).key("machine").value(cost.machine().name);
  json.key("world").value(std::int64_t{graph.world}).key("hash").value(hashOf(plan));
  json.key("budget_bytes").value(plan.budget).key("step_ns").value(report.run.step);
  json.key("lower_bound_ns").value(report.bound.best);
  json.key("bounds_ns").beginObject();
  json.key("compute").value(report.bound.compute).key("gathers").value(report.bound.gathers);
  json.key("reductions").value(report.bound.reductions).key("links").value(report.bound.links);
  json.key("windows").value(report.bound.windows).key("critical").value(report.bound.critical);
  json.key("launches").value(report.bound.launches).endObject();
  for (const auto& [key, values] : {std::pair{"busy_ns", &report.run.busy}, {"exposed_ns", &report.run.exposed}}) {
    json.key(key).beginObject();
    for (int r = 0; r < kResources; ++r) {
      json.key(name(static_cast<Resource>(r))).value((*values)[r]);
    }
    json.endObject();
  }
  json.key("peak_bytes").value(report.memory.peak).key("held_at_peak").beginObject();
  if (report.memory.peak_at != kNone) {
    for (const Holder& holder : holders(graph, usage, plan, report.memory.peak_at)) {
      json.key(holder.what).value(holder.bytes);
    }
  }
  json.endObject().key("instructions").beginArray();
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& in = plan.instructions[i];
    json.beginObject().key("kind").value(name(in.kind));
    if (in.node != kNone) {
      json.key("node").value(graph.nodes[in.node].name);
    }
    if (in.op != kNone) {
      json.key("op").value(std::int64_t{in.op});
    }
    if (in.count > 0) {
      json.key("items").beginArray();
      for (const Item& item : plan.itemsOf(in)) {
        json.value(nameOf(graph, item));
      }
      json.endArray();
    }
    if (in.kind != NodeKind::Release) {
      json.key("start_ns").value(report.run.start[i]).key("end_ns").value(report.run.end[i]);
    }
    json.key("memory_bytes").value(report.memory.at[i]);
    if (const std::string why = explain(plan.reasons[i]); !why.empty()) {
      json.key("why").value(why);
    }
    json.endObject();
  }
  json.endArray().endObject();
  return json.text();
}

std::string traceJson(const StepGraph& graph, const Plan& plan, const Report& report) {
  // Trace times are microseconds; three decimals keep the nanoseconds.
  const auto micros = [](Nanos nanos) {
    std::array<char, 48> text{};
    std::snprintf(text.data(), text.size(), "%lld.%03lld", static_cast<long long>(nanos / 1000),
                  static_cast<long long>(nanos % 1000));
    return std::string(text.data());
  };
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  out += R"({"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"simulated step"}})";
  for (int r = 0; r < kResources; ++r) {
    out += concat(R"(,{"ph":"M","pid":1,"tid":)", r, R"(,"name":"thread_name","args":{"name":")",
                  name(static_cast<Resource>(r)), "\"}}");
  }
  const auto quoted = [](const std::string& text) {
    Json json;
    json.value(text);
    return json.text();
  };
  Nanos now = 0;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& in = plan.instructions[i];
    if (in.kind == NodeKind::Release) {
      continue;
    }
    const Nanos start = report.run.start[i];
    const Nanos end = report.run.end[i];
    const auto tid = static_cast<int>(resourceOf(in.kind));
    if (in.kind != NodeKind::Wait || end > start) {
      const std::string label =
          in.node != kNone ? graph.nodes[in.node].name : concat(name(in.kind), " ", itemsText(graph, plan, in));
      out += concat(",\n{\"ph\":\"X\",\"pid\":1,\"tid\":", tid, ",\"ts\":", micros(start),
                    ",\"dur\":", micros(end - start), ",\"name\":", quoted(label), ",\"cat\":\"", name(in.kind), "\"");
      if (const std::string why = explain(plan.reasons[i]); !why.empty()) {
        out += ",\"args\":{\"why\":" + quoted(why) + "}";
      }
      out += "}";
    }
    if (in.node != kNone) {
      now = start;
      out += concat(",\n{\"ph\":\"C\",\"pid\":1,\"ts\":", micros(now),
                    ",\"name\":\"memory\",\"args\":{\"bytes\":", report.memory.at[i], "}}");
    }
  }
  return out + "\n]}\n";
}

}  // namespace dc::plan
