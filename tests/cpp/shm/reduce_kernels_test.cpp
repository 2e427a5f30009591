// Every kernel of every SIMD target of this machine against a plain loop, bit for bit.
#include "deepcompile/shm/reduce_kernels.h"

#include <hwy/targets.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/native_bfloat16.h"

#include "plain_reduction.h"

namespace dc::shm {
namespace {

constexpr std::array kOps = {ReduceOp::Sum,     ReduceOp::Average, ReduceOp::Min, ReduceOp::Max,
                             ReduceOp::Product, ReduceOp::And,     ReduceOp::Or,  ReduceOp::Xor};
constexpr std::array kTypes = {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16, DType::Int8,
                               DType::Int16,   DType::Int32,   DType::Int64,   DType::UInt8,    DType::Bool};

void onEveryTarget(const std::function<void()>& body) {
  hwy::SetSupportedTargetsForTest(0);
  std::int64_t targets = hwy::SupportedTargets() | HWY_SCALAR;
  std::set<std::string_view> done;
  for (; targets != 0; targets &= targets - 1) {
    hwy::SetSupportedTargetsForTest(targets & -targets);
    // One that was not compiled in is replaced by another, which would be tested twice.
    if (done.insert(simdTarget()).second) {
      SCOPED_TRACE(simdTarget());
      body();
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

// A buffer at a given distance from a multiple of 64 bytes, with bytes around it that must not change.
class Buffer {
 public:
  Buffer(std::size_t offset, std::size_t size) : storage_(size + offset + 192, kAround), size_(size) {
    begin_ = -reinterpret_cast<std::uintptr_t>(storage_.data()) % 64 + 64 + offset;
  }
  Buffer(std::size_t offset, const Bytes& bytes, std::size_t size) : Buffer(offset, size) {
    std::copy_n(bytes.begin(), size, data());
  }

  std::byte* data() { return storage_.data() + begin_; }

  // Whether it begins as `bytes` does.
  bool holds(const Bytes& bytes) { return std::equal(data(), data() + size_, bytes.begin()) && aroundIsUntouched(); }

 private:
  static constexpr std::byte kAround{0xA5};
  bool aroundIsUntouched() {
    const auto untouched = [](std::byte byte) { return byte == kAround; };
    return std::all_of(storage_.data(), data(), untouched) &&
           std::all_of(data() + size_, storage_.data() + storage_.size(), untouched);
  }
  std::vector<std::byte> storage_;
  std::size_t size_;
  std::size_t begin_;
};

void reduceBuffers(ReduceOp op, DType dtype, std::vector<Buffer>& inputs, std::vector<Buffer*> outputs,
                   std::int64_t count, bool streaming) {
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  std::transform(inputs.begin(), inputs.end(), std::back_inserter(from), [](Buffer& b) { return b.data(); });
  std::transform(outputs.begin(), outputs.end(), std::back_inserter(to), [](Buffer* b) { return b->data(); });
  // Reading ahead, here past the end of all buffers, changes no bit either.
  const CacheHints hints = {streaming, count % 2 == 0 ? nullptr : from.front() + 64};
  reduceRanks(op, dtype, from, to, count, hints);
}

constexpr std::int64_t kMost = 1031;
constexpr std::array<std::int64_t, 21> kCounts = {0,  1,  2,  3,   7,   8,   15,  16,  17,  31,   33,
                                                  63, 64, 65, 127, 129, 255, 256, 257, 513, kMost};

class ReduceKernels : public testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count * sizeOf(dtype())); }

  // body(op, number of inputs, inputs of kMost elements, the result) for all supported ones, on every target.
  template <typename Body>
  void forAll(std::size_t mostInputs, Body body) {
    for (std::size_t n = 1; n <= mostInputs; ++n) {
      const std::vector<Bytes> inputs = randomInputs(dtype(), n, kMost);
      for (const ReduceOp op : kOps) {
        if (supports(op, dtype())) {
          const Bytes result = expected(op, dtype(), inputs);
          SCOPED_TRACE(testing::Message() << name(op) << " of " << n << " inputs");
          onEveryTarget([&] { body(op, inputs, result); });
        }
      }
    }
  }
  std::vector<Buffer> placed(const std::vector<Bytes>& inputs, std::int64_t count, std::size_t offset) const {
    std::vector<Buffer> result;
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      result.emplace_back((offset * (r + 1)) % 64, inputs[r], bytes(count));
    }
    return result;
  }
};

TEST_P(ReduceKernels, GiveTheBitsOfThePlainLoopForEveryCountAndAlignment) {
  forAll(9, [&](ReduceOp op, const std::vector<Bytes>& inputs, const Bytes& result) {
    for (const std::int64_t count : kCounts) {
      for (const std::size_t offset : {0, 1, 4, 24}) {
        for (const bool streaming : {false, true}) {
          std::vector<Buffer> from = placed(inputs, count, offset);
          Buffer to(offset, bytes(count));
          reduceBuffers(op, dtype(), from, {&to}, count, streaming);
          ASSERT_TRUE(to.holds(result)) << count << " elements, offset " << offset << ", streaming " << streaming;
        }
      }
    }
  });
}

TEST_P(ReduceKernels, WriteTheSameBitsToAllOutputsAndMayReduceInPlace) {
  forAll(4, [&](ReduceOp op, const std::vector<Bytes>& inputs, const Bytes& result) {
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{67}, kMost}) {
      for (const std::size_t offset : {0, 8, 13}) {
        for (const bool streaming : {false, true}) {
          for (std::size_t inPlace = 0; inPlace < inputs.size(); ++inPlace) {
            std::vector<Buffer> buffers = placed(inputs, count, offset);
            Buffer second((offset * (inPlace + 1)) % 64, bytes(count));  // aligned as the first output, then not
            Buffer third(offset + 2, bytes(count));
            reduceBuffers(op, dtype(), buffers, {&buffers[inPlace], &second}, count, streaming);
            ASSERT_TRUE(buffers[inPlace].holds(result)) << count << " elements over input " << inPlace;
            ASSERT_TRUE(second.holds(result)) << count << " elements, second output";
            for (std::size_t r = 0; r < inputs.size(); ++r) {
              ASSERT_TRUE(r == inPlace || buffers[r].holds(inputs[r])) << "input " << r << " was changed";
            }
            std::vector<Buffer> again = placed(inputs, count, offset);
            reduceBuffers(op, dtype(), again, {&again[inPlace], &second, &third}, count, streaming);
            ASSERT_TRUE(again[inPlace].holds(result) && second.holds(result) && third.holds(result)) << count;
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Of, ReduceKernels, testing::ValuesIn(kTypes),
                         [](const auto& info) { return std::string(name(info.param)); });

// ---- Single cases, with the results written down ----

template <typename T>
T reduceValues(ReduceOp op, DType dtype, std::vector<T> values) {
  std::vector<const std::byte*> inputs;
  for (const T& value : values) {
    inputs.push_back(reinterpret_cast<const std::byte*>(&value));
  }
  T result{};
  auto* output = reinterpret_cast<std::byte*>(&result);
  reduceRanks(op, dtype, inputs, {&output, 1}, 1);
  return result;
}

std::uint16_t reduceHalf(ReduceOp op, DType dtype, std::vector<std::uint16_t> bits) {
  return reduceValues<std::uint16_t>(op, dtype, std::move(bits));
}

TEST(ReduceKernelsOfHalves, RoundOnceToNearestEvenAtTheEnd) {
  onEveryTarget([] {
    // 1 + 2^-8 is between 1 and 1 + 2^-7; so is 1 + 2^-7 + 2^-8, with an odd neighbour below.
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::BFloat16, {0x3F80, 0x3B80}), 0x3F80);
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::BFloat16, {0x3F81, 0x3B80}), 0x3F82);
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::Float16, {0x3C00, 0x1000}), 0x3C00);
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::Float16, {0x3C01, 0x1000}), 0x3C02);
    // Two such halves of the last place make one whole, which rounding after each addition would lose.
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::BFloat16, {0x3F80, 0x3B80, 0x3B80}), 0x3F81);
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::Float16, {0x3C00, 0x1000, 0x1000}), 0x3C01);
    // Half of the smallest and of the third smallest number: ties among denormals.
    EXPECT_EQ(reduceHalf(ReduceOp::Average, DType::Float16, {0x0001, 0x0000}), 0x0000);
    EXPECT_EQ(reduceHalf(ReduceOp::Average, DType::Float16, {0x8003, 0x8000}), 0x8002);
    EXPECT_EQ(reduceHalf(ReduceOp::Average, DType::BFloat16, {0x0003, 0x0000}), 0x0002);
  });
}

