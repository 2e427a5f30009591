#include "deepcompile/shm/group.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <thread>

#include "deepcompile/base/error.h"

namespace dc::shm {
namespace {

constexpr std::int64_t kMailboxMemory = 4 << 20;  // of a group, for all pairs of ranks together

Layout layoutFor(int size, const GroupOptions& options) {
  check(size >= 1, [&] { return concat("a group needs at least one rank, not ", size); });
  check(options.slot_bytes >= 4096, [&] { return concat("slots need at least 4096 bytes, not ", options.slot_bytes); });
  Layout layout;
  layout.ranks = size;
  // At least a line for each peer: that is the smallest part of a reduction.
  const std::int64_t slot_bytes = std::max(options.slot_bytes, size * kLine);
  layout.slot_bytes = (slot_bytes + 4095) / 4096 * 4096;
  const std::int64_t pairs = std::int64_t{size} * size;
  layout.mailbox_bytes = std::clamp<std::int64_t>(kMailboxMemory / pairs / 4096 * 4096, 8192, 256 << 10);
  return layout;
}

// 'R', 'S', 'T', ... as the kernel says it; '?' where it does not.
char processState(std::int64_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : '?';
}

}  // namespace

Group::Group(int rank, Layout layout, Handshake hands, const GroupOptions& options)
    : rank_(rank),
      layout_(layout),
      name_(options.name),
      memory_(std::move(hands.group)),
      heap_(std::move(hands.heap)),
      peers_(std::move(hands.peers)),
      heap_bases_(static_cast<std::size_t>(layout.ranks), heap_->base()),
      patience_(Patience::forRanks(layout.ranks)),
      timeout_(options.timeout.count()),
      short_stages_(0, kShortBytes),
      stages_(short_stages_.end(), layout.slot_bytes),
      results_(stages_.end(), layout.resultBytes()) {
  RankBlock& own = block(rank_);
  own.pid = owner_.pid();
  own.state.store(RankState::Present, std::memory_order_release);
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].heap) {
      heap_bases_[r] = peers_[r].heap->data();
    }
  }
  setTuning(options.tuning.value_or(Tuning{}));
}

std::unique_ptr<Group> Group::open(Rendezvous& rendezvous, int rank, int size, const GroupOptions& options,
                                   std::string& reason) {
  const Layout layout = layoutFor(size, options);
  check(rank >= 0 && rank < size, [&] { return concat("rank ", rank, " of a group of ", size, " ranks"); });
  if (options.tuning) {
    checkTuning(*options.tuning);
  }
  auto hands = shakeHands(rendezvous, rank, layout, options.timeout, reason);
  if (!hands) {
    return nullptr;
  }
  std::unique_ptr<Group> group(new Group(rank, layout, std::move(*hands), options));
  if (!options.tuning) {
    group->tuning_ = measureTuning(*group);
  }
  return group;
}

std::vector<std::unique_ptr<Group>> Group::ofThreads(int size, const GroupOptions& options) {
  const Layout layout = layoutFor(size, options);
  const auto memory = std::make_shared<Segment>(makeGroupMemory(layout));
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.emplace_back(new Group(rank, layout, {memory, SharedHeap::ofProcess(), {}}, options));
  }
  return groups;
}

void Group::setTuning(const Tuning& tuning) {
  checkTuning(tuning);
  tuning_ = tuning;
}

Group::~Group() {
  if (!owner_.isThis()) {
    return;
  }
  block(rank_).state.store(RankState::Left, std::memory_order_release);
}

RankBlock& Group::block(int rank) const {
  return *reinterpret_cast<RankBlock*>(memory_->data() + layout_.blocks() +
                                       rank * static_cast<std::int64_t>(sizeof(RankBlock)));
}

std::byte* Group::mailbox(int from, int to) const {
  return memory_->data() + layout_.mailboxes() + (std::int64_t{from} * layout_.ranks + to) * layout_.mailbox_bytes;
}

void Group::poison(const std::string& text) {
  if (!owner_.isThis()) {
    return;
  }
  Poison& poison = header().poison;
  // Before anything that the caller does next with memory that peers may be using (pipeline.h).
  if (poison.claimed.exchange(1, std::memory_order_seq_cst) != 0) {
    return;
  }
  const std::size_t size = std::min(text.size(), sizeof(poison.text) - 1);
  std::memcpy(poison.text, text.data(), size);
  poison.text[size] = '\0';
  poison.set.store(1, std::memory_order_release);
  for (int rank = 0; rank < layout_.ranks; ++rank) {
    for (const Post& post : block(rank).posts) {
      wake(post.turn);
    }
    wake(block(rank).reduced.value);
  }
}

void Group::throwIfPoisoned() const {
  if (!poisoned()) [[likely]] {
    return;
  }
  // The rank that claimed the error writes its text, unless it ends while it does.
  const Poison& poison = header().poison;
  const auto patient = Clock::now() + std::chrono::seconds(1);
  while (poison.set.load(std::memory_order_acquire) == 0 && Clock::now() < patient) {
    std::this_thread::yield();
  }
  const bool told = poison.set.load(std::memory_order_acquire) != 0;
  fail("the shared-memory group '", name_,
       "' has failed and cannot be used any more: ", told ? poison.text : "a rank ended while it said why");
}

