#include "deepcompile/plan/models.h"

#include <algorithm>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

struct Shape {
  std::string_view name;
  std::int64_t layers, hidden, ffn, heads, kv_heads, vocab;
  std::int64_t experts, experts_per_token;  // 0: dense
  bool gated;                               // three matrices in the feed-forward part, else two
  bool tied;                                // the head is the embedding; learned positions
};

constexpr Shape kShapes[] = {
    {"llama3-8b", 32, 4096, 14336, 32, 8, 128256, 0, 0, true, false},
    {"llama3-70b", 80, 8192, 28672, 64, 8, 128256, 0, 0, true, false},
    {"llama3-405b", 126, 16384, 53248, 128, 8, 128256, 0, 0, true, false},
    {"mixtral-8x7b", 32, 4096, 14336, 32, 8, 32000, 8, 2, true, false},
    {"gpt2-small", 12, 768, 3072, 12, 12, 50257, 0, 0, false, true},
    {"tiny-llama", 4, 256, 688, 8, 4, 1000, 0, 0, true, false},
};

// Parameters of fewer elements than this stay gathered, as DeepSpeed does by default.
constexpr std::int64_t kPersistentElements = 100000;
// Adam in mixed precision: fp32 weights, two moments; the gradient adds up in fp32.
constexpr Bytes kStateBytes = 12;
constexpr Bytes kAccumBytes = 4;

// One operation of a layer. Backward takes twice the operations of forward.
struct Operation {
  std::string name;
  std::vector<Index> params;
  std::int64_t mega_flops = 0;  // forward
  Bytes moved = 0;              // device memory read and written, forward
  Bytes made = 0;               // what forward keeps for backward
  Bytes workspace = 0;
};

class Generator {
 public:
  Generator(const Shape& shape, const ModelOptions& options, const Machine& machine)
      : shape_(shape), options_(options), machine_(machine), element_(elementBytes(options.dtype)) {
    graph_.name = std::string(shape.name);
    graph_.world = options.world;
    graph_.stage = options.stage;
    tokens_ = static_cast<std::int64_t>(options.batch) * options.sequence;
  }

  StepGraph make() {
    buildLayers();
    for (int micro = 0; micro < options_.accumulate; ++micro) {
      microBatch(micro);
    }
    update();
    validate(graph_);
    return std::move(graph_);
  }

 private:
  Index param(const std::string& name, std::int64_t elements) {
    const std::int64_t shard = (elements + options_.world - 1) / options_.world;
    Param it;
    it.name = name;
    it.dtype = options_.dtype;
    it.bytes = elements * element_;
    it.shard = options_.stage == 3 ? shard * element_ : it.bytes;
    it.grad = it.bytes;
    it.accum = (options_.stage == 1 ? elements : shard) * kAccumBytes;
    it.state = options_.host_optimizer ? 0 : shard * kStateBytes;
    it.persistent = options_.stage == 3 && elements < kPersistentElements;
    graph_.params.push_back(it);
    return static_cast<Index>(graph_.params.size()) - 1;
  }

  // A matrix product of all tokens with in x out weights.
  Operation matmul(const std::string& name, std::vector<Index> params, std::int64_t in, std::int64_t out,
                   std::int64_t tokens) {
    Operation op;
    op.name = name;
    op.params = std::move(params);
    op.mega_flops = 2 * tokens * in / 1000 * out / 1000;
    op.moved = (in * out + tokens * (in + out)) * element_;
    op.made = tokens * out * element_;
    return op;
  }

