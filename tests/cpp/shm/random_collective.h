// One random collective with values that every rank can compute for itself, and so check the result without asking
// anyone.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"

namespace dc::shm::testing {

// The element of `rank` at `index`: small whole numbers, whose sums and products are exact in every type.
inline double valueOf(std::uint64_t seed, int rank, std::int64_t index, ReduceOp op, DType dtype) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(rank) * 0xC2B2AE3D27D4EB4Fu +
                    static_cast<std::uint64_t>(index) * 0x165667B19E3779F9u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 32;
  if (dtype == DType::Bool) {
    return static_cast<double>(x % 2);
  }
  if (op == ReduceOp::Product) {
    return x % 3 == 0 ? 2 : 1;  // 2^9 still fits bfloat16; int8 wraps, see `wrap`
  }
  return static_cast<double>(x % 7) - (dtype == DType::UInt8 ? 0 : 3);
}

template <typename Integer>
double wrap(double value) {
  return static_cast<double>(static_cast<Integer>(static_cast<std::int64_t>(value)));
}

// Rounds to what the type can hold.
inline double asType(double value, DType dtype) {
  switch (dtype) {
    case DType::Float64:
      return value;
    case DType::Float32:
      return static_cast<float>(value);
    case DType::Float16:
      return static_cast<double>(static_cast<_Float16>(static_cast<float>(value)));
    case DType::BFloat16: {
      const auto single = static_cast<float>(value);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &single, sizeof(bits));
      bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
      float rounded = 0;
      std::memcpy(&rounded, &bits, sizeof(bits));
      return rounded;
    }
    case DType::Int8:
      return wrap<std::int8_t>(value);
    case DType::Int16:
      return wrap<std::int16_t>(value);
    case DType::UInt8:
      return wrap<std::uint8_t>(value);
    case DType::Bool:
      return value != 0;
    default:
      return value;
  }
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

inline void store(std::byte* to, double value, DType dtype) {
  switch (dtype) {
    case DType::Float64:
      return put(to, value);
    case DType::Float32:
      return put(to, static_cast<float>(value));
    case DType::Float16:
      return put(to, static_cast<_Float16>(static_cast<float>(value)));
    case DType::BFloat16: {
      const auto single = static_cast<float>(asType(value, dtype));
      std::uint32_t bits = 0;
      std::memcpy(&bits, &single, sizeof(bits));
      return put(to, static_cast<std::uint16_t>(bits >> 16));
    }
    case DType::Int8:
      return put(to, static_cast<std::int8_t>(static_cast<std::int64_t>(value)));
    case DType::Int16:
      return put(to, static_cast<std::int16_t>(static_cast<std::int64_t>(value)));
    case DType::Int32:
      return put(to, static_cast<std::int32_t>(value));
    case DType::Int64:
      return put(to, static_cast<std::int64_t>(value));
    case DType::UInt8:
    case DType::Bool:
      return put(to, static_cast<std::uint8_t>(static_cast<std::int64_t>(value)));
  }
}

inline double reduced(std::uint64_t seed, int ranks, std::int64_t index, ReduceOp op, DType dtype) {
  double all = valueOf(seed, 0, index, op, dtype);
  for (int r = 1; r < ranks; ++r) {
    const double value = valueOf(seed, r, index, op, dtype);
    const auto a = static_cast<std::int64_t>(all);
    const auto b = static_cast<std::int64_t>(value);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average:
        all = dtype == DType::Bool ? (a | b) : all + value;
        break;
      case ReduceOp::Min:
        all = std::min(all, value);
        break;
      case ReduceOp::Max:
        all = std::max(all, value);
        break;
      case ReduceOp::Product:
        all *= value;
        break;
      case ReduceOp::And:
        all = static_cast<double>(a & b);
        break;
      case ReduceOp::Or:
        all = static_cast<double>(a | b);
        break;
      case ReduceOp::Xor:
        all = static_cast<double>(a ^ b);
        break;
    }
  }
  if (op == ReduceOp::Average) {
    all = dtype == DType::Float64 ? all / ranks : static_cast<float>(all) / static_cast<float>(ranks);
  }
  return asType(all, dtype);
}

