#include "deepcompile/base/last_cache.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

namespace dc {
namespace {

// A directory as the kernel has it for a core.
class LastCache : public ::testing::Test {
 protected:
  LastCache() { std::filesystem::create_directories(directory_); }
  ~LastCache() override { std::filesystem::remove_all(directory_); }

  void add(const std::string& type, const std::string& size) {
    const std::string cache = directory_ + "/index" + std::to_string(caches_++);
    std::filesystem::create_directory(cache);
    std::ofstream(cache + "/type") << type << "\n";
    std::ofstream(cache + "/size") << size << "\n";
  }

  const std::string directory_ = ::testing::TempDir() + "last_cache_" + std::to_string(::getpid());
  int caches_ = 0;
};

TEST_F(LastCache, IsTheLargestThatHoldsData) {
  add("Data", "32K");
  add("Instruction", "9000K");
  add("Unified", "1024K");
  EXPECT_EQ(largestCacheIn(directory_), 1 << 20);
  add("Unified", "32768K");
  EXPECT_EQ(largestCacheIn(directory_), 32 << 20);
  add("Unified", "105M");
  EXPECT_EQ(largestCacheIn(directory_), 105 << 20);
}

TEST_F(LastCache, IsNothingWhereNobodyTells) {
  EXPECT_EQ(largestCacheIn(directory_), 0);
  add("Unified", "");
  EXPECT_EQ(largestCacheIn(directory_), 0);
  EXPECT_EQ(largestCacheIn("/nonexistent"), 0);
}

TEST_F(LastCache, OfThisCoreIsAtLeastTheSmallestThatIsBuilt) {
  EXPECT_TRUE(lastCacheBytes() == 0 || lastCacheBytes() >= 64 << 10) << lastCacheBytes();
}

}  // namespace
}  // namespace dc
