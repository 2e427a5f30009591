#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/offers.h"
#include "deepcompile/shm/pipeline.h"
#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {
namespace {

constexpr std::int64_t kBlockBytes = 8192;

struct AllReduce {
  Group& group;
  const std::byte* in;
  std::byte* out;
  std::int64_t count;
  DType dtype;
  ReduceOp op;
  std::int64_t element = sizeOf(dtype);

  std::int64_t bytes() const { return count * element; }
  // In place the lines that are written have just been read: they are in the caches, and past them is a way round.
  bool streams() const { return in != out && bytes() >= group.tuning().streaming_bytes; }
};

// Elements of one part of `pieces` equal pieces: whole cache lines, so that no two ranks write the same.
std::int64_t partElements(const AllReduce& task, int parts) {
  const std::int64_t unit = kLine / task.element;
  return ((task.count + parts - 1) / parts + unit - 1) / unit * unit;
}

// Where a message of `pieces` pieces is at a step. All ranks have the same order.
std::int64_t pieceAt(std::int64_t step, std::int64_t pieces, bool from_end) {
  return from_end ? pieces - 1 - step : step;
}

// Everybody stages everything, and reduces everything. No second step to wait for, which is best for messages whose
// latency counts; and between two ranks no way moves fewer bytes.
void inOneStep(const AllReduce& task, Call& call, bool from_end = false) {
  const int ranks = call.ranks();
  const std::int64_t most = std::min(task.group.tuning().chunk_bytes, task.group.layout().slot_bytes) / kLine * kLine;
  const std::int64_t chunk = ranks > 1 ? most : std::max(task.bytes(), kLine);
  const std::int64_t slot = std::min(task.bytes(), chunk);
  const std::int64_t chunks = chunksFor(task.bytes(), chunk);
  const auto begin = [&](std::int64_t step) { return pieceAt(step, chunks, from_end) * chunk; };
  const auto bytes = [&](std::int64_t step) { return std::min(chunk, task.bytes() - begin(step)); };
  constexpr int kFew = 16;
  std::array<const std::byte*, kFew> few;
  std::vector<const std::byte*> many(ranks > kFew ? static_cast<std::size_t>(ranks) : 0);
  const std::span<const std::byte*> inputs(ranks > kFew ? many.data() : few.data(), static_cast<std::size_t>(ranks));
  pipeline(
      call, chunks, slot,
      [&](std::int64_t step, const Turn& turn) {
        if (ranks > 1) {
          copyBytes(call.stageData(turn), task.in + begin(step), bytes(step), call.stagesPastCaches());
        }
      },
      [&](std::int64_t step, const Turn& turn) {
        for (int r = 0; r < ranks; ++r) {
          inputs[static_cast<std::size_t>(r)] = r == call.rank() ? task.in + begin(step) : call.staged(r, turn);
        }
        std::byte* out = task.out + begin(step);
        // The chunk after the next is the one that is staged when this one is reduced.
        const CacheHints hints = {task.streams(), step + 2 < chunks ? task.in + begin(step + 2) : nullptr};
        reduceRanks(task.op, task.dtype, inputs, {&out, 1}, bytes(step) / task.element, hints);
      });
}

// All ranks' tensors lie in shared memory: each rank reduces its part, and writes the result to everybody.
void onSharedTensors(const AllReduce& task, Call& call, const Offers& offers) {
  const int ranks = call.ranks();
  const std::int64_t part = partElements(task, ranks);
  const std::int64_t begin = std::min(part * call.rank(), task.count);
  const std::int64_t elements = std::min(part, task.count - begin);
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  for (int r = 0; r < ranks; ++r) {
    inputs.push_back(offers.at(r, 0) + begin * task.element);
    outputs.push_back(offers.at(r, 1) + begin * task.element);
  }
  reduceRanks(task.op, task.dtype, inputs, outputs, elements, {.streaming = task.streams()});
  try {
    meetAfterSharing(call);
  } catch (const Error&) {
    // A peer that was too slow may still write its part, long after this tensor's memory has become another's.
    task.group.heap().retire(task.out);
    throw;
  }
}

// Two steps through slots that stay in cache. A piece has one part for each rank: a rank stages the parts of its peers,
// reduces its own over what they staged, and copies the parts that they reduced. The three steps of different pieces
// overlap.
class InTwoSteps {
 public:
  InTwoSteps(const AllReduce& task, Call& call, bool from_end)
      : task_(task), call_(call), from_end_(from_end), inputs_(static_cast<std::size_t>(call.ranks())) {
    const int ranks = call.ranks();
    const std::int64_t unit = kLine / task.element;
    const std::int64_t room =
        std::min(task.group.tuning().chunk_bytes / (ranks - 1), task.group.layout().resultBytes());
    const std::int64_t most = std::max(room / task.element / unit, std::int64_t{1}) * unit;
    pieces_ = std::max<std::int64_t>(1, (task.count + ranks * most - 1) / (ranks * most));
    part_ = std::min(most, partElements(task, static_cast<int>(std::min<std::int64_t>(pieces_, 1 << 20)) * ranks));
  }