TEST(ReduceKernelsOfHalves, OverflowToInfinityFromHalfOfTheLastPlaceOn) {
  onEveryTarget([] {
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::Float16, {0x7BFF, 0x4B80}), 0x7BFF);  // 65504 + 15
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::Float16, {0x7BFF, 0x4C00}), 0x7C00);  // 65504 + 16
    EXPECT_EQ(reduceHalf(ReduceOp::Product, DType::Float16, {0x7BFF, 0xFBFF}), 0xFC00);
    EXPECT_EQ(reduceHalf(ReduceOp::Average, DType::Float16, {0x7BFF, 0x7BFF}), 0x7BFF);  // the sum fits in float32
    EXPECT_EQ(reduceHalf(ReduceOp::Sum, DType::BFloat16, {0x7F7F, 0x7B00}), 0x7F80);
  });
}

TEST(ReduceKernelsOfHalves, KeepEveryNumberThatIsTheOnlyInput) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
  }
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    const Format format = dtype == DType::Float16 ? kFloat16 : kBFloat16;
    onEveryTarget([&] {
      std::vector<std::uint16_t> result(all.size());
      const auto* input = reinterpret_cast<const std::byte*>(all.data());
      auto* output = reinterpret_cast<std::byte*>(result.data());
      reduceRanks(ReduceOp::Sum, dtype, {&input, 1}, {&output, 1}, 65536);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const bool nan = std::isnan(decode(format, all[i]));
        ASSERT_EQ(result[i], nan ? encode(format, std::nanf("")) : all[i]) << name(dtype);
      }
    });
  }
}

