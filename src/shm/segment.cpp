#include "deepcompile/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "deepcompile/base/error.h"

namespace dc::shm {
namespace {

std::string mebibytes(std::int64_t bytes) { return concat(bytes, " bytes (", (bytes + (1 << 20) - 1) >> 20, " MiB)"); }

[[noreturn]] void tooLittle(const std::string& purpose, std::int64_t bytes, const std::string& why) {
  fail("cannot reserve ", mebibytes(bytes), " of shared memory for ", purpose, ": ", why, "; ",
       mebibytes(availableMemory()),
       " are available. Free memory, raise the limit, or use fewer ranks or smaller slots");
}

std::string addressLimit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "";
  }
  return concat(" (the address space of the process is limited to ",
                mebibytes(static_cast<std::int64_t>(limit.rlim_cur)), ": see ulimit -v)");
}

// A number in a file of /proc or /sys; the largest number where there is none or it says "max".
std::int64_t numberIn(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? value : std::numeric_limits<std::int64_t>::max();
}

void reservePages(int fd, const std::string& purpose, std::int64_t begin, std::int64_t bytes) {
  // Beyond its limit the kernel would end a process instead of refusing, so ask first.
  if (bytes > availableMemory()) {
    tooLittle(purpose, bytes, "not enough memory");
  }
  int status = 0;
  do {
    status = ::fallocate(fd, 0, begin, bytes);
  } while (status != 0 && errno == EINTR);
  if (status != 0) {
    tooLittle(purpose, bytes, std::strerror(errno));
  }
}

Descriptor makeFile(const std::string& purpose, std::int64_t bytes) {
  Descriptor fd(
      ::memfd_create(concat("deepcompile ", purpose).substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw Unavailable(concat("cannot create shared memory for ", purpose, ": ", std::strerror(errno)));
  }
  if (::ftruncate(fd.get(), bytes) != 0) {
    tooLittle(purpose, bytes, std::strerror(errno));
  }
  // Nobody who holds the descriptor can shrink the memory under another's feet.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw Unavailable(concat("cannot seal shared memory for ", purpose, ": ", std::strerror(errno)));
  }
  return fd;
}

}  // namespace

std::int64_t availableInControlGroup(const std::string& directory) {
  const std::int64_t limit = numberIn(directory + "/memory.max");
  if (limit == std::numeric_limits<std::int64_t>::max()) {
    return limit;
  }
  // Files that were read stay in memory, and count, until it is needed for something else.
  std::int64_t used = numberIn(directory + "/memory.current");
  std::ifstream stat(directory + "/memory.stat");
  std::string name;
  for (std::int64_t value = 0; stat >> name >> value;) {
    if (name == "active_file" || name == "inactive_file") {
      used -= value;
    }
  }
  return std::max<std::int64_t>(0, limit - std::max<std::int64_t>(0, used));
}

std::int64_t availableMemory() {
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.starts_with("MemAvailable:")) {
      available = std::stoll(line.substr(13)) * 1024;
      break;
    }
  }
  return std::min(available, availableInControlGroup("/sys/fs/cgroup"));
}

Segment::Segment(std::string purpose, Descriptor descriptor, std::int64_t size, bool populated)
    : purpose_(std::move(purpose)), descriptor_(std::move(descriptor)), size_(size) {
  const int flags = MAP_SHARED | (populated ? MAP_POPULATE : MAP_NORESERVE);
  void* address = ::mmap(nullptr, static_cast<std::size_t>(size), PROT_READ | PROT_WRITE, flags, descriptor_.get(), 0);
  if (address == MAP_FAILED) {
    throw Unavailable(concat("cannot map ", mebibytes(size), " of shared memory for ", purpose_, ": ",
                             std::strerror(errno), addressLimit()));
  }
  data_ = static_cast<std::byte*>(address);
  if (!populated) {
    // A core dump would read every page, and so make them all exist. Failure is no harm but then.
    (void)::madvise(address, static_cast<std::size_t>(size), MADV_DONTDUMP);
  }
}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(purpose_, other.purpose_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<std::size_t>(size_));
  }
}

Segment Segment::reserve(const std::string& purpose, std::int64_t bytes) {
  check(bytes > 0, "a shared-memory segment needs a size");
  Descriptor fd = makeFile(purpose, bytes);
  reservePages(fd.get(), purpose, 0, bytes);
  return Segment(purpose, std::move(fd), bytes, true);
}

Segment Segment::sparse(const std::string& purpose, std::int64_t bytes) {
  check(bytes > 0, "a shared-memory segment needs a size");
  return Segment(purpose, makeFile(purpose, bytes), bytes, false);
}

Segment Segment::map(Descriptor descriptor) {
  struct stat status = {};
  if (::fstat(descriptor.get(), &status) != 0 || status.st_size <= 0) {
    fail("a peer handed over a descriptor that is not shared memory");
  }
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  check(seals >= 0 && (seals & F_SEAL_SHRINK) != 0, "a peer handed over shared memory that it could still shrink");
  Segment segment("a peer", std::move(descriptor), status.st_size, false);
  segment.closeDescriptor();
  return segment;
}

void Segment::populate(std::int64_t begin, std::int64_t bytes) {
  reservePages(descriptor_.get(), purpose_, begin, bytes);
}

void Segment::discard(std::int64_t begin, std::int64_t bytes) {
  // Failure costs memory, not correctness.
  (void)::fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes);
}

}  // namespace dc::shm
