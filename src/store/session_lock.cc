#include "store/session_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <string_view>
#include <utility>

#include "base/checksum.h"
#include "store/bytes.h"

namespace kvcell {
namespace {

constexpr int kAttempts = 100;

// The number of the process that holds a lock, as it wrote it into the file: digits only, whatever lies there; may be
// "".
std::string HolderOf(const File& file) {
  std::array<std::byte, 20> bytes{};
  const auto n = file.ReadAt(0, bytes);
  std::string digits;
  for (size_t i = 0; n && i < *n; ++i) {
    const char c = static_cast<char>(bytes[i]);
    if (c < '0' || c > '9') break;
    digits += c;
  }
  return digits;
}

}  // namespace

Status LockWithPid(const File& file, const std::string& what) {
  const auto locked = file.TryLock(0, 1, LockKind::kExclusive);
  if (!locked) return locked.error();
  if (!*locked) {
    const std::string holder = HolderOf(file);
    const bool own = holder == std::to_string(::getpid());
    return Status(StatusCode::kBusy, fmt::format("{} is in use by {}: {}, or use another name", what,
                                                 own              ? "this process itself"
                                                 : holder.empty() ? "another process"
                                                                  : "process " + holder,
                                                 own ? "free what holds it" : "try again when it has ended"));
  }
  const std::string pid = fmt::format("{}\n", ::getpid());
  (void)file.Truncate(0);  // the lock is what counts; without a number (a full disk) others name no process
  (void)file.WriteAt(0, std::as_bytes(std::span(pid)));
  return OkStatus();
}

class SessionLocks::Held : public Store::SessionLock {
 public:
  Held(SessionLocks& locks, std::string name, File file)
      : locks_(locks), name_(std::move(name)), file_(std::move(file)) {}
  ~Held() override {
    // The name goes while it is still locked: whoever opened it before sees that and opens a new one.
    (void)locks_.calls_.UnlinkAt(locks_.directory_.fd(), locks_.FileName(name_).c_str());
    file_.Close();
    const std::lock_guard lock(locks_.mutex_);
    locks_.held_.erase(name_);
  }

 private:
  SessionLocks& locks_;
  const std::string name_;
  File file_;
};

std::string SessionLocks::FileName(const std::string& row_name) const {
  ByteWriter salted;
  salted.Raw(std::as_bytes(std::span(store_))).Sized(row_name);
  std::string text;
  for (const uint8_t byte : Checksum128(salted.bytes())) text += fmt::format("{:02x}", byte);
  return text;
}

Result<std::unique_ptr<Store::SessionLock>> SessionLocks::Lock(const std::string& name) {
  return LockRow(row_name_(name), name);
}

Result<std::unique_ptr<Store::SessionLock>> SessionLocks::LockRow(const std::string& row_name,
                                                                  const std::string& name) {
  const std::string file_name = FileName(row_name);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    auto file =
        File::Open(calls_, directory_.fd(), file_name, O_RDWR | O_CREAT, 0600, directory_.path() + "/" + file_name);
    if (!file) {
      if (file.error().code() == StatusCode::kNotFound) continue;  // went between finding and opening it
      return Fail(file.error());
    }
    KVCELL_FAIL_IF_ERROR(LockWithPid(*file, fmt::format("session '{}'", name)));
    const auto info = file->Stat();
    if (!info) return Fail(info.error());
    if (info->st_nlink == 0) continue;
    {
      const std::lock_guard lock(mutex_);
      held_.insert(row_name);
    }
    return std::make_unique<Held>(*this, row_name, std::move(*file));
  }
  return Fail(StatusCode::kBusy, fmt::format("session '{}' is taken and left by others all the time: try again", name));
}

bool SessionLocks::Holds(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return held_.contains(row_name_(name));
}

}  // namespace kvcell
