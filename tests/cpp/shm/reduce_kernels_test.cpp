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

namespace dc::shm {
namespace {

using Bytes = std::vector<std::byte>;

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

// ---- The reference: one element at a time, formats by arithmetic instead of bits ----

struct Format {
  int mantissa;
  int bias;
};
constexpr Format kFloat16{10, 15};
constexpr Format kBFloat16{7, 127};

float decode(Format f, std::uint16_t bits) {
  const int fraction = bits & ((1 << f.mantissa) - 1);
  const int exponent = (bits & 0x7FFF) >> f.mantissa;
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 2 * f.bias + 1) {
    return sign * (fraction == 0 ? std::numeric_limits<float>::infinity() : std::nanf(""));
  }
  const int hidden = exponent == 0 ? 0 : 1 << f.mantissa;
  return sign * std::ldexp(static_cast<float>(hidden + fraction), std::max(exponent, 1) - f.bias - f.mantissa);
}

std::uint16_t encode(Format f, float value) {
  const int infinity = (2 * f.bias + 1) << f.mantissa;
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(infinity | 1 << (f.mantissa - 1));
  }
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value) || value == 0) {
    return static_cast<std::uint16_t>(sign | (value == 0 ? 0 : infinity));
  }
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, 1 - f.bias);
  // In units of the last place; 2^(mantissa+1) of them are the next power of two, and the bits count on from there.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(double{value}), f.mantissa - exponent)));
  const int bits = ((exponent + f.bias - 1) << f.mantissa) + units;
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

template <typename T>
T combined(ReduceOp op, T total, T next) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::Min:
        return std::isnan(total) || total <= next ? total : next;
      case ReduceOp::Max:
        return std::isnan(total) || total >= next ? total : next;
      case ReduceOp::Product:
        return total * next;
      default:
        return total + next;
    }
  } else {
    const auto a = static_cast<std::uint64_t>(total);
    const auto b = static_cast<std::uint64_t>(next);
    switch (op) {
      case ReduceOp::Min:
        return std::min(total, next);
      case ReduceOp::Max:
        return std::max(total, next);
      case ReduceOp::Product:
        return static_cast<T>(a * b);
      case ReduceOp::And:
        return static_cast<T>(a & b);
      case ReduceOp::Or:
        return static_cast<T>(a | b);
      case ReduceOp::Xor:
        return static_cast<T>(a ^ b);
      default:
        return static_cast<T>(a + b);
    }
  }
}

// Element = what lies in memory, decoded to what is accumulated and encoded again.
template <typename Element, typename Decode, typename Encode>
Bytes plainLoop(ReduceOp op, const std::vector<Bytes>& inputs, Decode decoded, Encode encoded) {
  Bytes result(inputs[0].size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(Element)) {
    Element element;
    std::memcpy(&element, &inputs[0][at], sizeof(Element));
    auto total = decoded(element);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      std::memcpy(&element, &inputs[r][at], sizeof(Element));
      total = combined(op, total, decoded(element));
    }
    if constexpr (std::is_floating_point_v<decltype(total)>) {
      if (op == ReduceOp::Average) {
        total /= static_cast<decltype(total)>(inputs.size());
      }
      total = std::isnan(total) ? std::numeric_limits<decltype(total)>::quiet_NaN() : total;
    }
    element = encoded(total);
    std::memcpy(&result[at], &element, sizeof(Element));
  }
  return result;
}

template <typename T>
Bytes plainLoop(ReduceOp op, const std::vector<Bytes>& inputs) {
  return plainLoop<T>(op, inputs, std::identity(), std::identity());
}

Bytes plainHalfLoop(ReduceOp op, const std::vector<Bytes>& inputs, Format format) {
  return plainLoop<std::uint16_t>(
      op, inputs, [&](std::uint16_t bits) { return decode(format, bits); },
      [&](float value) { return encode(format, value); });
}

