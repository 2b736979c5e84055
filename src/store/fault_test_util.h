// A watcher between the store and the machine: it sees every call of the store's own seam and of SQLite's files before
// it is made, in one numbered stream, and may fail it, cut it short, kill the process or write it down.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sqlite3.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "base/file.h"

namespace kvcell::test {

enum class CallKind {
  kOpen,
  kRead,
  kWrite,
  kAllocate,
  kPunch,
  kSync,
  kTruncate,
  kUnlink,
  kRename,
  kMkdir,
  kChmod,
  kLock,
  kStat
};

struct Call {
  CallKind kind;
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  const void* data = nullptr;  // of a write
  bool creates = false;        // of an open
};

// Returns 0 to let the call pass, an errno to fail it, or kShort to do half of a write.
using Watcher = std::function<int(const Call&)>;
inline constexpr int kShort = -1;

inline std::string PathOfDescriptor(int fd) {
  std::array<char, 4096> path{};
  const ssize_t n = ::readlink(fmt::format("/proc/self/fd/{}", fd).c_str(), path.data(), path.size() - 1);
  return n < 0 ? "" : std::string(path.data(), static_cast<size_t>(n));
}

// The store's own calls.
class WatchedCalls : public SystemCalls {
 private:
  static std::string Join(int directory, const char* name) {
    return name[0] == '/' ? name : PathOfDescriptor(directory) + "/" + name;
  }
  int Ask(const Call& call) { return watcher ? watcher(call) : 0; }
  template <typename Make>
  auto Guard(CallKind kind, std::string path, off_t offset, uint64_t bytes, const void* data, Make make) {
    const int verdict = Ask({kind, std::move(path), static_cast<uint64_t>(offset), bytes, data});
    return verdict > 0 ? static_cast<decltype(make())>(-verdict) : make();
  }

 public:
  Watcher watcher;

