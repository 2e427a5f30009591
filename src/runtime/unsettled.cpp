#include "deepcompile/runtime/unsettled.h"

#include "deepcompile/comm/interpreter.h"
#include "deepcompile/runtime/copied_autograd_meta.h"

namespace dc {
namespace {

using torch::autograd::AutogradMeta;

// Autograd metadata of a shard whose `grad` settles before it is read. Writing it (`shard.grad = None`) needs no
// settling: reductions write to the gradient buffer, which the next settle publishes.
struct SettlingMeta : CopiedAutogradMeta {
  SettlingMeta(AutogradMeta* before, std::shared_ptr<Unsettled> unsettled)
      : CopiedAutogradMeta(before), unsettled(std::move(unsettled)) {}

  const at::Tensor& grad() const override {
    if (unsettled->pending()) [[unlikely]] {
      const InterpreterReleased others_run;
      unsettled->settle();
    }
    return grad_;
  }

  std::shared_ptr<Unsettled> unsettled;
};

}  // namespace

void settleBeforeReads(const at::Tensor& shard, const std::shared_ptr<Unsettled>& unsettled) {
  at::TensorImpl* impl = shard.unsafeGetTensorImpl();
  auto* meta = dynamic_cast<AutogradMeta*>(impl->autograd_meta());
  if (meta == nullptr || !shard.is_leaf() || meta->is_view_) {
    return;  // nothing is published in its gradient
  }
  if (auto* settling = dynamic_cast<SettlingMeta*>(meta); settling != nullptr) {
    settling->unsettled = unsettled;
    return;
  }
  impl->set_autograd_meta(std::make_unique<SettlingMeta>(meta, unsettled));
}

}  // namespace dc
