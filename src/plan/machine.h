// What a step runs on, as far as the planner must know it: memory, links, and how much
// communication disturbs compute.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deepcompile/plan/types.h"

namespace dc::plan {

// A link moves b bytes in latency + b / bandwidth.
struct Link {
  Nanos latency = 0;
  std::int64_t bandwidth = 1;  // bytes per second

  bool operator==(const Link&) const = default;
};

// A measured point: a collective over `bytes` (the whole, gathered size) took `time`.
struct Point {
  Bytes bytes = 0;
  Nanos time = 0;

  bool operator==(const Point&) const = default;
};

// What may leave the device.
enum class Offload : std::uint8_t { Nothing, States, Everything };  // optimizer states; activations and shards too
std::optional<Offload> offload(std::string_view word);              // "no", "states", "yes"

struct Machine {
  std::string name = "machine";
  int devices = 1;          // ranks that share a node
  Bytes budget = kLargest;  // device memory that a rank may use for training
  Link inside;              // between the ranks of a node, per rank; latency per hop
  Link between;             // between nodes, per rank; latency per hop
  Link to_device;           // host to device
  Link to_host;             // device to host
  Offload offload = Offload::Everything;
  bool shared_links = true;           // gathers and reductions that run at the same time share the bandwidth
  int slowdown = 0;                   // compute takes this many thousandths longer while a collective runs
  Nanos launch = 0;                   // host time to launch one node or collective
  std::int64_t flops = 1;             // matrix operations that are reached, in million per second; for model graphs
  std::int64_t memory_bandwidth = 1;  // bytes per second of device memory that are reached; for model graphs
  std::int64_t host_update = 1;       // bytes of optimizer state per second and rank that the host updates
  std::vector<Point> gather;          // measured curves, by rising size; empty: the links decide
  std::vector<Point> reduce;

  bool operator==(const Machine&) const = default;
};

// Why `next` cannot come after `points` in a measured curve; empty where it can.
std::string_view curveFault(const std::vector<Point>& points, const Point& next);
// Checks a machine that a program has put together; an error names what is wrong.
void validate(const Machine& machine);

// The text form; parseMachine(print(m)) == m. "machine NAME like PRESET" starts from a preset.
Machine parseMachine(std::string_view text, const std::string& file = "machine");
std::string print(const Machine& machine);

std::vector<std::string_view> presetNames();
// An unknown name is an error that names the nearest preset.
Machine preset(std::string_view name);

}  // namespace dc::plan
