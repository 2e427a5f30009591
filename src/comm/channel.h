// What a communicator is made from. Opening is a collective: every rank does it at the same point of its program.
#pragma once

#include <memory>

#include "deepcompile/comm/communicator.h"

namespace dc {

class Channel {
 public:
  virtual ~Channel() = default;
  virtual std::shared_ptr<Communicator> open(std::shared_ptr<Traffic> traffic) const = 0;
};

}  // namespace dc
