// Autograd metadata of a tensor, moved into a subclass of ours.
#pragma once

#include <utility>

#include <torch/csrc/autograd/variable.h>

namespace dc {

struct CopiedAutogradMeta : torch::autograd::AutogradMeta {
  // `from` may be null; it must not be used again. Not for views, whose metadata have another class.
  explicit CopiedAutogradMeta(AutogradMeta* from) {
    if (from == nullptr) {
      return;
    }
    AutogradMeta& before = *from;
    name_ = std::move(before.name_);
    grad_ = std::move(before.grad_);
    grad_fn_ = std::move(before.grad_fn_);
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

 private:
  // Fields that not every supported PyTorch has.
  template <typename Meta>
  static void takeGradDtype(Meta& to, Meta& from) {
    if constexpr (requires { from.grad_dtype_; }) {
      to.grad_dtype_ = from.grad_dtype_;
    }
    if constexpr (requires { from.allow_grad_dtype_mismatch_; }) {
      to.allow_grad_dtype_mismatch_ = from.allow_grad_dtype_mismatch_;
    }
  }
};

}  // namespace dc
