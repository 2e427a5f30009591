#include "deepcompile/runtime/gathered.h"

#include <cstring>
#include <utility>

#include <ATen/Functions.h>

#include "deepcompile/base/error.h"
#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {
namespace {

std::uint64_t checksum(const Buffer& buffer) {
  std::uint64_t sum = 0xcbf29ce484222325ULL;
  const auto* bytes = static_cast<const unsigned char*>(buffer.memory.get());
  std::int64_t i = 0;
  for (; i + 8 <= buffer.bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, 8);
    sum = (sum ^ word) * 0x100000001b3ULL;
    sum ^= sum >> 29;
  }
  for (; i < buffer.bytes; ++i) {
    sum = (sum ^ bytes[i]) * 0x100000001b3ULL;
  }
  return sum;
}

// The context of the storage's data pointer, before and after the release.
struct Owner {
  GatherKey key;
  std::shared_ptr<BufferPool> pool;  // null: the memory is not the pool's
  std::optional<Buffer> buffer;
  // The error for writers; null: writing is allowed.
  std::shared_ptr<const std::string> read_only;
  Writing writing = Writing::Forbidden;
  std::shared_ptr<LateError> late;
  std::optional<std::uint64_t> as_it_was;  // checksum of the memory when a writable pointer was first requested
  std::shared_ptr<StepTrace> trace;

  void reportChange() {
    if (buffer && as_it_was && *as_it_was != checksum(*buffer)) {
      late->set(*read_only);
    }
    as_it_was.reset();
  }

  void giveBack() {
    if (buffer) {
      reportChange();
      if (trace != nullptr) {
        trace->addInstant({TraceEntry::Kind::Release, key.id, key.dtype, buffer->bytes});
      }
      Buffer memory = *std::exchange(buffer, std::nullopt);
      if (pool != nullptr) {
        pool->give(std::move(memory));
      }
    }
  }
};

void deleteOwner(void* context) {
  auto* owner = static_cast<Owner*>(context);
  owner->giveBack();
  delete owner;
}

Owner* ownerOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return nullptr;
  }
  c10::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &deleteOwner ? static_cast<Owner*>(data.get_context()) : nullptr;
}

template <typename Storage>
concept TellsOfWriters = requires(Storage storage) { storage.clear_materializer(); };

template <typename Storage>
void setWriteGuard(Storage& storage, bool on) {
  if constexpr (TellsOfWriters<Storage>) {
    if (storage.has_materializer()) {
      storage.clear_materializer();
    }
    if (on) {
      storage.set_materializer([](c10::StorageImpl* written) {
        const c10::DataPtr& data = written->_mutable_data_ptr_no_checks();
        auto* owner = static_cast<Owner*>(data.get_context());
        check(owner->writing != Writing::Forbidden, [&] { return *owner->read_only; });
        owner->as_it_was = checksum(*owner->buffer);
      });
    }
  }
}

}  // namespace

at::Tensor makeGathered(std::shared_ptr<BufferPool> pool, Buffer buffer, const GatherKey& key, at::IntArrayRef shape,
                        at::Device device, std::shared_ptr<StepTrace> trace) {
  void* const memory = buffer.memory.get();
  const std::int64_t bytes = buffer.bytes;
  auto* owner = new Owner{key,     std::move(pool), std::move(buffer), nullptr, Writing::Forbidden,
                          nullptr, std::nullopt,    std::move(trace)};
  return tensorOver(c10::DataPtr(memory, owner, &deleteOwner, device), bytes, shape, key.dtype, device);
}

at::Tensor makeInPlace(std::shared_ptr<std::byte> memory, std::int64_t bytes, const GatherKey& key,
                       at::IntArrayRef shape, at::Device device, std::shared_ptr<StepTrace> trace) {
  using Holder = std::shared_ptr<std::byte>;
  std::byte* const data = memory.get();
  c10::DataPtr pointer(
      data, new Holder(std::move(memory)), [](void* holder) { delete static_cast<Holder*>(holder); }, device);
  return makeGathered(nullptr, {std::move(pointer), bytes, Event()}, key, shape, device, std::move(trace));
}

std::optional<GatherKey> gatherKeyOf(const at::Tensor& tensor) {
  const Owner* owner = ownerOf(tensor);
  return owner == nullptr ? std::nullopt : std::optional(owner->key);
}

void setGatherKey(const at::Tensor& gathered, const GatherKey& key) {
  if (Owner* owner = ownerOf(gathered); owner != nullptr) {
    owner->key = key;
  }
}

void setFreeAfter(const at::Tensor& gathered, Event event) {
  if (Owner* owner = ownerOf(gathered); owner != nullptr && owner->buffer) {
    owner->buffer->free_after = std::move(event);
  }
}

void guardWriting(const at::Tensor& gathered, Writing writing, std::shared_ptr<const std::string> message,
                  std::shared_ptr<LateError> late) {
  Owner* owner = ownerOf(gathered);
  if (owner == nullptr || !owner->buffer) {
    return;
  }
  if (writing == Writing::Noticed && !gathered.device().is_cpu()) {
    return;  // detecting a change needs a checksum, and the host cannot read the device's memory
  }
  owner->reportChange();
  owner->read_only = std::move(message);
  owner->writing = writing;
  owner->late = std::move(late);
  setWriteGuard(*gathered.storage().unsafeGetStorageImpl(), true);
}

void allowWriting(const at::Tensor& gathered) {
  if (Owner* owner = ownerOf(gathered); owner != nullptr && owner->read_only != nullptr) {
    owner->reportChange();
    owner->read_only = nullptr;
    setWriteGuard(*gathered.storage().unsafeGetStorageImpl(), false);
  }
}

void releaseStorage(const at::Tensor& gathered, std::string message, bool poison, ReleasedSize size) {
  Owner* owner = ownerOf(gathered);
  if (owner == nullptr || !owner->buffer) {
    return;
  }
  allowWriting(gathered);
  c10::StorageImpl& storage = *gathered.storage().unsafeGetStorageImpl();
  if (poison) {
    // All bits set is a NaN in every floating-point type.
    rawTensor(owner->buffer->memory.get(), {owner->buffer->bytes}, at::kByte, storage.device()).fill_(0xff);
  }
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  void* const context = data.release_context();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, context, &deleteOwner, data.device()));
  if (size == ReleasedSize::Zero) {
    storage.set_nbytes(std::size_t{0});
  }
  guardStorage(storage, std::move(message));
  owner->giveBack();
}

}  // namespace dc