  void run() {
    for (std::int64_t step = 0; step < pieces_ + 2; ++step) {
      if (step < pieces_) {
        stage(step);
      }
      if (step >= 1 && step - 1 < pieces_) {
        reducePart(step - 1);
      }
      if (step >= 2) {
        copyOut(step - 2);
      }
    }
  }

 private:
  struct Part {
    std::int64_t begin;  // bytes from the start of the tensor
    std::int64_t elements;
  };
  // Of `rank` in the piece of a step.
  Part part(std::int64_t step, int rank) const {
    const std::int64_t begin =
        std::min((pieceAt(step, pieces_, from_end_) * call_.ranks() + rank) * part_, task_.count);
    return {begin * task_.element, std::min(part_, task_.count - begin)};
  }
  std::int64_t partBytes() const { return part_ * task_.element; }
  std::int64_t stagedBytes() const { return partBytes() * (call_.ranks() - 1); }
  // Where in the slot of `owner` the part of `reader` lies: a rank keeps its own part to itself.
  std::int64_t place(int owner, int reader) const { return (reader < owner ? reader : reader - 1) * partBytes(); }
  // Of the pieces that are under way: at most three.
  Turn& turnOf(std::int64_t step) { return turns_[static_cast<std::size_t>(step % kRing)]; }

  void stage(std::int64_t step) {
    const Turn turn = turnOf(step) = call_.nextTurn(stagedBytes(), partBytes());
    std::byte* slot = call_.stageData(turn);
    for (int r = 0; r < call_.ranks(); ++r) {
      if (r != call_.rank()) {
        const Part p = part(step, r);
        copyBytes(slot + place(call_.rank(), r), task_.in + p.begin, p.elements * task_.element,
                  call_.stagesPastCaches());
      }
    }
    call_.post(turn);
  }

  void reducePart(std::int64_t step) {
    const Turn turn = turnOf(step);
    const int me = call_.rank();
    const Part p = part(step, me);
    call_.awaitPosts(turn);
    for (int r = 0; r < call_.ranks(); ++r) {
      inputs_[static_cast<std::size_t>(r)] = r == me ? task_.in + p.begin : call_.staged(r, turn) + place(r, me);
    }
    const std::array<std::byte*, 2> own_and_shared = {task_.out + p.begin, call_.result(me, turn)};
    if (call_.stagesPastCaches()) {
      reduceAndCopyPastCaches(own_and_shared, p.elements);
    } else {
      reduceRanks(task_.op, task_.dtype, inputs_, own_and_shared, p.elements);
    }
    call_.postResult(turn);
  }

  // Block by block, so that what is copied to the result slot is still in the nearest cache.
  void reduceAndCopyPastCaches(std::array<std::byte*, 2> own_and_shared, std::int64_t elements) {
    auto& [own, shared] = own_and_shared;
    for (std::int64_t done = 0; done < elements;) {
      const std::int64_t block = std::min(kBlockBytes / task_.element, elements - done);
      const std::int64_t bytes = block * task_.element;
      reduceRanks(task_.op, task_.dtype, inputs_, {&own, 1}, block);
      copyBytes(shared, own, bytes, true);
      for (const std::byte*& input : inputs_) {
        input += bytes;
      }
      own += bytes;
      shared += bytes;
      done += block;
    }
  }

  void copyOut(std::int64_t step) {
    const Turn turn = turnOf(step);
    for (int r = 0; r < call_.ranks(); ++r) {
      if (r != call_.rank()) {
        const Part p = part(step, r);
        call_.awaitResult(r, turn);
        copyBytes(task_.out + p.begin, call_.result(r, turn), p.elements * task_.element, task_.streams());
      }
    }
  }

  const AllReduce& task_;
  Call& call_;
  const bool from_end_;
  std::vector<const std::byte*> inputs_;
  std::int64_t pieces_ = 0;
  std::int64_t part_ = 0;  // elements
  std::array<Turn, kRing> turns_;
};

}  // namespace

void allReduce(Group& group, const void* in, void* out, std::int64_t count, DType dtype, ReduceOp op,
               std::uint64_t tag) {
  checkReduction(op, dtype, count);
  const AllReduce task = {group, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), count, dtype, op};
  Call call(group, {Kind::AllReduce, dtype, op, 1, -1, count, tag});
  if (group.size() == 1 || task.bytes() <= group.tuning().one_step_bytes) {
    inOneStep(task, call);
    return;
  }
  const std::array<Run, 2> runs = {run(in, task.bytes()), run(out, task.bytes())};
  const Offers offers = exchangeOffers(call, group, runs);
  if (offers) {
    onSharedTensors(task, call, offers);
    return;
  }
  const bool from_end = call.beginsAtTheEnd(offers.sameAsLast());
  if (group.size() == 2) {
    inOneStep(task, call, from_end);
  } else {
    InTwoSteps(task, call, from_end).run();
  }
}

}  // namespace dc::shm
