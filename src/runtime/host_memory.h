// The process's own memory between steps.
#pragma once

namespace dc {

// A training step takes and frees the same memory again and again. Left to itself glibc gives what is free at the end
// of its heap back to the system and takes it anew, page fault by page fault, in every step. After this call up to 1
// GiB stays with the process; what it needs at most does not change. Does nothing where the environment sets glibc's
// thresholds, or says DEEPCOMPILE_MALLOC=unchanged. For the whole process.
void keepFreedMemory();

}  // namespace dc
