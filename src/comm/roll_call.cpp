#include "deepcompile/comm/roll_call.h"

#include <chrono>
#include <utility>
#include <vector>

#include "deepcompile/base/error.h"

namespace dc {

std::function<std::string()> makeRollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size) {
  return [store = std::move(store), rank, size]() -> std::string {
    // Deadlines of one operation pass on all ranks within a moment of each other.
    constexpr std::chrono::milliseconds kMoment{2000};
    try {
      std::vector<std::string> keys;
      for (int r = 0; r < size; ++r) {
        keys.push_back(concat("gave_up/", r));
      }
      store->set(keys[static_cast<std::size_t>(rank)], std::vector<std::uint8_t>{1});
      try {
        store->wait(keys, kMoment);
      } catch (const std::exception&) {
        // Some are missing; which is said below.
      }
      std::string silent;
      for (int r = 0; r < size; ++r) {
        if (!store->check({keys[static_cast<std::size_t>(r)]})) {
          silent += concat(silent.empty() ? "" : ", ", r);
        }
      }
      return silent.empty() ? "every rank waited for it" : concat("ranks [", silent, "] did not answer");
    } catch (const std::exception& error) {
      return concat("the store of the process group does not answer either (", error.what(),
                    "), so the rank that serves it is gone");
    }
  };
}

}  // namespace dc
