#include "deepcompile/plan/graph_text.h"

#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

std::vector<std::string_view> keys(const NameTable& names) {
  std::vector<std::string_view> known(names.size());
  for (const auto& [text, id] : names) {
    known[id] = text;
  }
  return known;
}

class GraphParser {
 public:
  GraphParser(std::string_view text, const std::string& file) : in_(text, file) {}

  StepGraph parse() {
    while (in_.nextLine()) {
      const Word& first = in_.words()[0];
      if (first.text == "graph") {
        graph_.name = nameAt(1, "the graph's name");
        noMoreThan(2);
      } else if (first.text == "world") {
        graph_.world = static_cast<int>(in_.integer(in_.word(1, "the number of ranks"), 1, 1 << 20));
        noMoreThan(2);
      } else if (first.text == "stage") {
        graph_.stage = static_cast<int>(in_.integer(in_.word(1, "a ZeRO stage"), 1, 3));
        noMoreThan(2);
      } else if (first.text == "param") {
        param();
      } else if (first.text == "buffer") {
        buffer();
      } else if (first.text == "node") {
        node();
      } else {
        in_.fail(first, unknown("line", first.text, {"graph", "world", "stage", "param", "buffer", "node"}));
      }
    }
    linkAfter();
    validate(graph_);
    return std::move(graph_);
  }

 private:
  std::string nameAt(std::size_t index, std::string_view expected) {
    const Word& word = in_.word(index, expected);
    if (!isName(word.text)) {
      in_.fail(word, concat("'", word.text,
                            "' is not a name: it holds one of , = or an unprintable character, or a % that is no %XX; "
                            "write such a character as % and its two hexadecimal digits"));
    }
    return decodeName(word.text);
  }

  void noMoreThan(std::size_t count) {
    if (in_.words().size() > count) {
      in_.fail(in_.words()[count], concat("unexpected '", in_.words()[count].text, "'"));
    }
  }

  std::string declare(NameTable& names, std::size_t id, std::string_view what) {
    std::string name = nameAt(1, concat("the ", what, "'s name"));
    if (!names.emplace(name, static_cast<Index>(id)).second) {
      in_.fail(in_.words()[1], concat(what, " '", name, "' is declared twice"));
    }
    return name;
  }

  // alias=NAME may name a parameter or a buffer, so no name may mean both.
  void notAlso(const NameTable& names, std::string_view what) {
    if (const std::string name = decodeName(in_.words()[1].text); names.contains(name)) {
      in_.fail(in_.words()[1], concat("'", name, "' is already the name of a ", what));
    }
  }

  void flag(const Field& field) {
    if (field.has_value) {
      in_.fail(field.value, concat("'", field.key.text, "' takes no value"));
    }
  }

  void param() {
    Param param;
    param.name = declare(params_, graph_.params.size(), "param");
    notAlso(buffers_, "buffer");
    bool has_bytes = false;
    bool has_shard = false;
    bool has_grad = false;
    for (std::size_t i = 2; i < in_.words().size(); ++i) {
      const Field field = in_.field(in_.words()[i]);
      const std::string_view key = field.key.text;
      if (key == "bytes") {
        param.bytes = in_.bytes(field.value);
        has_bytes = true;
      } else if (key == "shard") {
        param.shard = in_.bytes(field.value);
        has_shard = true;
      } else if (key == "grad") {
        param.grad = in_.bytes(field.value);
        has_grad = true;
      } else if (key == "accum") {
        param.accum = in_.bytes(field.value);
      } else if (key == "state") {
        param.state = in_.bytes(field.value);
      } else if (key == "dtype") {
        const auto found = dtype(field.value.text);
        if (!found) {
          in_.fail(field.value, unknown("dtype", field.value.text, {"f32", "f16", "bf16", "f8"}));
        }
        param.dtype = *found;
      } else if (key == "persistent") {
        flag(field);
        param.persistent = true;
      } else if (key == "frozen") {
        flag(field);
        param.frozen = true;
      } else {
        in_.fail(field.key, unknown("field of param", key,
                                    {"bytes", "shard", "grad", "accum", "state", "dtype", "persistent", "frozen"}));
      }
    }
    if (!has_bytes) {
      in_.word(in_.words().size(), "bytes=SIZE");
    }
    if (!has_shard) {
      param.shard = graph_.stage == 3 ? (param.bytes + graph_.world - 1) / graph_.world : param.bytes;
    }
    if (!has_grad && !param.frozen) {
      param.grad = param.bytes;
    }
    graph_.params.push_back(std::move(param));
  }

