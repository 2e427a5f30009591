// Rank 0 is the host, the others visit it:
//   1. The host tells the address of a local socket through the rendezvous.
//   2. Visitors connect, give their heap, and tell through the rendezvous how that went.
//   3. The host tells the verdict through the rendezvous: from here on all are connected, or nobody goes on.
//   4. The host hands out the descriptors of all; every visitor says how it took them.
//   5. The host tells how all have taken them. Nobody uses the memory before.
// Whoever ends while connected closes its connection, which the others notice at once.
#include "deepcompile/shm/handshake.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <functional>
#include <new>
#include <sstream>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/local_socket.h"
#include "deepcompile/shm/random_hex.h"
#include "deepcompile/shm/set_up_outcome.h"

namespace dc::shm {
namespace {

using Millis = std::chrono::milliseconds;

constexpr Millis kSlice(250);   // between looks at who is still there
constexpr Millis kHello(5000);  // of a visitor, after it has connected

std::string answerKey(int rank) { return concat("answer/", rank); }

class Host {
 public:
  Host(Rendezvous& rendezvous, const Layout& layout, Millis timeout)
      : rendezvous_(rendezvous),
        layout_(layout),
        timeout_(timeout),
        visitors_(static_cast<std::size_t>(layout.ranks)) {}

  std::optional<Handshake> run(std::string& reason) {
    const std::string name = concat("deepcompile-", randomHex());
    secret_ = randomHex();
    Outcome outcome = attempt(0, [&] {
      heap_ = SharedHeap::ofProcess();
      segment_ = makeGroupMemory(layout_);
      door_.emplace(LocalSocket::listen(name, layout_.ranks + 8));
    });
    rendezvous_.set("address", outcome.good() ? concat(outcome.kind, name, " ", secret_) : outcome.text());
    if (!outcome.accept(reason)) {
      return std::nullopt;
    }
    try {
      outcome = judge();
    } catch (const std::exception& error) {
      outcome = {Outcome::kError, error.what()};
    }
    rendezvous_.set("verdict", outcome.text());
    if (!outcome.accept(reason)) {
      return std::nullopt;
    }
    Handshake hands = handOut(outcome);
    for (const Visitor& visitor : visitors_) {
      if (visitor.connection) {
        // One that has ended since is noticed by whoever waits for it.
        (void)attempt(0, [&] { visitor.connection->send(outcome.text(), {}, Clock::now() + timeout_); });
      }
    }
    return outcome.accept(reason) ? std::optional(std::move(hands)) : std::nullopt;
  }

 private:
  struct Visitor {
    std::optional<LocalSocket> connection;
    std::string heap_id;
    Descriptor heap;
    Descriptor end;  // of its process; empty where the system does not tell
  };

  // Asks every rank whether it got through.
  Outcome judge() {
    const auto last = Clock::now() + timeout_;
    for (int rank = 1; rank < layout_.ranks; ++rank) {
      if (const Outcome outcome = awaitAnswer(rank, last); !outcome.good()) {
        return outcome;
      }
    }
    for (int rank = 1; rank < layout_.ranks; ++rank) {
      while (!visitorOf(rank).connection) {
        takeVisitor(last + timeout_);
      }
    }
    return {};
  }

  Outcome awaitAnswer(int rank, Clock::time_point last) {
    for (;;) {
      while (door_->readable()) {
        takeVisitor(last);
      }
      // Before the look at its answer: a rank may have answered and gone.
      int gone = 0;
      for (int other = 1; other < layout_.ranks && gone == 0; ++other) {
        gone = visitorOf(other).connection && visitorOf(other).connection->hungUp() ? other : 0;
      }
      const int asked = gone != 0 ? gone : rank;
      try {
        Outcome outcome = Outcome::read(rendezvous_.get(answerKey(asked), kSlice));
        return gone != 0 && outcome.good() ? ended(gone) : outcome;
      } catch (const std::exception& error) {
        if (gone != 0) {
          return ended(gone);
        }
        if (Clock::now() > last) {
          return {Outcome::kError, concat("rank ", rank, " did not come to the set-up of shared memory within ",
                                          static_cast<double>(timeout_.count()) / 1000, " s: ", error.what())};
        }
      }
    }
  }

