// Moves an optimizer's states between the device and the host, by parameter.
//
// A state keeps its identity: the optimizer's tensor object is, at any time, on the device or in host memory. So other
// code can read its values at any time, on the host after settle(); the optimizer, which needs it on the device, calls
// require() first. Memory is freed in the order of the caller's stream, so forward, backward and update must run on one
// stream, or on streams that wait for each other. Each call depends on where a state is and not on earlier calls. So a
// schedule that is interrupted, repeated or does not fit the program costs time but never loses a value.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ArrayRef.h>
#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/host_copies.h"
#include "deepcompile/runtime/host_moves.h"
#include "deepcompile/runtime/step_schedule.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

class StateOffload {
 public:
  // States are needed on `device`.
  StateOffload(at::Device device, std::shared_ptr<Stream> offload_stream, std::shared_ptr<Stream> reload_stream,
               std::shared_ptr<HostCopies> copies, std::shared_ptr<Context> context);

  // Sets the state tensors of parameter `id`; an empty list forgets it. Tensors that are known already stay where they
  // are; new ones may be on the device or, all of them, on the host. `name` is the parameter's, for messages.
  void set(std::int64_t id, std::vector<at::Tensor> tensors, std::string name);

  // The moves of one point of the schedule, in this order; parameters without states are skipped.
  // `leave` starts D2H for states on the device, which may be read meanwhile, but not written. For a state that is
  // being reloaded it cancels the reload, since the host still has it. `free`: states for which `leave` was called are
  // on the host from now on, in the caller's order, and their device memory is freed. `fetch` starts H2D for states on
  // the host. It does nothing while returns are not allowed: within an accumulation a compiled graph that reloads
  // states for the update runs several times before it.
  void move(const StateMoves& moves);
  // The same with the runtime's lock held, which all other calls take.
  void moveLocked(const StateMoves& moves);
  void allowReturns(bool allowed);
  // Puts the states on the device, wherever they were; in the caller's order they may be written.
  void require(at::IntArrayRef ids);
  // Waits for all moves. When it returns, the host may read and write all states.
  void settle();

  // Bytes of states that are on the host.
  std::int64_t bytesAway() const;
  // The parameters whose states may not be written, because they are on the host or being moved.
  std::vector<std::int64_t> away() const;

 private:
  enum class Place { Device, Leaving, Host, Returning };
  struct States {
    std::string name;
    std::vector<at::Tensor> tensors;  // the optimizer's own objects
    std::vector<Moved> copies;        // the destinations while they are being moved
    Place place = Place::Device;
    Event on_host;  // passes when the host copies are complete
  };

  void leave(at::IntArrayRef ids);
  void free(at::IntArrayRef ids);
  void fetch(at::IntArrayRef ids);
  void start(States& states, Place towards);
  // Orders the caller after the copies and discards them.
  void drop(States& states);
  // Orders the caller after the copies and makes them the states; with `stay` discards them, because the states are
  // needed where they are.
  void arrive(States& states, bool stay = false);

  const at::Device device_;
  const std::shared_ptr<Stream> offload_stream_;
  const std::shared_ptr<Stream> reload_stream_;
  const std::shared_ptr<HostCopies> copies_;
  const std::shared_ptr<Context> context_;
  std::unordered_map<std::int64_t, States> states_;
  bool returns_allowed_ = true;
};

}  // namespace dc