bool Group::gone(int rank) const {
  if (block(rank).state.load(std::memory_order_acquire) == RankState::Left) {
    return true;
  }
  const auto index = static_cast<std::size_t>(rank);
  if (index >= peers_.size() || !peers_[index].end) {
    return false;
  }
  pollfd entry = {peers_[index].end->get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

std::string Group::describe(int rank) const {
  const RankBlock& block = this->block(rank);
  const RankState state = block.state.load(std::memory_order_acquire);
  std::string_view how = "running";
  if (state == RankState::Absent) {
    return concat("rank ", rank, " (not there yet)");
  }
  if (state == RankState::Left) {
    how = "has left the group";
  } else if (gone(rank)) {
    how = "has ended";
  } else if (const char kernel_state = processState(block.pid); kernel_state == 'T' || kernel_state == 't') {
    how = "is stopped";
  }
  return concat("rank ", rank, " (process ", block.pid, ", ", how, ")");
}

bool Group::hopeless(Clock::time_point started) {
  if (poisoned()) {
    return true;
  }
  const std::string where = concat("rank ", rank_, ", ", text(meaning_), " in group '", name_, "', turn ", turn_, ": ");
  if (gone(awaited_)) {
    hopeless_because_ = concat(where, describe(awaited_), " and will not come");
    return true;
  }
  if (Clock::now() - started < timeout()) {
    return false;
  }
  std::string missing;
  for (int r = 0; r < size(); ++r) {
    const RankBlock& peer = block(r);
    std::uint64_t posted = 0;
    for (const Post& post : peer.posts) {
      posted = std::max(posted, post.turn.load(std::memory_order_acquire));
    }
    if (r == awaited_ || (r != rank_ && posted < turn_)) {
      missing += concat(missing.empty() ? "" : ", ", describe(r));
    }
  }
  hopeless_because_ = concat(where, "waited ", static_cast<double>(timeout().count()) / 1000, " s for ", missing,
                             ". Look there for an error, a deadlock or a collective that is called on some ranks only");
  return true;
}

void Group::giveUp() {
  if (!poisoned()) {
    poison(hopeless_because_);
    // Another rank may have claimed it at the same moment; ours is as good.
    throw Error(hopeless_because_);
  }
  throwIfPoisoned();
  std::abort();  // unreachable
}

void Group::failMismatch(std::uint64_t number) {
  // Ranks by what they mean, as far as they have said it.
  std::vector<std::pair<std::string, std::string>> sides;
  for (int r = 0; r < size(); ++r) {
    const Post& post = block(r).posts[number % kRing];
    if (post.turn.load(std::memory_order_acquire) != number) {
      continue;
    }
    const std::string meant = text(post.meaning);
    const auto side = std::find_if(sides.begin(), sides.end(), [&](const auto& s) { return s.first == meant; });
    if (side == sides.end()) {
      sides.emplace_back(meant, concat("rank ", r));
    } else {
      side->second += concat(", rank ", r);
    }
  }
  std::string all;
  for (const auto& [meant, ranks] : sides) {
    all += concat(all.empty() ? "" : "; ", ranks, ": ", meant);
  }
  const std::string message = concat("ranks of group '", name_, "' do not mean the same collective: ", all,
                                     ". All ranks must make the same calls in the same order, with the same sizes");
  poison(message);
  throw Error(message);
}

Call::Call(Group& group, const Meaning& meaning)
    : group_(group), lock_(hold(group)), exceptions_(std::uncaught_exceptions()) {
  group_.throwIfPoisoned();
  group_.meaning_ = meaning;
}

std::unique_lock<std::mutex> Call::hold(Group& group) {
  check(group.owner_.isThis(), [&] {
    return concat("the shared-memory group '", group.name_, "' belongs to process ", group.owner_.pid(),
                  "; a forked child cannot use it, only a group of its own");
  });
  std::unique_lock lock(group.mutex_, std::try_to_lock);
  if (!lock) {
    LongWait::begins();
    lock.lock();
  }
  return lock;
}

Call::~Call() {
  if (std::uncaught_exceptions() > exceptions_ && !group_.poisoned()) {
    group_.poison(concat("rank ", group_.rank_, " stopped in ", text(group_.meaning_)));
  }
}

void Call::refuse(const std::string& what) {
  const std::string message = concat("rank ", group_.rank_, ", group '", group_.name_, "': ", what);
  group_.poison(message);
  throw Error(message);
}

void Call::post(const Turn& turn) {
  RankBlock& own = group_.block(group_.rank_);
  Post& post = own.posts[turn.number % kRing];
  post.meaning = group_.meaning_;
  publish(post.turn, turn.number, own.sleepers);
}

void Call::await(int rank, const std::atomic<std::uint64_t>& word, std::uint64_t number) {
  group_.awaited_ = rank;
  awaitAtLeast(word, number, group_.block(rank).sleepers, group_.patience_, group_);
}

void Call::awaitPosts(const Turn& turn) {
  for (int r = 0; r < ranks(); ++r) {
    if (r == group_.rank_) {
      continue;
    }
    const Post& post = group_.block(r).posts[turn.number % kRing];
    await(r, post.turn, turn.number);
    if (post.meaning != group_.meaning_) [[unlikely]] {
      group_.failMismatch(turn.number);
    }
  }
}

void Call::postResult(const Turn& turn) {
  RankBlock& own = group_.block(group_.rank_);
  publish(own.reduced.value, turn.number, own.sleepers);
}

void Call::awaitResult(int rank, const Turn& turn) { await(rank, group_.block(rank).reduced.value, turn.number); }

}  // namespace dc::shm
