#include "deepcompile/shm/segment.h"

#include <limits>

#include <gtest/gtest.h>

#include "shm_ranks.h"

namespace dc::shm::testing {
namespace {

void write(const std::filesystem::path& path, const std::string& text) { std::ofstream(path) << text; }

TEST(AvailableMemory, OfAControlGroupCountsCachedFilesAsFree) {
  const TemporaryDirectory directory;
  const auto path = directory.path();
  EXPECT_EQ(availableInControlGroup(path.string()), std::numeric_limits<std::int64_t>::max());
  write(path / "memory.max", "max\n");
  write(path / "memory.current", "900\n");
  EXPECT_EQ(availableInControlGroup(path.string()), std::numeric_limits<std::int64_t>::max());
  write(path / "memory.max", "1000\n");
  EXPECT_EQ(availableInControlGroup(path.string()), 100);
  write(path / "memory.stat", "anon 200\nfile 700\nshmem 100\ninactive_file 400\nactive_file 200\n");
  EXPECT_EQ(availableInControlGroup(path.string()), 700);
}

// A dump would make every page of the address space exist.
TEST(Segment, WithoutMemoryStaysOutOfCoreDumps) {
  const Segment segment = Segment::sparse("a test", std::int64_t{1} << 30);
  std::ifstream maps("/proc/self/smaps");
  bool found = false;
  bool left_out = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("deepcompile a test") != std::string::npos) {
      found = true;
    } else if (found && line.starts_with("VmFlags:")) {
      left_out = line.find(" dd") != std::string::npos;
      break;
    }
  }
  if (!found) {
    GTEST_SKIP() << "this system does not tell";
  }
  EXPECT_TRUE(left_out);
}

}  // namespace
}  // namespace dc::shm::testing
