// How elements become vectors that can be accumulated, and back; and what the reductions do to such vectors. Included
// once per SIMD target, by reduce_kernels.cpp alone.
//
// A kind of lanes has
//   Memory    the PlainLanes of what lies in memory, kBytes of it at a time
//   load      that to a Vector, which is what is accumulated
//   combine   an Op applied to two Vectors
//   finish    the end of the Op, and back to a vector of Memory
//   finishFour  the same of four, for kinds that gain from seeing them together

// Not a #pragma once: each target includes the file again.
#if defined(DC_SHM_REDUCE_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef DC_SHM_REDUCE_LANES_INL_H
#undef DC_SHM_REDUCE_LANES_INL_H
#else
#define DC_SHM_REDUCE_LANES_INL_H
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace dc::shm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename V>
using LaneOf = hn::TFromD<hn::DFromV<V>>;

// ---- Operations on vectors of one type ----

// One NaN for all: payloads would tell in which order the compiler put the operands of an addition.
template <typename V>
HWY_INLINE V withPlainNaN(V v) {
  if constexpr (hwy::IsFloat<LaneOf<V>>()) {
    const hn::DFromV<V> d;
    return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, std::numeric_limits<LaneOf<V>>::quiet_NaN()), v);
  } else {
    return v;
  }
}

struct Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    return hn::Add(total, next);
  }
  // What is left to do when all inputs are combined.
  template <typename V>
  HWY_INLINE V scale(V total) const {
    return total;
  }
};

struct Average : Sum {
  explicit Average(std::size_t inputs) : count(static_cast<double>(inputs)) {}
  template <typename V>
  HWY_INLINE V scale(V total) const {
    const hn::DFromV<V> d;
    return hn::Div(total, hn::Set(d, static_cast<LaneOf<V>>(count)));
  }
  double count;
};

// The same bits without the slow division: the inverse of a power of two is exact, so both round the same number.
struct AverageOfPowerOfTwo : Sum {
  explicit AverageOfPowerOfTwo(std::size_t inputs) : inverse(1.0 / static_cast<double>(inputs)) {}
  template <typename V>
  HWY_INLINE V scale(V total) const {
    const hn::DFromV<V> d;
    return hn::Mul(total, hn::Set(d, static_cast<LaneOf<V>>(inverse)));
  }
  double inverse;
};

struct Product : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    if constexpr (sizeof(LaneOf<V>) == 1 && HWY_TARGET != HWY_SCALAR) {
      // Nobody multiplies bytes. Even bytes: the low half of the product of the words that they are in. Odd: shifted.
      const hn::DFromV<V> d;
      const hn::RepartitionToWide<decltype(d)> wide;
      const auto a = hn::BitCast(wide, total);
      const auto b = hn::BitCast(wide, next);
      const auto low = hn::Set(wide, 0xFF);
      const auto odd = hn::ShiftLeft<8>(hn::Mul(hn::ShiftRight<8>(a), hn::ShiftRight<8>(b)));
      return hn::BitCast(d, hn::Or(hn::And(hn::Mul(a, b), low), odd));
    } else {
      return hn::Mul(total, next);
    }
  }
};

// hn::Min and hn::Max of floating-point numbers treat NaN and -0 as each processor likes; a comparison does not. A NaN
// that is the total stays, since nothing compares with it; one that comes next is taken.
struct Min : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    if constexpr (hwy::IsFloat<LaneOf<V>>()) {
      return hn::IfThenElse(hn::Or(hn::Lt(next, total), hn::IsNaN(next)), next, total);
    } else {
      return hn::Min(total, next);
    }
  }
};

struct Max : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    if constexpr (hwy::IsFloat<LaneOf<V>>()) {
      return hn::IfThenElse(hn::Or(hn::Gt(next, total), hn::IsNaN(next)), next, total);
    } else {
      return hn::Max(total, next);
    }
  }
};

struct And : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    return hn::And(total, next);
  }
};

struct Or : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    return hn::Or(total, next);
  }
};

struct Xor : Sum {
  template <typename V>
  static HWY_INLINE V combine(V total, V next) {
    return hn::Xor(total, next);
  }
};

// ---- Four at a time ----

template <typename V>
struct Four {
  V a, b, c, d;
};

template <typename Lanes>
concept FinishesFour = requires { Lanes::kFinishesFour; };

template <typename Lanes, typename Op, typename V>
HWY_INLINE auto finishFour(const Op& op, const Four<V>& totals) {
  if constexpr (FinishesFour<Lanes>) {
    return Lanes::finishFour(op, totals);
  } else {
    return Four{Lanes::finish(op, totals.a), Lanes::finish(op, totals.b), Lanes::finish(op, totals.c),
                Lanes::finish(op, totals.d)};
  }
}

