// What one build of a schedule assumes. The planner tries many.
#pragma once

#include "deepcompile/plan/types.h"

namespace dc::plan {

struct Settings {
  Bytes reserve = 0;         // memory that keeping parameters gathered leaves to prefetching
  Bytes gather_bucket = 0;   // gathers are fused up to this size
  Bytes reduce_bucket = 0;   // reductions are fused up to this size
  int stretch = 1000;        // how much longer than alone a gather is expected to take, in thousandths
  Bytes pending = 0;         // gradients that may wait for their reduction at any time, beside the newest bucket
  bool farthest = false;     // where memory is short, what is used again last leaves first
  Bytes defer = 0;           // gradients that are reduced last, beside the updates that do not need them
  int defer_after = 500;     // they are made after this part of the last backward pass, in thousandths
  Bytes make_room = 0;       // optimizer states to offload beyond what the budget forces
  int lead = 1000;           // how much longer than alone a copy back to the device is given, in thousandths
  Bytes make_room_each = 0;  // activations to offload in every micro-batch beyond what the budget forces
};

}  // namespace dc::plan