  void buildLayers() {
    const std::int64_t h = shape_.hidden;
    const std::int64_t kv = h / shape_.heads * shape_.kv_heads;
    Operation embed;
    embed.name = "embed";
    embed.params = {param("embed", shape_.vocab * h)};
    if (shape_.tied) {
      embed.params.push_back(param("positions", static_cast<std::int64_t>(options_.sequence) * h));
    }
    embed.moved = 3 * tokens_ * h * element_;
    embed.made = tokens_ * h * element_;
    blocks_.push_back({embed});
    for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
      const std::string at = concat("l", layer, ".");
      std::vector<Operation> block;
      const Index norm1 = param(at + "norm1", h);
      const Index q = param(at + "q", h * h);
      const Index k = param(at + "k", h * kv);
      const Index v = param(at + "v", h * kv);
      block.push_back(matmul("qkv", {norm1, q, k, v}, h, h + 2 * kv, tokens_));
      Operation attention;
      attention.name = "attention";
      attention.mega_flops = 2 * tokens_ * options_.sequence / 1000 * h / 1000;  // causal: half of 4 s^2 h
      attention.moved = tokens_ * (2 * h + 2 * kv) * element_;
      attention.made = tokens_ * h * element_;
      block.push_back(attention);
      block.push_back(matmul("out", {param(at + "o", h * h)}, h, h, tokens_));
      const Index norm2 = param(at + "norm2", h);
      const std::int64_t wide = shape_.gated ? 2 * shape_.ffn : shape_.ffn;
      if (shape_.experts == 0) {
        std::vector<Index> up = {norm2, param(at + "up", h * shape_.ffn)};
        if (shape_.gated) {
          up.push_back(param(at + "gate", h * shape_.ffn));
        }
        block.push_back(matmul("up", up, h, wide, tokens_));
        block.push_back(matmul("down", {param(at + "down", shape_.ffn * h)}, shape_.ffn, h, tokens_));
      } else {
        block.push_back(
            matmul("router", {norm2, param(at + "router", h * shape_.experts)}, h, shape_.experts, tokens_));
        const std::int64_t routed = tokens_ * shape_.experts_per_token / shape_.experts;
        for (std::int64_t e = 0; e < shape_.experts; ++e) {
          const std::string ex = concat(at, "e", e, ".");
          Operation expert = matmul(concat("expert", e),
                                    {param(ex + "up", h * shape_.ffn), param(ex + "gate", h * shape_.ffn),
                                     param(ex + "down", h * shape_.ffn)},
                                    h, 3 * shape_.ffn, routed);
          block.push_back(expert);
        }
      }
      blocks_.push_back(std::move(block));
    }
    Operation head = matmul("head", {param("norm", h)}, h, shape_.vocab, tokens_);
    head.params.push_back(shape_.tied ? blocks_[0][0].params[0] : param("head", shape_.vocab * h));
    head.workspace = tokens_ * shape_.vocab * 4;  // fp32 logits
    blocks_.push_back({head});
  }

  Nanos timeOf(const Operation& op, int times) const {
    const Nanos compute = mulDiv(op.mega_flops * times, 1000000000, machine_.flops);
    const Nanos memory = mulDiv(op.moved * times, 1000000000, machine_.memory_bandwidth);
    return std::max<Nanos>(std::max(compute, memory), 1000);
  }

  Index buffer(const std::string& name, Bytes bytes) {
    graph_.buffers.push_back({name, bytes, kNone, kNone, false});
    return static_cast<Index>(graph_.buffers.size()) - 1;
  }

  void node(const std::string& name, Phase phase, int micro, std::size_t block, const Operation& op, int times,
            bool grads, std::vector<Index> reads, std::vector<Index> makes) {
    Node it;
    it.name = name;
    it.phase = phase;
    it.micro = micro;
    it.block = static_cast<Index>(block);
    it.time = timeOf(op, times);
    it.workspace = op.workspace;
    it.uses = op.params;
    if (grads) {
      it.grads = op.params;
    }
    it.reads = std::move(reads);
    it.makes = std::move(makes);
    if (!graph_.nodes.empty()) {
      it.after = {static_cast<Index>(graph_.nodes.size()) - 1};
    }
    graph_.nodes.push_back(std::move(it));
  }

  // Activations chain the nodes: each operation makes what the next one reads, and backward reads
  // it again.
  void microBatch(int micro) {
    const std::string m = concat("m", micro, ".");
    const std::size_t count = blocks_.size();
    std::vector<std::vector<Index>> made(count);
    const auto forward = [&](std::size_t b, bool again, Index input) {
      Index before = input;
      made[b].clear();
      for (std::size_t o = 0; o < blocks_[b].size(); ++o) {
        const Operation& op = blocks_[b][o];
        const std::string name = concat(m, again ? "r" : "f", b, ".", op.name);
        std::vector<Index> makes;
        std::vector<Index> reads;
        if (before != kNone) {
          reads = {before};
        }
        const bool last = o + 1 == blocks_[b].size();
        // The last output of a layer is the next layer's input; when computed again nobody reads
        // it.
        if (b + 1 < count && !(again && last)) {
          makes = {buffer(name, op.made)};
          before = makes[0];
          made[b].push_back(before);
        }
        node(name, again ? Phase::Backward : Phase::Forward, micro, b, op, 1, false, reads, makes);
      }
      return before;
    };
    std::vector<Index> inputs(count, kNone);
    Index x = kNone;
    for (std::size_t b = 0; b < count; ++b) {
      inputs[b] = x;
      x = forward(b, false, x);
    }
    for (std::size_t b = count; b-- > 0;) {
      const bool again = options_.checkpoint && b > 0 && b + 1 < count;
      if (again) {
        forward(b, true, inputs[b]);
      }
      for (std::size_t o = blocks_[b].size(); o-- > 0;) {
        // An operation's backward reads its input; the gradients that flow between nodes are part
        // of the workspace.
        std::vector<Index> reads;
        const Index input = o == 0 ? inputs[b] : made[b][o - 1];
        if (input != kNone) {
          reads = {input};
        }
        Operation op = blocks_[b][o];
        op.workspace += 2 * op.made;
        node(concat(m, "b", b, ".", op.name), Phase::Backward, micro, b, op, 2, true, reads, {});
      }
    }
  }

  void update() {
    std::vector<char> done(graph_.params.size(), 0);
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      Node it;
      it.name = concat("update", b);
      it.kind = NodeKind::Optimizer;
      it.phase = Phase::Update;
      it.micro = options_.accumulate - 1;
      it.block = static_cast<Index>(b);
      Bytes elements = 0;
      for (const Operation& op : blocks_[b]) {
        for (const Index id : op.params) {
          if (done[id] == 0) {
            done[id] = 1;
            it.updates.push_back(id);
            elements += (graph_.params[id].bytes / element_ + options_.world - 1) / options_.world;
          }
        }
      }
      // Adam reads and writes its states, reads the gradient and writes the weights.
      it.time = std::max<Nanos>(
          mulDiv(elements * (2 * kStateBytes + kAccumBytes + element_), 1000000000, machine_.memory_bandwidth), 2000);
      if (options_.host_optimizer) {
        it.time = mulDiv(elements * kStateBytes, 1000000000, machine_.host_update) +
                  mulDiv(elements * kAccumBytes, 1000000000, machine_.to_host.bandwidth) +
                  mulDiv(elements * element_, 1000000000, machine_.to_device.bandwidth);
      }
      it.after = {static_cast<Index>(graph_.nodes.size()) - 1};
      graph_.nodes.push_back(std::move(it));
    }
  }

  const Shape& shape_;
  const ModelOptions& options_;
  const Machine& machine_;
  const Bytes element_;
  std::int64_t tokens_ = 0;
  StepGraph graph_;
  std::vector<std::vector<Operation>> blocks_;
};

}  // namespace

std::vector<std::string_view> modelNames() {
  std::vector<std::string_view> names;
  for (const Shape& shape : kShapes) {
    names.push_back(shape.name);
  }
  return names;
}

StepGraph makeModel(std::string_view model, const ModelOptions& options, const Machine& machine) {
  const auto require = [&](std::int64_t value, std::int64_t most, const char* what) {
    check(value >= 1 && value <= most, [&] { return concat(what, " ", value, ": expected 1 to ", most); });
  };
  require(options.world, 1 << 20, "world");
  require(options.batch, 1 << 16, "batch");
  require(options.sequence, 1 << 22, "sequence");
  require(options.accumulate, 1 << 14, "accumulation");
  require(options.stage, 3, "stage");
  for (const Shape& shape : kShapes) {
    if (shape.name == model) {
      return Generator(shape, options, machine).make();
    }
  }
  fail(unknown("model", model, modelNames()));
}

}  // namespace dc::plan
