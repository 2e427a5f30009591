// The explanation as one HTML page without scripts or outside files: a timeline of the simulated step with
// one row for each resource and the memory below it, and the tables.
#include <algorithm>
#include <array>

#include "deepcompile/plan/explain.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

constexpr int kWidth = 1200;  // of the picture's time axis, in pixels
constexpr int kLeft = 130;    // for the names of the rows
constexpr int kRow = 30;
constexpr int kMemory = 140;  // height of the memory curve

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string percent(std::int64_t part, std::int64_t whole) {
  const std::int64_t tenths = whole == 0 ? 0 : mulDiv(part, 1000, whole);
  return concat(tenths / 10, ".", tenths % 10, " %");
}

std::string tableRow(std::initializer_list<std::string> cells) {
  std::string out = "<tr>";
  for (const std::string& cell : cells) {
    out += concat("<td>", escaped(cell), "</td>");
  }
  return out + "</tr>\n";
}

std::string labelOf(const StepGraph& graph, const Plan& plan, const Instruction& in) {
  if (in.node != kNone) {
    return graph.nodes[in.node].name;
  }
  std::string text = std::string(name(in.kind));
  const auto items = plan.itemsOf(in);
  for (std::size_t i = 0; i < items.size() && i < 3; ++i) {
    text += concat(" ", nameOf(graph, items[i]));
  }
  return items.size() > 3 ? text + concat(" and ", items.size() - 3, " more") : text;
}

// Work that is narrower than a pixel is drawn together with its neighbours, so that the page stays small
// however long the step is.
class Picture {
 public:
  Picture(const StepGraph& graph, const Plan& plan, const Report& report)
      : graph_(graph), plan_(plan), report_(report), step_(std::max<Nanos>(report.run.step, 1)) {}

  std::string draw() {
    const int height = kResources * kRow + kMemory + 50;
    out_ = concat("<svg viewBox=\"0 0 ", kLeft + kWidth + 40, " ", height,
                  "\" role=\"img\" aria-label=\"timeline of the simulated step\">\n");
    for (int r = 0; r < kResources; ++r) {
      out_ += concat("<text x=\"0\" y=\"", r * kRow + 19, "\">", name(static_cast<Resource>(r)), "</text>\n");
    }
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      const Instruction& in = plan_.instructions[i];
      const Nanos start = report_.run.start[i];
      const Nanos end = report_.run.end[i];
      if (in.kind == NodeKind::Release || end <= start) {
        continue;
      }
      if (in.kind == NodeKind::Wait) {
        stand(start, end);
      } else {
        add(static_cast<std::size_t>(resourceOf(in.kind)), start, end, labelOf(graph_, plan_, in));
      }
    }
    for (std::size_t r = 0; r < kResources; ++r) {
      flush(r);
    }
    stalls();
    memory();
    for (int tick = 0; tick <= 4; ++tick) {
      out_ += concat("<text x=\"", kLeft + kWidth * tick / 4, "\" y=\"", height - 6, "\" class=\"tick\">",
                     roundNanos(mulDiv(step_, tick, 4)), "</text>\n");
    }
    return out_ + "</svg>\n";
  }

 private:
  struct Bar {
    int from = -1;  // pixels
    int to = -1;
    int pieces = 0;
    std::string label;
  };

  int pixel(Nanos time) const { return static_cast<int>(mulDiv(time, kWidth, step_)); }

  void add(std::size_t row, Nanos start, Nanos end, const std::string& label) {
    Bar& bar = bars_[row];
    const int from = pixel(start);
    const int to = std::max(pixel(end), from + 1);
    const bool narrow = to - from <= 2 && bar.to - bar.from <= 60;
    if (bar.from >= 0 && narrow && from <= bar.to + 1) {
      bar.to = std::max(bar.to, to);
      ++bar.pieces;
      return;
    }
    flush(row);
    bar = {from, to, 1, label};
  }

  void flush(std::size_t row) {
    Bar& bar = bars_[row];
    if (bar.from >= 0) {
      const std::string more = bar.pieces > 1 ? concat(" and ", bar.pieces - 1, " more") : "";
      out_ += concat("<rect x=\"", kLeft + bar.from, "\" y=\"", static_cast<int>(row) * kRow + 4, "\" width=\"",
                     bar.to - bar.from, "\" height=\"", kRow - 8, "\" class=\"r", row, "\"><title>", escaped(bar.label),
                     more, "</title></rect>\n");
    }
    bar = {};
  }

  void stand(Nanos start, Nanos end) {
    for (int x = pixel(start); x < kWidth && start < end; ++x) {
      const Nanos until = std::min(end, mulDiv(step_, x + 1, kWidth));
      stood_[x] += std::max<Nanos>(until - start, 0);
      start = std::max(start, until);
    }
  }

  // Where the compute stream stands still for half of a pixel's time or more.
  void stalls() {
    for (int x = 0; x < kWidth; ++x) {
      const int from = x;
      Nanos stood = 0;
      for (; x < kWidth && stood_[x] * 2 * kWidth >= step_; ++x) {
        stood += stood_[x];
      }
      if (x > from) {
        out_ += concat("<rect x=\"", kLeft + from, "\" y=\"4\" width=\"", x - from, "\" height=\"", kRow - 8,
                       "\" class=\"wait\"><title>stands still for ", roundNanos(stood), "</title></rect>\n");
      }
    }
  }

  // The most that is held in each pixel's time, and the budget.
  void memory() {
    std::vector<Bytes> most(kWidth + 1, 0);
    int at = 0;
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      if (plan_.instructions[i].kind != NodeKind::Release && plan_.instructions[i].node != kNone) {
        at = std::min(pixel(report_.run.start[i]), kWidth);
      }
      most[at] = std::max(most[at], report_.memory.at[i]);
    }
    const Bytes top = std::max<Bytes>({plan_.budget < kLargest ? plan_.budget : 0, report_.memory.peak, 1});
    const int base = kResources * kRow + kMemory + 15;
    std::string points = concat(kLeft, ",", base);
    Bytes held = 0;
    for (int x = 0; x <= kWidth; ++x) {
      held = most[x] > 0 ? most[x] : held;
      points += concat(" ", kLeft + x, ",", base - mulDiv(held, kMemory, top));
    }
    out_ += concat("<text x=\"0\" y=\"", base - kMemory / 2, "\">memory</text>\n<polygon class=\"memory\" points=\"",
                   points, " ", kLeft + kWidth, ",", base, "\"><title>peak ", roundBytes(report_.memory.peak),
                   "</title></polygon>\n");
    if (plan_.budget < kLargest) {
      const auto y = base - mulDiv(plan_.budget, kMemory, top);
      out_ += concat("<line class=\"budget\" x1=\"", kLeft, "\" x2=\"", kLeft + kWidth, "\" y1=\"", y, "\" y2=\"", y,
                     "\"><title>budget ", roundBytes(plan_.budget), "</title></line>\n");
    }
  }

  const StepGraph& graph_;
  const Plan& plan_;
  const Report& report_;
  const Nanos step_;
  std::array<Bar, kResources> bars_;
  std::array<Nanos, kWidth> stood_{};  // by pixel
  std::string out_;
};

