// Gathers that move nothing: where the ranks' shards can be had under adjacent addresses (Communicator::joinShards) a
// parameter is read where its shards lie. One rank's shard is the parameter.
//
// That is only right while no rank changes a shard, so the program has to say when: from hold() until the backward
// before an update has ended. At the first read in that time the ranks meet, so that all have done with what they
// changed before; end() lets them meet again, so that all have done with their reads. In between nobody waits for
// anybody.
//
// Not synchronized: the runtime's lock guards it. All ranks hold, read and end alike.
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

  // Nobody changes a shard until end(). Again in every forward: the ranks then meet again. False: reads are gathers
  // again; what was read in place may still be read until end().
  void hold(bool hold);
  // Where the whole parameter lies; null where it has to be gathered. May meet the other ranks.
  const void* place(std::int64_t ds_id, at::ScalarType dtype);
  // The same, kept in memory for as long as somebody has it.
  std::shared_ptr<std::byte> find(std::int64_t ds_id, at::ScalarType dtype);
  // True between hold() and end(), where parameters can be read in place.
  bool holding() const { return state_ != State::Off; }
  // Shards may change once this stream has done what is on it.
  void end();

 private:
  enum class State {
    Off,
    Held,  // nobody has read yet
    Met,
  };
  void meet();
  // Of several ranks' shards; null where they are not joined.
  std::shared_ptr<std::byte> joined(std::int64_t ds_id, at::ScalarType dtype);
  // The only rank's shard; null where it does not lie there as the whole parameter.
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
