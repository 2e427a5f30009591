#include "deepcompile/runtime/unsettled.h"

#include <torch/csrc/autograd/variable.h>

#include "deepcompile/comm/interpreter.h"

namespace dc {
namespace {

using torch::autograd::AutogradMeta;

// Fields that not every supported PyTorch has.
template <typename Meta>
void takeGradDtype(Meta& to, Meta& from) {
  if constexpr (requires { from.grad_dtype_; }) {
    to.grad_dtype_ = from.grad_dtype_;
  }
  if constexpr (requires { from.allow_grad_dtype_mismatch_; }) {
    to.allow_grad_dtype_mismatch_ = from.allow_grad_dtype_mismatch_;
  }
}

// What autograd knows of a shard, with a gradient that is settled before it is read. Writing it (`shard.grad = None`)
// needs no settling: the reductions write to the gradient buffer, and the next one to settle publishes that.
struct SettlingMeta : AutogradMeta {
  SettlingMeta(AutogradMeta& before, std::shared_ptr<Unsettled> unsettled) : unsettled(std::move(unsettled)) {
    name_ = std::move(before.name_);
    grad_ = std::move(before.grad_);
    grad_accumulator_ = std::move(before.grad_accumulator_);
    fw_grad_ = std::move(before.fw_grad_);
    hooks_ = std::move(before.hooks_);
    cpp_hooks_list_ = std::move(before.cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(before.post_acc_grad_hooks_);
    requires_grad_ = before.requires_grad_;
    retains_grad_ = before.retains_grad_;
    output_nr_ = before.output_nr_;
    takeGradDtype<AutogradMeta>(*this, before);
  }

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
  impl->set_autograd_meta(std::make_unique<SettlingMeta>(*meta, unsettled));
}

}  // namespace dc
