// How far the settings of a build could be others without any decision of it being another. Most changes of a setting
// change nothing: a bucket of 9 MB and one of 10 MB hold the same gradients.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "deepcompile/plan/strategies/settings.h"

namespace dc::plan {

class Leeway {
 public:
  using Amount = Bytes Settings::*;

  explicit Leeway(const Settings& settings) : settings_(settings) {
    for (const Amount amount : kAmounts) {
      least_.*amount = std::numeric_limits<Bytes>::min();
      most_.*amount = std::numeric_limits<Bytes>::max();
    }
  }

  // Whether the setting is more than `bound`. It could be anything that gives the same answer.
  bool above(Amount amount, Bytes bound) {
    const bool is_above = settings_.*amount > bound;
    if (is_above) {
      least_.*amount = std::max(least_.*amount, bound + 1);
    } else {
      most_.*amount = std::min(most_.*amount, bound);
    }
    return is_above;
  }

  // The value itself: another could decide otherwise.
  Bytes exactly(Amount amount) { return least_.*amount = most_.*amount = settings_.*amount; }

  bool farthest() {
    order_matters_ = true;
    return settings_.farthest;
  }

  // Whether a build with these amounts would decide the same, all else being the same.
  bool holds(const Settings& other) const {
    return (!order_matters_ || other.farthest == settings_.farthest) &&
           std::ranges::all_of(kAmounts, [&](Amount amount) {
             return least_.*amount <= other.*amount && other.*amount <= most_.*amount;
           });
  }

 private:
  static constexpr std::array<Amount, 7> kAmounts = {
      &Settings::reserve, &Settings::gather_bucket, &Settings::reduce_bucket, &Settings::pending,
      &Settings::defer,   &Settings::make_room,     &Settings::make_room_each};

  Settings settings_;
  Settings least_;
  Settings most_;
  bool order_matters_ = false;
};

}  // namespace dc::plan