// Blocks of ordinary numbers, where the processor's own conversion is used, and blocks with one that it gets wrong.
TEST(ReduceKernelsOfHalves, AreTheSameBitsWhetherTheProcessorConvertsOrWeDo) {
  if (!convertsToBFloat16()) {
    GTEST_SKIP() << "the processor does not convert to bfloat16";
  }
  std::mt19937 random(7);
  constexpr std::int64_t kCount = 4096;
  std::vector<std::uint16_t> a(kCount);
  std::vector<std::uint16_t> b(kCount);
  for (const double rare : {0.0, 0.002, 1.0}) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
      for (int round = 0; round < 50; ++round) {
        for (std::int64_t i = 0; i < kCount; ++i) {
          // Exponents near one another, so that sums are not the larger number alone.
          const auto ordinary = [&] {
            return static_cast<std::uint16_t>((random() & 0x8000) | (0x3E00 + random() % 0x400));
          };
          const bool any = std::uniform_real_distribution<>(0, 1)(random) < rare;
          a[i] = any ? static_cast<std::uint16_t>(random()) : ordinary();
          b[i] = any ? static_cast<std::uint16_t>(random() & 0x80FF) : ordinary();
        }
        std::array<std::vector<std::uint16_t>, 2> found;
        for (const bool native : {false, true}) {
          nativeBFloat16Allowed() = native;
          std::vector<std::uint16_t>& out = found[native ? 1 : 0];
          out.resize(kCount);
          const std::array<const std::byte*, 2> inputs = {reinterpret_cast<const std::byte*>(a.data()),
                                                          reinterpret_cast<const std::byte*>(b.data())};
          std::byte* output = reinterpret_cast<std::byte*>(out.data());
          reduceRanks(op, DType::BFloat16, inputs, {&output, 1}, kCount);
        }
        nativeBFloat16Allowed() = true;
        ASSERT_EQ(found[0], found[1]) << "one in " << 1 / rare << " is rare";
      }
    }
  }
}

