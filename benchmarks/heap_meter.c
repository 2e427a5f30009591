// Counts what a process has allocated, exactly: loaded before libc (LD_PRELOAD), it stands in for the functions that give and
// take memory. benchmarks/memory.py compiles it, and reads its numbers through ctypes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static atomic_int_fast64_t live;
static atomic_int_fast64_t peak;

// Blocks of at least this size are known one by one, so that the peak can be told by what it consists of.
enum { kLarge = 1 << 15, kMost = 8192 };
struct Block {
  void* memory;
  int64_t size;
};
static struct Block blocks[kMost];
static int used;
static int64_t at_peak[kMost];
static int used_at_peak;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void) {
  while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {
  }
}
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

static void* count(void* memory) {
  if (memory == NULL) {
    return memory;
  }
  const int64_t size = (int64_t)malloc_usable_size(memory);
  lock();
  const int64_t now = atomic_fetch_add(&live, size) + size;
  if (size >= kLarge && used < kMost) {
    blocks[used++] = (struct Block){memory, size};
  }
  if (now > atomic_load(&peak)) {
    atomic_store(&peak, now);
    if (size >= kLarge) {  // a small one changes nothing that is worth a copy
      used_at_peak = used;
      for (int i = 0; i < used; ++i) {
        at_peak[i] = blocks[i].size;
      }
    }
  }
  unlock();
  return memory;
}

static void uncount(void* memory) {
  if (memory == NULL) {
    return;
  }
  const int64_t size = (int64_t)malloc_usable_size(memory);
  lock();
  atomic_fetch_sub(&live, size);
  for (int i = used; size >= kLarge && i-- > 0;) {
    if (blocks[i].memory == memory) {
      blocks[i] = blocks[--used];
      break;
    }
  }
  unlock();
}

int64_t heap_live(void) { return atomic_load(&live); }
int64_t heap_peak(void) { return atomic_load(&peak); }
void heap_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
// Sizes of the large blocks that were there at the peak, or (now != 0) are there now; returns how many.
int heap_blocks(int now, int64_t* sizes, int most) {
  lock();
  const int count = now ? used : used_at_peak;
  for (int i = 0; i < count && i < most; ++i) {
    sizes[i] = now ? blocks[i].size : at_peak[i];
  }
  unlock();
  return count < most ? count : most;
}

void* malloc(size_t size) { return count(__libc_malloc(size)); }
void* calloc(size_t number, size_t size) { return count(__libc_calloc(number, size)); }
void* memalign(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* memory = count(__libc_memalign(alignment, size));
  if (memory == NULL) {
    return ENOMEM;
  }
  *out = memory;
  return 0;
}

void* realloc(void* memory, size_t size) {
  uncount(memory);
  return count(__libc_realloc(memory, size));
}

void free(void* memory) {
  uncount(memory);
  __libc_free(memory);
}
