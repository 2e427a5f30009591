// The tensor that holds a gathered parameter: it has the parameter's shape, over a padded buffer of the pool.
//
// Its storage carries a GatherKey, also after the release. So autograd can save it as "parameter 3 in bf16" and gather
// it again, and a read after the release is an error that names the parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/buffer_pool.h"
#include "deepcompile/runtime/late_error.h"
#include "deepcompile/runtime/step_trace.h"

namespace dc {

struct GatherKey {
  std::int64_t graph_id = 0;
  std::int64_t id = 0;
  at::ScalarType dtype = at::kFloat;
  std::uint32_t version = 0;     // of the shard, when it was gathered
  std::uint64_t generation = 0;  // of the runtime: another runtime has other parameters under these ids
};

// The memory of `buffer` as a tensor of `shape`. The memory returns to the pool at releaseStorage, or with the last
// tensor over it, whichever comes first; `trace`, if any, logs that.
at::Tensor makeGathered(std::shared_ptr<BufferPool> pool, Buffer buffer, const GatherKey& key, at::IntArrayRef shape,
                        at::Device device, std::shared_ptr<StepTrace> trace = nullptr);

// The same over the shards themselves (read in place). `memory` is a reference that is dropped, not memory of the pool.
at::Tensor makeInPlace(std::shared_ptr<std::byte> memory, std::int64_t bytes, const GatherKey& key,
                       at::IntArrayRef shape, at::Device device, std::shared_ptr<StepTrace> trace = nullptr);

// The key of a tensor (or a view of one) that makeGathered made; nothing for any other tensor.
std::optional<GatherKey> gatherKeyOf(const at::Tensor& tensor);
// Sets the key of a tensor that makeGathered made: its memory now holds what `key` says.
void setGatherKey(const at::Tensor& gathered, const GatherKey& key);

// The pool may use the memory of `gathered` again once `event` has passed.
void setFreeAfter(const at::Tensor& gathered, Event event);

// Makes writing to a gathered parameter an error with `message`, from PyTorch 2.13 on. Forbidden: asking for writable
// memory throws. Noticed: some operators ask for writable memory and only read; so only a change is an error, detected
// by checksum when the memory goes back or the copy is used again, and raised by the next call that checks `late`.
enum class Writing { Forbidden, Noticed };
void guardWriting(const at::Tensor& gathered, Writing writing, std::shared_ptr<const std::string> message,
                  std::shared_ptr<LateError> late);
// Removes the guard; a change until now is reported to `late`.
void allowWriting(const at::Tensor& gathered);

// The size that a released storage reports. Views of it can be made only while it keeps the nominal size.
enum class ReleasedSize { Zero, Nominal };

// Returns the memory to the pool; reading any tensor over the storage throws `message` from now on. With `poison` the
// memory is filled with NaN first, to expose readers that kept its address. Does nothing the second time.
void releaseStorage(const at::Tensor& gathered, std::string message, bool poison,
                    ReleasedSize size = ReleasedSize::Zero);

}  // namespace dc