  // Anyone on the host may connect and say what he likes; only a rank of this job knows the secret.
  void takeVisitor(Clock::time_point deadline) {
    Visitor visitor;
    visitor.connection.emplace(door_->accept(deadline));
    if (!visitor.connection->peerIsSameUser()) {
      return;
    }
    std::vector<Descriptor> gifts;
    std::istringstream hello;
    try {
      hello.str(visitor.connection->receive(gifts, std::min(deadline, Clock::now() + kHello)));
    } catch (const Error&) {
      return;
    }
    std::string secret;
    int rank = 0;
    hello >> secret >> rank >> visitor.heap_id;
    if (!hello || secret != secret_ || rank < 1 || rank >= layout_.ranks || visitorOf(rank).connection ||
        gifts.size() != 1) {
      return;
    }
    visitor.heap = std::move(gifts[0]);
    visitor.end = visitor.connection->peerProcess();
    visitorOf(rank) = std::move(visitor);
  }

  Visitor& visitorOf(int rank) { return visitors_[static_cast<std::size_t>(rank)]; }

  // What comes of a message to or from a visitor.
  Outcome exchange(int rank, const std::function<Outcome(const LocalSocket&)>& step) {
    const LocalSocket& visitor = *visitorOf(rank).connection;
    try {
      return step(visitor);
    } catch (const std::exception& error) {
      return visitor.hungUp() ? ended(rank) : Outcome{Outcome::kError, concat("rank ", rank, ": ", error.what())};
    }
  }

  // Adds to `outcome` how everybody has taken it.
  Handshake handOut(Outcome& outcome) {
    const auto deadline = Clock::now() + timeout_;
    Visitor& own = visitorOf(0);
    own.heap_id = heap_->id();
    own.heap = Descriptor(::fcntl(heap_->descriptor(), F_DUPFD_CLOEXEC, 0));
    own.end = ownProcess();
    const bool ends_known =
        std::all_of(visitors_.begin(), visitors_.end(), [](const Visitor& v) { return bool(v.end); });
    for (int rank = 1; rank < layout_.ranks; ++rank) {
      outcome.add(exchange(rank, [&](const LocalSocket& visitor) {
        handTo(visitor, ends_known, deadline);
        return Outcome();
      }));
    }
    Handshake hands;
    hands.heap = heap_;
    outcome.add(attempt(0, [&] {
      for (Visitor& visitor : visitors_) {
        hands.peers.push_back(visitor.connection ? sharePeer(visitor.heap_id, std::move(visitor.heap),
                                                             ends_known ? std::move(visitor.end) : Descriptor())
                                                 : PeerProcess());
      }
    }));
    for (int rank = 1; rank < layout_.ranks; ++rank) {
      outcome.add(exchange(rank, [&](const LocalSocket& visitor) {
        std::vector<Descriptor> none;
        return Outcome::read(visitor.receive(none, deadline));
      }));
    }
    segment_.closeDescriptor();
    hands.group = std::make_shared<Segment>(std::move(segment_));
    return hands;
  }

  // The group's memory; then for each rank its heap's name and descriptor, and that of its process where all are known.
  void handTo(const LocalSocket& connection, bool ends_known, Clock::time_point deadline) const {
    const int memory = segment_.descriptor();
    connection.send("memory", std::span(&memory, 1), deadline);
    for (const Visitor& visitor : visitors_) {
      const std::array<int, 2> descriptors = {visitor.heap.get(), visitor.end.get()};
      connection.send(visitor.heap_id, std::span(descriptors).first(ends_known ? 2 : 1), deadline);
    }
  }