// A tensor's worth of memory: ordinary or in the shared heap, and off its natural alignment by up to a line.
class Buffer {
 public:
  Buffer(std::int64_t bytes, std::int64_t shift, bool shared, SharedHeap& heap) : heap_(shared ? &heap : nullptr) {
    if (heap_ != nullptr) {
      block_ = heap_->allocate(bytes + shift);
    } else {
      own_.resize(static_cast<std::size_t>(bytes + shift));
      block_ = own_.data();
    }
    data_ = block_ + shift;
    if (bytes > 0) {  // an empty vector has no memory, which memset does not take
      std::memset(data_, 0xA5, static_cast<std::size_t>(bytes));
    }
  }
  ~Buffer() {
    if (heap_ != nullptr) {
      heap_->free(block_);
    }
  }
  Buffer(const Buffer&) = delete;
  std::byte* data() const { return data_; }

 private:
  SharedHeap* heap_;
  std::vector<std::byte> own_;
  std::byte* block_ = nullptr;
  std::byte* data_ = nullptr;
};

// All ranks make the same from the same seed, but for what may differ between them.
struct RandomCollective {
  std::uint64_t seed;
  Kind kind;
  DType dtype;
  ReduceOp op = ReduceOp::Sum;
  std::int64_t count;  // elements of a part
  int root;
  bool in_place;
  bool shared;
  bool uneven;

  RandomCollective(std::uint64_t seed, int ranks, std::int64_t most_bytes) : seed(seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
    kind = static_cast<Kind>(below(9));
    dtype = static_cast<DType>(below(10));
    do {
      op = static_cast<ReduceOp>(below(8));
    } while (!supports(op, dtype));
    // As many small ones as large ones, and some of nothing.
    const double scale = std::log2(static_cast<double>(most_bytes)) * static_cast<double>(below(1000)) / 1000;
    count = below(20) == 0 ? 0 : static_cast<std::int64_t>(std::exp2(scale)) / sizeOf(dtype);
    root = static_cast<int>(below(static_cast<std::uint64_t>(ranks)));
    in_place = below(2) == 0;
    shared = below(3) == 0;
    uneven = below(3) == 0;
  }

  // How many elements rank `to` gets of rank `from`.
  std::int64_t part(int from, int to) const {
    return uneven ? static_cast<std::int64_t>(
                        (seed + static_cast<std::uint64_t>(from) * 7 + static_cast<std::uint64_t>(to) * 13) % 5) *
                        count / 4
                  : count;
  }

  void run(Group& group) const;

 private:
  std::byte* fill(std::byte* at, int rank, std::int64_t begin, std::int64_t elements) const {
    for (std::int64_t i = 0; i < elements; ++i) {
      store(at + i * sizeOf(dtype), valueOf(seed, rank, begin + i, op, dtype), dtype);
    }
    return at + elements * sizeOf(dtype);
  }
  template <typename Expected>
  void expect(const std::byte* at, std::int64_t elements, Expected&& expected) const {
    std::vector<std::byte> wanted(static_cast<std::size_t>(elements * sizeOf(dtype)));
    for (std::int64_t i = 0; i < elements; ++i) {
      store(wanted.data() + i * sizeOf(dtype), expected(i), dtype);
    }
    for (std::int64_t i = 0; i < elements; ++i) {
      check(std::memcmp(at + i * sizeOf(dtype), wanted.data() + i * sizeOf(dtype),
                        static_cast<std::size_t>(sizeOf(dtype))) == 0,
            [&] {
              return concat("wrong element ", i, " of ", elements, ", seed ", seed, ": ",
                            text({kind, dtype, op, 1, root, count, 0}), in_place ? " in place" : "",
                            shared ? " shared" : "", uneven ? " uneven" : "");
            });
    }
  }
};

