#include <algorithm>
#include <array>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/machine.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

// In the order of Offload.
constexpr std::array<std::string_view, 3> kOffloads = {"no", "states", "yes"};

const std::vector<std::string_view> kLines = {
    "machine",  "devices", "budget", "inside",           "between",     "to_device", "to_host", "shared_links",
    "slowdown", "launch",  "flops",  "memory_bandwidth", "host_update", "gather",    "reduce",  "offload"};

Link link(const TextReader& in, Link value) {
  for (std::size_t i = 1; i < in.words().size(); ++i) {
    const Field field = in.field(in.words()[i]);
    if (field.key.text == "latency") {
      value.latency = in.nanos(field.value);
    } else if (field.key.text == "bandwidth") {
      value.bandwidth = in.bytes(field.value);
      if (value.bandwidth == 0) {
        in.fail(field.value, "a link needs a bandwidth above zero");
      }
    } else {
      in.fail(field.key, unknown("field of a link", field.key.text, {"latency", "bandwidth"}));
    }
  }
  return value;
}

// SIZE:TIME ..., sizes rising.
std::vector<Point> curve(const TextReader& in) {
  std::vector<Point> points;
  in.word(1, "SIZE:TIME");
  for (std::size_t i = 1; i < in.words().size(); ++i) {
    const Word& word = in.words()[i];
    const std::size_t colon = word.text.find(':');
    if (colon == std::string_view::npos) {
      in.fail(word, concat("expected SIZE:TIME, found '", word.text, "'"));
    }
    const Point point{in.bytes({word.text.substr(0, colon), word.column}),
                      in.nanos({word.text.substr(colon + 1), word.column + static_cast<int>(colon) + 1})};
    if (const std::string_view fault = curveFault(points, point); !fault.empty()) {
      in.fail(word, std::string(fault));
    }
    points.push_back(point);
  }
  return points;
}

std::string print(const std::vector<Point>& points) {
  std::string out;
  for (const Point& point : points) {
    out += concat(" ", exactBytes(point.bytes), ":", exactNanos(point.time));
  }
  return out;
}

std::string print(const char* key, const Link& link) {
  return concat(key, " latency=", exactNanos(link.latency), " bandwidth=", exactBytes(link.bandwidth), "\n");
}

}  // namespace

std::optional<Offload> offload(std::string_view word) {
  const auto found = std::ranges::find(kOffloads, word);
  return found == kOffloads.end() ? std::nullopt : std::optional(static_cast<Offload>(found - kOffloads.begin()));
}

std::string_view curveFault(const std::vector<Point>& points, const Point& next) {
  if (next.bytes <= 0 || (!points.empty() && next.bytes <= points.back().bytes)) {
    return "the sizes of a curve start above zero and rise";
  }
  if (next.time < (points.empty() ? 0 : points.back().time)) {
    return "a larger size cannot take less time: measure again or leave the point out";
  }
  return "";
}

void validate(const Machine& machine) {
  const std::string of = "machine '" + machine.name + "'";
  check(machine.devices >= 1, [&] { return concat(of, ": devices is ", machine.devices, "; at least 1"); });
  check(machine.slowdown >= 0, [&] { return concat(of, ": slowdown is ", machine.slowdown, "; at least 0"); });
  for (const Link* link : {&machine.inside, &machine.between, &machine.to_device, &machine.to_host}) {
    check(link->bandwidth >= 1 && link->latency >= 0, [&] {
      return concat(of, ": a link has latency ", link->latency, " ns and bandwidth ", link->bandwidth,
                    " bytes a second; at least 0 and 1");
    });
  }
  for (const std::vector<Point>* curve : {&machine.gather, &machine.reduce}) {
    std::vector<Point> before;
    for (const Point& point : *curve) {
      const std::string_view fault = curveFault(before, point);
      check(fault.empty(), [&] { return concat(of, ", ", point.bytes, " bytes in ", point.time, " ns: ", fault); });
      check(point.bytes <= kLargest && point.time <= kLargest,
            [&] { return concat(of, ", ", point.bytes, " bytes in ", point.time, " ns: too large"); });
      before.push_back(point);
    }
  }
}