Bytes plainBoolLoop(ReduceOp op, const std::vector<Bytes>& inputs) {
  const bool all = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::And;
  const ReduceOp bits = all ? ReduceOp::And : op == ReduceOp::Xor ? ReduceOp::Xor : ReduceOp::Or;
  const auto truth = [](std::uint8_t byte) { return static_cast<std::uint8_t>(byte != 0 ? 1 : 0); };
  return plainLoop<std::uint8_t>(bits, inputs, truth, std::identity());
}

Bytes expected(ReduceOp op, DType dtype, const std::vector<Bytes>& inputs) {
  switch (dtype) {
    case DType::Float32:
      return plainLoop<float>(op, inputs);
    case DType::Float64:
      return plainLoop<double>(op, inputs);
    case DType::Float16:
      return plainHalfLoop(op, inputs, kFloat16);
    case DType::BFloat16:
      return plainHalfLoop(op, inputs, kBFloat16);
    case DType::Int8:
      return plainLoop<std::int8_t>(op, inputs);
    case DType::Int16:
      return plainLoop<std::int16_t>(op, inputs);
    case DType::Int32:
      return plainLoop<std::int32_t>(op, inputs);
    case DType::Int64:
      return plainLoop<std::int64_t>(op, inputs);
    case DType::UInt8:
      return plainLoop<std::uint8_t>(op, inputs);
    case DType::Bool:
      return plainBoolLoop(op, inputs);
  }
  return {};
}

// ---- Inputs ----

template <typename T>
T special(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const std::array values = {T{0},
                             -T{0},
                             T{1},
                             T{-1},
                             Limits::min(),
                             Limits::denorm_min(),
                             Limits::max(),
                             -Limits::max(),
                             Limits::infinity(),
                             T{3} / T{2},
                             Limits::quiet_NaN(),
                             -Limits::infinity()};
  return values[random() % values.size()];
}

template <typename T>
void putFloating(std::byte* at, std::mt19937_64& random) {
  const T near = std::uniform_real_distribution<T>(-2, 2)(random);
  const T value = random() % 4 == 0 ? special<T>(random) : near;
  std::memcpy(at, &value, sizeof(T));
}

void putHalf(std::byte* at, Format format, std::mt19937_64& random) {
  // Exponents around 1 by random fractions: sums lie between two numbers of the format, often in the middle.
  const auto near = static_cast<int>(random() % 4) + format.bias - 2;
  auto bits = static_cast<std::uint16_t>((near << format.mantissa) | (random() & ((1U << format.mantissa) - 1)) |
                                         (random() & 0x8000));
  if (random() % 4 == 0) {
    bits = encode(format, special<float>(random));
  }
  std::memcpy(at, &bits, sizeof(bits));
}

// A third of the elements are random bits, which are NaNs with payloads, infinities and denormals too.
Bytes randomElements(DType dtype, std::int64_t count, std::mt19937_64& random) {
  Bytes bytes(static_cast<std::size_t>(count * sizeOf(dtype)));
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
  for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(sizeOf(dtype))) {
    if (random() % 3 == 0) {
      continue;
    }
    switch (dtype) {
      case DType::Float32:
        putFloating<float>(&bytes[at], random);
        break;
      case DType::Float64:
        putFloating<double>(&bytes[at], random);
        break;
      case DType::Float16:
        putHalf(&bytes[at], kFloat16, random);
        break;
      case DType::BFloat16:
        putHalf(&bytes[at], kBFloat16, random);
        break;
      case DType::Bool:
        bytes[at] = static_cast<std::byte>(random() % 2);
        break;
      default:
        break;
    }
  }
  return bytes;
}

std::vector<Bytes> randomInputs(DType dtype, std::size_t inputs, std::int64_t count) {
  std::mt19937_64 random(static_cast<std::uint64_t>(dtype) * 100 + inputs);
  std::vector<Bytes> result(inputs);
  std::generate(result.begin(), result.end(), [&] { return randomElements(dtype, count, random); });
  return result;
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
  reduceRanks(op, dtype, from, to, count, streaming);
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
