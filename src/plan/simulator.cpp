#include "deepcompile/plan/simulator.h"

#include <algorithm>
#include <span>

#include "deepcompile/base/error.h"

namespace dc::plan {
namespace {

// Work is counted in 1/1024 of a nanosecond at full speed, so that slowed resources stay exact
// integers.
constexpr std::int64_t kFull = 1024;
constexpr auto kCompute = static_cast<std::size_t>(Resource::Compute);
constexpr auto kGather = static_cast<std::size_t>(Resource::Gather);
constexpr auto kReduce = static_cast<std::size_t>(Resource::Reduce);

struct Task {
  Index instruction = kNone;
  Index after_compute = 0;  // how many entries of the compute queue must be done
  Index after_op = kNone;   // an operation that must be done (compute: the wait's; gather: a reload
                            // of its shards)
  bool wait = false;
  Nanos launched = 0;  // when the host has launched it
  std::int64_t work = 0;
};

struct Stream {
  std::vector<Task> queue;
  std::size_t head = 0;
  bool running = false;
  std::int64_t left = 0;  // work of the running task
};

class Engine {
 public:
  Engine(const StepGraph& graph, const CostModel& cost, const Plan& plan, Nanos limit)
      : plan_(plan),
        limit_(limit),
        shared_(cost.machine().shared_links),
        slowed_(kFull * 1000 / (1000 + cost.machine().slowdown)),
        op_done_(static_cast<std::size_t>(plan.ops), 0),
        op_resource_(static_cast<std::size_t>(plan.ops), 0) {
    fill(graph, cost);
    result_.start.assign(plan.instructions.size(), 0);
    result_.end.assign(plan.instructions.size(), 0);
    result_.stall.assign(static_cast<std::size_t>(plan.ops), 0);
  }

  Simulation run() {
    while (true) {
      startAll();
      const Nanos least = leastStep();
      if (least >= limit_) {
        result_.step = least;
        result_.complete = false;
        return std::move(result_);
      }
      const Nanos dt = nextEvent();
      if (dt < 0) {
        break;
      }
      advance(dt);
      ++result_.events;
    }
    for (const Stream& stream : streams_) {
      check(stream.head == stream.queue.size(),
            "internal error: the simulated plan waits for something that never starts");
    }
    finish();
    return std::move(result_);
  }

 private:
  void fill(const StepGraph& graph, const CostModel& cost) {
    std::vector<Index> shard_op(graph.params.size(), kNone);
    Nanos host = 0;
    streams_[kCompute].queue.reserve(plan_.instructions.size());
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      const Instruction& instruction = plan_.instructions[i];
      if (instruction.kind == NodeKind::Release) {
        continue;
      }
      const auto resource = static_cast<std::size_t>(resourceOf(instruction.kind));
      const auto computed = static_cast<Index>(streams_[kCompute].queue.size());
      Task& task = streams_[resource].queue.emplace_back();
      task.instruction = static_cast<Index>(i);
      task.wait = instruction.kind == NodeKind::Wait;
      if (!task.wait) {
        host += cost.machine().launch;
        const Nanos duration = durationOf(graph, cost, plan_, instruction);
        task.work = duration * kFull;
        to_start_[resource] += duration;
      }
      task.launched = host;
      if (resource == kCompute) {
        task.after_op = task.wait ? instruction.op : kNone;
      } else {
        task.after_compute = computed;
        op_resource_[instruction.op] = static_cast<char>(resource);
      }
      if (instruction.kind == NodeKind::Reload || instruction.kind == NodeKind::Gather) {
        for (const Item& item : plan_.itemsOf(instruction)) {
          if (item.kind == ItemKind::Shard) {
            shard_op[item.id] = instruction.op;
          } else if (item.kind == ItemKind::Param && instruction.kind == NodeKind::Gather) {
            task.after_op = std::max(task.after_op, shard_op[item.id]);
          }
        }
      }
    }
    for (std::size_t r = 0; r < kResources; ++r) {
      if (!streams_[r].queue.empty()) {
        used_[uses_++] = r;
      }
    }
  }

  // Starts (and, where they take no time, finishes) all that can start now.
  void startAll() {
    bool changed = true;
    while (changed) {
      changed = false;
      for (const std::size_t r : used()) {
        while (tryStart(r)) {
          changed = changed || r != kCompute;  // compute comes first: what waited for it is still to be asked
        }
      }
    }
  }

  // True when it is done already, so that others may start.
  bool tryStart(std::size_t r) {
    Stream& stream = streams_[r];
    if (stream.running || stream.head == stream.queue.size()) {
      return false;
    }
    const Task& task = stream.queue[stream.head];
    if (r == kCompute && reached_ != static_cast<Index>(stream.head)) {
      reached_ = static_cast<Index>(stream.head);
      reached_at_ = now_;
      result_.start[task.instruction] = now_;
    }
    if (static_cast<std::size_t>(task.after_compute) > streams_[kCompute].head ||
        (task.after_op != kNone && op_done_[task.after_op] == 0) || task.launched > now_) {
      return false;
    }
    if (task.wait) {
      const Nanos stall = now_ - reached_at_;
      const Index op = plan_.instructions[task.instruction].op;
      result_.stall[op] += stall;
      result_.exposed[op_resource_[op]] += stall;
      result_.end[task.instruction] = now_;
      ++stream.head;
      return true;
    }
    if (r == kCompute) {
      result_.host_bound += now_ - reached_at_;
    }
    result_.start[task.instruction] = now_;
    to_start_[r] -= task.work / kFull;
    if (task.work == 0) {
      complete(r);
      return true;
    }
    stream.running = true;
    stream.left = task.work;
    return false;
  }

