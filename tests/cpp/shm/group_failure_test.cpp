// What happens when a rank dies, stops, leaves, comes with something else, or does not come at all.
#include <fcntl.h>
#include <sys/resource.h>

#include <atomic>
#include <fstream>

#include <gtest/gtest.h>

#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/group.h"
#include "deepcompile/shm/offers.h"
#include "deepcompile/shm/pipeline.h"

#include "random_collective.h"
#include "shm_ranks.h"

namespace dc::shm::testing {
namespace {

using std::chrono::milliseconds;

GroupOptions options(milliseconds timeout) {
  GroupOptions options;
  options.name = "tested";
  options.timeout = timeout;
  options.tuning = Tuning{};
  return options;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void sum(Group& group, std::int64_t count, DType dtype = DType::Float32, ReduceOp op = ReduceOp::Sum) {
  std::vector<std::byte> data(static_cast<std::size_t>(count * sizeOf(dtype)));
  allReduce(group, data.data(), data.data(), count, dtype, op);
}

// A rank that a signal has stopped for good, but for SIGCONT and SIGKILL.
void waitUntilStopped(pid_t pid) {
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  ASSERT_TRUE(WIFSTOPPED(status));
}

std::size_t openDescriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

TEST(GroupFailure, DifferentSizesTypesOrOperationsAreAnErrorOnEveryRankThatNamesBothSides) {
  const std::vector<std::pair<std::function<void(Group&)>, std::string>> others = {
      {[](Group& g) { sum(g, 200'000); }, "all_reduce(sum, float32, 200000 elements)"},
      {[](Group& g) { sum(g, 8, DType::Float64); }, "all_reduce(sum, float64, 8 elements)"},
      {[](Group& g) { sum(g, 8, DType::Float32, ReduceOp::Max); }, "all_reduce(max, float32, 8 elements)"},
      {[](Group& g) { barrier(g); }, "barrier()"},
  };
  for (const auto& [other, meant] : others) {
    const Errors errors = onThreadGroup(3, options(milliseconds(20'000)), [&](Group& group) {
      if (group.rank() == 1) {
        other(group);
      } else {
        sum(group, 8);
      }
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(contains(error, meant) && contains(error, "rank 1: ")) << error;
      EXPECT_TRUE(contains(error, "all_reduce(sum, float32, 8 elements)")) << error;
    }
  }
}

TEST(GroupFailure, DifferentRootsOrTagsAreAnError) {
  for (const std::string& error : onThreadGroup(2, options(milliseconds(20'000)), [](Group& group) {
         std::int64_t number = 0;
         const auto data = run(&number, 8);
         broadcast(group, {&data, 1}, group.rank());
       })) {
    EXPECT_TRUE(contains(error, "root 0") && contains(error, "root 1")) << error;
  }
  for (const std::string& error : onThreadGroup(2, options(milliseconds(20'000)), [](Group& group) {
         float number = 0;
         allReduce(group, &number, &number, 1, DType::Float32, ReduceOp::Sum,
                   70 + static_cast<std::uint64_t>(group.rank()));
       })) {
    EXPECT_TRUE(contains(error, "tag 70") && contains(error, "tag 71")) << error;
  }
}

TEST(GroupFailure, AnAllToAllWhoseSizesDoNotFitNamesSenderAndReceiver) {
  for (const std::string& error : onThreadGroup(3, options(milliseconds(20'000)), [](Group& group) {
         std::vector<std::byte> data(100);
         RunTable from;
         RunTable to;
         for (int r = 0; r < 3; ++r) {
           from.add(data.data(), group.rank() == 2 && r == 0 ? 24 : 8);
           from.endRank();
           to.add(data.data() + 40, 8);
           to.endRank();
         }
         allToAll(group, from, to);
       })) {
    EXPECT_TRUE(contains(error, "rank 2 sends 24 bytes to rank 0, which expects 8")) << error;
  }
}

TEST(GroupFailure, WhatOneRankFindsWrongWithItsArgumentsReachesItsPeers) {
  for (const std::string& error : onThreadGroup(2, options(milliseconds(20'000)), [](Group& group) {
         std::vector<std::byte> data(100);
         RunTable to;
         for (int r = 0; r < 2; ++r) {
           to.add(data.data() + 50 * r, group.rank() == 0 ? 10 : 8);
           to.endRank();
         }
         const auto from = run(data.data(), 8);
         gather(group, {&from, 1}, to, 0);
       })) {
    EXPECT_TRUE(contains(error, "gather: room for 10 bytes of rank 0, while the root gives 8")) << error;
  }
}

// Rank 1 is still busy with rank 0's tensor when rank 0 has given up on it and may have changed that tensor.
TEST(GroupFailure, ARankThatWasGivenUpDoesNotTakeWhatItReadOfSharedTensors) {
  std::atomic<bool> given_up = false;
  const Errors errors = onThreadGroup(2, options(milliseconds(300)), [&](Group& group) {
    constexpr std::int64_t kBytes = 100'000;
    const Buffer in(kBytes, 0, true, group.heap());
    const Buffer out(2 * kBytes, 0, true, group.heap());
    const auto from = shm::Run{in.data(), kBytes};
    if (group.rank() == 0) {
      RunTable to;
      for (int r = 0; r < 2; ++r) {
        to.add(out.data() + r * kBytes, kBytes);
        to.endRank();
      }
      const std::string error = errorOf([&] { allGather(group, {&from, 1}, to); });
      given_up = true;
      check(contains(error, "waited 0.3 s for rank 1"), error.c_str());
      return;
    }
    Call call(group, {.kind = Kind::AllGather, .count = 2 * kBytes});
    check(static_cast<bool>(exchangeOffers(call, group, {&from, 1})), "no offers");
    while (!given_up) {
      std::this_thread::yield();
    }
    meetAfterSharing(call);
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_TRUE(contains(errors[1], "waited 0.3 s for rank 1")) << errors[1];
}

TEST(GroupFailure, MemoryThatAPeerMayStillWriteIsNotUsedAgain) {
  std::atomic<bool> given_up = false;
  const Errors errors = onThreadGroup(2, options(milliseconds(300)), [&](Group& group) {
    constexpr std::int64_t kCount = 100'003;
    SharedHeap& heap = group.heap();
    std::byte* data = heap.allocate(kCount);
    if (group.rank() == 0) {
      const std::string error = errorOf([&] { allReduce(group, data, data, kCount, DType::UInt8, ReduceOp::Max); });
      heap.free(data);
      std::byte* next = heap.allocate(kCount);
      given_up = true;
      check(contains(error, "waited 0.3 s for rank 1"), error.c_str());
      check(next != data, "the memory is in use again");
      heap.free(next);
      return;
    }
    Call call(group, {Kind::AllReduce, DType::UInt8, ReduceOp::Max, 1, -1, kCount, 0});
    const shm::Run runs[2] = {{data, kCount}, {data, kCount}};
    check(static_cast<bool>(exchangeOffers(call, group, runs)), "no offers");
    while (!given_up) {
      std::this_thread::yield();
    }
    heap.free(data);
  });
  EXPECT_EQ(errors, noErrors(2));
}

TEST(GroupFailure, AFailedGroupRefusesEveryLaterCallWithTheFirstError) {
  onThreadGroup(2, options(milliseconds(20'000)), [](Group& group) {
    EXPECT_THROW(sum(group, 8 + group.rank()), Error);
    for (int i = 0; i < 3; ++i) {
      const std::string error = errorOf([&] { sum(group, 8); });
      EXPECT_TRUE(contains(error, "has failed and cannot be used any more") && contains(error, "9 elements")) << error;
    }
  });
}

TEST(GroupFailure, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const auto started = Clock::now();
  const Errors errors = onProcessGroup(3, options(milliseconds(20'000)), [](Group& group) {
    barrier(group);
    group.setTimeout(milliseconds(700));
    if (group.rank() == 2) {
      // Alive, and busy with something else for longer than the others wait.
      const auto end = Clock::now() + milliseconds(1500);
      while (Clock::now() < end && !group.poisoned()) {
        std::this_thread::yield();
      }
      return;
    }
    sum(group, 1000);
  });
  EXPECT_LT(Clock::now() - started, milliseconds(10'000));
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(contains(errors[static_cast<std::size_t>(r)], "waited 0.7 s for rank 2")) << errors[0];
    EXPECT_TRUE(contains(errors[static_cast<std::size_t>(r)], "all_reduce(sum, float32, 1000 elements)")) << errors[0];
  }
}

TEST(GroupFailure, AStoppedRankIsSaidToBeStoppedAndGetsTheErrorWhenItGoesOn) {
  Processes ranks(2, [](int rank, const std::filesystem::path& directory) {
    const auto group = openGroup(directory, rank, 2, options(milliseconds(500)));
    barrier(*group);
    if (rank == 1) {
      ::raise(SIGSTOP);
    }
    sum(*group, 1000);
  });
  waitUntilStopped(ranks.pid(1));
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(ranks.pid(0)), nullptr, WEXITED | WNOWAIT), 0);
  ::kill(ranks.pid(1), SIGCONT);
  const Errors errors = ranks.errors();
  EXPECT_TRUE(contains(errors[0], "rank 1") && contains(errors[0], "is stopped")) << errors[0];
  EXPECT_TRUE(contains(errors[1], "has failed and cannot be used any more")) << errors[1];
}

TEST(GroupFailure, ARankThatEndsIsNoticedLongBeforeTheDeadline) {
  for (const bool killed : {true, false}) {
    const auto started = Clock::now();
    const Errors errors = onProcessGroup(3, options(milliseconds(60'000)), [&](Group& group) {
      barrier(group);
      if (group.rank() == 1) {
        killed ? static_cast<void>(::raise(SIGKILL)) : ::_exit(3);
      }
      sum(group, 100'000);
    });
    EXPECT_LT(Clock::now() - started, milliseconds(5000));
    EXPECT_TRUE(contains(errors[0], "rank 1") && contains(errors[0], "has ended")) << errors[0];
    EXPECT_TRUE(contains(errors[2], "rank 1") && contains(errors[2], "has ended")) << errors[2];
  }
}

TEST(GroupFailure, ARankThatIsDoneMayLeaveWhileOthersStillRead) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(onProcessGroup(3, options(milliseconds(20'000)),
                             [](Group& group) {
                               std::vector<float> data(300'000, 1);
                               allReduce(group, data.data(), data.data(), 300'000, DType::Float32, ReduceOp::Sum);
                               check(data.front() == 3 && data.back() == 3, "wrong sum");
                             }),
              noErrors(3));
  }
}

TEST(GroupFailure, AChildThatARankForksDoesNotSpeakForIt) {
  EXPECT_EQ(onProcessGroup(2, options(milliseconds(20'000)),
                           [](Group& group) {
                             barrier(group);
                             const pid_t child = ::fork();
                             if (child == 0) {
                               const std::string error = errorOf([&] { barrier(group); });
                               group.poison("a child");
                               group.~Group();  // what a child does that ends by the ordinary way
                               ::_exit(contains(error, "a forked child cannot use it") ? 0 : 1);
                             }
                             int status = -1;
                             ::waitpid(child, &status, 0);
                             check(status == 0, "a child used the group");
                             barrier(group);
                             sum(group, 100'000);
                           }),
            noErrors(2));
}

TEST(GroupFailure, TooLittleMemoryIsAnErrorOnEveryRankThatSaysHowMuchIsNeeded) {
  const Errors errors = Processes(2, [](int rank, const std::filesystem::path& directory) {
                          ::signal(SIGXFSZ, SIG_IGN);
                          (void)SharedHeap::ofProcess();  // address space only, and not what is limited here
                          if (rank == 0) {
                            const rlimit limit = {1 << 20, 1 << 20};
                            ::setrlimit(RLIMIT_FSIZE, &limit);
                          }
                          openGroup(directory, rank, 2, options(milliseconds(5000)));
                        }).errors();
  const auto needed = Layout{2, GroupOptions{}.slot_bytes, 256 << 10}.size();
  for (const std::string& error : errors) {
    EXPECT_TRUE(contains(error, concat("cannot reserve ", needed, " bytes"))) << error;
  }
}

TEST(GroupFailure, ARankThatNeverComesToTheSetUpIsNamed) {
  const auto started = Clock::now();
  const Errors errors = Processes(3, [](int rank, const std::filesystem::path& directory) {
                          if (rank != 2) {
                            openGroup(directory, rank, 3, options(milliseconds(500)));
                          }
                        }).errors();
  EXPECT_LT(Clock::now() - started, milliseconds(5000));
  EXPECT_TRUE(contains(errors[0], "rank 2 did not come")) << errors[0];
  EXPECT_TRUE(contains(errors[1], "rank 2 did not come")) << errors[1];
}

TEST(GroupFailure, RanksThatCannotReachTheSocketAreToldApartWithoutAnError) {
  TemporaryDirectory directory;
  std::vector<std::string> reasons(3);
  const Errors errors = onThreads(3, [&](int rank) {
    // As on another host: what rank 2 reads of rank 0's address names a socket that is not there.
    class Elsewhere : public DirectoryRendezvous {
     public:
      using DirectoryRendezvous::DirectoryRendezvous;
      std::string get(const std::string& key, milliseconds timeout) override {
        std::string value = DirectoryRendezvous::get(key, timeout);
        return key == "address" ? value.insert(5, "x") : value;
      }
    };
    DirectoryRendezvous here(directory.path());
    Elsewhere elsewhere(directory.path());
    Rendezvous& rendezvous = rank == 2 ? static_cast<Rendezvous&>(elsewhere) : here;
    check(Group::open(rendezvous, rank, 3, options(milliseconds(5000)), reasons[static_cast<std::size_t>(rank)]) ==
              nullptr,
          "took shared memory for granted");
  });
  EXPECT_EQ(errors, noErrors(3));
  for (const std::string& reason : reasons) {
    EXPECT_TRUE(contains(reason, "rank 2 does not share the host of rank 0")) << reason;
  }
}

// The rest get the error within the deadline and a second, whatever they were doing: every tenth is killed during
// set-up.
TEST(GroupFailure, FiftyRandomDeathsLeaveAnErrorAndNothingElse) {
  constexpr int kRanks = 4;
  constexpr milliseconds kDeadline(3000);
  const std::size_t descriptors = openDescriptors();
  std::mt19937 random(20261115);
  for (int i = 0; i < 50; ++i) {
    const int victim = static_cast<int>(random() % kRanks);
    const auto delay = std::chrono::microseconds(random() % 20'000);
    Processes ranks(kRanks, [&](int rank, const std::filesystem::path& directory) {
      const auto group = openGroup(directory, rank, kRanks, options(kDeadline));
      std::ofstream(directory / concat("open.", rank));
      for (std::uint64_t seed = 1;; ++seed) {
        RandomCollective(seed, kRanks, 300'000).run(*group);
      }
    });
    if (i % 10 != 0) {
      DirectoryRendezvous(ranks.directory()).get(concat("open.", victim), milliseconds(10'000));
    }
    std::this_thread::sleep_for(delay);
    ::kill(ranks.pid(victim), SIGKILL);
    const auto killed = Clock::now();
    const Errors errors = ranks.errors();
    EXPECT_LT(Clock::now() - killed, kDeadline + milliseconds(1000));
    for (int r = 0; r < kRanks; ++r) {
      const std::string& error = errors[static_cast<std::size_t>(r)];
      EXPECT_EQ(error == "killed", r == victim) << "round " << i << ", rank " << r << ": " << error;
      EXPECT_FALSE(contains(error, "wrong element")) << error;
    }
  }
  EXPECT_EQ(openDescriptors(), descriptors);
}

// Memory without a name goes with the last process that has it, however that one ends: so nothing can be left behind.
TEST(GroupFailure, AGroupMapsNoFileThatHasAName) {
  EXPECT_EQ(onProcessGroup(2, options(milliseconds(20'000)),
                           [](Group& group) {
                             sum(group, 100'000);
                             std::ifstream maps("/proc/self/maps");
                             int shared = 0;
                             for (std::string line; std::getline(maps, line);) {
                               if (contains(line, "rw-s")) {
                                 check(contains(line, "memfd:deepcompile") && contains(line, "(deleted)"),
                                       line.c_str());
                                 ++shared;
                               }
                             }
                             check(shared >= 3, "the group's memory and two heaps");
                           }),
            noErrors(2));
}

TEST(GroupFailure, OpeningAndClosingGroupsLeavesNoDescriptor) {
  EXPECT_EQ(Processes(2,
                      [](int rank, const std::filesystem::path& directory) {
                        openGroup(directory / "0", rank, 2, options(milliseconds(20'000)));  // opens the heap, once
                        const std::size_t before = openDescriptors();
                        for (int i = 1; i < 30; ++i) {
                          openGroup(directory / std::to_string(i), rank, 2, options(milliseconds(20'000)));
                        }
                        check(openDescriptors() == before, "descriptors were left open");
                      })
                .errors(),
            noErrors(2));
}

// 8 ranks on however few cores there are: they must let one another run.
TEST(GroupStress, TwentyThousandRandomCollectivesOfEightRanks) {
  constexpr int kRanks = 8;
  GroupOptions stress = options(milliseconds(60'000));
  stress.slot_bytes = 64 << 10;
  stress.tuning =
      Tuning{.one_step_bytes = 4096, .chunk_bytes = 32 << 10, .streaming_bytes = 100'000, .long_bytes = 150'000};
  EXPECT_EQ(onProcessGroup(kRanks, stress,
                           [](Group& group) {
                             for (std::uint64_t seed = 1; seed <= 20'000; ++seed) {
                               RandomCollective(seed, kRanks, 40'000).run(group);
                             }
                           }),
            noErrors(kRanks));
}

}  // namespace
}  // namespace dc::shm::testing
