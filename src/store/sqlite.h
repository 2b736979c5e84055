// A thin door to SQLite: connections, cached statements and transactions whose errors are Statuses that name the file.
#pragma once

#include <sqlite3.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kvcell/status.h"

namespace kvcell {

inline constexpr int kBusyMilliseconds = 10'000;  // a writer waits for others no longer

class Query;

// One connection. Thread-compatible: the owner serialises.
class Database {
 public:
  // Opens the file at `path`, which exists (its mode is inherited by SQLite's other files). No symbolic link is
  // followed.
  static Result<std::unique_ptr<Database>> Open(const std::string& path, bool read_only);
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  const std::string& path() const { return path_; }
  sqlite3* handle() { return handle_; }
  // Statements without parameters and rows, several separated by ';'.
  Status Run(const char* sql);
  // kIoError where `path` names another file by now, or none: what is written would be lost without a word.
  Status CheckInPlace();
  // What SQLite's result code means: kNoSpace, kBusy, kPermission, kCorruption, kIoError.
  Status Failed(int code) const;

 private:
  friend class Query;
  explicit Database(std::string path) : path_(std::move(path)) {}
  static Result<std::unique_ptr<Database>> OpenUri(const std::string& path, const std::string& uri, bool read_only);
  Result<sqlite3_stmt*> Prepared(const char* sql);

  std::string path_;
  sqlite3* handle_ = nullptr;
  std::map<std::string_view, sqlite3_stmt*> statements_;  // by text: literals that live for ever
};

// A prepared statement in use; gives it back when it goes out of scope. `sql` is a literal. Blobs and texts are bound
// without a copy: they outlive the Query. Errors of binding are reported by the next Step.
class Query {
 public:
  Query(Database& database, const char* sql);
  ~Query();
  Query(const Query&) = delete;
  Query& operator=(const Query&) = delete;

  Query& Int(int64_t value);
  Query& Int(uint64_t value) { return Int(static_cast<int64_t>(value)); }
  Query& Null();
  Query& Blob(std::span<const std::byte> bytes);
  Query& Text(std::string_view text);

  // True: a row is there to read. False: no more.
  Result<bool> Step();
  // Runs to the end.
  Status Run();
  // Ready to be bound and run again.
  void Reset();

  int64_t GetInt(int column) const { return sqlite3_column_int64(statement_, column); }
  uint64_t GetUint(int column) const { return static_cast<uint64_t>(GetInt(column)); }
  bool IsNull(int column) const { return sqlite3_column_type(statement_, column) == SQLITE_NULL; }
  // Valid until the next Step.
  std::span<const std::byte> GetBlob(int column) const;
  std::string GetText(int column) const;

 private:
  Database& database_;
  sqlite3_stmt* statement_ = nullptr;
  Status error_;
  int bound_ = 0;
};

// BEGIN ... COMMIT; rolled back unless Commit succeeded.
class Transaction {
 public:
  enum class Kind { kRead, kWrite };
  explicit Transaction(Database& database) : database_(database) {}
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  // A writer waits here for other writers (kBusy after ten seconds).
  Status Begin(Kind kind);
  Status Commit();

 private:
  Database& database_;
  bool open_ = false;
};

}  // namespace kvcell