Machine parseMachine(std::string_view text, const std::string& file) {
  TextReader in(text, file);
  Machine machine;
  while (in.nextLine()) {
    const Word& first = in.words()[0];
    const std::string_view key = first.text;
    const auto value = [&](std::string_view expected) -> const Word& {
      if (in.words().size() > 2) {
        in.fail(in.words()[2], concat("unexpected '", in.words()[2].text, "'"));
      }
      return in.word(1, expected);
    };
    const auto positive = [&](std::string_view expected) {
      const Word& word = value(expected);
      const std::int64_t number = in.bytes(word);
      if (number == 0) {
        in.fail(word, concat(key, " must be above zero"));
      }
      return number;
    };
    if (key == "machine") {
      const std::string named(in.word(1, "the machine's name").text);
      if (!isName(named)) {
        in.fail(in.words()[1], concat("'", named, "' is not a name"));
      }
      if (in.words().size() > 2) {
        if (in.words()[2].text != "like") {
          in.fail(in.words()[2], concat("expected 'like', found '", in.words()[2].text, "'"));
        }
        const Word& base = in.word(3, "the name of a preset");
        bool found = false;
        for (const std::string_view preset_name : presetNames()) {
          found = found || preset_name == base.text;
        }
        if (!found) {
          in.fail(base, unknown("machine", base.text, presetNames()));
        }
        machine = preset(base.text);
      }
      machine.name = named;
    } else if (key == "devices") {
      machine.devices = static_cast<int>(in.integer(value("ranks in a node"), 1, 1 << 20));
    } else if (key == "budget") {
      machine.budget = in.bytes(value("a size"));
    } else if (key == "inside") {
      machine.inside = link(in, machine.inside);
    } else if (key == "between") {
      machine.between = link(in, machine.between);
    } else if (key == "to_device") {
      machine.to_device = link(in, machine.to_device);
    } else if (key == "to_host") {
      machine.to_host = link(in, machine.to_host);
    } else if (key == "offload") {
      const Word& word = value("yes, states or no");
      const auto found = offload(word.text);
      if (!found) {
        in.fail(word, concat("expected yes, states or no, found '", word.text, "'"));
      }
      machine.offload = *found;
    } else if (key == "shared_links") {
      const Word& word = value("yes or no");
      if (word.text != "yes" && word.text != "no") {
        in.fail(word, concat("expected yes or no, found '", word.text, "'"));
      }
      machine.shared_links = word.text == "yes";
    } else if (key == "slowdown") {
      machine.slowdown = static_cast<int>(in.integer(value("thousandths"), 0, 100000));
    } else if (key == "launch") {
      machine.launch = in.nanos(value("a time"));
    } else if (key == "flops") {
      machine.flops = positive("million operations per second");
    } else if (key == "memory_bandwidth") {
      machine.memory_bandwidth = positive("bytes per second");
    } else if (key == "host_update") {
      machine.host_update = positive("bytes per second");
    } else if (key == "gather") {
      machine.gather = curve(in);
    } else if (key == "reduce") {
      machine.reduce = curve(in);
    } else {
      in.fail(first, unknown("line", key, kLines));
    }
  }
  return machine;
}

std::string print(const Machine& machine) {
  std::string out =
      concat("machine ", machine.name, "\ndevices ", machine.devices, "\nbudget ", exactBytes(machine.budget), "\n");
  out += print("inside", machine.inside) + print("between", machine.between);
  out += print("to_device", machine.to_device) + print("to_host", machine.to_host);
  out += concat("offload ", kOffloads[static_cast<std::size_t>(machine.offload)], "\n");
  out += concat("shared_links ", machine.shared_links ? "yes" : "no", "\nslowdown ", machine.slowdown, "\nlaunch ",
                exactNanos(machine.launch), "\nflops ", machine.flops, "\nmemory_bandwidth ",
                exactBytes(machine.memory_bandwidth), "\nhost_update ", exactBytes(machine.host_update), "\n");
  if (!machine.gather.empty()) {
    out += "gather" + print(machine.gather) + "\n";
  }
  if (!machine.reduce.empty()) {
    out += "reduce" + print(machine.reduce) + "\n";
  }
  return out;
}

}  // namespace dc::plan
