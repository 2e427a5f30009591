// Offloads activations to host memory and reloads them, for one graph.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "deepcompile/runtime/context.h"
#include "deepcompile/runtime/host_copies.h"
#include "deepcompile/runtime/stream.h"

namespace dc {

// Both directions are asynchronous and ordered: a reload starts after the offload that it undoes. The copies keep their
// source and destination alive until they are done.
class TensorOffload {
 public:
  TensorOffload(std::shared_ptr<Stream> offload_stream, std::shared_ptr<Stream> reload_stream,
                std::shared_ptr<HostCopies> copies, std::shared_ptr<Context> context);

  // Starts copying `tensor` to the host. The copy is readable after waitOffload(id).
  at::Tensor offload(const at::Tensor& tensor, std::int64_t id);
  void waitOffload(std::int64_t id);
  // Starts copying `host`, which offload(id) returned, back to where it came from. Readable after waitReload(id).
  at::Tensor reload(const at::Tensor& host, std::int64_t id);
  void waitReload(std::int64_t id);

 private:
  struct Transfer {
    at::Device device = at::kCPU;  // where the tensor came from
    Event offloaded;
    Event reloaded;
    bool reloading = false;
  };
  Transfer& find(const char* operation, std::int64_t id);

  const std::shared_ptr<Stream> offload_stream_;
  const std::shared_ptr<Stream> reload_stream_;
  const std::shared_ptr<HostCopies> copies_;
  const std::shared_ptr<Context> context_;
  std::unordered_map<std::int64_t, Transfer> transfers_;
};

}  // namespace dc
