#include "deepcompile/shm/random_hex.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "deepcompile/base/error.h"

namespace dc::shm {

std::string randomHex() {
  std::array<unsigned char, 16> bytes = {};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail("cannot get random bytes for a name: ", std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace dc::shm
