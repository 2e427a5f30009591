// Unix sockets in the abstract namespace, which hand descriptors over. They have no file, and reach only processes of
// the same host and network namespace: that a connection succeeds is the proof that two ranks share a host.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "deepcompile/shm/descriptor.h"

namespace dc::shm {

using Clock = std::chrono::steady_clock;

class LocalSocket {
 public:
  // Accepts up to `backlog` connections that nobody has taken yet.
  static LocalSocket listen(const std::string& name, int backlog);
  // Throws where nobody listens under that name on this host.
  static LocalSocket connect(const std::string& name);
  LocalSocket accept(Clock::time_point deadline) const;

  // One message with descriptors. Messages keep their bounds.
  void send(const std::string& bytes, std::span<const int> descriptors, Clock::time_point deadline) const;
  std::string receive(std::vector<Descriptor>& descriptors, Clock::time_point deadline) const;

  // Whether somebody has connected, or a message has come.
  bool readable() const;
  // True when the other side has closed the connection, or ended.
  bool hungUp() const;
  bool peerIsSameUser() const;
  // A descriptor that becomes readable when the peer's process ends; empty where the system has none.
  Descriptor peerProcess() const;

 private:
  explicit LocalSocket(Descriptor fd) : fd_(std::move(fd)) {}
  void await(short events, Clock::time_point deadline) const;

  Descriptor fd_;
};

// The same for this process itself.
Descriptor ownProcess();

}  // namespace dc::shm
