// Names that nobody can guess, and that no two ever share.
#pragma once

#include <string>

namespace dc::shm {

// 128 random bits, as 32 digits.
std::string randomHex();

}  // namespace dc::shm
