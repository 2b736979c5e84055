// Files by way of a system-call seam: everything the store asks of the kernel goes through SystemCalls, so that a test
// can make any call fail, write short or forget what was not synced.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

enum class LockKind : uint8_t { kShared, kExclusive, kUnlock };

// The system calls, each as the kernel has it but for errors, which come back as -errno. The base class makes the real
// calls; tests override some. Thread-safe.
class SystemCalls {
 public:
  virtual ~SystemCalls() = default;
  static SystemCalls& Real();

  virtual int OpenAt(int directory, const char* name, int flags, mode_t mode);
  virtual int Close(int fd);
  virtual ssize_t PRead(int fd, void* to, size_t bytes, off_t offset);
  virtual ssize_t PWrite(int fd, const void* from, size_t bytes, off_t offset);
  virtual int Allocate(int fd, off_t offset, off_t bytes);   // posix_fallocate
  virtual int PunchHole(int fd, off_t offset, off_t bytes);  // the range reads as zeros afterwards; the size stays
  virtual int SyncData(int fd);                              // fdatasync
  virtual int Sync(int fd);                                  // fsync
  virtual int Truncate(int fd, off_t bytes);
  virtual int UnlinkAt(int directory, const char* name);
  virtual int RenameAt(int directory, const char* from, const char* to);
  virtual int MkdirAt(int directory, const char* name, mode_t mode);  // exactly `mode`, whatever the umask
  virtual int Stat(int fd, struct stat* out);
  virtual int StatAt(int directory, const char* name, struct stat* out);  // of a symbolic link itself
  virtual int Chmod(int fd, mode_t mode);
  // A range lock that belongs to the open file (F_OFD_SETLK): it conflicts with other opens of the same process too,
  // and goes when the last descriptor closes, so also when the process dies. Never waits: -EAGAIN.
  virtual int Lock(int fd, off_t offset, off_t bytes, LockKind kind);
};

// The Status of a failed call: `cannot <action> <path>: <reason>; <what to do>`. Codes by errno: kNoSpace, kPermission,
// kNotFound, kInvalidArgument (a symbolic link, or not the kind of file it has to be), kBusy, else kIoError.
Status ErrnoStatus(int error, std::string_view action, const std::string& path);

// An open file or directory; closes itself. Reads and writes are complete or an error. Movable; const calls are
// thread-safe.
class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File() { Close(); }

  // Opens `name` below `directory` (AT_FDCWD for a path as it stands); `path` names it in messages. O_CLOEXEC,
  // O_NOFOLLOW and O_NONBLOCK are added: no symbolic link is followed and a FIFO can't hang. Anything but a regular
  // file (or, with O_DIRECTORY, a directory) is kInvalidArgument. A file that O_CREAT makes has exactly `mode`,
  // whatever the umask.
  static Result<File> Open(SystemCalls& calls, int directory, const std::string& name, int flags, mode_t mode,
                           std::string path);

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  void Close();

  // How many bytes were there: fewer than asked for only at the end of the file.
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> to) const;
  Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) const;
  // Takes disk space for the range, growing the file: writes into it can't meet a full disk any more.
  Status Allocate(uint64_t offset, uint64_t bytes) const;
  // kUnsupported where the file system can't.
  Status PunchHole(uint64_t offset, uint64_t bytes) const;
  Status WriteZeros(uint64_t offset, uint64_t bytes) const;
  // The range will be read soon: the system may begin to read it now. Changes nothing else, so errors mean nothing.
  void WillRead(uint64_t offset, uint64_t bytes) const;
  // The range was written and will be synced: the system may begin to write it now. Waits for nothing and takes no
  // error away from the sync that follows.
  void WillSync(uint64_t offset, uint64_t bytes) const;
  // Whether the system reads on behind what this open file is asked for, as it does from the start.
  void ReadAhead(bool on) const;
  Status SyncData() const;
  Status Sync() const;
  Status Truncate(uint64_t bytes) const;
  Result<struct stat> Stat() const;
  // False where another open file holds a conflicting lock.
  Result<bool> TryLock(uint64_t offset, uint64_t bytes, LockKind kind) const;
  void Unlock(uint64_t offset, uint64_t bytes) const;

 private:
  Status Failed(int error, std::string_view action) const { return ErrnoStatus(error, action, path_); }

  SystemCalls* calls_ = nullptr;
  int fd_ = -1;
  std::string path_;
};

// Names of the entries of an open directory, "." and ".." left out, in no order.
Result<std::vector<std::string>> ListDirectory(const File& directory);

// Makes a directory (mode exactly 0700) and those above it that are missing; fine where it is there already.
Status MakeDirectories(SystemCalls& calls, const std::string& path);

}  // namespace kvcell