// All bits but the sign in steps that pass every exponent and every way to round.
TEST(ReduceKernelsOfHalves, RoundFloat32ToNearestEvenOverTheWholeRange) {
  std::vector<std::uint16_t> first, second;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    for (const std::uint32_t apart : {0U, 10U << 10, 11U << 10, 12U << 10, 13U << 10}) {
      first.push_back(static_cast<std::uint16_t>(i));
      second.push_back(static_cast<std::uint16_t>(((i & 0x7C00) > apart ? i - apart : i) ^ (i * 2654435761U & 0x83FF)));
    }
  }
  const auto count = static_cast<std::int64_t>(first.size());
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    std::vector<Bytes> inputs(2, Bytes(first.size() * 2));
    std::memcpy(inputs[0].data(), first.data(), inputs[0].size());
    std::memcpy(inputs[1].data(), second.data(), inputs[1].size());
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Average}) {
      const Bytes result = expected(op, dtype, inputs);
      onEveryTarget([&] {
        std::vector<Buffer> from{{0, inputs[0], inputs[0].size()}, {0, inputs[1], inputs[1].size()}};
        Buffer to(0, result.size());
        reduceBuffers(op, dtype, from, {&to}, count, false);
        ASSERT_TRUE(to.holds(result)) << name(op) << " of " << name(dtype);
      });
    }
  }
}

TEST(ReduceKernelsOfFloats, MakeOnePlainNaNOfAnyNaN) {
  const auto bits = [](std::uint32_t value) { return std::bit_cast<float>(value); };
  onEveryTarget([&] {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
      for (const std::vector<float>& values : {std::vector<float>{bits(0xFFC12345), 1},
                                               {1, bits(0x7FC54321), 2},
                                               {bits(0x7FC00001), bits(0xFFC00002)},
                                               {3, bits(0x7F800001)},
                                               {bits(0x7F812345)}}) {
        const auto result = reduceValues<float>(op, DType::Float32, values);
        EXPECT_EQ(std::bit_cast<std::uint32_t>(result), 0x7FC00000U) << name(op);
      }
    }
    const float infinity = std::numeric_limits<float>::infinity();
    const auto result = reduceValues<float>(ReduceOp::Sum, DType::Float32, {infinity, -infinity});
    EXPECT_EQ(std::bit_cast<std::uint32_t>(result), 0x7FC00000U);
  });
}

TEST(ReduceKernelsOfFloats, KeepTheFirstOfEqualsAndTheSignOfZero) {
  onEveryTarget([] {
    for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
      EXPECT_TRUE(std::signbit(reduceValues<double>(op, DType::Float64, {-0.0, 0.0})));
      EXPECT_FALSE(std::signbit(reduceValues<double>(op, DType::Float64, {0.0, -0.0})));
    }
    EXPECT_TRUE(std::signbit(reduceValues<float>(ReduceOp::Sum, DType::Float32, {-0.0F, -0.0F})));
    EXPECT_TRUE(std::signbit(reduceValues<float>(ReduceOp::Average, DType::Float32, {-0.0F})));
  });
}

TEST(ReduceKernelsOfFloats, AddInTheOrderOfTheInputs) {
  onEveryTarget([] {
    EXPECT_EQ(reduceValues<float>(ReduceOp::Sum, DType::Float32, {1e8F, -1e8F, 1}), 1);
    EXPECT_EQ(reduceValues<float>(ReduceOp::Sum, DType::Float32, {1, 1e8F, -1e8F}), 0);
  });
}

