// Makes a storage throw an error with a reason when its data is read, instead of returning a null pointer.
#pragma once

#include <string>
#include <utility>

#include <c10/core/StorageImpl.h>

namespace dc {

// From now on every access to the data of `storage` throws `message`.
inline void guardStorage(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

// PyTorch before 2.12 cannot take a guard off again.
template <typename Storage>
concept Unguardable = requires(Storage storage) { storage.clear_data_ptr_access_error_msg_(); };

// For storage whose data will come back: guards it only if this PyTorch can remove the guard again.
template <typename Storage>
void guardUntilReturn(Storage& storage, std::string message) {
  if constexpr (Unguardable<Storage>) {
    guardStorage(storage, std::move(message));
  }
}

template <typename Storage>
void unguardStorage(Storage& storage) {
  if constexpr (Unguardable<Storage>) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace dc