constexpr const char* kStyle =
    "body{font:14px sans-serif;max-width:1360px;margin:2em auto;padding:0 1em;color:#222}"
    "svg{width:100%;font-size:12px}.tick{text-anchor:middle;fill:#666}"
    ".r0{fill:#4c78a8}.r1{fill:#54a24b}.r2{fill:#b279a2}.r3{fill:#eeca3b}.r4{fill:#9d755d}.wait{fill:#e45756}"
    ".memory{fill:#bcd}.budget{stroke:#e45756;stroke-dasharray:4}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}";

}  // namespace

std::string explainHtml(const StepGraph& graph, const Usage& usage, const CostModel& cost, const Plan& plan,
                        const Report& report, std::size_t most) {
  const Simulation& run = report.run;
  const std::string title = concat(graph.name, " on ", graph.world, " ranks of ", cost.machine().name);
  std::string out = concat("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>", escaped(title),
                           "</title><style>", kStyle, "</style></head><body>\n<h1>", escaped(title), "</h1>\n");
  out += concat("<p>Strategy ", escaped(plan.strategy), ", plan ", hashOf(plan), ". The step takes <b>",
                roundNanos(run.step), "</b>; no plan can take less than ", roundNanos(report.bound.best),
                ", so at most ", percent(run.step - report.bound.best, run.step), " is left.</p>\n");
  out += Picture(graph, plan, report).draw();
  out +=
      "<p>Red: the compute stream stands still.</p>\n<h2>Resources</h2>\n<table><tr><th>resource</th><th>busy</th>"
      "<th>of the step</th><th>exposed</th></tr>\n";
  for (int r = 0; r < kResources; ++r) {
    out += tableRow({std::string(name(static_cast<Resource>(r))), roundNanos(run.busy[r]),
                     percent(run.busy[r], run.step), r == 0 ? "" : roundNanos(run.exposed[r])});
  }
  out += concat("</table>\n<h2>Memory at its peak</h2>\n<p>", roundBytes(report.memory.peak), " of ",
                roundBytes(plan.budget), "</p>\n<table><tr><th>held by</th><th>bytes</th></tr>\n");
  if (report.memory.peak_at != kNone) {
    for (const Holder& holder : holders(graph, usage, plan, report.memory.peak_at)) {
      out += tableRow({std::string(holder.what), roundBytes(holder.bytes)});
    }
  }
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < plan.instructions.size(); ++i) {
    if (resourceOf(plan.instructions[i].kind) != Resource::Compute && plan.instructions[i].kind != NodeKind::Release) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return run.stall[plan.instructions[a].op] > run.stall[plan.instructions[b].op];
  });
  const std::size_t shown = std::min(most, order.size());
  out +=
      concat("</table>\n<h2>Decisions, the most exposed first (", shown, " of ", order.size(),
             ")</h2>\n<table><tr><th>operation</th><th>starts</th><th>takes</th><th>exposed</th><th>why</th></tr>\n");
  for (std::size_t k = 0; k < shown; ++k) {
    const std::size_t i = order[k];
    const Instruction& in = plan.instructions[i];
    out += tableRow({labelOf(graph, plan, in), roundNanos(run.start[i]), roundNanos(run.end[i] - run.start[i]),
                     roundNanos(run.stall[in.op]), explain(plan.reasons[i])});
  }
  return out + "</table>\n</body></html>\n";
}

}  // namespace dc::plan
