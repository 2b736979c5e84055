#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>

namespace kvcell {
namespace {

template <typename Call>
auto Retry(Call call) {
  for (;;) {
    const auto result = call();
    if (result != -1) return result;
    if (errno != EINTR) return static_cast<decltype(call())>(-errno);
  }
}

bool FitsOffset(uint64_t offset, uint64_t bytes) {
  constexpr uint64_t kMost = static_cast<uint64_t>(std::numeric_limits<off_t>::max());
  return offset <= kMost && bytes <= kMost - offset;
}

}  // namespace

SystemCalls& SystemCalls::Real() {
  static SystemCalls calls;
  return calls;
}

int SystemCalls::OpenAt(int directory, const char* name, int flags, mode_t mode) {
  return Retry([&] { return ::openat(directory, name, flags, mode); });
}
int SystemCalls::Close(int fd) { return ::close(fd) == 0 ? 0 : -errno; }
ssize_t SystemCalls::PRead(int fd, void* to, size_t bytes, off_t offset) {
  return Retry([&] { return ::pread(fd, to, bytes, offset); });
}
ssize_t SystemCalls::PWrite(int fd, const void* from, size_t bytes, off_t offset) {
  return Retry([&] { return ::pwrite(fd, from, bytes, offset); });
}
int SystemCalls::Allocate(int fd, off_t offset, off_t bytes) {
  for (;;) {
    const int error = ::posix_fallocate(fd, offset, bytes);
    if (error != EINTR) return -error;
  }
}
int SystemCalls::PunchHole(int fd, off_t offset, off_t bytes) {
  return Retry([&] { return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes); });
}
int SystemCalls::SyncData(int fd) {
  return Retry([&] { return ::fdatasync(fd); });
}
int SystemCalls::Sync(int fd) {
  return Retry([&] { return ::fsync(fd); });
}
int SystemCalls::Truncate(int fd, off_t bytes) {
  return Retry([&] { return ::ftruncate(fd, bytes); });
}
int SystemCalls::UnlinkAt(int directory, const char* name) { return ::unlinkat(directory, name, 0) == 0 ? 0 : -errno; }
int SystemCalls::RenameAt(int directory, const char* from, const char* to) {
  return ::renameat(directory, from, directory, to) == 0 ? 0 : -errno;
}
int SystemCalls::MkdirAt(int directory, const char* name, mode_t mode) {
  if (::mkdirat(directory, name, mode) != 0) return -errno;
  return ::fchmodat(directory, name, mode, 0) == 0 ? 0 : -errno;
}
int SystemCalls::Stat(int fd, struct stat* out) { return ::fstat(fd, out) == 0 ? 0 : -errno; }
int SystemCalls::StatAt(int directory, const char* name, struct stat* out) {
  return ::fstatat(directory, name, out, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : -errno;
}
int SystemCalls::Chmod(int fd, mode_t mode) { return ::fchmod(fd, mode) == 0 ? 0 : -errno; }
int SystemCalls::Lock(int fd, off_t offset, off_t bytes, LockKind kind) {
  struct flock lock = {};
  lock.l_type = kind == LockKind::kShared ? F_RDLCK : kind == LockKind::kExclusive ? F_WRLCK : F_UNLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = bytes;
  return Retry([&] { return ::fcntl(fd, F_OFD_SETLK, &lock); });
}

Status ErrnoStatus(int error, std::string_view action, const std::string& path) {
  const auto status = [&](StatusCode code, std::string_view advice) {
    return Status(code, fmt::format("cannot {} {}: {}; {}", action, path, ::strerrordesc_np(error), advice));
  };
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return status(StatusCode::kNoSpace, "free some space, what was stored before is intact");
    case EACCES:
    case EPERM:
    case EROFS:
      return status(StatusCode::kPermission, "check its owner and mode, or choose another place");
    case ENOENT:
      return status(StatusCode::kNotFound, "check the path");
    case ELOOP:
      return status(StatusCode::kInvalidArgument, "it is a symbolic link, give the place that it points to");
    case ENOTDIR:
    case EISDIR:
    case ENXIO:
    case ENAMETOOLONG:
    case EEXIST:
      return status(StatusCode::kInvalidArgument, "choose another path");
    case EAGAIN:
      return status(StatusCode::kBusy, "another process holds it, try again");
    case EOPNOTSUPP:
      return status(StatusCode::kUnsupported, "this file system can't do it");
    case EMFILE:
    case ENFILE:
      return status(StatusCode::kIoError, "raise the limit of open files (ulimit -n)");
    default:
      return status(StatusCode::kIoError, "check the disk, what was stored before is intact");
  }
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    Close();
    calls_ = other.calls_;
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

void File::Close() {
  if (fd_ >= 0) (void)calls_->Close(std::exchange(fd_, -1));
}

Result<File> File::Open(SystemCalls& calls, int directory, const std::string& name, int flags, mode_t mode,
                        std::string path) {
  const int always = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  File file;
  file.calls_ = &calls;
  file.path_ = std::move(path);
  bool created = false;
  if ((flags & O_CREAT) != 0) {
    file.fd_ = calls.OpenAt(directory, name.c_str(), flags | O_EXCL | always, mode);
    created = file.fd_ >= 0;
    if (file.fd_ == -EEXIST && (flags & O_EXCL) == 0) {
      file.fd_ = calls.OpenAt(directory, name.c_str(), (flags & ~O_CREAT) | always, 0);
    }
  } else {
    file.fd_ = calls.OpenAt(directory, name.c_str(), flags | always, 0);
  }
  if (file.fd_ < 0) {
    const int error = -std::exchange(file.fd_, -1);
    return Fail(file.Failed(error, "open"));
  }
  if (created) {
    if (const int result = calls.Chmod(file.fd_, mode); result < 0)
      return Fail(file.Failed(-result, "set the mode of"));
  }
  auto info = file.Stat();
  if (!info) return Fail(info.error());
  const bool wants_directory = (flags & O_DIRECTORY) != 0;
  if (wants_directory ? !S_ISDIR(info->st_mode) : !S_ISREG(info->st_mode)) {
    return Fail(StatusCode::kInvalidArgument, fmt::format("{} is not a {}: move it away or choose another path",
                                                          file.path_, wants_directory ? "directory" : "regular file"));
  }
  return file;
}

Result<size_t> File::ReadAt(uint64_t offset, std::span<std::byte> to) const {
  if (!FitsOffset(offset, to.size())) return Fail(Failed(EINVAL, "read"));
  size_t done = 0;
  while (done < to.size()) {
    const ssize_t n = calls_->PRead(fd_, to.data() + done, to.size() - done, static_cast<off_t>(offset + done));
    if (n < 0) return Fail(Failed(static_cast<int>(-n), "read"));
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

Status File::WriteAt(uint64_t offset, std::span<const std::byte> bytes) const {
  if (!FitsOffset(offset, bytes.size())) return Failed(EFBIG, "write");
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = calls_->PWrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (n < 0) return Failed(static_cast<int>(-n), "write");
    if (n == 0) return Failed(ENOSPC, "write");  // no progress and no error: never spin on it
    done += static_cast<size_t>(n);
  }
  return OkStatus();
}

Status File::Allocate(uint64_t offset, uint64_t bytes) const {
  if (!FitsOffset(offset, bytes)) return Failed(EFBIG, "allocate space in");
  const int result = calls_->Allocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return result < 0 ? Failed(-result, "allocate space in") : OkStatus();
}

Status File::PunchHole(uint64_t offset, uint64_t bytes) const {
  if (bytes == 0) return OkStatus();
  if (!FitsOffset(offset, bytes)) return Failed(EINVAL, "free space in");
  const int result = calls_->PunchHole(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return result < 0 ? Failed(-result, "free space in") : OkStatus();
}

Status File::WriteZeros(uint64_t offset, uint64_t bytes) const {
  static constexpr std::array<std::byte, 65536> kZeros{};
  while (bytes > 0) {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(bytes, kZeros.size()));
    KVCELL_RETURN_IF_ERROR(WriteAt(offset, std::span(kZeros).first(n)));
    offset += n;
    bytes -= n;
  }
  return OkStatus();
}

void File::WillRead(uint64_t offset, uint64_t bytes) const {
  (void)::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

void File::WillSync(uint64_t offset, uint64_t bytes) const {
  (void)::sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void File::ReadAhead(bool on) const { (void)::posix_fadvise(fd_, 0, 0, on ? POSIX_FADV_NORMAL : POSIX_FADV_RANDOM); }

Status File::SyncData() const {
  const int result = calls_->SyncData(fd_);
  return result < 0 ? Failed(-result, "sync") : OkStatus();
}

Status File::Sync() const {
  const int result = calls_->Sync(fd_);
  return result < 0 ? Failed(-result, "sync") : OkStatus();
}

Status File::Truncate(uint64_t bytes) const {
  if (!FitsOffset(0, bytes)) return Failed(EFBIG, "resize");
  const int result = calls_->Truncate(fd_, static_cast<off_t>(bytes));
  return result < 0 ? Failed(-result, "resize") : OkStatus();
}

Result<struct stat> File::Stat() const {
  struct stat info = {};
  const int result = calls_->Stat(fd_, &info);
  if (result < 0) return Fail(Failed(-result, "examine"));
  return info;
}

Result<bool> File::TryLock(uint64_t offset, uint64_t bytes, LockKind kind) const {
  if (!FitsOffset(offset, bytes)) return Fail(Failed(EINVAL, "lock"));
  const int result = calls_->Lock(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), kind);
  if (result == -EAGAIN || result == -EACCES) return false;
  // The arguments are right: a file system (or a kernel) without such locks says so in several ways.
  const bool unsupported = result == -EINVAL || result == -ENOLCK || result == -ENOSYS;
  if (result < 0) return Fail(Failed(unsupported ? EOPNOTSUPP : -result, "lock"));
  return true;
}

void File::Unlock(uint64_t offset, uint64_t bytes) const {
  if (FitsOffset(offset, bytes)) {
    (void)calls_->Lock(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), LockKind::kUnlock);
  }
}

Result<std::vector<std::string>> ListDirectory(const File& directory) {
  const int fd = ::openat(directory.fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Fail(ErrnoStatus(errno, "list", directory.path()));
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd), ::closedir);
  if (stream == nullptr) {
    const int error = errno;
    ::close(fd);
    return Fail(ErrnoStatus(error, "list", directory.path()));
  }
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      if (errno != 0) return Fail(ErrnoStatus(errno, "list", directory.path()));
      return names;
    }
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

Status MakeDirectories(SystemCalls& calls, const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    const int result = calls.MkdirAt(AT_FDCWD, part.c_str(), 0700);
    if (result < 0 && result != -EEXIST) {
      struct stat info = {};  // a directory above that can't be written is fine as long as it is there
      if (calls.StatAt(AT_FDCWD, part.c_str(), &info) < 0) return ErrnoStatus(-result, "make directory", part);
    }
    if (end == std::string::npos) return OkStatus();
  }
}

}  // namespace kvcell
