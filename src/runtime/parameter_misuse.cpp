#include "deepcompile/runtime/parameter_misuse.h"

#include <utility>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/copied_autograd_meta.h"

namespace dc {
namespace {

std::string useTheParameter(const std::string& label) {
  return label +
         " is sharded: what its module shows is a gathered copy. The parameter itself is the entry of "
         "model.parameters() and model.named_parameters(): set requires_grad and grad there";
}

struct GatheredMeta : CopiedAutogradMeta {
  GatheredMeta(AutogradMeta* before, std::shared_ptr<const std::string> label, std::shared_ptr<LateError> late)
      : CopiedAutogradMeta(before), label(std::move(label)), late(std::move(late)) {}

  GatheredMeta(const GatheredMeta&) = delete;
  GatheredMeta& operator=(const GatheredMeta&) = delete;

  ~GatheredMeta() override {
    if (requires_grad_) {
      late->set("requires_grad was set on a copy: " + useTheParameter(*label));
    }
  }

  at::Tensor& mutable_grad() override {
    // A program that called retain_grad() or requires_grad_() finds the gradient on the copy.
    check(retains_grad_ || requires_grad_, [&] { return useTheParameter(*label); });
    return grad_;
  }

  std::shared_ptr<const std::string> label;
  std::shared_ptr<LateError> late;
};

}  // namespace

void refuseUseAsParameter(const at::Tensor& gathered, std::shared_ptr<const std::string> label,
                          std::shared_ptr<LateError> late) {
  at::TensorImpl* impl = gathered.unsafeGetTensorImpl();
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
  if (meta == nullptr || !meta->is_view_) {
    impl->set_autograd_meta(std::make_unique<GatheredMeta>(meta, std::move(label), std::move(late)));
  }
}

void refuseDirectGradients(const at::Tensor& shard, std::string message) {
  shard.register_hook([message = std::move(message)](const at::Tensor& gradient) {
    // Operators that contain a graph (torch.cond) return zeros for inputs without a gradient.
    check(!gradient.defined() || !gradient.any().item<bool>(), [&] { return message; });
  });
}

}  // namespace dc