  void buffer() {
    Buffer buffer;
    buffer.name = declare(buffers_, graph_.buffers.size(), "buffer");
    notAlso(params_, "param");
    for (std::size_t i = 2; i < in_.words().size(); ++i) {
      const Field field = in_.field(in_.words()[i]);
      if (field.key.text == "bytes") {
        buffer.bytes = in_.bytes(field.value);
      } else if (field.key.text == "alias") {
        const auto base = buffers_.find(decodeName(field.value.text));
        if (base != buffers_.end() && base->second < static_cast<Index>(graph_.buffers.size())) {
          buffer.alias_buffer = base->second;
        } else {
          buffer.alias_param = find(params_, field.value, "param or buffer");
        }
      } else if (field.key.text == "input") {
        flag(field);
        buffer.input = true;
      } else if (field.key.text == "gradient") {
        flag(field);
        buffer.gradient = true;
      } else {
        in_.fail(field.key, unknown("field of buffer", field.key.text, {"bytes", "alias", "input", "gradient"}));
      }
    }
    if ((buffer.alias_buffer != kNone || buffer.alias_param != kNone) &&
        (buffer.bytes != 0 || buffer.input || buffer.gradient)) {
      in_.fail(in_.words()[1], "an alias has no bytes of its own and is neither an input nor a gradient");
    }
    graph_.buffers.push_back(std::move(buffer));
  }

  Index find(const NameTable& names, const Word& word, std::string_view what) {
    const auto found = names.find(decodeName(word.text));
    if (found == names.end()) {
      in_.fail(word, unknown(what, word.text, keys(names)));
    }
    return found->second;
  }

  std::vector<Index> ids(const NameTable& names, const Word& value, std::string_view what) {
    std::vector<Index> found;
    for (const Word& word : in_.list(value)) {
      found.push_back(find(names, word, what));
    }
    return found;
  }

  void node() {
    Node node;
    node.name = declare(nodes_, graph_.nodes.size(), "node");
    const Word& kind = in_.word(2, "compute or optimizer");
    const auto found = nodeKind(kind.text);
    if (!found) {
      in_.fail(kind, unknown("kind of node", kind.text, {"compute", "optimizer"}));
    }
    if (*found != NodeKind::Compute && *found != NodeKind::Optimizer) {
      in_.fail(kind, concat("'", kind.text, "' nodes are placed by the planner; write uses=PARAM or grads=PARAM on ",
                            "the compute node that needs or makes it"));
    }
    node.kind = *found;
    node.phase = node.kind == NodeKind::Optimizer ? Phase::Update : Phase::Forward;
    std::vector<Word> after;
    for (std::size_t i = 3; i < in_.words().size(); ++i) {
      const Field field = in_.field(in_.words()[i]);
      const std::string_view key = field.key.text;
      if (key == "time") {
        node.time = in_.nanos(field.value);
      } else if (key == "phase") {
        const auto value = phase(field.value.text);
        if (!value) {
          in_.fail(field.value, unknown("phase", field.value.text, {"forward", "backward", "update"}));
        }
        node.phase = *value;
      } else if (key == "micro") {
        node.micro = static_cast<Index>(in_.integer(field.value, 0, 1 << 20));
      } else if (key == "block") {
        node.block = static_cast<Index>(in_.integer(field.value, 0, 1 << 28));
      } else if (key == "workspace") {
        node.workspace = in_.bytes(field.value);
      } else if (key == "uses") {
        node.uses = ids(params_, field.value, "param");
      } else if (key == "grads") {
        node.grads = ids(params_, field.value, "param");
      } else if (key == "updates") {
        node.updates = ids(params_, field.value, "param");
      } else if (key == "makes") {
        node.makes = ids(buffers_, field.value, "buffer");
      } else if (key == "reads") {
        node.reads = ids(buffers_, field.value, "buffer");
      } else if (key == "after") {
        after = in_.list(field.value);
      } else {
        in_.fail(field.key, unknown("field of node", key,
                                    {"time", "phase", "micro", "block", "workspace", "uses", "grads", "updates",
                                     "makes", "reads", "after"}));
      }
    }
    after_.push_back({in_.line(), std::move(after)});
    graph_.nodes.push_back(std::move(node));
  }

