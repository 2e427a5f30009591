// Ranks that die, or may not share memory, while a group is set up; and what a process keeps of its peers.
#include "deepcompile/shm/handshake.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstddef>

#include <gtest/gtest.h>

#include "deepcompile/shm/collectives.h"

#include "shm_ranks.h"

namespace dc::shm::testing {
namespace {

using std::chrono::milliseconds;

GroupOptions options(milliseconds timeout) {
  GroupOptions options;
  options.timeout = timeout;
  options.tuning = Tuning{};
  return options;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Ends the process when this rank answers: before its answer can be read, or right after it.
class LastAnswer : public DirectoryRendezvous {
 public:
  LastAnswer(const std::filesystem::path& directory, bool answers)
      : DirectoryRendezvous(directory), answers_(answers) {}
  void set(const std::string& key, const std::string& value) override {
    if (answers_) {
      DirectoryRendezvous::set(key, value);
    }
    ::_exit(0);
  }

 private:
  bool answers_;
};

TEST(Handshake, ARankThatEndsInTheSetUpIsNamedAtOnce) {
  for (const bool answers : {false, true}) {
    const auto started = Clock::now();
    const Errors errors = Processes(4, [&](int rank, const std::filesystem::path& directory) {
                            if (rank == 2) {
                              LastAnswer rendezvous(directory, answers);
                              std::string reason;
                              Group::open(rendezvous, rank, 4, options(milliseconds(30'000)), reason);
                            } else {
                              openGroup(directory, rank, 4, options(milliseconds(30'000)));
                            }
                          }).errors();
    EXPECT_LT(Clock::now() - started, milliseconds(10'000));
    for (const int rank : {0, 1, 3}) {
      const std::string& error = errors[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(contains(error, "rank 2 has ended during the set-up")) << answers << ": " << error;
    }
  }
}

TEST(Handshake, ThatRankZeroEndsInTheSetUpIsNoticedAtOnce) {
  // After its address, before its verdict.
  class LastVerdict : public DirectoryRendezvous {
   public:
    using DirectoryRendezvous::DirectoryRendezvous;
    void set(const std::string& key, const std::string& value) override {
      if (key == "verdict") {
        ::_exit(0);
      }
      DirectoryRendezvous::set(key, value);
    }
  };
  const auto started = Clock::now();
  const Errors errors = Processes(3, [&](int rank, const std::filesystem::path& directory) {
                          LastVerdict rendezvous(directory);
                          std::string reason;
                          Group::open(rendezvous, rank, 3, options(milliseconds(30'000)), reason);
                        }).errors();
  EXPECT_LT(Clock::now() - started, milliseconds(10'000));
  for (const int rank : {1, 2}) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(contains(error, "rank 0 has ended during the set-up")) << error;
  }
}

std::int64_t addressSpaceInUse() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

void limitAddressSpace() {
  const auto most = static_cast<rlim_t>(addressSpaceInUse() + (std::int64_t{256} << 20));
  const rlimit limit = {most, most};
  check(::setrlimit(RLIMIT_AS, &limit) == 0, "cannot limit the address space");
}

// As a sandbox does.
void forbidMemoryFiles() {
  const std::array<sock_filter, 4> program = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {program.size(), const_cast<sock_filter*>(program.data())};
  check(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0,
        "cannot filter system calls");
}

TEST(Handshake, RanksThatMayNotShareMemoryGetNoGroupAndTheReasonOnAllOfThem) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space";
#endif
  struct Case {
    void (*refused)();
    std::string why;
  };
  const std::vector<Case> cases = {{&limitAddressSpace, "ulimit -v"}, {&forbidMemoryFiles, "Operation not permitted"}};
  for (const auto& [refused, why] : cases) {
    for (const int which : {0, 2}) {
      const auto started = Clock::now();
      const Errors errors =
          Processes(3, [&](int rank, const std::filesystem::path& directory) {
            if (rank == which) {
              refused();
            }
            DirectoryRendezvous rendezvous(directory);
            std::string reason;
            const auto group = Group::open(rendezvous, rank, 3, options(milliseconds(30'000)), reason);
            check(group == nullptr, "shared memory that the system refuses");
            check(contains(reason, concat("rank ", which, " cannot share memory")) && contains(reason, why),
                  [&] { return reason; });
          }).errors();
      EXPECT_EQ(errors, noErrors(3));
      EXPECT_LT(Clock::now() - started, milliseconds(10'000));
    }
  }
}

std::int64_t heapsMapped() {
  std::ifstream maps("/proc/self/maps");
  std::int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += contains(line, "deepcompile tensors") ? 1 : 0;
  }
  return count;
}

std::size_t openDescriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

TEST(Handshake, AProcessMapsTheHeapOfAPeerOnceForAllGroups) {
  constexpr int kRanks = 3;
  EXPECT_EQ(Processes(kRanks,
                      [](int rank, const std::filesystem::path& directory) {
                        std::vector<std::unique_ptr<Group>> groups;
                        groups.push_back(openGroup(directory / "0", rank, kRanks, options(milliseconds(20'000))));
                        const std::size_t descriptors = openDescriptors();
                        for (int i = 1; i < 6; ++i) {
                          groups.push_back(
                              openGroup(directory / std::to_string(i), rank, kRanks, options(milliseconds(20'000))));
                        }
                        check(heapsMapped() == kRanks, [&] { return concat(heapsMapped(), " heaps mapped"); });
                        check(openDescriptors() == descriptors, "groups hold descriptors of their own");
                        // The mapping serves whichever group is left.
                        barrier(*groups.back());
                        groups.erase(groups.begin(), groups.end() - 1);
                        constexpr std::int64_t kCount = 100'000;
                        auto* data = reinterpret_cast<float*>(groups[0]->heap().allocate(kCount * 4));
                        std::fill(data, data + kCount, static_cast<float>(rank + 1));
                        allReduce(*groups[0], data, data, kCount, DType::Float32, ReduceOp::Sum);
                        check(data[0] == 6 && data[kCount - 1] == 6, "a wrong sum");
                        barrier(*groups[0]);
                        groups.clear();
                        check(heapsMapped() == 1, "heaps of peers stay mapped");
                      })
                .errors(),
            noErrors(kRanks));
}

}  // namespace
}  // namespace dc::shm::testing
