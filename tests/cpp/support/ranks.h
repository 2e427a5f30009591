// Ranks as threads, each with a runtime's parts of its own: what the tests of the executors have in common.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "deepcompile/runtime/agreement.h"
#include "deepcompile/runtime/z1_executor.h"
#include "deepcompile/runtime/z2_executor.h"
#include "deepcompile/runtime/z3_executor.h"

#include "support/thread_communicator.h"

namespace dc::testing {

struct GroupSetup {
  int ranks = 2;
  CpuStreamMode mode = CpuStreamMode::Inline;
  std::int64_t bucket_size = 64;
  Config config = {};
};

// A deadline that a correct run never meets, and that ends a wrong one soon.
inline Config configOfTests() {
  Config config;
  config.timeout = 2;  // ten times as long in the first step
  return config;
}

inline std::string nameOf(CpuStreamMode mode) { return mode == CpuStreamMode::Inline ? "Inline" : "Worker"; }

// What the ranks share.
class World {
 public:
  explicit World(GroupSetup given)
      : setup(given),
        gathers(std::make_shared<MeetingPoint>(given.ranks)),
        reductions(std::make_shared<MeetingPoint>(given.ranks)) {}

  const GroupSetup setup;
  const std::shared_ptr<MeetingPoint> gathers;
  const std::shared_ptr<MeetingPoint> reductions;
};

class Rank {
 public:
  Rank(World& world, int rank)
      : setup(world.setup),
        context(std::make_shared<Context>(setup.config, rank, setup.ranks)),
        registry(std::make_shared<DSParamRegistry>()),
        buckets(std::make_shared<DoubleBufferedReduceBucket>(setup.bucket_size, setup.config.double_buffer)),
        pool(std::make_shared<BufferPool>(c10::GetCPUAllocator())),
        gather_comm(std::make_shared<ThreadCommunicator>(world.gathers, rank, setup.ranks, context->traffic)),
        reduce_comm(std::make_shared<ThreadCommunicator>(world.reductions, rank, setup.ranks, context->traffic)),
        gather_stream(makeCpuStream(setup.mode, "gather")),
        reduce_stream(makeCpuStream(setup.mode, "reduce")),
        copy_stream(makeCpuStream(setup.mode, "copy")) {
    // Less than the waits for them: a collective knows more of what went wrong, so it is to speak first.
    gather_comm->setTimeout(context->timeout() / 2);
    reduce_comm->setTimeout(context->timeout() / 2);
  }

  int rank() const { return context->rank; }

  // ZeRO-1 and 2: this rank owns `own` of the flattened gradient.
  DSParam& addWhole(std::int64_t id, std::vector<std::int64_t> shape, Slice own, at::ScalarType dtype = at::kFloat) {
    const at::Tensor gradient = at::full({own.size()}, -1, dtype);
    registry->registerParam(id, shape, at::zeros(shape, dtype), gradient, false, own.begin, false);
    return registry->getParam(id);
  }

  // ZeRO-3: this rank's shard of `values`, padded with zeros.
  DSParam& addSharded(std::int64_t id, const at::Tensor& values, bool persistent = false, bool frozen = false) {
    const std::int64_t shard = (values.numel() + setup.ranks - 1) / setup.ranks;
    const at::Tensor padded = at::zeros({shard * setup.ranks}, values.options());
    padded.narrow(0, 0, values.numel()).copy_(values.reshape({-1}));
    at::Tensor mine = padded.narrow(0, rank() * shard, shard).clone();
    mine.set_requires_grad(!frozen);
    registry->registerParam(id, values.sizes().vec(), mine,
                            frozen ? at::Tensor() : at::zeros({shard}, values.options()), true, 0, persistent);
    DSParam& param = registry->getParam(id);
    std::vector<Slice> owners;
    for (int r = 0; r < setup.ranks; ++r) {
      owners.push_back({r * shard, (r + 1) * shard});
    }
    param.setOwners(owners);
    return param;
  }

