#include "deepcompile/runtime/shards_in_place.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/async.h"

namespace dc {
namespace {

// Null while the shard is offloaded.
const void* placeOf(const DSParam& param) {
  return param.isPartitioned() && !param.isOffloaded() ? param.getDSTensor().const_data_ptr() : nullptr;
}

}  // namespace

ShardsInPlace::ShardsInPlace(std::shared_ptr<Communicator> comm, std::shared_ptr<Stream> stream,
                             std::shared_ptr<Context> context, std::shared_ptr<DSParamRegistry> registry,
                             std::vector<std::int64_t> ids)
    : comm_(std::move(comm)),
      stream_(std::move(stream)),
      context_(std::move(context)),
      registry_(std::move(registry)),
      ids_(std::move(ids)) {}

void ShardsInPlace::hold(bool hold) {
  const bool useless = joined_ && memory_.empty();
  const bool lie_so = comm_->size() == 1 ? !off_ : comm_->joinsShards();
  // Debug mode poisons released copies, so they must not be the shards themselves.
  const bool can = lie_so && !useless && !context_->config.debug;
  state_ = hold && can && !context_->profiling ? State::Held : State::Off;
}

bool ShardsInPlace::whereTheyWere() const {
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (placeOf(registry_->getParam(ids_[i])) != places_[i]) {
      return false;
    }
  }
  return true;
}

// The ranks exchange whether their shards have moved. If any has, all ranks join them again.
void ShardsInPlace::meet() {
  const bool same = joined_ && whereTheyWere();
  const auto all_same = std::make_shared<bool>(true);
  runCollective(
      *stream_, [place = context_->place] { return concat("meeting before shards are read in place on ", place); },
      [comm = comm_, same, all_same] {
        for (const std::string& other : comm->exchange(std::string(1, same ? 'y' : 'n'))) {
          *all_same = *all_same && other == "y";
        }
      });
  context_->await(stream_->record());
  state_ = State::Met;
  reads_open_ = true;
  if (*all_same) {
    return;
  }
  places_.clear();
  std::vector<at::Tensor> shards;
  for (const std::int64_t id : ids_) {
    const DSParam& param = registry_->getParam(id);
    places_.push_back(placeOf(param));
    const bool lies = places_.back() != nullptr && param.getDSTensor().is_contiguous();
    shards.push_back(lies ? param.getDSTensor() : at::empty({0}));
  }
  const auto joined = std::make_shared<std::vector<std::shared_ptr<std::byte>>>();
  runCollective(
      *stream_, [place = context_->place] { return concat("joining the shards of all ranks on ", place); },
      [comm = comm_, shards = std::move(shards), joined] { *joined = comm->joinShards(shards); });
  context_->await(stream_->record());
  memory_.clear();
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if ((*joined)[i] != nullptr) {
      memory_[ids_[i]] = std::move((*joined)[i]);
    }
  }
  joined_ = true;
}

const at::Tensor* ShardsInPlace::ofOneRank(std::int64_t ds_id, at::ScalarType dtype) const {
  const DSParam& param = registry_->getParam(ds_id);
  const bool lies = param.getDtype() == dtype && placeOf(param) != nullptr && param.getDSTensor().is_contiguous();
  return lies ? &param.getDSTensor() : nullptr;
}

std::shared_ptr<std::byte> ShardsInPlace::joined(std::int64_t ds_id, at::ScalarType dtype) {
  if (state_ == State::Held) {
    meet();
  }
  const auto found = memory_.find(ds_id);
  return found != memory_.end() && registry_->getParam(ds_id).getDtype() == dtype ? found->second : nullptr;
}

const void* ShardsInPlace::place(std::int64_t ds_id, at::ScalarType dtype) {
  if (state_ == State::Off) {
    return nullptr;
  }
  if (comm_->size() > 1) {
    return joined(ds_id, dtype).get();
  }
  const at::Tensor* const shard = ofOneRank(ds_id, dtype);
  return shard == nullptr ? nullptr : shard->const_data_ptr();
}

std::shared_ptr<std::byte> ShardsInPlace::find(std::int64_t ds_id, at::ScalarType dtype) {
  if (state_ == State::Off) [[likely]] {
    return nullptr;
  }
  if (comm_->size() > 1) {
    return joined(ds_id, dtype);
  }
  const at::Tensor* const found = ofOneRank(ds_id, dtype);
  if (found == nullptr) {
    return nullptr;
  }
  const auto shard = std::make_shared<at::Tensor>(*found);
  return {shard, static_cast<std::byte*>(shard->mutable_data_ptr())};
}

void ShardsInPlace::end() {
  state_ = State::Off;
  if (!std::exchange(reads_open_, false) || memory_.empty()) {
    return;
  }
  runCollective(
      *stream_, [place = context_->place] { return concat("ending the reads of shards in place on ", place); },
      [comm = comm_] { comm->barrier(); });
}

}  // namespace dc
