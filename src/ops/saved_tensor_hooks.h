// Makes autograd keep gathered parameters as their ids (Python provides the hooks; without Python nothing is
// installed).
#pragma once

namespace dc::ops {

// Both act on the calling thread. `install` does nothing where other default hooks are active: what those keep is
// theirs.
struct SavedTensorHooks {
  void (*install)() = nullptr;
  void (*uninstall)() = nullptr;
};

// Set once, when the Python module is loaded.
SavedTensorHooks& savedTensorHooks();

inline void keepGatheredAsIds() {
  if (savedTensorHooks().install != nullptr) {
    savedTensorHooks().install();
  }
}

inline void stopKeepingGatheredAsIds() {
  if (savedTensorHooks().uninstall != nullptr) {
    savedTensorHooks().uninstall();
  }
}

}  // namespace dc::ops
