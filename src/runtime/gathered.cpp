#include "deepcompile/runtime/gathered.h"

#include <cstring>
#include <utility>

#include "deepcompile/runtime/raw_tensor.h"
#include "deepcompile/runtime/storage_guard.h"

namespace dc {
namespace {

// Lives in the context of the storage's data pointer, with and without memory.
struct Owner {
  GatherKey key;
  std::shared_ptr<BufferPool> pool;
  std::optional<Buffer> buffer;

  void giveBack() {
    if (buffer) {
      pool->give(*std::exchange(buffer, std::nullopt));
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

}  // namespace

at::Tensor makeGathered(std::shared_ptr<BufferPool> pool, Buffer buffer, const GatherKey& key, at::IntArrayRef shape,
                        at::Device device) {
  void* const memory = buffer.memory.get();
  const std::int64_t bytes = buffer.bytes;
  auto* owner = new Owner{key, std::move(pool), std::move(buffer)};
  return tensorOver(c10::DataPtr(memory, owner, &deleteOwner, device), bytes, shape, key.dtype, device);
}

std::optional<GatherKey> gatherKeyOf(const at::Tensor& tensor) {
  const Owner* owner = ownerOf(tensor);
  return owner == nullptr ? std::nullopt : std::optional(owner->key);
}

void setFreeAfter(const at::Tensor& gathered, Event event) {
  if (Owner* owner = ownerOf(gathered); owner != nullptr && owner->buffer) {
    owner->buffer->free_after = std::move(event);
  }
}

void releaseStorage(const at::Tensor& gathered, std::string message, bool poison, ReleasedSize size) {
  Owner* owner = ownerOf(gathered);
  if (owner == nullptr || !owner->buffer) {
    return;
  }
  c10::StorageImpl& storage = *gathered.storage().unsafeGetStorageImpl();
  if (poison && storage.device_type() == at::kCPU) {
    // All bits set is a NaN in every floating-point type.
    std::memset(owner->buffer->memory.get(), 0xff, static_cast<std::size_t>(owner->buffer->bytes));
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
