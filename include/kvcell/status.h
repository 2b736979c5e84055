// Errors as values: a closed set of codes and one sentence that says what happened and what to do.
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace kvcell {

// What went wrong, as a closed set: callers switch on it, exit codes and tests rely on the numbers. After any of these
// the process lives on and nothing that was stored is lost; the comment says what is still usable.
enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,  // the request itself is wrong (unknown codec, bad name); nothing was changed
  kNotFound = 2,         // no such file, session or block; nothing was changed
  kMismatch = 3,         // stored bytes belong to another model, codec or format; they are intact
  kCorruption = 4,       // bytes failed a check; what lies before them is still sound
  kOutOfBudget = 5,      // RAM or file budget would be passed; nothing was allocated
  kNoSpace = 6,          // the disk is full; what was stored before is intact
  kIoError = 7,          // the system refused a read or write; what was stored before is intact
  kPermission = 8,       // the system denied access; nothing was changed
  kUnsupported = 9,      // a valid request that this build or machine can't meet; nothing was changed
  kBusy = 10,            // another process or step holds it; try again or fork
  kCancelled = 11,       // stopped on request; what was complete before is intact
  kInternal = 12,        // a fault of kvcell itself: please report it
};

// The code's stable name, as `--json` prints it, e.g. "out_of_budget".
std::string_view StatusCodeName(StatusCode code);

// Outcome of an operation. Cheap when ok. Thread-compatible.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // One sentence without a final newline: the object (file, field), what is wrong, what to do.
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }

// A value or the Status that says why there is none (never an ok Status).
template <typename T>
using Result = tl::expected<T, Status>;

inline tl::unexpected<Status> Fail(StatusCode code, std::string message) {
  return tl::unexpected<Status>(Status(code, std::move(message)));
}
inline tl::unexpected<Status> Fail(Status status) { return tl::unexpected<Status>(std::move(status)); }

}  // namespace kvcell

// Returns early with the Status of `expr` (a Status) unless it is ok; works in functions that return Status.
#define KVCELL_RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                         \
    if (::kvcell::Status kvcell_status_ = (expr); !kvcell_status_.ok()) return kvcell_status_; \
  } while (false)

// The same for functions that return Result<T>.
#define KVCELL_FAIL_IF_ERROR(expr)                                      \
  do {                                                                  \
    if (::kvcell::Status kvcell_status_ = (expr); !kvcell_status_.ok()) \
      return ::kvcell::Fail(std::move(kvcell_status_));                 \
  } while (false)
