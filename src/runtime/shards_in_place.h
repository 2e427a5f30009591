// Reads in place, which move nothing: if the ranks' shards can be mapped at adjacent addresses
// (Communicator::joinShards), that mapping is the whole parameter. With one rank the shard is the parameter.
//
// This is only correct while no rank changes a shard, so the program must promise that: from hold() until the backward
// before an update has ended. There are two barriers. At the first read all ranks have finished their earlier changes
// of shards; at end() all ranks have finished their reads. In between no rank waits for another.
//
// Not synchronized: the runtime's lock guards it. All ranks call hold(), place() or find(), and end() alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/base/environment.h"
#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class ShardsInPlace {
 public:
  // `stream` carries the communicator's operations.
  ShardsInPlace(std::shared_ptr<Communicator> comm, std::shared_ptr<Stream> stream, std::shared_ptr<Context> context,
                std::shared_ptr<DSParamRegistry> registry, std::vector<std::int64_t> ids);

  // True: no rank changes a shard until end(); called in every forward, each followed by a barrier. False: later reads
  // gather again, but earlier copies in place may be read until end().
  void hold(bool hold);
  // The address of the whole parameter; null if it has to be gathered. May wait for the other ranks.
  const void* place(std::int64_t ds_id, at::ScalarType dtype);
  // The same as a shared pointer, which keeps the mapping alive.
  std::shared_ptr<std::byte> find(std::int64_t ds_id, at::ScalarType dtype);
  // True between hold() and end(), if parameters can be read in place.
  bool holding() const { return state_ != State::Off; }
  // Shards may change after the work that is now on `stream_`.
  void end();

 private:
  enum class State {
    Off,
    Held,  // no read yet
    Met,   // after the barrier of the first read
  };
  void meet();
  // The mapping of several ranks' shards; null if they are not joined.
  std::shared_ptr<std::byte> joined(std::int64_t ds_id, at::ScalarType dtype);
  // The only rank's shard; null if it is not the whole parameter in this dtype.
  const at::Tensor* ofOneRank(std::int64_t ds_id, at::ScalarType dtype) const;
  bool whereTheyWere() const;

  const std::shared_ptr<Communicator> comm_;
  const std::shared_ptr<Stream> stream_;
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<DSParamRegistry> registry_;
  const std::vector<std::int64_t> ids_;
  const bool off_ = Environment::read().read_in_place == "off";
  State state_ = State::Off;
  bool reads_open_ = false;
  bool joined_ = false;
  std::vector<const void*> places_;  // of this rank's shards when they were joined, by position in ids_
  std::unordered_map<std::int64_t, std::shared_ptr<std::byte>> memory_;
};

}  // namespace dc
