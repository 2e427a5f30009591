#include "deepcompile/plan/machine.h"

#include <gtest/gtest.h>

#include "deepcompile/plan/cost.h"
#include "deepcompile/plan/text.h"

namespace dc::plan {
namespace {

TEST(Machine, EveryPresetPrintsAndParsesToItself) {
  EXPECT_EQ(presetNames().size(), 5u);
  for (const std::string_view name : presetNames()) {
    const Machine machine = preset(name);
    EXPECT_EQ(machine.name, name);
    EXPECT_EQ(parseMachine(print(machine)), machine);
  }
}

TEST(Machine, AnUnknownPresetNamesTheNearest) {
  try {
    preset("8xh10");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "unknown machine '8xh10'; the nearest is '8xh100'");
  }
}

TEST(Machine, AFileMayStartFromAPreset) {
  const Machine machine = parseMachine("machine mine like 8xa100\nbudget 10GiB\ngather 1MiB:20us 2MiB:30us\n");
  EXPECT_EQ(machine.devices, 8);
  EXPECT_EQ(machine.budget, Bytes{10} << 30);
  EXPECT_EQ(parseMachine(print(machine)), machine);
}

TEST(Machine, WhatAProgramPutsTogetherIsCheckedAsATextIs) {
  Machine machine = preset("2xcpu");
  EXPECT_NO_THROW(validate(machine));
  machine.gather = {{1000, 20}, {2000, 10}};
  EXPECT_THROW(validate(machine), Error);
  machine.gather = {{1000, 20}, {1000, 20}};
  EXPECT_THROW(validate(machine), Error);
  machine.gather = {{1000, 20}, {2000, 20}};
  EXPECT_NO_THROW(validate(machine));
  machine.inside.bandwidth = 0;
  EXPECT_THROW(validate(machine), Error);
}

TEST(Machine, WhatMayLeaveTheDeviceIsNothingStatesOrEverything) {
  EXPECT_EQ(parseMachine("machine m").offload, Offload::Everything);
  EXPECT_EQ(parseMachine("machine m\noffload no").offload, Offload::Nothing);
  const Machine states = parseMachine("machine m\noffload states");
  EXPECT_EQ(states.offload, Offload::States);
  EXPECT_EQ(parseMachine(print(states)), states);
  EXPECT_THROW(parseMachine("machine m\noffload shards"), ParseError);
}

TEST(Machine, ACurveMustRise) {
  EXPECT_THROW(parseMachine("machine m\ngather 2MiB:30us 1MiB:20us"), ParseError);
  EXPECT_THROW(parseMachine("machine m\ngather 1MiB:30us 2MiB:20us"), ParseError);
}

TEST(Cost, MeasuredPointsAreInterpolated) {
  const CostModel cost(parseMachine("machine m\ngather 1000:10us 2000:20us 4000:22us"), 2);
  EXPECT_EQ(cost.gather(0), 0);
  EXPECT_EQ(cost.gather(10), 10000);
  EXPECT_EQ(cost.gather(1500), 15000);
  EXPECT_EQ(cost.gather(3000), 21000);
  EXPECT_EQ(cost.gather(8000), 44000);
}

TEST(Cost, TheSlowerOfTheLinksInsideAndBetweenNodesDecides) {
  const Machine machine = parseMachine(
      "machine m\ndevices 2\ninside latency=1us bandwidth=100GB\nbetween latency=10us "
      "bandwidth=1GB\n");
  // One node: half of the data arrives over the inside link.
  EXPECT_EQ(CostModel(machine, 2).gather(2000000), 1000 + 10000);
  // Two nodes: half of the data enters a node over two links of 1 GB/s.
  EXPECT_EQ(CostModel(machine, 4).gather(2000000), 11000 + 500000);
  EXPECT_EQ(CostModel(machine, 1).gather(2000000), 0);
}

TEST(Cost, TheSaturatingSizeIsTheSmallestThatReachesNineTenthsOfTheBandwidth) {
  const CostModel cost(parseMachine("machine m\ndevices 2\ninside latency=9us bandwidth=2GB\n"), 2);
  // Nine times the latency in transfer time: 81 us at 4 bytes per ns.
  EXPECT_GE(cost.saturatingGather(), 324000);
  EXPECT_LE(cost.saturatingGather(), 324000 * 9 / 8);
}

TEST(Cost, NoSplitBeatsTheLeastTime) {
  const CostModel cost(parseMachine("machine m\ngather 1000:10us 2000:12us 4000:40us"), 2);
  for (Bytes size = 1; size < 9000; size += 37) {
    EXPECT_LE(cost.leastGather(size), cost.gather(size));
    EXPECT_LE(cost.leastGather(size), cost.gather(size / 2) + cost.gather(size - size / 2));
  }
}

}  // namespace
}  // namespace dc::plan