  Rendezvous& rendezvous_;
  const Layout layout_;
  const Millis timeout_;
  std::string secret_;
  std::shared_ptr<SharedHeap> heap_;
  Segment segment_;
  std::optional<LocalSocket> door_;
  std::vector<Visitor> visitors_;  // by rank; nobody at 0
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
Outcome awaitVerdict(Rendezvous& rendezvous, const std::optional<LocalSocket>& host, Millis timeout) {
  const auto last = Clock::now() + timeout + timeout / 2;
  for (;;) {
    const bool hung_up = host && host->hungUp();
    try {
      return Outcome::read(rendezvous.get("verdict", kSlice));
    } catch (const std::exception& error) {
      if (hung_up) {
        return ended(0);
      }
      if (Clock::now() > last) {
        return {Outcome::kError, concat("rank 0 did not say how the set-up of shared memory ended: ", error.what())};
      }
    }
  }
}

Handshake takeFrom(const LocalSocket& host, int rank, const Layout& layout, Clock::time_point deadline) {
  Handshake hands;
  std::vector<Descriptor> descriptors;
  host.receive(descriptors, deadline);
  check(descriptors.size() == 1, "rank 0 did not hand over the group's memory");
  hands.group = std::make_shared<Segment>(Segment::map(std::move(descriptors[0])));
  checkHeader(*hands.group, layout);
  for (int r = 0; r < layout.ranks; ++r) {
    descriptors.clear();
    const std::string heap_id = host.receive(descriptors, deadline);
    check(descriptors.size() == 1 || descriptors.size() == 2, "rank 0 handed over an unexpected number of descriptors");
    hands.peers.push_back(r == rank ? PeerProcess()
                                    : sharePeer(heap_id, std::move(descriptors[0]),
                                                descriptors.size() == 2 ? std::move(descriptors[1]) : Descriptor()));
  }
  return hands;
}

std::optional<Handshake> visit(Rendezvous& rendezvous, int rank, const Layout& layout, Millis timeout,
                               std::string& reason) {
  const std::string address = rendezvous.get("address", timeout);
  if (!Outcome::read(address).accept(reason)) {
    return std::nullopt;
  }
  const std::size_t space = address.find(' ');
  const std::string name = address.substr(1, space - 1);
  const std::string secret = address.substr(space + 1);
  std::shared_ptr<SharedHeap> heap;
  std::optional<LocalSocket> host;
  Outcome outcome = attempt(rank, [&] { heap = SharedHeap::ofProcess(); });
  if (outcome.good()) {
    try {
      host.emplace(LocalSocket::connect(name));
      const int descriptor = heap->descriptor();
      host->send(concat(secret, " ", rank, " ", heap->id()), std::span(&descriptor, 1), Clock::now() + timeout);
    } catch (const Error& error) {
      outcome = {Outcome::kNoMemory, concat("rank ", rank, " does not share the host of rank 0 (", error.what(), ")")};
    }
  }
  rendezvous.set(answerKey(rank), outcome.text());
  if (!awaitVerdict(rendezvous, host, timeout).accept(reason)) {
    return std::nullopt;
  }
  Handshake hands;
  const auto deadline = Clock::now() + timeout;
  outcome = attempt(rank, [&] { hands = takeFrom(*host, rank, layout, deadline); });
  hands.heap = std::move(heap);
  try {
    host->send(outcome.text(), {}, deadline);
    // Rank 0 waits for the slowest of all.
    std::vector<Descriptor> rest;
    std::string answer = host->receive(rest, deadline + timeout);
    while (!rest.empty()) {  // what this rank did not come to take
      rest.clear();
      answer = host->receive(rest, deadline + timeout);
    }
    outcome = Outcome::read(answer);
  } catch (const std::exception& error) {
    outcome.add(host->hungUp() ? ended(0) : Outcome{Outcome::kError, concat("rank ", rank, ": ", error.what())});
  }
  return outcome.accept(reason) ? std::optional(std::move(hands)) : std::nullopt;
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

std::optional<Handshake> shakeHands(Rendezvous& rendezvous, int rank, const Layout& layout, Millis timeout,
                                    std::string& reason) {
  return rank == 0 ? Host(rendezvous, layout, timeout).run(reason) : visit(rendezvous, rank, layout, timeout, reason);
}

}  // namespace dc::shm
