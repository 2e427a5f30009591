// The collectives of a group. All block until the result is there and the caller's memory is its own again. Reductions
// take the ranks' values in rank order, 16-bit types in fp32 with one rounding at the end, so all ranks hold the same
// bits, whatever the way that the data took. Sizes may be zero; nothing needs alignment.
//
// Errors (a peer is gone, does not come in time, or means another call) poison the group: see group.h.
#pragma once

#include <cstdint>

#include "deepcompile/shm/dtype.h"
#include "deepcompile/shm/group.h"
#include "deepcompile/shm/runs.h"

namespace dc::shm {

// `out` may be `in` itself, or must not overlap it.
void allReduce(Group& group, const void* in, void* out, std::int64_t count, DType dtype, ReduceOp op,
               std::uint64_t tag = 0);

// What rank r gives as `from` arrives in everybody's to[r]. Sizes may differ between ranks, but all must agree on them.
// `from` may be this rank's own part of `to`.
void allGather(Group& group, Runs from, const RunTable& to, std::uint64_t tag = 0);

// The sum (or another reduction) of what all ranks hold in from[r] arrives at rank r in `to`. Sizes may differ between
// ranks, but all must agree on them. `to` may be this rank's own part of `from`, run by run, or must not overlap it.
void reduceScatter(Group& group, const RunTable& from, Runs to, DType dtype, ReduceOp op, std::uint64_t tag = 0);

void broadcast(Group& group, Runs data, int root, std::uint64_t tag = 0);
// `out` is used on the root only; it may be `in`.
void reduce(Group& group, const void* in, void* out, std::int64_t count, DType dtype, ReduceOp op, int root);
// `to` is used on the root only; all ranks give the same number of bytes.
void gather(Group& group, Runs from, const RunTable& to, int root, std::uint64_t tag = 0);
// `from` is used on the root only; all ranks take the same number of bytes.
void scatter(Group& group, const RunTable& from, Runs to, int root, std::uint64_t tag = 0);
// from[r] of this rank arrives at rank r. Any sizes; what a rank sends must be what the other expects.
void allToAll(Group& group, const RunTable& from, const RunTable& to, std::uint64_t tag = 0);
void barrier(Group& group);

// Throws for a root that is no rank of the group, or a reduction that the dtype does not have.
void checkRoot(const Group& group, int root);
void checkReduction(ReduceOp op, DType dtype, std::int64_t count);

}  // namespace dc::shm
