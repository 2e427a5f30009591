#include "deepcompile/runtime/replay.h"

#include <algorithm>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

// Divergences that nobody takes must not grow for ever.
constexpr std::size_t kMostPending = 64;

bool contains(const std::vector<ReplayKey>& keys, const ReplayKey& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

ReplayFollower::ReplayFollower(std::vector<ReplayVariant> variants, std::unordered_set<std::int64_t> leaves,
                               std::unordered_set<std::int64_t> persistent, Agree agree, NameOf name_of)
    : leaves_(std::move(leaves)),
      persistent_(std::move(persistent)),
      agree_(std::move(agree)),
      name_of_(std::move(name_of)) {
  check(!variants.empty(), "a replay needs at least one recorded order");
  for (ReplayVariant& variant : variants) {
    addVariant(std::move(variant));
  }
}

void ReplayFollower::addVariant(ReplayVariant variant) {
  check(!in_cycle_, "a recorded order cannot be added in the middle of an iteration");
  variants_.push_back(std::move(variant));
  followed_to_the_end_.push_back(0);
}

bool ReplayFollower::follows(const ReplayAccess& access) const {
  if (access.kind == ReplayAccess::Kind::Group) {
    return true;
  }
  return leaves_.count(access.key.id) == 0 && settled_.count(access.key.id) == 0;
}

std::size_t ReplayFollower::following(const ReplayVariant& variant, std::size_t from) const {
  while (from < variant.size() && !follows(variant[from].access)) {
    ++from;
  }
  return from;
}

void ReplayFollower::begin(std::unordered_set<std::int64_t> current) {
  settled_ = std::move(current);
  history_.clear();
  live_.clear();
  left_ = false;
  in_cycle_ = true;
  // The one that was right most often; all ranks have counted the same.
  variant_ = static_cast<std::size_t>(std::max_element(followed_to_the_end_.begin(), followed_to_the_end_.end()) -
                                      followed_to_the_end_.begin());
  cursor_ = 0;
}

std::string ReplayFollower::describe(const ReplayAccess& access) const {
  const char* how = access.kind == ReplayAccess::Kind::Group ? "the leaf module of " : "";
  return concat(how, "'", name_of_(access.key.id), "'", access.backward ? " (backward)" : " (forward)");
}

std::string ReplayFollower::differenceAt(const std::string& found) const {
  const ReplayVariant& variant = variants_[variant_];
  const std::string expected = cursor_ < variant.size() ? describe(variant[cursor_].access) : "the end";
  return concat("read ", history_.size(), " was ", found, " where order ", variant_, " has ", expected);
}

std::size_t ReplayFollower::placeAfterHistory(const ReplayVariant& variant) const {
  // Persistent parameters are followed at their first read only; within the history later ones are not listed.
  std::size_t place = 0;
  for (const ReplayAccess& read : history_) {
    while (place < variant.size() && !(variant[place].access == read) && !follows(variant[place].access)) {
      ++place;
    }
    if (place >= variant.size() || !(variant[place].access == read)) {
      return variant.size() + 1;
    }
    ++place;
  }
  return place;
}

bool ReplayFollower::switchVariant(bool whole) {
  for (std::size_t other = 0; other < variants_.size(); ++other) {
    if (other == variant_) {
      continue;
    }
    const ReplayVariant& variant = variants_[other];
    const std::size_t place = placeAfterHistory(variant);
    if (place > variant.size() || (whole && following(variant, place) < variant.size())) {
      continue;
    }
    variant_ = other;
    cursor_ = place;
    ++switches_;
    return true;
  }
  return false;
}

void ReplayFollower::noteDivergence(std::string difference) {
  if (!left_) {
    left_ = true;
    ++divergences_;
    if (diverged_.size() < kMostPending) {
      diverged_.push_back({std::move(difference), {}});
    }
  }
}

std::size_t ReplayFollower::nextRead(const ReplayKey& key, std::size_t from) const {
  const ReplayVariant& variant = variants_[variant_];
  while (from < variant.size() && !(variant[from].access.key == key)) {
    ++from;
  }
  return from;
}

bool ReplayFollower::launchedBetween(const ReplayKey& key, std::size_t from, std::size_t to) const {
  const ReplayVariant& variant = variants_[variant_];
  for (std::size_t place = from; place <= to && place < variant.size(); ++place) {
    for (const auto& launch : variant[place].launches) {
      if (contains(launch, key)) {
        return true;
      }
    }
  }
  return false;
}

std::vector<ReplayKey> ReplayFollower::dropUnneeded() {
  const ReplayVariant& variant = variants_[variant_];
  std::vector<ReplayKey> needed;
  std::vector<ReplayKey> dropped;
  for (const ReplayKey& key : live_) {
    const std::size_t read = nextRead(key, cursor_);
    (read < variant.size() && !launchedBetween(key, cursor_, read) ? needed : dropped).push_back(key);
  }
  live_ = std::move(needed);
  dropped_ += static_cast<std::int64_t>(dropped.size());
  return dropped;
}

void ReplayFollower::startLate(std::size_t from, Step& step) {
  const ReplayVariant& variant = variants_[variant_];
  for (std::size_t place = from; place < cursor_; ++place) {
    for (const auto& launch : variant[place].launches) {
      std::vector<ReplayKey> late;
      for (const ReplayKey& key : launch) {
        const std::size_t read = nextRead(key, place);
        if (read >= cursor_ && read < variant.size() && !contains(live_, key) && settled_.count(key.id) == 0) {
          late.push_back(key);
          if (!stays(key.id)) {
            live_.push_back(key);
          }
        }
      }
      if (!late.empty()) {
        step.launches.push_back(std::move(late));
      }
    }
  }
}

// The read at the cursor is the one that came.
void ReplayFollower::serve(Step& step) {
  const PlannedRead& read = variants_[variant_][cursor_];
  for (const auto& launch : read.launches) {
    for (const ReplayKey& key : launch) {
      if (!stays(key.id) && !contains(live_, key)) {
        live_.push_back(key);
      }
    }
    step.launches.push_back(launch);
  }
  step.keep = read.keep;
  const ReplayKey& key = read.access.key;
  if (read.access.kind != ReplayAccess::Kind::Group && !stays(key.id)) {
    if (!read.keep) {
      std::erase(live_, key);
    } else if (!contains(live_, key)) {
      live_.push_back(key);
    }
  }
  ++cursor_;
}

ReplayFollower::Step ReplayFollower::next(const ReplayAccess& access) {
  Step step;
  if (!follows(access)) {
    return step;
  }
  step.followed = true;
  const ReplayVariant& variant = variants_[variant_];
  cursor_ = following(variant, cursor_);
  if (cursor_ < variant.size() && variant[cursor_].access == access) [[likely]] {
    history_.push_back(access);
    serve(step);
  } else {
    std::string difference = differenceAt(describe(access));
    agree_(difference);
    history_.push_back(access);
    if (switchVariant(/*whole=*/false)) {
      step.drop = dropUnneeded();
      --cursor_;  // the variant's place is behind this read
      startLate(0, step);
      serve(step);
    } else {
      noteDivergence(std::move(difference));
      std::size_t again = cursor_;
      while (again < variant.size() && !(variant[again].access == access)) {
        ++again;
      }
      if (again < variant.size()) {  // what is between was skipped
        const std::size_t skipped = std::exchange(cursor_, again);
        step.drop = dropUnneeded();
        startLate(skipped, step);
        serve(step);
      } else if (contains(live_, access.key) && access.kind != ReplayAccess::Kind::Group) {
        step.keep = true;  // an additional read of what is there for a later one
      }
    }
  }
  if (persistent_.count(access.key.id) > 0) {
    settled_.insert(access.key.id);
  }
  return step;
}

std::vector<ReplayKey> ReplayFollower::forgetAll() {
  dropped_ += static_cast<std::int64_t>(live_.size());
  settled_.clear();
  in_cycle_ = false;
  return std::exchange(live_, {});
}

std::vector<ReplayKey> ReplayFollower::end() {
  if (!in_cycle_) {
    return {};
  }
  cursor_ = following(variants_[variant_], cursor_);
  if (cursor_ < variants_[variant_].size()) {
    std::string difference = differenceAt("the end of the iteration");
    agree_(difference);
    if (!switchVariant(/*whole=*/true)) {
      noteDivergence(std::move(difference));
    }
  }
  ++cycles_;
  last_reads_ = std::exchange(history_, {});
  if (left_) {
    if (!diverged_.empty() && diverged_.back().reads.empty()) {
      diverged_.back().reads = last_reads_;
    }
  } else {
    ++followed_to_the_end_[variant_];
  }
  return forgetAll();
}

std::vector<ReplayKey> ReplayFollower::abandon() {
  history_.clear();
  return forgetAll();
}

}  // namespace dc