  void complete(std::size_t r) {
    Stream& stream = streams_[r];
    const Index instruction = stream.queue[stream.head].instruction;
    result_.end[instruction] = now_;
    result_.busy[r] += now_ - result_.start[instruction];
    if (const Index op = plan_.instructions[instruction].op; op != kNone) {
      op_done_[op] = 1;
      last_op_ = op;
    }
    stream.running = false;
    ++stream.head;
  }

  std::int64_t rate(std::size_t r) const {
    const bool gathers = streams_[kGather].running;
    const bool reduces = streams_[kReduce].running;
    if (r == kCompute) {
      return gathers || reduces ? slowed_ : kFull;
    }
    return (r == kGather || r == kReduce) && shared_ && gathers && reduces ? kFull / 2 : kFull;
  }

  // Time to the next completion or launch that something waits for; -1 when nothing is left.
  Nanos nextEvent() const {
    Nanos next = kNoLimit;
    for (const std::size_t r : used()) {
      const Stream& stream = streams_[r];
      if (stream.running) {
        const std::int64_t speed = rate(r);
        if (next == kNoLimit || stream.left <= (next - 1) * speed) {
          next = speed == kFull ? (stream.left + kFull - 1) / kFull : (stream.left + speed - 1) / speed;
        }
      } else if (stream.head < stream.queue.size() && stream.queue[stream.head].launched > now_) {
        next = std::min(next, stream.queue[stream.head].launched - now_);
      }
    }
    return next == kNoLimit ? -1 : next;
  }

  void advance(Nanos dt) {
    std::array<std::int64_t, kResources> speeds{};
    for (const std::size_t r : used()) {
      speeds[r] = rate(r);
    }
    now_ += dt;
    for (const std::size_t r : used()) {
      if (streams_[r].running) {
        streams_[r].left -= dt * speeds[r];
        if (streams_[r].left <= 0) {
          complete(r);
        }
      }
    }
  }

  // All compute that is left runs from now on, the slower while a collective does.
  Nanos leastStep() const {
    const auto left = [&](std::size_t r) {
      return to_start_[r] + (streams_[r].running ? streams_[r].left / kFull : 0);
    };
    const Nanos links = shared_ ? left(kGather) + left(kReduce) : std::max(left(kGather), left(kReduce));
    return now_ + left(kCompute) + mulDiv(links, kFull - slowed_, kFull);
  }

  std::span<const std::size_t> used() const { return {used_.data(), uses_}; }

  void finish() {
    result_.step = now_;
    const std::vector<Task>& queue = streams_[kCompute].queue;
    const Nanos computed = queue.empty() ? 0 : result_.end[queue.back().instruction];
    if (now_ > computed && last_op_ != kNone) {
      result_.stall[last_op_] += now_ - computed;
      result_.exposed[op_resource_[last_op_]] += now_ - computed;
    }
  }

  const Plan& plan_;
  const Nanos limit_;
  const bool shared_;
  const std::int64_t slowed_;
  std::array<Stream, kResources> streams_;
  std::array<std::size_t, kResources> used_{};  // resources with anything to do; the first `uses_` count
  std::size_t uses_ = 0;
  std::array<Nanos, kResources> to_start_{};  // what has not begun, at full speed
  std::vector<char> op_done_;
  std::vector<char> op_resource_;
  Simulation result_;
  Nanos now_ = 0;
  Nanos reached_at_ = 0;
  Index reached_ = kNone;  // the entry of the compute queue that the stream has come to
  Index last_op_ = kNone;
};

}  // namespace

Nanos durationOf(const StepGraph& graph, const CostModel& cost, const Plan& plan, const Instruction& instruction) {
  Bytes bytes = 0;
  const bool reduce = instruction.kind == NodeKind::Reduce;
  for (const Item& item : plan.itemsOf(instruction)) {
    bytes += reduce ? graph.params[item.id].grad : deviceBytes(graph, item);
  }
  switch (instruction.kind) {
    case NodeKind::Compute:
    case NodeKind::Optimizer:
      return graph.nodes[instruction.node].time;
    case NodeKind::Gather:
      return cost.gather(bytes);
    case NodeKind::Reduce:
      return cost.reduce(bytes);
    case NodeKind::Offload:
      return cost.toHost(bytes);
    case NodeKind::Reload:
      return cost.toDevice(bytes);
    default:
      return 0;
  }
}

Simulation simulate(const StepGraph& graph, const CostModel& cost, const Plan& plan, Nanos limit) {
  return Engine(graph, cost, plan, limit).run();
}

}  // namespace dc::plan