inline void RandomCollective::run(Group& group) const {
  const int me = group.rank();
  const int ranks = group.size();
  const std::int64_t element = sizeOf(dtype);
  const std::int64_t shift = static_cast<std::int64_t>(seed % 3) * (me + 1);  // unlike on other ranks
  const auto own = [&](std::int64_t i) { return valueOf(seed, me, i, op, dtype); };
  RunTable table;
  RunTable other;
  switch (kind) {
    case Kind::AllReduce:
    case Kind::Reduce: {
      const Buffer in(count * element, shift, shared, group.heap());
      const Buffer out(count * element, shift, shared, group.heap());
      fill(in.data(), me, 0, count);
      std::byte* result = in_place ? in.data() : out.data();
      if (kind == Kind::AllReduce) {
        allReduce(group, in.data(), result, count, dtype, op);
      } else {
        reduce(group, in.data(), result, count, dtype, op, root);
      }
      if (kind == Kind::AllReduce || me == root) {
        expect(result, count, [&](std::int64_t i) { return reduced(seed, ranks, i, op, dtype); });
      }
      if (!in_place) {
        expect(in.data(), count, own);
      }
      return;
    }
    case Kind::AllGather:
    case Kind::Gather: {
      const auto size = [&](int r) { return kind == Kind::AllGather ? part(r, 0) : count; };
      std::int64_t total = 0;
      for (int r = 0; r < ranks; ++r) {
        total += size(r);
      }
      const Buffer in(size(me) * element, shift, shared, group.heap());
      const Buffer out(total * element, shift, shared, group.heap());
      std::byte* mine = in.data();
      std::int64_t begin = 0;
      for (int r = 0; r < ranks; ++r) {
        // Two runs for each rank: pieces need not lie together.
        const std::int64_t first = size(r) / 2 * element;
        table.add(out.data() + begin, first);
        table.add(out.data() + begin + first, size(r) * element - first);
        table.endRank();
        if (r == me && in_place) {
          mine = out.data() + begin;
        }
        begin += size(r) * element;
      }
      fill(mine, me, 0, size(me));
      const Run source = {mine, size(me) * element};
      if (kind == Kind::AllGather) {
        allGather(group, {&source, 1}, table);
      } else {
        gather(group, {&source, 1}, table, root);
      }
      begin = 0;
      for (int r = 0; r < ranks && (kind == Kind::AllGather || me == root); ++r) {
        expect(out.data() + begin, size(r), [&](std::int64_t i) { return valueOf(seed, r, i, op, dtype); });
        begin += size(r) * element;
      }
      return;
    }
    case Kind::ReduceScatter: {
      std::int64_t total = 0;
      std::int64_t mine = 0;
      for (int r = 0; r < ranks; ++r) {
        mine = r == me ? total : mine;
        total += part(0, r);
      }
      const Buffer in(total * element, shift, shared, group.heap());
      const Buffer out(part(0, me) * element, shift, shared, group.heap());
      fill(in.data(), me, 0, total);
      std::int64_t begin = 0;
      for (int r = 0; r < ranks; ++r) {
        table.add(in.data() + begin * element, part(0, r) * element);
        table.endRank();
        begin += part(0, r);
      }
      std::byte* result = in_place ? in.data() + mine * element : out.data();
      const std::int64_t first = part(0, me) / 3 * element;
      const Run destination[2] = {{result, first}, {result + first, part(0, me) * element - first}};
      reduceScatter(group, table, destination, dtype, op);
      expect(result, part(0, me), [&](std::int64_t i) { return reduced(seed, ranks, mine + i, op, dtype); });
      return;
    }
    case Kind::Broadcast: {
      const Buffer data(count * element, shift, shared, group.heap());
      fill(data.data(), me, 0, count);
      const Run run = {data.data(), count * element};
      broadcast(group, {&run, 1}, root);
      expect(data.data(), count, [&](std::int64_t i) { return valueOf(seed, root, i, op, dtype); });
      return;
    }
    case Kind::Scatter: {
      const Buffer in(count * element * ranks, shift, shared, group.heap());
      const Buffer out(count * element, shift, shared, group.heap());
      for (int r = 0; r < ranks && me == root; ++r) {
        fill(in.data() + r * count * element, root, r * count, count);
        table.add(in.data() + r * count * element, count * element);
        table.endRank();
      }
      const Run run = {out.data(), count * element};
      scatter(group, table, {&run, 1}, root);
      expect(out.data(), count, [&](std::int64_t i) { return valueOf(seed, root, me * count + i, op, dtype); });
      return;
    }
    case Kind::AllToAll: {
      std::int64_t sent = 0;
      std::int64_t received = 0;
      for (int r = 0; r < ranks; ++r) {
        sent += part(me, r);
        received += part(r, me);
      }
      const Buffer in(sent * element, shift, shared, group.heap());
      const Buffer out(received * element, shift, shared, group.heap());
      std::byte* from = in.data();
      std::byte* to = out.data();
      for (int r = 0; r < ranks; ++r) {
        table.add(from, part(me, r) * element);
        table.endRank();
        from = fill(from, me, r * 1000, part(me, r));
        other.add(to, part(r, me) * element);
        other.endRank();
        to += part(r, me) * element;
      }
      allToAll(group, table, other);
      to = out.data();
      for (int r = 0; r < ranks; ++r) {
        expect(to, part(r, me), [&](std::int64_t i) { return valueOf(seed, r, me * 1000 + i, op, dtype); });
        to += part(r, me) * element;
      }
      return;
    }
    default:
      barrier(group);
  }
}

}  // namespace dc::shm::testing
