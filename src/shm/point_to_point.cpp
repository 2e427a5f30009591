#include "deepcompile/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "deepcompile/base/error.h"
#include "deepcompile/shm/reduce_kernels.h"

namespace dc::shm {
namespace {

// A ring of bytes from one rank to another. `written` has one writer, the sender; `read` the receiver. Both only grow.
struct Mailbox {
  alignas(kLine) std::atomic<std::uint64_t> written;
  alignas(kLine) std::atomic<std::uint64_t> read;
  alignas(kLine) std::byte ring[1];  // up to the end of the mailbox
};

constexpr std::int64_t kMailboxHead = 2 * kLine;

// Precedes the bytes of a message in the ring. A multiple of its own size, so that it never wraps around.
struct alignas(32) Envelope {
  std::uint64_t magic;
  std::uint64_t tag;
  std::int64_t bytes;
};
constexpr std::uint64_t kEnvelope = 0x64635f6d65737361;

// How far a ring has room or holds bytes, and the copying in and out of it.
class Ring {
 public:
  Ring(std::byte* mailbox, std::int64_t mailbox_bytes)
      : box_(reinterpret_cast<Mailbox*>(mailbox)),
        data_(mailbox + kMailboxHead),
        size_((mailbox_bytes - kMailboxHead) / 64 * 64) {}

  std::int64_t filled() const {
    return static_cast<std::int64_t>(box_->written.load(std::memory_order_acquire) -
                                     box_->read.load(std::memory_order_acquire));
  }
  std::int64_t room() const { return size_ - filled(); }

  // The sender's side; not more than there is room for. Messages are padded to whole envelopes.
  void write(const std::byte* from, std::int64_t bytes) {
    move(box_->written, bytes, [&](std::byte* at, std::int64_t size) {
      std::memcpy(at, from, static_cast<std::size_t>(size));
      from += size;
    });
  }
  // The receiver's side; not more than is filled.
  void readInto(std::byte* to, std::int64_t bytes) {
    move(box_->read, bytes, [&](std::byte* at, std::int64_t size) {
      std::memcpy(to, at, static_cast<std::size_t>(size));
      to += size;
    });
  }

 private:
  template <typename Piece>
  void move(std::atomic<std::uint64_t>& position, std::int64_t bytes, Piece&& piece) {
    const std::uint64_t begin = position.load(std::memory_order_relaxed);
    const auto offset = static_cast<std::int64_t>(begin % static_cast<std::uint64_t>(size_));
    const std::int64_t first = std::min(bytes, size_ - offset);
    piece(data_ + offset, first);
    if (bytes > first) {
      piece(data_, bytes - first);
    }
    // Seen by the other side only with the bytes; it polls, so nobody needs waking.
    position.store(begin + static_cast<std::uint64_t>(bytes), std::memory_order_release);
  }

  Mailbox* box_;
  std::byte* data_;
  std::int64_t size_;
};

std::int64_t padded(std::int64_t bytes) { return (bytes + 31) / 32 * 32; }

// A message that came before anyone asked for it.
struct Early {
  std::uint64_t tag;
  std::vector<std::byte> bytes;
};

}  // namespace

struct Messenger::Request {
  Run data;
  int peer = 0;  // kAnySource: not known yet
  std::uint64_t tag = 0;
  Messenger::Done done;
  Clock::time_point asked = Clock::now();
};

// All that is under way. Used by the messenger's thread, except for the lists of new requests.
class Messenger::Mover {
 public:
  Mover(Group& group, const std::atomic<std::int64_t>& timeout)
      : group_(group), timeout_(timeout), peers_(static_cast<std::size_t>(group.size())) {
    for (int r = 0; r < group.size(); ++r) {
      Peer& peer = peers_[static_cast<std::size_t>(r)];
      peer.out.emplace(group.mailbox(group.rank(), r), group.layout().mailbox_bytes);
      peer.in.emplace(group.mailbox(r, group.rank()), group.layout().mailbox_bytes);
    }
  }

