#include "deepcompile/shm/joined_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "deepcompile/base/error.h"

namespace dc::shm {

bool JoinedMemory::wholePages(std::int64_t offset, std::int64_t bytes) {
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  return bytes > 0 && offset % page == 0 && bytes % page == 0;
}

JoinedMemory::JoinedMemory(std::span<const SharedPiece> pieces) {
  for (const SharedPiece& piece : pieces) {
    check(wholePages(reinterpret_cast<std::intptr_t>(piece.data), piece.bytes), "only whole pages can be joined");
    size_ += piece.bytes;
  }
  void* const range =
      ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check(range != MAP_FAILED,
        [&] { return concat("no room for ", size_, " bytes of addresses: ", std::strerror(errno)); });
  data_ = static_cast<std::byte*>(range);
  std::byte* place = data_;
  for (const SharedPiece& piece : pieces) {
    // Of a shared mapping, "grown from nothing" is a second mapping of the same pages.
    if (::mremap(piece.data, 0, static_cast<std::size_t>(piece.bytes), MREMAP_MAYMOVE | MREMAP_FIXED, place) ==
        MAP_FAILED) {
      const std::string why = std::strerror(errno);
      ::munmap(data_, static_cast<std::size_t>(size_));
      fail("shared memory cannot be mapped a second time: ", why);
    }
    place += piece.bytes;
  }
}

JoinedMemory::~JoinedMemory() { ::munmap(data_, static_cast<std::size_t>(size_)); }

}  // namespace dc::shm