  template <typename Executor>
  std::shared_ptr<Executor> graph(std::int64_t graph_id, std::vector<std::int64_t> ids) {
    std::shared_ptr<Executor> executor;
    const bool pre_divide = setup.config.pre_div_reduce;
    if constexpr (std::is_same_v<Executor, Z3CustomOpExecutor>) {
      executor = std::make_shared<Executor>(graph_id, nullptr, registry, buckets, std::move(ids), reduce_comm,
                                            reduce_stream, copy_stream,
                                            GatherResources{gather_comm, gather_stream, pool}, pre_divide, context);
    } else {
      executor = std::make_shared<Executor>(nullptr, registry, buckets, std::move(ids), reduce_comm, reduce_stream,
                                            copy_stream, pre_divide, context);
    }
    graphs[graph_id] = executor;
    return executor;
  }

  void agree() { agreeOnRegistration(*gather_comm, *registry, graphs); }

  // What arrived in this rank's gradient buffer.
  at::Tensor gradient(std::int64_t id) const { return registry->getParam(id).getGradBuffer(); }

  const GroupSetup setup;
  const std::shared_ptr<Context> context;
  const std::shared_ptr<DSParamRegistry> registry;
  const std::shared_ptr<DoubleBufferedReduceBucket> buckets;
  const std::shared_ptr<BufferPool> pool;
  const std::shared_ptr<ThreadCommunicator> gather_comm;
  const std::shared_ptr<ThreadCommunicator> reduce_comm;
  const std::shared_ptr<Stream> gather_stream;
  const std::shared_ptr<Stream> reduce_stream;
  const std::shared_ptr<Stream> copy_stream;
  std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>> graphs;
};

// What `body` throws, or "" for nothing.
inline std::string errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Runs `body` once per rank, each on a thread of its own. What each threw, by rank; empty for nothing.
inline std::vector<std::string> errorsOfRanks(World& world, const std::function<void(Rank&)>& body) {
  std::vector<std::string> errors(world.setup.ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < world.setup.ranks; ++r) {
    threads.emplace_back([&world, &body, &error = errors[r], r] {
      error = errorOf([&] {
        Rank rank(world, r);
        body(rank);
      });
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

// The same where nothing may be thrown.
inline void runRanks(World& world, const std::function<void(Rank&)>& body) {
  const auto errors = errorsOfRanks(world, body);
  for (std::size_t r = 0; r < errors.size(); ++r) {
    EXPECT_EQ(errors[r], "") << "on rank " << r;
  }
}

inline void runRanks(const GroupSetup& setup, const std::function<void(Rank&)>& body) {
  World world(setup);
  runRanks(world, body);
}

// A gradient that is different for every rank, parameter and number of the backward.
inline at::Tensor gradientOf(int rank, std::int64_t id, std::int64_t numel, int backward = 0) {
  return at::sin(at::arange(numel, at::kFloat) * 0.37 + (1.0 + rank) * 1.3 + static_cast<double>(id) * 7.1 +
                 backward * 3.3);
}

// The plain mean over the ranks of gradientOf, in double precision.
inline at::Tensor meanGradient(int ranks, std::int64_t id, std::int64_t numel, int backward = 0) {
  at::Tensor sum = at::zeros({numel}, at::kDouble);
  for (int r = 0; r < ranks; ++r) {
    sum += gradientOf(r, id, numel, backward).to(at::kDouble);
  }
  return sum / ranks;
}

inline ::testing::AssertionResult close(const at::Tensor& found, const at::Tensor& expected, double tolerance = 1e-6) {
  if (found.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << "shape " << found.sizes() << " instead of " << expected.sizes();
  }
  if (!at::allclose(found.to(at::kDouble), expected.to(at::kDouble), tolerance, tolerance)) {
    return ::testing::AssertionFailure() << "found\n" << found << "\nexpected\n" << expected;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace dc::testing

// The text holds `part`; the whole text is shown where it does not.
#define EXPECT_HAS(text, part)                                                     \
  do {                                                                             \
    const std::string text_found = (text);                                         \
    EXPECT_NE(text_found.find(part), std::string::npos) << "text: " << text_found; \
  } while (false)
