// An optimizer's states on their way between the device and the host, by parameter.
//
// A state keeps its identity: the tensor that the optimizer holds is, at any time, one on the device or one in host
// memory. So whoever reads it in between finds its values, on the host after settle(), and the optimizer, which needs
// it on the device, asks for it first. Memory goes back in the order of the caller's stream, so forward, backward and
// update run on one, or on some that wait for each other. What each call does follows from where a state is, so that a
// schedule that is interrupted, runs twice or does not fit what the program does costs time and never a value.
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

  // The tensors that parameter `id` has for states; an empty list forgets it. Tensors that it has already stay where
  // they are; others may be on the device or, all of them, on the host. `name` is the parameter's, for messages.
  void set(std::int64_t id, std::vector<at::Tensor> tensors, std::string name);

  // The moves of one point of the schedule, in their order; parameters without states are passed over.
  // `leave` starts copying to the host what is on the device, which may be read meanwhile, but not written. What is on
  // its way back turns round: the host still has it.
  // `free`: what has started to leave is on the host from now on, in the caller's order, and takes no memory on the
  // device.
  // `fetch` starts copying back what is on the host. Nothing while returns are not allowed: within an accumulation,
  // where a compiled graph that brings states back for its update runs again before it.
  void move(const StateMoves& moves);
  // The same with the runtime's lock held, which all other calls take.
  void moveLocked(const StateMoves& moves);
  void allowReturns(bool allowed);
  // The states are on the device and may be written, in the caller's order, wherever they were.
  void require(at::IntArrayRef ids);
  // Ends what is under way; the host may read, and write, all states when it returns.
  void settle();

  // Bytes of states that are on the host.
  std::int64_t bytesAway() const;
  // The parameters whose states may not be written: they are on the host or under way.
  std::vector<std::int64_t> away() const;

 private:
  enum class Place { Device, Leaving, Host, Returning };
  struct States {
    std::string name;
    std::vector<at::Tensor> tensors;  // the optimizer's own objects
    std::vector<Moved> copies;        // while they leave or return: where to
    Place place = Place::Device;
    Event on_host;  // of the copies that brought them there
  };

  void leave(at::IntArrayRef ids);
  void free(at::IntArrayRef ids);
  void fetch(at::IntArrayRef ids);
  void start(States& states, Place towards);
  // In the caller's order behind the copies: they are not wanted.
  void drop(States& states);
  // In the caller's order behind the copies: the states become them, or, where they had started to leave and are wanted
  // after all, stay what they are.
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
