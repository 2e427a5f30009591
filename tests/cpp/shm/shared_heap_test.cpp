// The heap of tensors that peers can read, and its memory under other addresses.
#include "deepcompile/shm/shared_heap.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/joined_memory.h"

namespace dc::shm {
namespace {

const std::int64_t kPage = ::sysconf(_SC_PAGESIZE);

TEST(SharedHeap, BlocksOfAPageAndMoreAreWholePagesAmongSmallOnes) {
  SharedHeap heap(64 << 20);
  for (const std::int64_t bytes : {100L, kPage, 300L, 3 * kPage + 1, 1L, kPage * 7}) {
    const std::int64_t offset = heap.offsetOf(heap.allocate(bytes), bytes);
    EXPECT_EQ(offset % (bytes >= kPage ? kPage : 128), 0) << bytes;
  }
}

TEST(SharedHeap, BlocksNeverOverlapAndKeepTheirBytesThroughTrims) {
  SharedHeap heap(256 << 20);
  std::mt19937 random(1);
  std::map<std::byte*, std::pair<std::int64_t, int>> blocks;  // -> bytes, value
  const auto intact = [](std::byte* data, std::int64_t bytes, int value) {
    for (std::int64_t i = 0; i < bytes; ++i) {
      if (data[i] != static_cast<std::byte>(value)) {
        return false;
      }
    }
    return true;
  };
  for (int turn = 0; turn < 3000; ++turn) {
    if (blocks.size() > 40 || (!blocks.empty() && random() % 3 == 0)) {
      const auto chosen = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random() % blocks.size()));
      ASSERT_TRUE(intact(chosen->first, chosen->second.first, chosen->second.second)) << "turn " << turn;
      heap.free(chosen->first);
      blocks.erase(chosen);
    } else {
      const std::int64_t bytes = 1 + static_cast<std::int64_t>(random() % (random() % 2 == 0 ? 500 : 200000));
      std::byte* const data = heap.allocate(bytes);
      const int value = static_cast<int>(random() % 256);
      std::memset(data, value, static_cast<std::size_t>(bytes));
      ASSERT_TRUE(blocks.emplace(data, std::pair(bytes, value)).second);
    }
    if (random() % 50 == 0) {
      heap.trim();
    }
  }
  for (const auto& [data, block] : blocks) {
    EXPECT_TRUE(intact(data, block.first, block.second));
    heap.free(data);
  }
  EXPECT_EQ(heap.allocated(), 0);
  heap.trim();
  EXPECT_EQ(heap.populated(), 0);
}

TEST(JoinedMemory, IsTheSameMemoryInTheOrderOfThePieces) {
  SharedHeap heap(64 << 20);
  std::byte* const first = heap.allocate(2 * kPage);
  std::byte* const second = heap.allocate(kPage);
  std::memset(first, 1, static_cast<std::size_t>(2 * kPage));
  std::memset(second, 2, static_cast<std::size_t>(kPage));
  const std::vector<SharedPiece> pieces = {{second, kPage}, {first, 2 * kPage}};
  const JoinedMemory joined(pieces);
  ASSERT_EQ(joined.size(), 3 * kPage);
  EXPECT_EQ(joined.data()[kPage - 1], std::byte{2});
  EXPECT_EQ(joined.data()[kPage], std::byte{1});
  first[5] = std::byte{7};
  EXPECT_EQ(joined.data()[kPage + 5], std::byte{7});
  joined.data()[0] = std::byte{9};
  EXPECT_EQ(second[0], std::byte{9});
}

TEST(JoinedMemory, LivesOnWithoutTheFirstMapping) {
  auto heap = std::make_unique<SharedHeap>(64 << 20);
  std::byte* const block = heap->allocate(kPage);
  std::memset(block, 3, static_cast<std::size_t>(kPage));
  const SharedPiece piece{block, kPage};
  const JoinedMemory joined({&piece, 1});
  heap.reset();
  EXPECT_EQ(joined.data()[kPage - 1], std::byte{3});
}

TEST(JoinedMemory, TakesWholePagesOnly) {
  SharedHeap heap(64 << 20);
  const SharedPiece piece{heap.allocate(2 * kPage), kPage + 128};
  EXPECT_THROW(JoinedMemory({&piece, 1}), Error);
}

}  // namespace
}  // namespace dc::shm
