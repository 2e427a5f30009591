// Ranks of a shared-memory group for tests: threads of this process, or forked processes that meet through a directory.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/group.h"

namespace dc::shm::testing {

// Errors by rank; empty where there was none.
using Errors = std::vector<std::string>;

inline std::string errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return std::string("error: ") + error.what();
  }
  return "";
}

inline Errors onThreads(int ranks, const std::function<void(int)>& body) {
  Errors errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { errors[static_cast<std::size_t>(rank)] = errorOf([&] { body(rank); }); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

inline Errors onThreadGroup(int ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
  const auto groups = Group::ofThreads(ranks, options);
  return onThreads(ranks, [&](int rank) { body(*groups[static_cast<std::size_t>(rank)]); });
}

// A key is a file: written aside and renamed, so that a reader sees all of it or none.
class DirectoryRendezvous : public Rendezvous {
 public:
  explicit DirectoryRendezvous(std::filesystem::path directory) : directory_(std::move(directory)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto aside = directory_ / concat(flat(key), ".", ::getpid(), ".", std::this_thread::get_id());
    std::ofstream(aside) << value;
    std::filesystem::rename(aside, directory_ / flat(key));
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (;;) {
      std::ifstream file(directory_ / flat(key));
      if (file) {
        return {std::istreambuf_iterator<char>(file), {}};
      }
      check(Clock::now() < deadline, [&] { return concat("nobody has set ", key); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  static std::string flat(std::string key) {
    for (char& c : key) {
      c = c == '/' ? '_' : c;
    }
    return key;
  }
  std::filesystem::path directory_;
};

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dc_shm_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Forked ranks: body(rank, directory). What a rank throws comes back as its error; a rank that is killed leaves none.
class Processes {
 public:
  Processes(int ranks, const std::function<void(int, const std::filesystem::path&)>& body) {
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        const std::string error = errorOf([&] { body(rank, directory_.path()); });
        std::ofstream(directory_.path() / concat("error.", rank)) << error;
        ::_exit(0);
      }
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (const pid_t pid : pids_) {
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    }
  }
  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  const std::filesystem::path& directory() const { return directory_.path(); }

  // Waits for all.
  Errors errors() {
    Errors all;
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      ::waitpid(pids_[rank], nullptr, 0);
      pids_[rank] = -1;
      std::ifstream file(directory_.path() / concat("error.", rank));
      all.emplace_back(file ? std::string(std::istreambuf_iterator<char>(file), {}) : std::string("killed"));
    }
    return all;
  }

 private:
  TemporaryDirectory directory_;
  std::vector<pid_t> pids_;
};

inline std::unique_ptr<Group> openGroup(const std::filesystem::path& directory, int rank, int ranks,
                                        const GroupOptions& options = {}) {
  std::filesystem::create_directories(directory);
  DirectoryRendezvous rendezvous(directory);
  std::string reason;
  auto group = Group::open(rendezvous, rank, ranks, options, reason);
  check(group != nullptr, [&] { return concat("not on one host: ", reason); });
  return group;
}

inline Errors onProcessGroup(int ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
  return Processes(ranks,
                   [&](int rank, const std::filesystem::path& directory) {
                     body(*openGroup(directory, rank, ranks, options));
                   })
      .errors();
}

inline Errors noErrors(int ranks) { return Errors(static_cast<std::size_t>(ranks)); }

}  // namespace dc::shm::testing
