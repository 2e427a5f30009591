// Makes malloc keep freed memory between steps.
#pragma once

namespace dc {

// Every training step allocates and frees the same memory. By default glibc returns free memory at the end of its heap
// to the system and takes it back, page fault by page fault, in every step. After this call the process keeps up to
// 1 GiB; its peak does not change. Does nothing if the environment sets glibc's thresholds or
// DEEPCOMPILE_MALLOC=unchanged. Affects the whole process.
void keepFreedMemory();

}  // namespace dc