// ---- Elements that accumulate as they are ----

template <typename T>
struct PlainLanes {
  using Memory = PlainLanes;
  using D = hn::ScalableTag<T>;
  using Vector = hn::Vec<D>;
  static constexpr std::size_t kElement = sizeof(T);
  static constexpr std::size_t kBytes = hn::MaxLanes(D()) * sizeof(T);

  static HWY_INLINE Vector load(const std::byte* from) { return hn::LoadU(D(), reinterpret_cast<const T*>(from)); }
  // stream needs aligned memory, store does not.
  static HWY_INLINE void store(Vector v, std::byte* to) { hn::StoreU(v, D(), reinterpret_cast<T*>(to)); }
  static HWY_INLINE void stream(Vector v, std::byte* to) { hn::Stream(v, D(), reinterpret_cast<T*>(to)); }

  template <typename Op>
  static HWY_INLINE Vector combine(const Op& op, Vector total, Vector next) {
    return op.combine(total, next);
  }
  template <typename Op>
  static HWY_INLINE Vector finish(const Op& op, Vector total) {
    return withPlainNaN(op.scale(total));
  }
};

struct BoolLanes : PlainLanes<std::uint8_t> {
  static HWY_INLINE Vector load(const std::byte* from) {
    return hn::Min(PlainLanes<std::uint8_t>::load(from), hn::Set(D(), 1));
  }
};

// ---- 16-bit floating-point numbers, which accumulate in float32 ----

using WordTag = hn::ScalableTag<std::uint32_t>;
using FloatTag = hn::ScalableTag<float>;
using Words = hn::Vec<WordTag>;
using Floats = hn::Vec<FloatTag>;

// A format converts the numbers in the low or in the high halves of 32-bit words; fromLow and fromHigh ignore what the
// other half holds, toLow makes it zero. NaNs have been through withPlainNaN.
struct BFloat16Format {
  static HWY_INLINE Floats fromLow(Words words) { return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(words)); }
  static HWY_INLINE Floats fromHigh(Words words) {
    return hn::BitCast(FloatTag(), hn::And(words, hn::Set(WordTag(), 0xFFFF0000u)));
  }
  // Nearest even: the upper half, plus the carry of its last bit and 0x7FFF added to the lower half. That carry may go
  // on into the exponent, and from the largest number to infinity.
  static HWY_INLINE Words toLow(Floats v) {
    const Words bits = hn::BitCast(WordTag(), v);
    const Words odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(WordTag(), 1));
    return hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(WordTag(), 0x7FFF))));
  }
#if HWY_TARGET != HWY_SCALAR
  // The same for both at once.
  static HWY_INLINE Words packed(Floats low, Floats high) {
    const hn::Repartition<std::uint16_t, WordTag> d;
    const Words l = hn::BitCast(WordTag(), low);
    const Words h = hn::BitCast(WordTag(), high);
    const auto upper = hn::OddEven(hn::BitCast(d, h), hn::BitCast(d, hn::ShiftRight<16>(l)));
    const auto lower = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<16>(h)), hn::BitCast(d, l));
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
    // Comparisons of unsigned words and additions under a mask are one instruction each: up from more than half of the
    // last place, or from half of it where the last bit is odd.
    const auto rest = hn::Or(hn::And(upper, hn::Set(d, 1)), lower);
    const auto up = hn::Gt(rest, hn::Set(d, 0x8000));
    return hn::BitCast(WordTag(), hn::IfThenElse(up, hn::Add(upper, hn::Set(d, 1)), upper));
#else
    // The average, (a + b + 1) / 2 without overflow, has the carry as its top bit.
    const auto added = hn::Or(hn::And(upper, hn::Set(d, 1)), hn::Set(d, 0x7FFE));
    return hn::BitCast(WordTag(), hn::Add(upper, hn::ShiftRight<15>(hn::AverageRound(lower, added))));
#endif
  }
#endif
};

