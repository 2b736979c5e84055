#include "base/text_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

namespace kvcell {
namespace {

struct FileCloser {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};

}  // namespace

Result<std::string> ReadTextFile(const std::string& path, size_t most) {
  const std::unique_ptr<std::FILE, FileCloser> file(path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
  if (file == nullptr) {
    return Fail(errno == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError,
                fmt::format("{}: the file can't be opened: {}", path, std::strerror(errno)));
  }
  std::string text;
  std::string buffer(size_t{1} << 16, '\0');
  size_t n = 0;
  while ((n = std::fread(buffer.data(), 1, buffer.size(), file.get())) > 0) {
    if (text.size() + n > most) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("{}: the text is larger than {} MiB; is it the right file?", path, most >> 20));
    }
    text.append(buffer, 0, n);
  }
  if (std::ferror(file.get()) != 0) {
    return Fail(StatusCode::kIoError, fmt::format("{}: the file can't be read: {}", path, std::strerror(errno)));
  }
  return text;
}

Status ReplaceTextFile(const std::string& path, const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code none;
  const bool special = fs::exists(path, none) && !fs::is_regular_file(path, none);
  const fs::path followed = fs::canonical(path, none);
  const std::string target = none ? path : followed.string();
  const std::string temporary = special ? path : fmt::format("{}.{}.tmp", target, ::getpid());
  std::FILE* const file = std::fopen(temporary.c_str(), "wb");
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (written && closed && (special || std::rename(temporary.c_str(), target.c_str()) == 0)) return OkStatus();
  Status status(StatusCode::kIoError, fmt::format("{}: the file can't be written: {}", path, std::strerror(errno)));
  if (!special) (void)std::remove(temporary.c_str());
  return status;
}

}  // namespace kvcell
