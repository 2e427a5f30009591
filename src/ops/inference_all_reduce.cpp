// torch.ops.deepspeed.inference_all_reduce: the sum over the ranks of one host, through the memory that they share.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include "deepcompile/base/error.h"
#include "deepcompile/comm/inference_group.h"

namespace dc::ops {
namespace {

namespace functional = at::functionalization::impl;

// The result has the strides that empty_like gives, in eager code and in traces alike.
at::Tensor allReduce(const at::Tensor& self) {
  const InferenceCall call;
  InferenceGroup& group = call.required();
  at::Tensor sum = at::empty_like(self);
  group.allReduce(self, sum);
  return sum;
}

at::Tensor& allReduceInPlace(at::Tensor& self) {
  const InferenceCall call;
  InferenceGroup& group = call.required();
  if (!self.is_contiguous()) {
    at::assert_no_internal_overlap(self);
  }
  group.allReduce(self, self);
  if (!self.is_inference()) {
    self.unsafeGetTensorImpl()->bump_version();
  }
  return self;
}

at::Tensor shapeOf(const at::Tensor& self) { return at::empty_like(self); }
at::Tensor& same(at::Tensor& self) { return self; }

at::Tensor& functionalized(at::Tensor& self) {
  static const auto in_place = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("deepspeed::inference_all_reduce_", "")
                                   .typed<at::Tensor&(at::Tensor&)>();
  static const auto out_of_place = c10::Dispatcher::singleton()
                                       .findSchemaOrThrow("deepspeed::inference_all_reduce", "")
                                       .typed<at::Tensor(const at::Tensor&)>();
  if (!functional::isFunctionalTensor(self)) {
    const at::AutoDispatchSkipFunctionalize below_functionalize;
    return in_place.call(self);
  }
  functional::sync(self);
  const at::Tensor inner = functional::from_functional_tensor(self);
  at::Tensor sum;
  {
    const at::AutoDispatchSkipFunctionalize below_functionalize;
    sum = out_of_place.call(inner);
  }
  functional::replace_(self, sum);
  functional::commit_update(self);
  functional::sync(self);
  return self;
}

}  // namespace
}  // namespace dc::ops

TORCH_LIBRARY(deepspeed, m) {
  m.def("inference_all_reduce(Tensor self) -> Tensor");
  m.def("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(deepspeed, CPU, m) {
  m.impl("inference_all_reduce", dc::ops::allReduce);
  m.impl("inference_all_reduce_", dc::ops::allReduceInPlace);
}

TORCH_LIBRARY_IMPL(deepspeed, Meta, m) {
  m.impl("inference_all_reduce", dc::ops::shapeOf);
  m.impl("inference_all_reduce_", dc::ops::same);
}

TORCH_LIBRARY_IMPL(deepspeed, Functionalize, m) { m.impl("inference_all_reduce_", dc::ops::functionalized); }
