#include "deepcompile/shm/handshake.h"

#include <fcntl.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <new>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/local_socket.h"

namespace dc::shm {
namespace {

using Millis = std::chrono::milliseconds;

// Verdicts of rank 0, told to all through the rendezvous: how the set-up ended, and why.
constexpr char kTogether = 'T';
constexpr char kApart = 'A';
constexpr char kError = 'E';

std::string randomHex() {
  std::array<unsigned char, 16> bytes = {};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail("cannot get random bytes for the name of a socket: ", std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string answerKey(int rank) { return concat("answer/", rank); }

// Sends descriptors in messages that the kernel takes; the other side knows how many are to come.
void sendAll(const LocalSocket& socket, const std::vector<int>& descriptors, Clock::time_point deadline) {
  for (std::size_t begin = 0; begin < descriptors.size(); begin += 100) {
    const std::size_t end = std::min(descriptors.size(), begin + 100);
    socket.send("descriptors", std::span(descriptors).subspan(begin, end - begin), deadline);
  }
}

// Rank 0 owns the memory until everybody has it.
class Host {
 public:
  Host(Rendezvous& rendezvous, const Layout& layout, int heap, Millis timeout)
      : rendezvous_(rendezvous), layout_(layout), heap_(heap), timeout_(timeout) {}

  std::optional<Handshake> run(std::string& reason) {
    const std::string name = concat("deepcompile-", randomHex());
    const std::string secret = randomHex();
    std::optional<LocalSocket> door;
    try {
      segment_ = makeGroupMemory(layout_);
      door.emplace(LocalSocket::listen(name, layout_.ranks + 8));
    } catch (const Error& error) {
      rendezvous_.set("address", concat(kError, error.what()));
      throw;
    }
    rendezvous_.set("address", concat(kTogether, name, " ", secret));
    std::string verdict;
    try {
      verdict = judge(*door, secret);
    } catch (const std::exception& error) {
      rendezvous_.set("verdict", concat(kError, error.what()));
      throw;
    }
    rendezvous_.set("verdict", verdict);
    if (verdict[0] == kApart) {
      reason = verdict.substr(1);
      return std::nullopt;
    }
    return handOut();
  }

 private:
  // Asks every rank whether it got through, and takes the connections of those that did.
  std::string judge(const LocalSocket& door, const std::string& secret) {
    const auto last = Clock::now() + timeout_;
    for (int rank = 1; rank < layout_.ranks; ++rank) {
      std::string answer;
      try {
        const auto left = std::chrono::duration_cast<Millis>(last - Clock::now());
        answer = rendezvous_.get(answerKey(rank), std::max(left, Millis(1)));
      } catch (const std::exception& error) {
        fail("rank ", rank, " did not come to the set-up of shared memory within ", timeout_.count() / 1000.0,
             " s: ", error.what());
      }
      if (answer != "ok") {
        return concat(kApart, "rank ", rank, " does not share the host of rank 0 (", answer, ")");
      }
    }
    const auto deadline = Clock::now() + timeout_;
    connections_.resize(static_cast<std::size_t>(layout_.ranks));
    heaps_.resize(connections_.size());
    for (int missing = layout_.ranks - 1; missing > 0;) {
      LocalSocket visitor = door.accept(deadline);
      std::vector<Descriptor> gifts;
      // Anyone on the host may connect; only a rank of this job knows the secret.
      if (!visitor.peerIsSameUser()) {
        continue;
      }
      const std::string hello = visitor.receive(gifts, deadline);
      const std::size_t rank = hello.starts_with(secret) ? std::stoul(hello.substr(secret.size())) : 0;
      if (rank == 0 || rank >= connections_.size() || connections_[rank] || gifts.size() != 1) {
        continue;
      }
      connections_[rank].emplace(std::move(visitor));
      heaps_[rank] = std::move(gifts[0]);
      --missing;
    }
    return std::string(1, kTogether);
  }

  Handshake handOut() {
    const auto deadline = Clock::now() + timeout_;
    Handshake hands;
    for (std::size_t rank = 0; rank < connections_.size(); ++rank) {
      hands.processes.push_back(rank == 0 ? ownProcess() : connections_[rank]->peerProcess());
    }
    heaps_[0] = Descriptor(::fcntl(heap_, F_DUPFD_CLOEXEC, 0));
    bool all_known = true;
    for (const Descriptor& process : hands.processes) {
      all_known = all_known && process;
    }
    std::vector<int> descriptors = {segment_.descriptor()};
    for (const Descriptor& heap : heaps_) {
      descriptors.push_back(heap.get());
    }
    if (all_known) {
      for (const Descriptor& process : hands.processes) {
        descriptors.push_back(process.get());
      }
    } else {
      hands.processes.clear();
    }
    for (std::size_t rank = 1; rank < connections_.size(); ++rank) {
      connections_[rank]->send(concat(descriptors.size()), {}, deadline);
      sendAll(*connections_[rank], descriptors, deadline);
    }
    hands.group = std::make_shared<Segment>(std::move(segment_));
    hands.heaps = std::move(heaps_);
    return hands;
  }

  Rendezvous& rendezvous_;
  const Layout layout_;
  const int heap_;
  const Millis timeout_;
  Segment segment_;
  std::vector<std::optional<LocalSocket>> connections_;  // by rank
  std::vector<Descriptor> heaps_;
};

void checkHeader(const Segment& segment, const Layout& layout) {
  const auto* header = reinterpret_cast<const Header*>(segment.data());
  check(
      segment.size() == layout.size() && header->magic == kMagic && header->ranks == layout.ranks &&
          header->slot_bytes == layout.slot_bytes && header->mailbox_bytes == layout.mailbox_bytes,
      "rank 0 laid the group's shared memory out differently: all ranks must run the same version of deepcompile with "
      "the same settings");
}

// Rank 0 waits for every rank before it judges, so this takes as long as the slowest. A rank 0 that has ended is
// noticed.
std::string awaitVerdict(Rendezvous& rendezvous, const std::optional<LocalSocket>& host, Millis timeout) {
  constexpr Millis kSlice(250);
  const auto last = Clock::now() + timeout + timeout / 2;
  for (;;) {
    const bool hung_up = host && host->hungUp();
    try {
      return rendezvous.get("verdict", kSlice);
    } catch (const std::exception& error) {
      if (hung_up) {
        fail("rank 0 has ended during the set-up of shared memory");
      }
      if (Clock::now() > last) {
        fail("rank 0 did not say how the set-up of shared memory ended: ", error.what());
      }
    }
  }
}

std::optional<Handshake> visit(Rendezvous& rendezvous, int rank, const Layout& layout, int heap, Millis timeout,
                               std::string& reason) {
  const std::string address = rendezvous.get("address", timeout);
  if (address[0] == kError) {
    throw Error(concat("rank 0: ", address.substr(1)));
  }
  const std::size_t space = address.find(' ');
  const std::string name = address.substr(1, space - 1);
  const std::string secret = address.substr(space + 1);
  std::optional<LocalSocket> host;
  std::string answer = "ok";
  try {
    host.emplace(LocalSocket::connect(name));
    host->send(concat(secret, rank), std::span(&heap, 1), Clock::now() + timeout);
  } catch (const Error& error) {
    answer = error.what();
  }
  rendezvous.set(answerKey(rank), answer);
  const std::string verdict = awaitVerdict(rendezvous, host, timeout);
  if (verdict[0] == kApart) {
    reason = verdict.substr(1);
    return std::nullopt;
  }
  if (verdict[0] == kError) {
    throw Error(concat("rank 0: ", verdict.substr(1)));
  }
  const auto deadline = Clock::now() + timeout;
  std::vector<Descriptor> descriptors;
  const std::size_t expected = std::stoul(host->receive(descriptors, deadline));
  while (descriptors.size() < expected) {
    host->receive(descriptors, deadline);
  }
  const auto ranks = static_cast<std::size_t>(layout.ranks);
  check(expected == 1 + ranks || expected == 1 + 2 * ranks, "rank 0 handed over an unexpected number of descriptors");
  Handshake hands;
  hands.group = std::make_shared<Segment>(Segment::map(std::move(descriptors[0])));
  checkHeader(*hands.group, layout);
  for (std::size_t i = 1; i <= ranks; ++i) {
    hands.heaps.push_back(std::move(descriptors[i]));
  }
  for (std::size_t i = 1 + ranks; i < expected; ++i) {
    hands.processes.push_back(std::move(descriptors[i]));
  }
  return hands;
}

}  // namespace

Segment makeGroupMemory(const Layout& layout) {
  Segment segment = Segment::reserve(concat("a group of ", layout.ranks, " ranks"), layout.size());
  auto* header = new (segment.data()) Header{};
  header->magic = kMagic;
  header->ranks = layout.ranks;
  header->slot_bytes = layout.slot_bytes;
  header->mailbox_bytes = layout.mailbox_bytes;
  return segment;  // the rest is zero, which is what it starts as
}

std::optional<Handshake> shakeHands(Rendezvous& rendezvous, int rank, const Layout& layout, int heap, Millis timeout,
                                    std::string& reason) {
  return rank == 0 ? Host(rendezvous, layout, heap, timeout).run(reason)
                   : visit(rendezvous, rank, layout, heap, timeout, reason);
}

}  // namespace dc::shm
