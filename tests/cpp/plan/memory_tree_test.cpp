#include "deepcompile/plan/memory_tree.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace dc::plan {
namespace {

TEST(MemoryTree, AnswersLikeAPlainArray) {
  std::mt19937 random(7);
  for (const Index size : {1, 2, 3, 7, 8, 100}) {
    std::vector<Bytes> plain(size);
    for (Bytes& value : plain) {
      value = random() % 100;
    }
    MemoryTree tree(plain);
    for (int i = 0; i < 500; ++i) {
      const Index from = random() % size;
      const Index to = from + random() % (size - from);
      if (i % 2 == 0) {
        const Bytes bytes = static_cast<Bytes>(random() % 100) - 50;
        tree.add(from, to, bytes);
        std::for_each(plain.begin() + from, plain.begin() + to + 1, [&](Bytes& value) { value += bytes; });
      }
      ASSERT_EQ(tree.max(from, to), *std::max_element(plain.begin() + from, plain.begin() + to + 1));
      const Bytes limit = static_cast<Bytes>(random() % 200) - 50;
      Index last = to;
      while (last >= from && plain[last] <= limit) {
        --last;
      }
      ASSERT_EQ(tree.lastAbove(from, to, limit), last);
      Index first = from;
      while (first <= to && plain[first] <= limit) {
        ++first;
      }
      ASSERT_EQ(tree.firstAbove(from, to, limit), first);
    }
  }
}

}  // namespace
}  // namespace dc::plan