  std::deque<Request> new_sends;     // under the messenger's mutex
  std::deque<Request> new_receives;  // the same

  void take() {
    for (Request& request : new_sends) {
      peers_[static_cast<std::size_t>(request.peer)].sends.push_back(std::move(request));
    }
    new_sends.clear();
    for (Request& request : new_receives) {
      receives_.push_back(std::move(request));
    }
    new_receives.clear();
  }

  bool idle() const {
    return receives_.empty() &&
           std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.sends.empty() && !p.current; });
  }

  // Moves what can be moved without waiting. True when anything was.
  bool progress() {
    bool moved = false;
    for (Peer& peer : peers_) {
      moved = pushOut(peer) || moved;
      moved = takeIn(peer) || moved;
    }
    return matchEarly() || moved;
  }

  // Why waiting has become pointless: a peer that something waits for is gone, the group has failed, or a request is
  // over its time. The caller moves once more before it believes it: a peer may have sent its last and gone.
  std::optional<std::string> hopeless() const {
    for (int r = 0; r < group_.size(); ++r) {
      const Peer& peer = peers_[static_cast<std::size_t>(r)];
      const bool sending = !peer.sends.empty();
      const bool receiving = peer.arrivesFor() != nullptr || std::any_of(receives_.begin(), receives_.end(),
                                                                         [&](const Request& q) { return q.peer == r; });
      if ((sending || receiving) && r != group_.rank() && group_.gone(r)) {
        return concat("rank ", group_.rank(), ", ", sending ? "send to " : "receive from ", group_.describe(r),
                      " in group '", group_.name(), "': it will not come");
      }
    }
    const auto limit = Clock::now() - timeout();
    for (const Request& request : receives_) {
      if (request.asked < limit) {
        return late("receive", request);
      }
    }
    for (const Peer& peer : peers_) {
      if (const Request* request = peer.arrivesFor(); request != nullptr && request->asked < limit) {
        return late("receive", *request);
      }
      if (!peer.sends.empty() && peer.sends.front().asked < limit) {
        return late("send", peer.sends.front());
      }
    }
    return std::nullopt;
  }

  // Ends everything with an error.
  void failAll(const std::exception_ptr& error) {
    take();
    for (Peer& peer : peers_) {
      for (Request& request : peer.sends) {
        request.done(error, request.peer);
      }
      peer.sends.clear();
      if (const Request* request = peer.arrivesFor()) {
        request->done(error, request->peer);
      }
      peer.current.reset();
    }
    for (Request& request : receives_) {
      request.done(error, request.peer);
    }
    receives_.clear();
  }

 private:
  // A message that is arriving: into the memory of the request that asked for it, or aside.
  struct Arriving {
    Envelope envelope;
    std::int64_t done = 0;
    std::optional<Request> request;
    Early early;
  };
  struct Peer {
    std::optional<Ring> out;
    std::optional<Ring> in;
    std::deque<Request> sends;  // the first may be on its way
    std::int64_t sent = -1;     // bytes of the first; -1: not even its envelope
    std::optional<Arriving> current;
    std::deque<Early> early;

    // The request whose message is on its way, or none.
    const Request* arrivesFor() const { return current && current->request ? &*current->request : nullptr; }
    // Whether a message with that tag has come and was not asked for: later ones must not overtake it.
    bool hasEarly(std::uint64_t tag) const {
      return std::any_of(early.begin(), early.end(), [&](const Early& message) { return message.tag == tag; });
    }
  };

  std::string late(std::string_view what, const Request& request) const {
    return concat("rank ", group_.rank(), ", ", what, " of ", request.data.bytes, " bytes, tag ", request.tag,
                  " in group '", group_.name(), "': waited ", static_cast<double>(timeout().count()) / 1000, " s for ",
                  request.peer == kAnySource ? std::string("any rank") : group_.describe(request.peer));
  }

  bool pushOut(Peer& peer) {
    bool moved = false;
    while (!peer.sends.empty()) {
      Request& request = peer.sends.front();
      if (peer.sent < 0) {
        if (peer.out->room() < static_cast<std::int64_t>(sizeof(Envelope))) {
          return moved;
        }
        const Envelope envelope = {kEnvelope, request.tag, request.data.bytes};
        peer.out->write(reinterpret_cast<const std::byte*>(&envelope), sizeof(envelope));
        peer.sent = 0;
        moved = true;
      }
      const std::int64_t room = peer.out->room() / 32 * 32;
      const std::int64_t left = request.data.bytes - peer.sent;
      const std::int64_t now = std::min(left, room);
      if (now > 0) {
        peer.out->write(request.data.data + peer.sent, now);
        peer.sent += now;
        moved = true;
      }
      if (peer.sent < request.data.bytes) {
        return moved;
      }
      // Room is counted in whole envelopes, so the padding always fits.
      const std::byte padding[32] = {};
      peer.out->write(padding, padded(request.data.bytes) - request.data.bytes);
      peer.sent = -1;
      const Request finished = std::move(request);
      peer.sends.pop_front();
      finished.done(nullptr, finished.peer);
    }
    return moved;
  }

  int rankOf(const Peer& peer) const { return static_cast<int>(&peer - peers_.data()); }

  // The oldest receive that asked for such a message.
  std::list<Request>::iterator wanted(int source, std::uint64_t tag) {
    return std::find_if(receives_.begin(), receives_.end(), [&](const Request& request) {
      return (request.peer == source || request.peer == kAnySource) && request.tag == tag;
    });
  }

  bool takeIn(Peer& peer) {
    bool moved = false;
    for (;;) {
      if (!peer.current) {
        if (peer.in->filled() < static_cast<std::int64_t>(sizeof(Envelope))) {
          return moved;
        }
        begin(peer);
        moved = true;
      }
      Arriving& message = *peer.current;
      const std::int64_t total = padded(message.envelope.bytes);
      const std::int64_t now = std::min(total - message.done, peer.in->filled());
      if (now > 0) {
        std::byte* to = message.request ? message.request->data.data : message.early.bytes.data();
        const std::int64_t wanted_bytes = std::clamp<std::int64_t>(message.envelope.bytes - message.done, 0, now);
        peer.in->readInto(to + message.done, wanted_bytes);
        std::byte padding[32];
        peer.in->readInto(padding, now - wanted_bytes);
        message.done += now;
        moved = true;
      }
      if (message.done < total) {
        return moved;
      }
      finish(peer);
    }
  }

  void begin(Peer& peer) {
    Arriving message;
    peer.in->readInto(reinterpret_cast<std::byte*>(&message.envelope), sizeof(Envelope));
    check(message.envelope.magic == kEnvelope && message.envelope.bytes >= 0,
          "a mailbox holds no message where one should be");
    const std::uint64_t tag = message.envelope.tag;
    const auto request = peer.hasEarly(tag) ? receives_.end() : wanted(rankOf(peer), tag);
    if (request != receives_.end()) {
      checkSize(*request, rankOf(peer), message.envelope.bytes);
      message.request = std::move(*request);
      receives_.erase(request);
    } else {
      message.early = {tag, std::vector<std::byte>(static_cast<std::size_t>(message.envelope.bytes))};
    }
    peer.current = std::move(message);
  }

  void finish(Peer& peer) {
    Arriving message = std::move(*peer.current);
    peer.current.reset();
    if (message.request) {
      message.request->done(nullptr, rankOf(peer));
    } else {
      peer.early.push_back(std::move(message.early));
    }
  }

  void checkSize(const Request& request, int source, std::int64_t bytes) const {
    check(request.data.bytes == bytes, [&] {
      return concat("rank ", group_.rank(), " receives ", request.data.bytes, " bytes with tag ", request.tag,
                    " from rank ", source, ", which sends ", bytes, " in group '", group_.name(), "'");
    });
  }

  // Messages that came early, for receives that were asked for since.
  bool matchEarly() {
    bool moved = false;
    for (Peer& peer : peers_) {
      for (auto early = peer.early.begin(); early != peer.early.end();) {
        const auto request = wanted(rankOf(peer), early->tag);
        if (request == receives_.end()) {
          ++early;
          continue;
        }
        checkSize(*request, rankOf(peer), static_cast<std::int64_t>(early->bytes.size()));
        std::copy(early->bytes.begin(), early->bytes.end(), request->data.data);
        const Request finished = std::move(*request);
        receives_.erase(request);
        early = peer.early.erase(early);
        finished.done(nullptr, rankOf(peer));
        moved = true;
      }
    }
    return moved;
  }

  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }

  Group& group_;
  const std::atomic<std::int64_t>& timeout_;
  std::vector<Peer> peers_;
  std::list<Request> receives_;  // in the order in which they were asked for
};

