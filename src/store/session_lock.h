// Which process writes a session: a file under locks/ whose name gives nothing away, locked while the process lives.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/file.h"
#include "kvcell/status.h"
#include "store/segment_format.h"
#include "store/store.h"

namespace kvcell {

// Thread-safe. Outlives the locks that it gives.
class SessionLocks {
 public:
  SessionLocks(SystemCalls& calls, File directory, StoreId store)
      : calls_(calls), directory_(std::move(directory)), store_(store) {}

  // kBusy naming the process that holds the session, be it this one.
  Result<std::unique_ptr<Store::SessionLock>> Lock(const std::string& name);
  // Whether this object gave the lock of that name and it is still held.
  bool Holds(const std::string& name) const;

 private:
  class Held;
  std::string FileName(const std::string& name) const;

  SystemCalls& calls_;
  const File directory_;
  const StoreId store_;
  mutable std::mutex mutex_;
  std::set<std::string> held_;
};

// Takes an exclusive lock on the whole of an open lock file, or says which process has it (`what` is "session 'x'").
// The pid is written into the file.
Status LockWithPid(const File& file, const std::string& what);

}  // namespace kvcell
