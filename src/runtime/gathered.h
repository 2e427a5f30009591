// The tensor that holds a gathered parameter: of the parameter's true shape, over a padded buffer of the pool.
//
// Its storage knows whose it is, also after the memory was taken from it. So what autograd saved of it can be packed as
// "parameter 3 in bf16" and gathered again, and a read after the release names the parameter.
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
  std::uint64_t generation = 0;  // of the runtime: ids mean something else in the next one
};

// The memory of `buffer` as a tensor of `shape`. The memory returns to the pool at releaseStorage, or when the last
// tensor over it is gone, whichever comes first; `trace`, if any, is told.
at::Tensor makeGathered(std::shared_ptr<BufferPool> pool, Buffer buffer, const GatherKey& key, at::IntArrayRef shape,
                        at::Device device, std::shared_ptr<StepTrace> trace = nullptr);

// The same over the shards themselves, which nobody owns here and which stay: `memory` is let go of, not given back.
at::Tensor makeInPlace(std::shared_ptr<std::byte> memory, std::int64_t bytes, const GatherKey& key,
                       at::IntArrayRef shape, at::Device device, std::shared_ptr<StepTrace> trace = nullptr);

// The key of a tensor (or a view of one) that makeGathered made; nothing for any other tensor.
std::optional<GatherKey> gatherKeyOf(const at::Tensor& tensor);
// Another one for a tensor that makeGathered made: the same memory now holds what `key` says.
void setGatherKey(const at::Tensor& gathered, const GatherKey& key);

// The pool may use the memory of `gathered` again once `event` has passed.
void setFreeAfter(const at::Tensor& gathered, Event event);

// Writing to a gathered parameter is an error, `message`, where PyTorch can tell (from 2.13 on). Code asks for writable
// memory also where it only reads. Forbidden: asking is the error. Noticed: only a change is, found when the memory
// goes back or the copy is used again, and raised by whoever looks at `late` next.
enum class Writing { Forbidden, Noticed };
void guardWriting(const at::Tensor& gathered, Writing writing, std::shared_ptr<const std::string> message,
                  std::shared_ptr<LateError> late);
// No guard any more; what was changed until now is reported.
void allowWriting(const at::Tensor& gathered);

// What a released storage says of its size. Views can be taken of it only while it keeps the nominal one.
enum class ReleasedSize { Zero, Nominal };

// Gives the memory back to the pool; every tensor over the storage throws `message` when it is read from now on. With
// `poison` the memory is filled with NaN first, for readers that do not ask the storage. Does nothing the second time.
void releaseStorage(const at::Tensor& gathered, std::string message, bool poison,
                    ReleasedSize size = ReleasedSize::Zero);

}  // namespace dc
