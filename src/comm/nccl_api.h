// The functions of NCCL that are used, taken at run time from the library that PyTorch has loaded: nothing is linked,
// and no header of NCCL is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/ScalarType.h>

namespace dc::nccl {

struct Comm;  // opaque
using Stream = void*;

struct UniqueId {
  char bytes[128];
};

// Values of NCCL's own enumerations.
enum class DataType : int {
  Int8 = 0,
  Uint8 = 1,
  Int32 = 2,
  Int64 = 4,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  Bfloat16 = 9,
};
enum class RedOp : int { Sum = 0, Avg = 4 };

struct Api {
  int (*getVersion)(int* version);
  int (*getUniqueId)(UniqueId* id);
  int (*commInitRank)(Comm** comm, int ranks, UniqueId id, int rank);
  int (*commDestroy)(Comm* comm);
  int (*commAbort)(Comm* comm);
  int (*commGetAsyncError)(Comm* comm, int* result);
  int (*allGather)(const void* send, void* receive, std::size_t count, int type, Comm* comm, Stream stream);
  int (*reduceScatter)(const void* send, void* receive, std::size_t count, int type, int op, Comm* comm, Stream stream);
  int (*reduce)(const void* send, void* receive, std::size_t count, int type, int op, int root, Comm* comm,
                Stream stream);
  int (*allReduce)(const void* send, void* receive, std::size_t count, int type, int op, Comm* comm, Stream stream);
  int (*broadcast)(const void* send, void* receive, std::size_t count, int type, int root, Comm* comm, Stream stream);
  int (*groupStart)();
  int (*groupEnd)();
  const char* (*getErrorString)(int result);
  const char* (*getLastError)(Comm* comm);
  // Null in versions before 2.19.
  int (*memAlloc)(void** memory, std::size_t bytes);
  int (*memFree)(void* memory);
  int (*commRegister)(Comm* comm, void* memory, std::size_t bytes, void** registration);
  int (*commDeregister)(Comm* comm, void* registration);

  bool canRegister() const {
    return memAlloc != nullptr && memFree != nullptr && commRegister != nullptr && commDeregister != nullptr;
  }

  // Loads the library at the first call. Throws where there is none.
  static const Api& get();
};

// Throws when `result` is an error: "NCCL: <operation> failed: ...".
void check(int result, const char* operation);

// How `dtype` travels; complex numbers as twice as many real ones (`factor`). Throws for types that NCCL cannot add.
struct Travel {
  DataType type;
  std::int64_t factor;
};
Travel travelType(at::ScalarType dtype);

}  // namespace dc::nccl