  int OpenAt(int directory, const char* name, int flags, mode_t mode) override {
    const int verdict = Ask({CallKind::kOpen, Join(directory, name), 0, 0, nullptr, (flags & O_CREAT) != 0});
    return verdict > 0 ? -verdict : SystemCalls::OpenAt(directory, name, flags, mode);
  }
  ssize_t PRead(int fd, void* to, size_t bytes, off_t offset) override {
    return Guard(CallKind::kRead, PathOfDescriptor(fd), offset, bytes, nullptr,
                 [&] { return SystemCalls::PRead(fd, to, bytes, offset); });
  }
  ssize_t PWrite(int fd, const void* from, size_t bytes, off_t offset) override {
    const int verdict = Ask({CallKind::kWrite, PathOfDescriptor(fd), static_cast<uint64_t>(offset), bytes, from});
    if (verdict > 0) return -verdict;
    return SystemCalls::PWrite(fd, from, verdict == kShort && bytes > 1 ? bytes / 2 : bytes, offset);
  }
  int Allocate(int fd, off_t offset, off_t bytes) override {
    return Guard(CallKind::kAllocate, PathOfDescriptor(fd), offset, static_cast<uint64_t>(bytes), nullptr,
                 [&] { return SystemCalls::Allocate(fd, offset, bytes); });
  }
  int PunchHole(int fd, off_t offset, off_t bytes) override {
    return Guard(CallKind::kPunch, PathOfDescriptor(fd), offset, static_cast<uint64_t>(bytes), nullptr,
                 [&] { return SystemCalls::PunchHole(fd, offset, bytes); });
  }
  int SyncData(int fd) override {
    return Guard(CallKind::kSync, PathOfDescriptor(fd), 0, 0, nullptr, [&] { return SystemCalls::SyncData(fd); });
  }
  int Sync(int fd) override {
    return Guard(CallKind::kSync, PathOfDescriptor(fd), 0, 0, nullptr, [&] { return SystemCalls::Sync(fd); });
  }
  int Truncate(int fd, off_t bytes) override {
    return Guard(CallKind::kTruncate, PathOfDescriptor(fd), 0, static_cast<uint64_t>(bytes), nullptr,
                 [&] { return SystemCalls::Truncate(fd, bytes); });
  }
  int UnlinkAt(int directory, const char* name) override {
    return Guard(CallKind::kUnlink, Join(directory, name), 0, 0, nullptr,
                 [&] { return SystemCalls::UnlinkAt(directory, name); });
  }
  int RenameAt(int directory, const char* from, const char* to) override {
    return Guard(CallKind::kRename, Join(directory, from), 0, 0, nullptr,
                 [&] { return SystemCalls::RenameAt(directory, from, to); });
  }
  int MkdirAt(int directory, const char* name, mode_t mode) override {
    return Guard(CallKind::kMkdir, name, 0, 0, nullptr, [&] { return SystemCalls::MkdirAt(directory, name, mode); });
  }
  int Stat(int fd, struct stat* out) override {
    return Guard(CallKind::kStat, "", 0, 0, nullptr, [&] { return SystemCalls::Stat(fd, out); });
  }
  int Chmod(int fd, mode_t mode) override {
    return Guard(CallKind::kChmod, PathOfDescriptor(fd), 0, 0, nullptr, [&] { return SystemCalls::Chmod(fd, mode); });
  }
  int Lock(int fd, off_t offset, off_t bytes, LockKind kind) override {
    if (kind == LockKind::kUnlock) return SystemCalls::Lock(fd, offset, bytes, kind);
    return Guard(CallKind::kLock, "", 0, 0, nullptr, [&] { return SystemCalls::Lock(fd, offset, bytes, kind); });
  }
};

// SQLite's files: while this object lives, connections that are opened go through a VFS that asks the same watcher. The
// shared-memory index of the log is not watched: it is no file to SQLite's mind and rebuilt after a crash.
class WatchedSqlite {
 public:
  explicit WatchedSqlite(WatchedCalls& calls) {
    real_ = sqlite3_vfs_find(nullptr);
    calls_ = &calls;
    vfs_ = *real_;
    vfs_.zName = "kvcell-watched";
    vfs_.szOsFile = static_cast<int>(sizeof(WatchedFile)) + real_->szOsFile;
    vfs_.pAppData = this;
    vfs_.xOpen = Open;
    vfs_.xDelete = Delete;
    vfs_.xAccess = [](sqlite3_vfs*, const char* name, int flags, int* out) {
      return real_->xAccess(real_, name, flags, out);
    };
    vfs_.xFullPathname = [](sqlite3_vfs*, const char* name, int n, char* out) {
      return real_->xFullPathname(real_, name, n, out);
    };
    vfs_.xRandomness = [](sqlite3_vfs*, int n, char* out) { return real_->xRandomness(real_, n, out); };
    vfs_.xSleep = [](sqlite3_vfs*, int microseconds) { return real_->xSleep(real_, microseconds); };
    vfs_.xCurrentTimeInt64 = [](sqlite3_vfs*, sqlite3_int64* now) { return real_->xCurrentTimeInt64(real_, now); };
    vfs_.xGetLastError = [](sqlite3_vfs*, int n, char* out) { return real_->xGetLastError(real_, n, out); };
    sqlite3_vfs_register(&vfs_, 1);
  }
  ~WatchedSqlite() {
    sqlite3_vfs_unregister(&vfs_);
    sqlite3_vfs_register(real_, 1);
  }
  WatchedSqlite(const WatchedSqlite&) = delete;
  WatchedSqlite& operator=(const WatchedSqlite&) = delete;

 private:
  struct WatchedFile {
    sqlite3_file base;
    std::string* path;
    sqlite3_file* real() { return reinterpret_cast<sqlite3_file*>(this + 1); }
    static WatchedFile& Of(sqlite3_file* file) { return *reinterpret_cast<WatchedFile*>(file); }
  };

  static int Ask(const Call& call) { return calls_->watcher ? calls_->watcher(call) : 0; }
  static int Code(int error, int otherwise) { return error == ENOSPC ? SQLITE_FULL : otherwise; }