  // Nodes may name later ones, so these are looked up at the end.
  void linkAfter() {
    for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
      for (const Word& word : after_[n].second) {
        const auto found = nodes_.find(decodeName(word.text));
        if (found == nodes_.end()) {
          throw ParseError(in_.file(), after_[n].first, word.column, unknown("node", word.text, keys(nodes_)));
        }
        graph_.nodes[n].after.push_back(found->second);
      }
    }
  }

  TextReader in_;
  StepGraph graph_;
  NameTable params_;
  NameTable buffers_;
  NameTable nodes_;
  std::vector<std::pair<int, std::vector<Word>>> after_;
};

template <typename Things>
void printList(std::string& out, const char* key, const std::vector<Index>& ids, const Things& things) {
  const char* between = "=";
  if (!ids.empty()) {
    out += key;
  }
  for (const Index id : ids) {
    out += between;
    out += encodeName(things[id].name);
    between = ",";
  }
}

}  // namespace

StepGraph parseGraph(std::string_view text, const std::string& file) { return GraphParser(text, file).parse(); }

std::string print(const StepGraph& graph) {
  std::string out = concat("graph ", encodeName(graph.name), "\nworld ", graph.world, "\nstage ", graph.stage, "\n");
  for (const Param& param : graph.params) {
    out += concat("param ", encodeName(param.name), " bytes=", exactBytes(param.bytes),
                  " shard=", exactBytes(param.shard), " grad=", exactBytes(param.grad),
                  " accum=", exactBytes(param.accum), " state=", exactBytes(param.state), " dtype=", name(param.dtype),
                  param.persistent ? " persistent" : "", param.frozen ? " frozen" : "", "\n");
  }
  for (const Buffer& buffer : graph.buffers) {
    out += "buffer " + encodeName(buffer.name);
    if (buffer.alias_buffer != kNone) {
      out += " alias=" + encodeName(graph.buffers[buffer.alias_buffer].name);
    } else if (buffer.alias_param != kNone) {
      out += " alias=" + encodeName(graph.params[buffer.alias_param].name);
    } else {
      out += " bytes=" + exactBytes(buffer.bytes);
    }
    out += concat(buffer.input ? " input" : "", buffer.gradient ? " gradient\n" : "\n");
  }
  for (const Node& node : graph.nodes) {
    out += concat("node ", encodeName(node.name), " ", name(node.kind), " time=", exactNanos(node.time),
                  " phase=", name(node.phase), " micro=", node.micro, " block=", node.block);
    if (node.workspace != 0) {
      out += " workspace=" + exactBytes(node.workspace);
    }
    printList(out, " after", node.after, graph.nodes);
    printList(out, " uses", node.uses, graph.params);
    printList(out, " grads", node.grads, graph.params);
    printList(out, " updates", node.updates, graph.params);
    printList(out, " reads", node.reads, graph.buffers);
    printList(out, " makes", node.makes, graph.buffers);
    out += '\n';
  }
  return out;
}

}  // namespace dc::plan
