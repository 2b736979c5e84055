#include "store/sqlite.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

namespace kvcell {
namespace {

std::string FileUri(const std::string& path) {
  std::string uri = "file:";
  for (const char c : path) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '/' || c == '_';
    uri += plain ? std::string(1, c) : fmt::format("%{:02x}", static_cast<uint8_t>(c));
  }
  return uri;
}

}  // namespace

Result<std::unique_ptr<Database>> Database::Open(const std::string& path, bool read_only) {
  auto database = OpenUri(path, path, read_only);
  if (!read_only || !database) return database;
  const Status status = (*database)->Run("SELECT 1 FROM sqlite_schema");
  if (status.ok()) return database;
  // Where SQLite may not make its shared memory, a file without a log can still be read, as one that nobody writes.
  std::error_code none;
  const auto log_bytes = std::filesystem::file_size(path + "-wal", none);
  if (!none && log_bytes > 0) return Fail(status);
  return OpenUri(path, FileUri(path) + "?immutable=1", read_only);
}

Result<std::unique_ptr<Database>> Database::OpenUri(const std::string& path, const std::string& uri, bool read_only) {
  std::unique_ptr<Database> database(new Database(path));
  const int flags = (read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE) | SQLITE_OPEN_NOMUTEX |
                    SQLITE_OPEN_NOFOLLOW | (uri == path ? 0 : SQLITE_OPEN_URI);
  const int code = sqlite3_open_v2(uri.c_str(), &database->handle_, flags, nullptr);
  if (code != SQLITE_OK) return Fail(database->Failed(code));
  sqlite3* handle = database->handle_;
  sqlite3_extended_result_codes(handle, 1);
  sqlite3_busy_timeout(handle, kBusyMilliseconds);
  // The schema may have been written by someone else: nothing in it may run.
  sqlite3_db_config(handle, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
  sqlite3_db_config(handle, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, nullptr);
  sqlite3_db_config(handle, SQLITE_DBCONFIG_ENABLE_VIEW, 0, nullptr);
  sqlite3_db_config(handle, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
  KVCELL_FAIL_IF_ERROR(database->Run("PRAGMA cell_size_check=ON; PRAGMA mmap_size=0; PRAGMA foreign_keys=ON;"));
  return database;
}

Database::~Database() {
  for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  if (handle_ != nullptr) sqlite3_close_v2(handle_);
}

Status Database::Run(const char* sql) {
  const int code = sqlite3_exec(handle_, sql, nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? OkStatus() : Failed(code);
}

Status Database::Failed(int code) const {
  const std::string reason = handle_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(handle_);
  const auto status = [&](StatusCode as, std::string_view advice) {
    return Status(as, fmt::format("index {}: {}; {}", path_, reason, advice));
  };
  switch (code & 0xff) {
    case SQLITE_FULL:
      return status(StatusCode::kNoSpace, "free some space, what was stored before is intact");
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return status(StatusCode::kBusy, "another process is writing, try again");
    case SQLITE_PERM:
    case SQLITE_READONLY:
    case SQLITE_AUTH:
      return status(StatusCode::kPermission, "check the owner and mode of the directory and its files");
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_MISMATCH:
    case SQLITE_ERROR:  // of a fixed statement: the schema isn't ours
      return status(StatusCode::kCorruption,
                    "the file is damaged and left as it is: move the store away and start a new one");
    case SQLITE_CANTOPEN:
      return status(StatusCode::kIoError, "check that it is a regular file and readable");
    case SQLITE_NOMEM:
      return status(StatusCode::kIoError, "there is too little memory");
    case SQLITE_IOERR:
      if (code == SQLITE_IOERR_CORRUPTFS) return status(StatusCode::kCorruption, "check the file system");
      return status(StatusCode::kIoError,
                    "check that the disk works and is not full; `kvcell store verify` tells what is intact");
    case SQLITE_TOOBIG:
      return status(StatusCode::kInvalidArgument, "the session's exact part is too large to store");
    default:
      return status(StatusCode::kInternal, "please report this");
  }
}

Status Database::CheckInPlace() {
  int moved = 0;
  if (sqlite3_file_control(handle_, "main", SQLITE_FCNTL_HAS_MOVED, &moved) != SQLITE_OK || moved == 0)
    return OkStatus();
  return Status(
      StatusCode::kIoError,
      fmt::format("index {}: the file was removed or replaced while it was in use, so nothing can be stored any "
                  "more; start the process again",
                  path_));
}

Result<sqlite3_stmt*> Database::Prepared(const char* sql) {
  if (const auto found = statements_.find(sql); found != statements_.end()) return found->second;
  sqlite3_stmt* statement = nullptr;
  const int code = sqlite3_prepare_v3(handle_, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
  if (code != SQLITE_OK) return Fail(Failed(code));
  statements_.emplace(sql, statement);
  return statement;
}

Query::Query(Database& database, const char* sql) : database_(database) {
  if (auto statement = database.Prepared(sql)) {
    statement_ = *statement;
  } else {
    error_ = statement.error();
  }
}

Query::~Query() { Reset(); }

void Query::Reset() {
  if (statement_ != nullptr) {
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
  }
  bound_ = 0;
}

Query& Query::Int(int64_t value) {
  if (error_.ok()) sqlite3_bind_int64(statement_, ++bound_, value);
  return *this;
}

Query& Query::Null() {
  if (error_.ok()) sqlite3_bind_null(statement_, ++bound_);
  return *this;
}

Query& Query::Blob(std::span<const std::byte> bytes) {
  if (!error_.ok()) return *this;
  const void* from = bytes.empty() ? "" : static_cast<const void*>(bytes.data());  // a null pointer would bind NULL
  const int code = sqlite3_bind_blob64(statement_, ++bound_, from, bytes.size(), SQLITE_STATIC);
  if (code != SQLITE_OK) error_ = database_.Failed(code);
  return *this;
}

Query& Query::Text(std::string_view text) {
  if (!error_.ok()) return *this;
  const int code = sqlite3_bind_text64(statement_, ++bound_, text.empty() ? "" : text.data(), text.size(),
                                       SQLITE_STATIC, SQLITE_UTF8);
  if (code != SQLITE_OK) error_ = database_.Failed(code);
  return *this;
}

Result<bool> Query::Step() {
  if (!error_.ok()) return Fail(error_);
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  return Fail(database_.Failed(code));
}

Status Query::Run() {
  for (;;) {
    const auto row = Step();
    if (!row) return row.error();
    if (!*row) {
      Reset();
      return OkStatus();
    }
  }
}

std::span<const std::byte> Query::GetBlob(int column) const {
  const void* bytes = sqlite3_column_blob(statement_, column);
  const int n = sqlite3_column_bytes(statement_, column);
  if (bytes == nullptr || n <= 0) return {};
  return {static_cast<const std::byte*>(bytes), static_cast<size_t>(n)};
}

std::string Query::GetText(int column) const {
  const auto bytes = GetBlob(column);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Transaction::~Transaction() {
  if (open_) (void)database_.Run("ROLLBACK");
}

Status Transaction::Begin(Kind kind) {
  KVCELL_RETURN_IF_ERROR(database_.Run(kind == Kind::kWrite ? "BEGIN IMMEDIATE" : "BEGIN"));
  open_ = true;
  return kind == Kind::kWrite ? database_.CheckInPlace() : OkStatus();
}

Status Transaction::Commit() {
  KVCELL_RETURN_IF_ERROR(database_.Run("COMMIT"));
  open_ = false;
  return OkStatus();
}

}  // namespace kvcell