// Own conversions, because those of Highway without F16C do not round to nearest even. No multiplication meets an
// addition here or in the caller without integer operations in between, so nothing can be contracted to a fused one.
struct Float16Format {
  static HWY_INLINE Floats fromLow(Words words) {
    const WordTag d;
    const Words sign = hn::ShiftLeft<16>(hn::And(words, hn::Set(d, 0x8000)));
    const Words magnitude = hn::And(words, hn::Set(d, 0x7FFF));
    const Words aligned = hn::ShiftLeft<13>(magnitude);
    const Words rebias = hn::Set(d, 112u << 23);
    const Words normal = hn::Add(aligned, rebias);
    const Words infinite = hn::Add(normal, rebias);
    // From the integer, not by scaling the bits, which would be a denormal float32 that some threads flush to zero.
    const hn::RebindToSigned<WordTag> integer;
    const Floats scaled =
        hn::Mul(hn::ConvertTo(FloatTag(), hn::BitCast(integer, magnitude)), hn::Set(FloatTag(), 0x1p-24f));
    Words bits = hn::IfThenElse(less(magnitude, 0x0400), hn::BitCast(d, scaled), normal);
    bits = hn::IfThenElse(less(magnitude, 0x7C00), bits, infinite);
    return hn::BitCast(FloatTag(), hn::Or(bits, sign));
  }
  static HWY_INLINE Floats fromHigh(Words words) { return fromLow(hn::ShiftRight<16>(words)); }

  static HWY_INLINE Words toLow(Floats v) {
    const WordTag d;
    const Words all = hn::BitCast(d, v);
    const Words sign = hn::And(hn::ShiftRight<16>(all), hn::Set(d, 0x8000));
    const Words bits = hn::And(all, hn::Set(d, 0x7FFFFFFF));
    const Words odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(d, 1));
    const Words rounded = hn::Add(bits, hn::Add(odd, hn::Set(d, 0xFFF)));
    const Words normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(d, 112u << 23)));
    // 0.5 has the last bit where denormals of float16 have theirs: the addition rounds to it.
    const Floats half = hn::Set(FloatTag(), 0.5f);
    const Words denormal = hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(FloatTag(), bits), half)), hn::BitCast(d, half));
    Words magnitude = hn::IfThenElse(less(bits, 0x38800000), denormal, normal);
    magnitude = hn::IfThenElse(less(bits, 0x47800000), magnitude, hn::Set(d, 0x7C00));
    magnitude = hn::IfThenElse(less(bits, 0x7F800001), magnitude, hn::Set(d, 0x7E00));
    return hn::Or(magnitude, sign);
  }
  static HWY_INLINE Words packed(Floats low, Floats high) { return hn::Or(toLow(low), hn::ShiftLeft<16>(toLow(high))); }

 private:
  // Of words without their top bit, so that the signed comparison, which all targets have, will do.
  static HWY_INLINE hn::Mask<WordTag> less(Words words, std::int32_t bound) {
    const hn::RebindToSigned<WordTag> d;
    return hn::RebindMask(WordTag(), hn::Lt(hn::BitCast(d, words), hn::Set(d, bound)));
  }
};

#if HWY_TARGET == HWY_SCALAR

// Vectors of one lane cannot be split in two.
template <typename Format>
struct HalfLanes {
  using Memory = PlainLanes<std::uint16_t>;
  using Vector = Floats;
  static constexpr std::size_t kElement = 2;
  static constexpr std::size_t kBytes = Memory::kBytes;

  static HWY_INLINE Vector load(const std::byte* from) {
    return Format::fromLow(hn::Set(WordTag(), hn::GetLane(Memory::load(from))));
  }
  template <typename Op>
  static HWY_INLINE Vector combine(const Op& op, Vector total, Vector next) {
    return op.combine(total, next);
  }
  template <typename Op>
  static HWY_INLINE Memory::Vector finish(const Op& op, Vector total) {
    return hn::Set(Memory::D(), static_cast<std::uint16_t>(hn::GetLane(Format::toLow(withPlainNaN(op.scale(total))))));
  }
};

#else

// A vector of memory is two of float32.
struct PairOfFloats {
  struct Vector {
    Floats first;
    Floats second;
  };
  static constexpr std::size_t kElement = 2;
  static constexpr std::size_t kBytes = PlainLanes<float>::kBytes;

  template <typename Op>
  static HWY_INLINE Vector combine(const Op& op, Vector total, Vector next) {
    return {op.combine(total.first, next.first), op.combine(total.second, next.second)};
  }
};

// They hold the elements at even and at odd places, so that none has to leave its 32-bit word.
template <typename Format>
struct HalfLanesInWords : PairOfFloats {
  using Memory = PlainLanes<std::uint32_t>;

  static HWY_INLINE Vector load(const std::byte* from) {
    const Words words = Memory::load(from);
    return {Format::fromLow(words), Format::fromHigh(words)};
  }
  template <typename Op>
  static HWY_INLINE Words finish(const Op& op, Vector total) {
    return Format::packed(withPlainNaN(op.scale(total.first)), withPlainNaN(op.scale(total.second)));
  }
};

template <typename Format>
struct HalfLanes : HalfLanesInWords<Format> {};

// bfloat16 is bound by the instructions that convert it. NaNs are rare, so eight vectors are asked at once whether one
// of them holds any.
template <>
struct HalfLanes<BFloat16Format> : HalfLanesInWords<BFloat16Format> {
  static constexpr bool kFinishesFour = true;