// Owned by the messenger and by its thread.
struct Messenger::State {
  explicit State(std::shared_ptr<Group> owned)
      : group(std::move(owned)), timeout(group->timeout().count()), mover(*group, timeout) {}
  void run();

  const std::shared_ptr<Group> group;
  std::atomic<std::int64_t> timeout;  // milliseconds
  std::mutex mutex;
  std::condition_variable asked;
  Mover mover;
  bool stopping = false;
};

Messenger::Messenger(std::shared_ptr<Group> group) : state_(std::make_shared<State>(std::move(group))) {}

Messenger::~Messenger() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->asked.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else if (thread_.joinable()) {
    thread_.join();
  }
}

void Messenger::setTimeout(std::chrono::milliseconds timeout) { state_->timeout = timeout.count(); }

void Messenger::send(Run data, int to, std::uint64_t tag, Done done) {
  check(to >= 0 && to < state_->group->size(),
        [&] { return concat("send to rank ", to, " of ", state_->group->size()); });
  ask({data, to, tag, std::move(done)}, true);
}

void Messenger::receive(Run data, int from, std::uint64_t tag, Done done) {
  check(from >= kAnySource && from < state_->group->size(),
        [&] { return concat("receive from rank ", from, " of ", state_->group->size()); });
  ask({data, from, tag, std::move(done)}, false);
}

