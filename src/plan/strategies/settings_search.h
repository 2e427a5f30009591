// The search for good settings of the schedule builder.
#pragma once

#include "deepcompile/plan/strategies/schedule_search.h"

namespace dc::plan {

// What the settings are measured by.
struct Facts {
  explicit Facts(const Problem& problem);

  Bytes largest = 0;  // gathered for one node
  Bytes most_grads;   // made by one node, or a saturating bucket
  Bytes states = 0;
  Bytes grads = 0;
  Bytes micros = 1;
};

// Changes the settings of the best plan so far, one thing at a time, for as long as it helps, until the
// search has made `most` attempts.
void climb(const Problem& problem, const Facts& facts, Search& search, int most);

// Changes one to three settings of the best plan at once, by factors drawn from a fixed sequence.
void wander(const Problem& problem, const Facts& facts, Search& search, int attempts);

}  // namespace dc::plan
