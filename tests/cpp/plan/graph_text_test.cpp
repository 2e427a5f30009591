#include "deepcompile/plan/graph_text.h"

#include <gtest/gtest.h>

#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

constexpr const char* kTwoLayers = R"(
graph two-layers
world 4
param w1 bytes=4MiB state=6MiB
param w2 bytes=4MiB dtype=f32 persistent
param f bytes=100 shard=25 frozen
buffer x bytes=1KiB input
buffer a bytes=1.5KiB
buffer v alias=a
buffer wt alias=w2
node f1 compute time=10us uses=w1 reads=x makes=a   # first layer
node b2 compute time=2.5us phase=backward block=1 reads=v,wt grads=w2 after=f2
node f2 compute time=20us block=1 uses=w2,f reads=a workspace=4KiB
node b1 compute time=20us phase=backward uses=w1 grads=w1 after=b2
node up optimizer time=1us updates=w1,w2 after=b1
)";

std::string errorOf(const std::string& text) {
  try {
    parseGraph(text, "g");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(GraphText, PrintingAndParsingAgainGivesTheSameGraphAndTheSameText) {
  const StepGraph graph = parseGraph(kTwoLayers);
  const std::string text = print(graph);
  EXPECT_EQ(parseGraph(text), graph);
  EXPECT_EQ(print(parseGraph(text)), text);
  EXPECT_EQ(hashOf(parseGraph(text)), hashOf(graph));
}

TEST(GraphText, NodesComeInAnOrderThatRespectsWhatTheyNeed) {
  const StepGraph graph = parseGraph(kTwoLayers);
  std::string order;
  for (const Node& node : graph.nodes) {
    order += node.name + " ";
  }
  EXPECT_EQ(order, "f1 f2 b2 b1 up ");
}

TEST(GraphText, UnitsAreExact) {
  const StepGraph graph = parseGraph(kTwoLayers);
  EXPECT_EQ(graph.buffers[1].bytes, 1536);
  EXPECT_EQ(graph.nodes[2].time, 2500);
  EXPECT_EQ(graph.params[0].shard, 1 << 20);
  EXPECT_EQ(errorOf("param w bytes=1.3B"), "g:1:15: '1.3B' is not a whole number of bytes");
}

TEST(GraphText, ErrorsGiveLineColumnReasonAndTheNearestName) {
  EXPECT_EQ(errorOf("world 2\nparam weight bytes=4\nnode n compute uses=wieght"),
            "g:3:21: unknown param 'wieght'; the nearest is 'weight'");
  EXPECT_EQ(errorOf("nod n compute"), "g:1:1: unknown line 'nod'; the nearest is 'node'");
  EXPECT_EQ(errorOf("param w bytes=-4"), "g:1:15: negative size '-4'");
  EXPECT_EQ(errorOf("param w bytes=4XiB"), "g:1:16: unknown unit 'XiB'; the nearest is 'KiB'");
  EXPECT_EQ(errorOf("param w shard=4"), "g:1:16: expected bytes=SIZE");
  EXPECT_EQ(errorOf("node n compute tme=3"), "g:1:16: unknown field of node 'tme'; the nearest is 'time'");
  EXPECT_EQ(errorOf("node n compute\nnode n compute"), "g:2:6: node 'n' is declared twice");
  EXPECT_EQ(errorOf("node n compute after=m"), "g:1:22: unknown node 'm'; the nearest is 'n'");
  EXPECT_EQ(errorOf("world 0"), "g:1:7: expected a whole number from 1 to 1048576, found '0'");
  EXPECT_EQ(errorOf("param a bytes=99999999999999999999GB"),
            "g:1:15: the size '99999999999999999999GB' is too large or has too many digits");
}

TEST(GraphText, ANameMayHoldAnyCharacter) {
  StepGraph graph;
  for (const char* name : {"a=b", "with space", "comma,comma", "100%", "#", "state:w", "buffer:x", "é", "%20", "\t"}) {
    graph.params.push_back({.name = name, .bytes = 4, .shard = 4, .grad = 4});
    graph.buffers.push_back({.name = std::string("of ") + name, .bytes = 1});
    const auto param = static_cast<Index>(graph.params.size()) - 1;
    graph.nodes.push_back({.name = std::string("node ") + name, .uses = {param}, .makes = {param}});
  }
  EXPECT_EQ(parseGraph(print(graph)), graph);
  const StepGraph text = parseGraph("param a%3Db bytes=4\nnode n compute uses=a%3db\n");
  EXPECT_EQ(text.params[0].name, "a=b");
  EXPECT_EQ(text.nodes[0].uses, std::vector<Index>{0});
  EXPECT_NE(errorOf("param 50% bytes=4").find("'50%' is not a name"), std::string::npos);
}

TEST(GraphText, ACycleIsAnErrorThatNamesItsNodes) {
  EXPECT_EQ(errorOf("node a compute after=c\nnode b compute after=a\nnode c compute after=b\nnode d compute"),
            "the graph has a cycle: 'a' needs 'c', which needs 'b', which needs 'a'");
}

TEST(GraphText, ABufferThatNobodyMakesIsAnError) {
  EXPECT_EQ(errorOf("buffer x bytes=4\nnode a compute reads=x"), "node 'a' reads buffer 'x', which no node makes");
}

TEST(GraphText, CollectivesAreNotWrittenByHand) {
  EXPECT_EQ(errorOf("param w bytes=4\nnode g gather uses=w"),
            "g:2:8: 'gather' nodes are placed by the planner; write uses=PARAM or grads=PARAM on "
            "the compute node that "
            "needs or makes it");
}

TEST(GraphText, AFrozenParameterHasNoGradient) {
  EXPECT_EQ(errorOf("param w bytes=4 frozen\nnode b compute grads=w"), "node 'b': parameter 'w' is frozen");
}

}  // namespace
}  // namespace dc::plan