void Messenger::ask(Request request, bool sends) {
  state_->group->throwIfPoisoned();
  const std::lock_guard lock(state_->mutex);
  (sends ? state_->mover.new_sends : state_->mover.new_receives).push_back(std::move(request));
  if (!thread_.joinable()) {
    thread_ = std::thread([state = state_] { state->run(); });
  }
  state_->asked.notify_all();
}

void Messenger::State::run() {
  auto last_move = Clock::now();
  auto last_look = last_move;
  for (;;) {
    {
      std::unique_lock lock(mutex);
      mover.take();
      if (stopping) {
        lock.unlock();
        mover.failAll(
            std::make_exception_ptr(Error(concat("the shared-memory group '", group->name(), "' was closed"))));
        return;
      }
      if (mover.idle()) {
        asked.wait(lock, [&] { return stopping || !mover.new_sends.empty() || !mover.new_receives.empty(); });
        last_move = last_look = Clock::now();
        continue;
      }
    }
    try {
      const bool moved = mover.progress();
      const auto now = Clock::now();
      if (moved) {
        last_move = now;
        continue;
      }
      if (now - last_look > std::chrono::milliseconds(5)) {
        last_look = now;
        group->throwIfPoisoned();
        if (const auto why = mover.hopeless(); why && !mover.progress()) {
          fail(*why);
        }
      }
      // A mailbox has many readers' worth of news; while nothing moves, look at longer and longer intervals.
      const auto quiet = now - last_move;
      if (quiet > group->patience().spin + group->patience().yield) {
        std::unique_lock lock(mutex);
        asked.wait_for(
            lock, std::clamp<Clock::duration>(quiet / 4, std::chrono::microseconds(20), std::chrono::milliseconds(2)));
      } else if (quiet > group->patience().spin) {
        std::this_thread::yield();
      } else {
        relax();
      }
    } catch (const std::exception& error) {
      group->poison(error.what());
      mover.failAll(std::current_exception());
    }
  }
}

}  // namespace dc::shm
