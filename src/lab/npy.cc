#include "lab/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "codec/f16.h"

namespace kvcell {
namespace {

constexpr std::string_view kMagic("\x93NUMPY\x01\x00", 8);

std::string Header(const std::string& descr, const std::vector<int64_t>& shape) {
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr,
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // Magic, two bytes of length and the header together are a multiple of 64, with a newline at the end.
  const size_t used = kMagic.size() + 2 + text.size() + 1;
  text.append((64 - used % 64) % 64, ' ').push_back('\n');
  std::string out(kMagic);
  out.push_back(static_cast<char>(text.size() & 255));
  out.push_back(static_cast<char>(text.size() >> 8));
  return out + text;
}

Status WriteFile(const std::string& path, const std::string& header, const void* bytes, size_t size) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  file.close();
  return file ? OkStatus() : Status(StatusCode::kIoError, fmt::format("can't write {}", path));
}

// What stands between `key': ` and the next of `ends`.
std::string_view Field(std::string_view header, std::string_view key, std::string_view ends) {
  const size_t at = header.find(key);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = header.substr(at + key.size());
  return rest.substr(0, rest.find_first_of(ends));
}

}  // namespace

Status WriteNpy(const std::string& path, const std::string& descr, const std::vector<int64_t>& shape,
                std::span<const float> values) {
  if (descr == "<f4") return WriteFile(path, Header(descr, shape), values.data(), values.size_bytes());
  std::vector<uint16_t> half(values.size());
  for (size_t i = 0; i < half.size(); ++i) half[i] = F32ToF16(values[i]);
  return WriteFile(path, Header("<f2", shape), half.data(), half.size() * 2);
}

Status WriteNpy(const std::string& path, const std::vector<int64_t>& shape, std::span<const int64_t> values) {
  return WriteFile(path, Header("<i8", shape), values.data(), values.size_bytes());
}

Result<NpyArray> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Fail(StatusCode::kNotFound, fmt::format("can't read {}", path));
  const auto damaged = [&](std::string_view what) {
    return Fail(StatusCode::kCorruption, fmt::format("{}: {}; export it again", path, what));
  };
  char start[10] = {};
  file.read(start, sizeof(start));
  if (!file || std::string_view(start, 8) != kMagic) return damaged("not a .npy file of version 1.0");
  std::string header(static_cast<size_t>(static_cast<uint8_t>(start[8]) | static_cast<uint8_t>(start[9]) << 8), ' ');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  if (!file) return damaged("ends within its header");
  const std::string_view descr = Field(header, "'descr': '", "'");
  if (descr != "<f2" && descr != "<f4") return damaged("its type is neither <f2 nor <f4");
  if (Field(header, "'fortran_order': ", ",") != "False") return damaged("it is not in C order");
  NpyArray array;
  constexpr int64_t kMost = int64_t{1} << 36;
  int64_t n = 1;
  std::string_view shape = Field(header, "'shape': (", ")");
  while (!shape.empty()) {
    const std::string_view part = shape.substr(0, shape.find(','));
    shape.remove_prefix(std::min(shape.size(), part.size() + 1));
    int64_t dim = 0;
    bool digits = false;
    for (const char c : part) {
      if (c == ' ') continue;
      if (c < '0' || c > '9' || dim > kMost) return damaged("its shape is no list of sizes");
      dim = dim * 10 + (c - '0');
      digits = true;
    }
    if (!digits) continue;
    if (dim < 1 || n > kMost / dim) return damaged("its shape is empty or beyond any use");
    n *= dim;
    array.shape.push_back(dim);
  }
  const auto width = static_cast<size_t>(descr == "<f2" ? 2 : 4);
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error || bytes != sizeof(start) + header.size() + static_cast<uint64_t>(n) * width) {
    return damaged("its size is not what its shape says");
  }
  array.values.resize(static_cast<size_t>(n));
  if (width == 4) {
    file.read(reinterpret_cast<char*>(array.values.data()), static_cast<std::streamsize>(array.values.size() * 4));
  } else {
    std::vector<uint16_t> half(array.values.size());
    file.read(reinterpret_cast<char*>(half.data()), static_cast<std::streamsize>(half.size() * 2));
    for (size_t i = 0; i < half.size(); ++i) array.values[i] = F16ToF32(half[i]);
  }
  if (!file) return damaged("ends early");
  return array;
}

}  // namespace kvcell
