#include "deepcompile/shm/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "deepcompile/base/error.h"

namespace dc::shm {
namespace {

constexpr int kMostDescriptors = 200;  // the kernel takes 253 in one message
constexpr int kPeerPidfd = 77;         // SO_PEERPIDFD, newer than our oldest headers

struct Address {
  sockaddr_un value = {};
  socklen_t size = 0;
};

// A name that begins with a zero byte is abstract.
Address abstractAddress(const std::string& name) {
  Address address;
  check(name.size() + 1 < sizeof(address.value.sun_path), "the name of a local socket is too long");
  address.value.sun_family = AF_UNIX;
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Descriptor makeSocket() {
  Descriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) {
    fail("cannot open a local socket: ", std::strerror(errno));
  }
  return fd;
}

Descriptor processDescriptor(pid_t pid) { return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

ucred credentials(int fd) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    fail("cannot tell who is at the other end of a local socket: ", std::strerror(errno));
  }
  return peer;
}

}  // namespace

LocalSocket LocalSocket::listen(const std::string& name, int backlog) {
  Descriptor fd = makeSocket();
  const Address address = abstractAddress(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.size) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    fail("cannot listen on a local socket: ", std::strerror(errno));
  }
  return LocalSocket(std::move(fd));
}

LocalSocket LocalSocket::connect(const std::string& name) {
  Descriptor fd = makeSocket();
  const Address address = abstractAddress(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.size) != 0) {
    fail("no local connection: ", std::strerror(errno));
  }
  return LocalSocket(std::move(fd));
}

void LocalSocket::await(short events, Clock::time_point deadline) const {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry = {fd_.get(), events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30)));
    if (ready > 0) {
      return;
    }
    check(ready < 0 ? errno == EINTR : left > 0, "a rank on this host did not answer in time");
  }
}

LocalSocket LocalSocket::accept(Clock::time_point deadline) const {
  await(POLLIN, deadline);
  Descriptor fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) {
    fail("cannot accept a local connection: ", std::strerror(errno));
  }
  return LocalSocket(std::move(fd));
}

void LocalSocket::send(const std::string& bytes, std::span<const int> descriptors, Clock::time_point deadline) const {
  check(descriptors.size() <= kMostDescriptors, "too many descriptors in one message");
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  await(POLLOUT, deadline);
  if (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size())) {
    fail("cannot send to a rank on this host: ", std::strerror(errno));
  }
}

std::string LocalSocket::receive(std::vector<Descriptor>& descriptors, Clock::time_point deadline) const {
  await(POLLIN, deadline);
  std::string bytes(4096, '\0');
  iovec part = {bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t size = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
  // Descriptors that arrived are owned from here on, also when the message turns out to be bad.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); size >= 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
  check(size > 0, [&] {
    return concat("a rank on this host went away during set-up", size < 0 ? concat(": ", std::strerror(errno)) : "");
  });
  check((message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0,
        "descriptors were lost on the way: this process has reached its limit of open files (ulimit -n)");
  bytes.resize(static_cast<std::size_t>(size));
  return bytes;
}

bool LocalSocket::readable() const {
  pollfd entry = {fd_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

bool LocalSocket::hungUp() const {
  pollfd entry = {fd_.get(), 0, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

bool LocalSocket::peerIsSameUser() const { return credentials(fd_.get()).uid == ::geteuid(); }

Descriptor LocalSocket::peerProcess() const {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (::getsockopt(fd_.get(), SOL_SOCKET, kPeerPidfd, &fd, &size) == 0) {
    return Descriptor(fd);
  }
  const pid_t pid = credentials(fd_.get()).pid;
  return pid > 0 ? processDescriptor(pid) : Descriptor();
}

Descriptor ownProcess() { return processDescriptor(::getpid()); }

}  // namespace dc::shm
