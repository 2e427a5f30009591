#include "deepcompile/base/error.h"
#include "deepcompile/shm/collectives.h"
#include "deepcompile/shm/pipeline.h"

namespace dc::shm {

void barrier(Group& group) {
  Call call(group, {.kind = Kind::Barrier});
  meet(call);
}

void checkRoot(const Group& group, int root) {
  check(root >= 0 && root < group.size(),
        [&] { return concat("root ", root, " is no rank of group '", group.name(), "' of ", group.size(), " ranks"); });
}

void checkReduction(ReduceOp op, DType dtype, std::int64_t count) {
  check(supports(op, dtype), [&] { return concat("no ", name(op), " of ", name(dtype), " values"); });
  check(count >= 0, [&] { return concat("a reduction of ", count, " elements"); });
}

}  // namespace dc::shm
