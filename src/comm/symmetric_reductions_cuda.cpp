#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "deepcompile/base/environment.h"
#include "deepcompile/base/error.h"
#include "deepcompile/comm/communicator_over.h"
#include "deepcompile/comm/numbers_cuda.h"
#include "deepcompile/comm/symmetric_reductions.h"
#include "deepcompile/comm/symmetric_staging.h"

namespace dc {
namespace {

constexpr std::int64_t kHalfBytes = std::int64_t{32} << 20;
constexpr std::int64_t kWord = 16;

std::int64_t roundUp(std::int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

bool onWords(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % kWord == 0; }

// What is staged and summed in one turn.
struct Turn {
  std::vector<cuda::Piece> words;  // staged as they are
  std::vector<cuda::Piece> odd;    // staged by elements
  std::vector<cuda::SumPiece> sums;
  std::int64_t used = 0;  // bytes of the half
};

// Milliseconds on the device, of work that the current stream is given between start() and stop().
class DeviceTimer {
 public:
  DeviceTimer() {
    C10_CUDA_CHECK(cudaEventCreate(&begin_));
    C10_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~DeviceTimer() {
    C10_CUDA_CHECK_WARN(cudaEventDestroy(begin_));
    C10_CUDA_CHECK_WARN(cudaEventDestroy(end_));
  }
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  void start(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(begin_, stream)); }
  // Blocks the host until the work is done; calls `late`, which throws, when it is not by then.
  template <typename Late>
  double stop(cudaStream_t stream, double timeout_seconds, Late&& late) {
    C10_CUDA_CHECK(cudaEventRecord(end_, stream));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
    cudaError_t state = cudaEventQuery(end_);
    while (state == cudaErrorNotReady) {
      (void)cudaGetLastError();  // that one is no error
      if (std::chrono::steady_clock::now() > deadline) {
        late();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      state = cudaEventQuery(end_);
    }
    C10_CUDA_CHECK(state);
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

class SymmetricReductions final : public CommunicatorOver {
 public:
  SymmetricReductions(const std::string& group_name, std::shared_ptr<Communicator> rest, int device, double timeout,
                      std::shared_ptr<Traffic> traffic)
      : CommunicatorOver(std::move(rest), std::move(traffic)),
        device_(static_cast<c10::DeviceIndex>(device)),
        staging_(group_name, at::Device(at::kCUDA, device_), kHalfBytes) {
    setTimeout(timeout);
    const std::string choice = Environment::read().symmetric_reductions;
    agreeOn(choice);
    if (choice == "auto") {
      measure();
    } else {
      faster_.fill(choice == "always");
    }
  }

  void abort() override {
    aborted_ = true;
    CommunicatorOver::abort();
  }

 protected:
  void doReduceScatter(std::span<const ReducePart> parts, ReduceOp op, std::uint64_t tag) override {
    const auto number = numberOf(parts);
    std::int64_t bytes = 0;
    for (const ReducePart& part : parts) {
      bytes += static_cast<std::int64_t>(part.send.nbytes());
    }
    if (!number || !isFaster(bytes)) {
      rest().reduceScatter(parts, op, tag);
      return;
    }
    reduceThroughStaging(parts, *number, op);
  }

 private:
  // Messages go the way that was faster for the nearest of these lengths.
  static constexpr std::array<std::int64_t, 4> kMeasuredBytes = {64 << 10, 1 << 20, 8 << 20, 64 << 20};

  bool isFaster(std::int64_t bytes) const {
    std::size_t nearest = 0;
    const auto distance = [&](std::size_t i) {
      return std::abs(std::log2(static_cast<double>(std::max<std::int64_t>(bytes, 1))) -
                      std::log2(static_cast<double>(kMeasuredBytes[i])));
    };
    for (std::size_t i = 1; i < kMeasuredBytes.size(); ++i) {
      nearest = distance(i) < distance(nearest) ? i : nearest;
    }
    return faster_[nearest];
  }

  // One type for all that the kernels know; the same answer on every rank.
  static std::optional<cuda::Number> numberOf(std::span<const ReducePart> parts) {
    const auto differs = [&](const ReducePart& part) { return part.send.dtype() != parts[0].send.dtype(); };
    return parts.empty() || std::any_of(parts.begin(), parts.end(), differs)
               ? std::nullopt
               : cuda::numberOf(parts[0].send.scalar_type());
  }

  // Every rank takes the same numbers of elements of each slice in a turn, so offsets are the same on all of them.
  void reduceThroughStaging(std::span<const ReducePart> parts, cuda::Number number, ReduceOp op) {
    check(!aborted_, [&] { return concat("the reductions of rank ", rank(), " were aborted after an error"); });
    const c10::cuda::CUDAGuard device(device_);
    const auto element = static_cast<std::int64_t>(parts[0].send.element_size());
    const std::int64_t per_word = kWord / element;
    Turn turn;
    for (const ReducePart& part : parts) {
      std::int64_t longest = 0;
      for (const Slice& slice : part.owners) {
        longest = std::max(longest, slice.size());
      }
      for (std::int64_t begin = 0; begin < longest;) {
        const std::int64_t room = (staging_.bytes() - turn.used) / size() / kWord * per_word;  // elements a rank
        if (room < std::min(longest - begin, kLeastElements)) {
          finish(turn, number, op);
          continue;
        }
        const std::int64_t count = std::min(longest - begin, room);
        add(turn, part, begin, count, element);
        begin += count;
      }
    }
    finish(turn, number, op);
  }

  // Elements [begin, begin + count) of every rank's slice of `part`, as far as the slices go.
  void add(Turn& turn, const ReducePart& part, std::int64_t begin, std::int64_t count, std::int64_t element) {
    const char* const send = static_cast<const char*>(part.send.const_data_ptr());
    for (int r = 0; r < size(); ++r) {
      const Slice& slice = part.owners[static_cast<std::size_t>(r)];
      const std::int64_t size_here = std::min(count, slice.size() - begin);
      if (size_here <= 0) {
        continue;
      }
      const char* const from = send + (slice.begin + begin) * element;
      if (r == rank()) {
        char* const to = static_cast<char*>(part.receive.mutable_data_ptr()) + begin * element;
        turn.sums.push_back({turn.used, from, to, size_here});
      } else if (char* const to = staging_.half() + turn.used; onWords(from) && size_here * element % kWord == 0) {
        turn.words.push_back({from, to, size_here * element / kWord});
      } else {
        turn.odd.push_back({from, to, size_here});
      }
      turn.used += roundUp(size_here * element);
    }
  }

  void finish(Turn& turn, cuda::Number number, ReduceOp op) {
    if (turn.used == 0) {
      return;
    }
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    C10_CUDA_CHECK(cuda::movePieces(turn.words.data(), static_cast<int>(turn.words.size()), stream));
    C10_CUDA_CHECK(cuda::castPieces(number, number, turn.odd.data(), static_cast<int>(turn.odd.size()), stream));
    staging_.meet(timeout());
    C10_CUDA_CHECK(cuda::sumOverRanks(number, staging_.halves(), op == ReduceOp::Average, turn.sums.data(),
                                      static_cast<int>(turn.sums.size()), stream));
    staging_.turn();
    turn = Turn();
  }

  // Ranks that go different ways would wait for each other in vain.
  void agreeOn(const std::string& choice) {
    const std::vector<std::string> all = rest().exchangeAny(choice);
    for (std::size_t r = 0; r < all.size(); ++r) {
      check(all[r] == choice, [&] {
        return concat("DEEPCOMPILE_SYMMETRIC_REDUCTIONS is '", all[r], "' on rank ", r, " and '", choice, "' on rank ",
                      rank(), "; set it alike on all ranks");
      });
    }
  }

  // Both ways at each size; what the slowest rank took decides, on all of them alike.
  void measure() {
    const c10::cuda::CUDAGuard device(device_);
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(at::Device(at::kCUDA, device_));
    std::array<std::array<double, 2>, kMeasuredBytes.size()> took{};
    for (std::size_t i = 0; i < kMeasuredBytes.size(); ++i) {
      const std::int64_t own = kMeasuredBytes[i] / 2 / size();
      ReducePart part{at::zeros({own * size()}, options), {}, at::empty({own}, options)};
      for (int r = 0; r < size(); ++r) {
        part.owners.push_back({r * own, (r + 1) * own});
      }
      for (const bool through_staging : {true, false}) {
        const auto once = [&] {
          if (through_staging) {
            reduceThroughStaging({&part, 1}, cuda::Number::BFloat16, ReduceOp::Average);
          } else {
            rest().reduceScatter({&part, 1}, ReduceOp::Average);
          }
        };
        constexpr int kWarm = 2;
        constexpr int kTimed = 5;
        for (int k = 0; k < kWarm; ++k) {
          once();
        }
        DeviceTimer timer;
        timer.start(stream);
        for (int k = 0; k < kTimed; ++k) {
          once();
        }
        took[i][through_staging ? 1 : 0] = timer.stop(stream, timeout(), [&] {
          abort();
          fail("measuring reductions: the ranks did not all take part within ", timeout(), " seconds (rank ", rank(),
               " of ", size(), ")");
        });
      }
    }
    const std::string mine(reinterpret_cast<const char*>(took.data()), sizeof(took));
    for (const std::string& other : rest().exchange(mine)) {
      decltype(took) theirs{};
      std::memcpy(theirs.data(), other.data(), sizeof(theirs));
      for (std::size_t i = 0; i < took.size(); ++i) {
        for (std::size_t way = 0; way < took[i].size(); ++way) {
          took[i][way] = std::max(took[i][way], theirs[i][way]);
        }
      }
    }
    for (std::size_t i = 0; i < took.size(); ++i) {
      faster_[i] = took[i][1] < took[i][0];
    }
  }

  // Of a rank's slice: fewer are not worth a turn that is full otherwise.
  static constexpr std::int64_t kLeastElements = 4096;

  const c10::DeviceIndex device_;
  SymmetricStaging staging_;
  std::atomic<bool> aborted_ = false;  // what has been enqueued through the staging memory ends at its deadline
  std::array<bool, kMeasuredBytes.size()> faster_{};
};

}  // namespace

std::shared_ptr<Communicator> makeSymmetricReductions(const std::string& group_name, std::shared_ptr<Communicator> rest,
                                                      int device, double timeout, std::shared_ptr<Traffic> traffic) {
  return std::make_shared<SymmetricReductions>(group_name, std::move(rest), device, timeout, std::move(traffic));
}

}  // namespace dc
