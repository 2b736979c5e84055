// Little-endian records in memory: a writer that appends and a reader that never passes the end, for rows, headers and
// files.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvcell {

static_assert(std::endian::native == std::endian::little, "stored integers are little-endian and used as they lie");

class ByteWriter {
 public:
  template <std::integral T>
  ByteWriter& Put(T value) {
    return Raw(std::as_bytes(std::span(&value, 1)));
  }
  ByteWriter& Raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  // With its length before it, so that no two different lists of fields give the same bytes.
  ByteWriter& Sized(std::span<const std::byte> bytes) { return Put(uint64_t{bytes.size()}).Raw(bytes); }
  ByteWriter& Sized(std::string_view text) { return Sized(std::as_bytes(std::span(text))); }
  ByteWriter& PadTo(size_t multiple) {
    bytes_.resize((bytes_.size() + multiple - 1) / multiple * multiple);
    return *this;
  }

  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// After a read past the end every further read gives zeros and ok() is false.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && rest_.empty(); }
  size_t left() const { return rest_.size(); }

  template <std::integral T>
  T Take() {
    T value{};
    const auto from = Raw(sizeof(T));
    if (!from.empty()) std::memcpy(&value, from.data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> Raw(uint64_t bytes) {
    if (!ok_ || bytes > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const auto taken = rest_.first(static_cast<size_t>(bytes));
    rest_ = rest_.subspan(static_cast<size_t>(bytes));
    return taken;
  }
  std::span<const std::byte> Sized() { return Raw(Take<uint64_t>()); }
  std::string Text() {
    const auto bytes = Sized();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

 private:
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// Sums and products of sizes that come from outside; nothing where 64 bits don't hold the result.
inline std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}
inline std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

inline constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace kvcell
