#include "kvcell/status.h"

namespace kvcell {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kMismatch:
      return "mismatch";
    case StatusCode::kCorruption:
      return "corruption";
    case StatusCode::kOutOfBudget:
      return "out_of_budget";
    case StatusCode::kNoSpace:
      return "no_space";
    case StatusCode::kIoError:
      return "io_error";
    case StatusCode::kPermission:
      return "permission";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kBusy:
      return "busy";
    case StatusCode::kCancelled:
      return "cancelled";
    case StatusCode::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace kvcell
