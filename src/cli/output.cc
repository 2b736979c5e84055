#include "cli/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/text_file.h"
#include "cli/units.h"

namespace kvcell::cli {
namespace {

// Characters, not bytes: continuation bytes take no column.
size_t Width(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

std::string Padded(const std::string& text, size_t width, bool right) {
  const size_t have = Width(text);
  const std::string space(width > have ? width - have : 0, ' ');
  return right ? space + text : text + space;
}

}  // namespace

void Write(std::FILE* stream, std::string_view text) { std::fwrite(text.data(), 1, text.size(), stream); }

bool IsTerminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

void PrintJson(const Json& object) {
  Write(stdout, object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  std::fflush(stdout);  // FinishOutput tells when it failed
}

Status WriteJsonFile(const std::string& path, const Json& object) {
  return ReplaceTextFile(path, object.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void PrintError(const Status& status) { Print(stderr, "kvcell: {}\n", status.message()); }
void PrintWarning(std::string_view message) { Print(stderr, "kvcell: warning: {}\n", message); }

void Table::Print(std::FILE* stream) const {
  if (!IsTerminal(stream)) {
    for (const auto& row : rows_) Write(stream, fmt::format("{}\n", fmt::join(row, "\t")));
    return;
  }
  std::vector<size_t> widths;
  for (const std::string& title : header_) widths.push_back(Width(title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  const auto line = [&](const std::vector<std::string>& row) {
    std::string text;
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      if (i > 0) text += "  ";
      text += Padded(row[i], widths[i], std::find(right_.begin(), right_.end(), i) != right_.end());
    }
    text.erase(text.find_last_not_of(' ') + 1);
    Write(stream, text + "\n");
  };
  const bool titled =
      std::any_of(header_.begin(), header_.end(), [](const std::string& title) { return !title.empty(); });
  if (titled) line(header_);
  for (const auto& row : rows_) line(row);
}

Progress::Progress(std::string what, bool wanted)
    : what_(std::move(what)), active_(wanted && IsTerminal(stderr)), start_(std::chrono::steady_clock::now()) {}

void Progress::Show(int64_t done, int64_t total) {
  if (!active_ || total <= 0) return;
  constexpr int64_t kCells = 24;
  const int64_t filled = kCells * done / total;
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  std::string rest;
  if (done > 0 && done < total) {
    rest = fmt::format(", {} left",
                       FormatMilliseconds(ms * static_cast<double>(total - done) / static_cast<double>(done)));
  }
  Print(stderr, "\r{} [{:=<{}}{:<{}}] {} of {}{}\033[K", what_, "", filled, "", kCells - filled, FormatCount(done),
        FormatCount(total), rest);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::Clear() {
  if (!drawn_) return;
  Print(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

void PrepareStandardStreams() {
  for (int fd = 0; fd <= 2; ++fd) {
    // Read-only for standard output: a write to a stream that was closed fails, as it should.
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
  }
  std::signal(SIGPIPE, SIG_IGN);
}

bool OutputFailed() { return std::ferror(stdout) != 0; }

int FinishOutput(int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && !OutputFailed()) return code;
  const int reason = errno;
  struct pollfd output = {.fd = STDOUT_FILENO, .events = 0, .revents = 0};
  const bool reader_left = poll(&output, 1, 0) > 0 && (output.revents & POLLERR) != 0;
  if (reader_left) return code == 0 ? 128 + SIGPIPE : code;
  Print(stderr, "kvcell: standard output can't be written{}{}\n", reason != 0 ? ": " : "",
        reason != 0 ? std::strerror(reason) : "");
  return code == 0 ? 1 : code;
}

int ExitCode(const Status& status) {
  if (status.ok()) return 0;
  return status.code() == StatusCode::kInvalidArgument ? 2 : 1;
}

int Failed(const Status& status) {
  PrintError(status);
  return ExitCode(status);
}

}  // namespace kvcell::cli
