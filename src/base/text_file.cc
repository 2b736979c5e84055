#include "base/text_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
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

}  // namespace kvcell
