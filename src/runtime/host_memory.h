// The process's own memory between steps.
#pragma once

namespace dc {

// A training step frees and takes the same memory again and again. Left to itself glibc gives what is free at the end
// of its heap back to the system and takes it anew, page fault by page fault, in every step. Its thresholds grow with
// the blocks that a program frees; this sets them to the most that they would grow to, so that up to 64 MiB stay. Does
// nothing where the environment sets them, or says DEEPCOMPILE_MALLOC=unchanged. For the whole process.
void keepFreedMemory();

}  // namespace dc