TEST(ReduceKernelsOfIntegers, WrapAround) {
  onEveryTarget([] {
    EXPECT_EQ(reduceValues<std::int8_t>(ReduceOp::Sum, DType::Int8, {127, 1}), -128);
    EXPECT_EQ(reduceValues<std::uint8_t>(ReduceOp::Product, DType::UInt8, {17, 16}), 16);
    const std::int64_t most = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(reduceValues<std::int64_t>(ReduceOp::Product, DType::Int64, {most, most}), 1);
  });
}

TEST(ReduceKernelsOfBools, TakeAnyNonzeroByteForTrueAndGiveZeroOrOne) {
  onEveryTarget([] {
    EXPECT_EQ(reduceValues<std::uint8_t>(ReduceOp::Sum, DType::Bool, {2}), 1);
    EXPECT_EQ(reduceValues<std::uint8_t>(ReduceOp::Sum, DType::Bool, {255, 1}), 1);
    EXPECT_EQ(reduceValues<std::uint8_t>(ReduceOp::And, DType::Bool, {1, 2}), 1);
    EXPECT_EQ(reduceValues<std::uint8_t>(ReduceOp::Xor, DType::Bool, {4, 8}), 0);
  });
}

TEST(ReduceKernelsErrors, NameTheOperationAndTheType) {
  for (const ReduceOp op : kOps) {
    for (const DType dtype : kTypes) {
      if (!supports(op, dtype)) {
        try {
          reduceValues<std::int64_t>(op, dtype, {0, 0});
          FAIL() << name(op) << " of " << name(dtype) << " was accepted";
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find(concat(name(op), " of ", name(dtype))), std::string::npos);
        }
      }
    }
  }
  EXPECT_TRUE(supports(ReduceOp::Average, DType::BFloat16) && supports(ReduceOp::Xor, DType::Bool));
  EXPECT_FALSE(supports(ReduceOp::Average, DType::Int32) || supports(ReduceOp::And, DType::Float32));
  EXPECT_THROW(reduceRanks(ReduceOp::Sum, DType::Float32, {}, {}, 1), Error);
}

TEST(CopyKernel, CopiesAllBytesAndNoOthers) {
  std::mt19937_64 random(7);
  const Bytes bytes = randomElements(DType::UInt8, 4 * kMost, random);
  onEveryTarget([&] {
    for (const std::size_t size : {0, 1, 63, 64, 65, 255, 256, 1000, 4 * static_cast<int>(kMost)}) {
      for (const std::size_t offset : {0, 1, 16, 63}) {
        for (const bool streaming : {false, true}) {
          Buffer from(offset / 2, bytes, size);
          Buffer to(offset, size);
          copyBytes(to.data(), from.data(), static_cast<std::int64_t>(size), streaming);
          ASSERT_TRUE(to.holds(bytes)) << size << " bytes, offset " << offset << ", streaming " << streaming;
        }
      }
    }
  });
}

TEST(SimdTargets, AreTestedDownToScalarCode) {
  std::set<std::string_view> tested;
  onEveryTarget([&] { tested.insert(simdTarget()); });
  EXPECT_TRUE(tested.contains(simdTarget())) << simdTarget() << " is what this machine uses";
#if HWY_ARCH_X86 && !defined(__AVX2__)
  EXPECT_TRUE(tested.contains("SCALAR") || tested.contains("EMU128"));  // as the compiler allows
  EXPECT_EQ(tested.contains("AVX2"), (hwy::SupportedTargets() & HWY_AVX2) != 0);
  EXPECT_EQ(tested.contains("AVX3"), (hwy::SupportedTargets() & HWY_AVX3) != 0);
#endif
}

}  // namespace
}  // namespace dc::shm
