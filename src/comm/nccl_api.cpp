#include "deepcompile/comm/nccl_api.h"

#include <dlfcn.h>

#include "deepcompile/base/error.h"

namespace dc::nccl {
namespace {

void* openLibrary() {
  // The copy that is in the process already, whatever its path; else whatever the loader finds.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    library = dlopen("libnccl.so.2", RTLD_NOW);
  }
  if (library == nullptr) {
    fail("NCCL is not there (", dlerror(), "): gradients and parameters on CUDA with several ranks need it; install ",
         "PyTorch with CUDA, or let a process group of torch.distributed serve");
  }
  return library;
}

template <typename Function>
void loadIfThere(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

template <typename Function>
void load(void* library, const char* name, Function& function) {
  loadIfThere(library, name, function);
  dc::check(function != nullptr, [&] { return concat("the NCCL library has no function ", name); });
}

Api loadApi() {
  void* const library = openLibrary();
  Api api{};
  load(library, "ncclGetVersion", api.getVersion);
  load(library, "ncclGetUniqueId", api.getUniqueId);
  load(library, "ncclCommInitRank", api.commInitRank);
  load(library, "ncclCommDestroy", api.commDestroy);
  load(library, "ncclCommAbort", api.commAbort);
  load(library, "ncclCommGetAsyncError", api.commGetAsyncError);
  load(library, "ncclAllGather", api.allGather);
  load(library, "ncclReduceScatter", api.reduceScatter);
  load(library, "ncclReduce", api.reduce);
  load(library, "ncclAllReduce", api.allReduce);
  load(library, "ncclBroadcast", api.broadcast);
  load(library, "ncclGroupStart", api.groupStart);
  load(library, "ncclGroupEnd", api.groupEnd);
  load(library, "ncclGetErrorString", api.getErrorString);
  load(library, "ncclGetLastError", api.getLastError);
  loadIfThere(library, "ncclMemAlloc", api.memAlloc);
  loadIfThere(library, "ncclMemFree", api.memFree);
  loadIfThere(library, "ncclCommRegister", api.commRegister);
  loadIfThere(library, "ncclCommDeregister", api.commDeregister);
  return api;
}

}  // namespace

const Api& Api::get() {
  static const Api api = loadApi();
  return api;
}

void check(int result, const char* operation) {
  constexpr int kSuccess = 0;
  constexpr int kInProgress = 7;  // of communicators that do not block
  if (result == kSuccess || result == kInProgress) [[likely]] {
    return;
  }
  const Api& api = Api::get();
  fail("NCCL: ", operation, " failed: ", api.getErrorString(result), " (", api.getLastError(nullptr),
       "). NCCL_DEBUG=INFO tells more");
}

Travel travelType(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return {DataType::Float32, 1};
    case at::kDouble:
      return {DataType::Float64, 1};
    case at::kHalf:
      return {DataType::Float16, 1};
    case at::kBFloat16:
      return {DataType::Bfloat16, 1};
    case at::kInt:
      return {DataType::Int32, 1};
    case at::kLong:
      return {DataType::Int64, 1};
    case at::kComplexFloat:
      return {DataType::Float32, 2};
    case at::kComplexDouble:
      return {DataType::Float64, 2};
    default:
      fail("NCCL cannot add tensors of dtype ", c10::toString(dtype),
           "; reduce in float32, float64, float16 or bfloat16");
  }
}

}  // namespace dc::nccl