  static int Open(sqlite3_vfs*, const char* name, sqlite3_file* file, int flags, int* out_flags) {
    file->pMethods = nullptr;
    auto& watched = WatchedFile::Of(file);
    const bool creates = (flags & SQLITE_OPEN_CREATE) != 0;
    if (Ask({CallKind::kOpen, name != nullptr ? name : "", 0, 0, nullptr, creates}) > 0) return SQLITE_CANTOPEN;
    const int code = real_->xOpen(real_, name, watched.real(), flags, out_flags);
    if (code != SQLITE_OK) return code;
    watched.path = new std::string(name != nullptr ? name : "");
    file->pMethods = &kMethods;
    return SQLITE_OK;
  }
  static int Delete(sqlite3_vfs*, const char* name, int sync) {
    if (Ask({CallKind::kUnlink, name}) > 0) return SQLITE_IOERR_DELETE;
    return real_->xDelete(real_, name, sync);
  }
  static int Close(sqlite3_file* file) {
    auto& watched = WatchedFile::Of(file);
    delete watched.path;
    return watched.real()->pMethods->xClose(watched.real());
  }
  static int Read(sqlite3_file* file, void* to, int bytes, sqlite3_int64 offset) {
    auto& watched = WatchedFile::Of(file);
    if (Ask({CallKind::kRead, *watched.path, static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes)}) > 0)
      return SQLITE_IOERR_READ;
    return watched.real()->pMethods->xRead(watched.real(), to, bytes, offset);
  }
  static int Write(sqlite3_file* file, const void* from, int bytes, sqlite3_int64 offset) {
    auto& watched = WatchedFile::Of(file);
    const int verdict =
        Ask({CallKind::kWrite, *watched.path, static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes), from});
    if (verdict > 0) return Code(verdict, SQLITE_IOERR_WRITE);
    if (verdict == kShort) {
      watched.real()->pMethods->xWrite(watched.real(), from, bytes / 2, offset);
      return SQLITE_FULL;
    }
    return watched.real()->pMethods->xWrite(watched.real(), from, bytes, offset);
  }
  static int Truncate(sqlite3_file* file, sqlite3_int64 bytes) {
    auto& watched = WatchedFile::Of(file);
    if (Ask({CallKind::kTruncate, *watched.path, 0, static_cast<uint64_t>(bytes)}) > 0) return SQLITE_IOERR_TRUNCATE;
    return watched.real()->pMethods->xTruncate(watched.real(), bytes);
  }
  static int Sync(sqlite3_file* file, int flags) {
    auto& watched = WatchedFile::Of(file);
    if (const int verdict = Ask({CallKind::kSync, *watched.path}); verdict > 0)
      return Code(verdict, SQLITE_IOERR_FSYNC);
    return watched.real()->pMethods->xSync(watched.real(), flags);
  }

  template <auto Method, typename... Args>
  static auto Pass(sqlite3_file* file, Args... args) {
    auto* real = WatchedFile::Of(file).real();
    return (real->pMethods->*Method)(real, args...);
  }

  static const sqlite3_io_methods kMethods;
  static inline sqlite3_vfs* real_ = nullptr;
  static inline WatchedCalls* calls_ = nullptr;
  sqlite3_vfs vfs_{};
};

inline const sqlite3_io_methods WatchedSqlite::kMethods = {
    3,
    Close,
    Read,
    Write,
    Truncate,
    Sync,
    [](sqlite3_file* f, sqlite3_int64* n) { return Pass<&sqlite3_io_methods::xFileSize>(f, n); },
    [](sqlite3_file* f, int kind) { return Pass<&sqlite3_io_methods::xLock>(f, kind); },
    [](sqlite3_file* f, int kind) { return Pass<&sqlite3_io_methods::xUnlock>(f, kind); },
    [](sqlite3_file* f, int* out) { return Pass<&sqlite3_io_methods::xCheckReservedLock>(f, out); },
    [](sqlite3_file* f, int op, void* arg) { return Pass<&sqlite3_io_methods::xFileControl>(f, op, arg); },
    [](sqlite3_file* f) { return Pass<&sqlite3_io_methods::xSectorSize>(f); },
    [](sqlite3_file* f) { return Pass<&sqlite3_io_methods::xDeviceCharacteristics>(f); },
    [](sqlite3_file* f, int page, int n, int extend, void volatile** out) {
      return Pass<&sqlite3_io_methods::xShmMap>(f, page, n, extend, out);
    },
    [](sqlite3_file* f, int offset, int n, int flags) {
      return Pass<&sqlite3_io_methods::xShmLock>(f, offset, n, flags);
    },
    [](sqlite3_file* f) { Pass<&sqlite3_io_methods::xShmBarrier>(f); },
    [](sqlite3_file* f, int remove) { return Pass<&sqlite3_io_methods::xShmUnmap>(f, remove); },
    [](sqlite3_file*, sqlite3_int64, int, void** out) {
      *out = nullptr;  // no mapping: reads are seen
      return SQLITE_OK;
    },
    [](sqlite3_file*, sqlite3_int64, void*) { return SQLITE_OK; },
};

}  // namespace kvcell::test