  template <typename Op>
  static HWY_INLINE Four<Words> finishFour(const Op& op, const Four<Vector>& totals) {
    const Four<Vector> v = {scaled(op, totals.a), scaled(op, totals.b), scaled(op, totals.c), scaled(op, totals.d)};
    const auto odd = hn::Or(hn::Or(hasNaN(v.a), hasNaN(v.b)), hn::Or(hasNaN(v.c), hasNaN(v.d)));
    if (HWY_UNLIKELY(!hn::AllFalse(FloatTag(), odd))) {
      return {finish(op, totals.a), finish(op, totals.b), finish(op, totals.c), finish(op, totals.d)};
    }
    return {packed(v.a), packed(v.b), packed(v.c), packed(v.d)};
  }

 protected:
  template <typename Op>
  static HWY_INLINE Vector scaled(const Op& op, const Vector& v) {
    return {op.scale(v.first), op.scale(v.second)};
  }

 private:
  // Where one of the two is a NaN.
  static HWY_INLINE hn::Mask<FloatTag> hasNaN(const Vector& v) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
    return {_mm512_cmp_ps_mask(v.first.raw, v.second.raw, _CMP_UNORD_Q)};  // Highway asks one vector at a time
#else
    return hn::Or(hn::IsNaN(v.first), hn::IsNaN(v.second));
#endif
  }
  static HWY_INLINE Words packed(const Vector& v) { return BFloat16Format::packed(v.first, v.second); }
};

#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86

// Sums and averages on processors that convert to bfloat16 themselves (AVX512_BF16, which no target of Highway's in
// Debian has): a quarter fewer instructions. The conversion rounds as we want but makes zeros of denormals, so those
// are looked for together with the NaNs. A thread that flushes denormals has none of either after an addition.
struct NativeBFloat16Lanes : HalfLanes<BFloat16Format> {
  template <typename Op>
  static HWY_INLINE Four<Words> finishFour(const Op& op, const Four<Vector>& totals) {
    const Four<Vector> v = {scaled(op, totals.a), scaled(op, totals.b), scaled(op, totals.c), scaled(op, totals.d)};
    if (HWY_UNLIKELY((rare(v.a) | rare(v.b) | rare(v.c) | rare(v.d)) != 0)) {
      return {finish(op, totals.a), finish(op, totals.b), finish(op, totals.c), finish(op, totals.d)};
    }
    return {packed(v.a), packed(v.b), packed(v.c), packed(v.d)};
  }

 private:
  static HWY_INLINE unsigned rare(const Vector& v) {
    constexpr int kNaNOrDenormal = 0x01 | 0x20 | 0x80;
    return static_cast<unsigned>(_mm512_fpclass_ps_mask(v.first.raw, kNaNOrDenormal) |
                                 _mm512_fpclass_ps_mask(v.second.raw, kNaNOrDenormal));
  }
  static HWY_INLINE Words packed(const Vector& v) {
    __m512i halves;  // those of `first` in the lower 16 words, those of `second` in the upper
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves) : "v"(v.second.raw), "v"(v.first.raw));
    alignas(64) static constexpr std::uint16_t kInTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                               21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                               11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return Words{_mm512_permutexvar_epi16(_mm512_load_si512(kInTurns), halves)};
  }
};

#endif

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

// F16C converts the lower and the upper half of a vector; it ignores the flushing of denormals and rounds as we want.
template <>
struct HalfLanes<Float16Format> : PairOfFloats {
  using HalfTag = hn::Rebind<hwy::float16_t, FloatTag>;
  using Memory = PlainLanes<std::uint16_t>;

  static HWY_INLINE Vector load(const std::byte* from) {
    const auto* numbers = reinterpret_cast<const hwy::float16_t*>(from);
    return {hn::PromoteTo(FloatTag(), hn::LoadU(HalfTag(), numbers)),
            hn::PromoteTo(FloatTag(), hn::LoadU(HalfTag(), numbers + hn::MaxLanes(HalfTag())))};
  }
  template <typename Op>
  static HWY_INLINE Memory::Vector finish(const Op& op, Vector total) {
    return hn::Combine(Memory::D(), demoted(withPlainNaN(op.scale(total.second))),
                       demoted(withPlainNaN(op.scale(total.first))));
  }

 private:
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<HalfTag>> demoted(Floats v) {
    return hn::BitCast(hn::RebindToUnsigned<HalfTag>(), hn::DemoteTo(HalfTag(), v));
  }
};

#endif
#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace dc::shm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DC_SHM_REDUCE_LANES_INL_H
