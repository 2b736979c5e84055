// Which process writes a session: a file under locks/ whose name gives nothing away, locked while the process lives.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/file.h"
#include "kvcell/status.h"
#include "store/segment_format.h"
#include "store/store.h"

namespace kvcell {

// Thread-safe. Outlives the locks that it gives.
class SessionLocks {
 public:
  // `row_name` gives what a session is found by; it tells nothing of the name in an encrypted store.
  SessionLocks(SystemCalls& calls, File directory, StoreId store,
               std::function<std::string(const std::string&)> row_name)
      : calls_(calls), directory_(std::move(directory)), store_(store), row_name_(std::move(row_name)) {}

  // kBusy naming the process that holds the session, be it this one.
  Result<std::unique_ptr<Store::SessionLock>> Lock(const std::string& name);
  // The same by what the session is found by, whatever its namespace; `name` is for people.
  Result<std::unique_ptr<Store::SessionLock>> LockRow(const std::string& row_name, const std::string& name);
  // Whether this object gave the lock of that name and it is still held.
  bool Holds(const std::string& name) const;

 private:
  class Held;
  std::string FileName(const std::string& row_name) const;

  SystemCalls& calls_;
  const File directory_;
  const StoreId store_;
  const std::function<std::string(const std::string&)> row_name_;
  mutable std::mutex mutex_;
  std::set<std::string> held_;  // row names
};

// Takes an exclusive lock on the whole of an open lock file, or says which process has it (`what` is "session 'x'").
// The pid is written into the file.
Status LockWithPid(const File& file, const std::string& what);

}  // namespace kvcell
