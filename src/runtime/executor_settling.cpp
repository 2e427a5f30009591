// Backwards within an accumulation end without a wait for their reductions; this ends it.
#include "deepcompile/base/error.h"
#include "deepcompile/runtime/executor.h"

namespace dc {

// Without a bucket that was flushed at the end there would be nobody to say whether gradients came beyond the expected
// ones. On a device a wait does not hold the host up, and what is ordered on it is left as it is.
bool CustomOpExecutor::mayLeaveRunning() const {
  return settle_later_ && !param_updated_ && order_learned_ && !had_surplus_ && comm_->size() > 1 &&
         !context_->device_order && last_presence_ != nullptr;
}

void CustomOpExecutor::settle() {
  if (!unsettled_) {
    return;
  }
  context_->await(rs_stream_->record());
  reduceSurplus();
  finishSettling();
}

void CustomOpExecutor::settleAlone() {
  if (!unsettled_) {
    return;
  }
  context_->await(rs_stream_->record());
  check(!anySurplus(order_->hasSurplus()), [&] {
    return concat(
        "gradients are read within an accumulation while some rank has more of them than expected, so they are not "
        "complete (",
        place(), "); read them after the last backward of the accumulation");
  });
  finishSettling();
}

void CustomOpExecutor::discardGradients(const std::vector<std::int64_t>& ds_ids) {
  settle();
  for (const std::int64_t id : ds_ids) {
    if (hasParam(id)) {
      has_acc_grad_.erase(id);
      discardLocal(id);
    }
  }
  if (has_acc_grad_.size() == 0) {
    param_registry_->setUpdateFollowed(true);  // nothing is left that a backward could add to
  }
}

void CustomOpExecutor::finishSettling() {
  unsettled_ = false;
  copied_.letGo(*context_, 0);
  reduced_from_.letGo(*context_, 0);
  readPresence();
  reductionsSettled();
}

}  // namespace dc
