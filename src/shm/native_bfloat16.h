// Whether the processor converts float32 to bfloat16 itself (AVX512_BF16), and may.
#pragma once

#include <atomic>

namespace dc::shm {

// For tests, which compare the two ways: true as a rule.
inline std::atomic<bool>& nativeBFloat16Allowed() {
  static std::atomic<bool> allowed = true;
  return allowed;
}

inline bool convertsToBFloat16() {
#if defined(__x86_64__)
  static const bool found = __builtin_cpu_supports("avx512bf16") != 0;
  return found && nativeBFloat16Allowed().load(std::memory_order_relaxed);
#else
  return false;
#endif
}

}  // namespace dc::shm
