// Where the ranks of a group meet before they share memory: any key-value store that all of them reach.
#pragma once

#include <chrono>
#include <string>

namespace dc::shm {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until some rank has set the key; throws when none does in time.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace dc::shm
