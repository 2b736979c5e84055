// Builds GGUF files byte by byte, so that tests can lie in any field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf_check.h"

namespace kvcell {

class GgufBytes {
 public:
  template <typename T>
  GgufBytes& Number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  GgufBytes& Raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  GgufBytes& Text(std::string_view text) { return Number(uint64_t{text.size()}).Raw(text); }
  GgufBytes& Header(uint64_t n_tensors, uint64_t n_keys, uint32_t version = 3) {
    return Raw("GGUF").Number(version).Number(n_tensors).Number(n_keys);
  }
  GgufBytes& Key(std::string_view key, GgufType type) { return Text(key).Number(static_cast<uint32_t>(type)); }
  GgufBytes& Uint(std::string_view key, uint32_t value) { return Key(key, GgufType::kUint32).Number(value); }
  GgufBytes& Float(std::string_view key, float value) { return Key(key, GgufType::kFloat32).Number(value); }
  GgufBytes& String(std::string_view key, std::string_view value) { return Key(key, GgufType::kString).Text(value); }
  GgufBytes& Array(std::string_view key, GgufType element, uint64_t count) {
    return Key(key, GgufType::kArray).Number(static_cast<uint32_t>(element)).Number(count);
  }
  GgufBytes& Tensor(std::string_view name, std::initializer_list<uint64_t> dims, uint32_t type, uint64_t offset) {
    Text(name).Number(static_cast<uint32_t>(dims.size()));
    for (const uint64_t n : dims) Number(n);
    return Number(type).Number(offset);
  }
  // Data of tensors: padding to the alignment, then zeros.
  GgufBytes& Data(size_t bytes, size_t alignment = 32) {
    bytes_.resize((bytes_.size() + alignment - 1) / alignment * alignment + bytes, '\0');
    return *this;
  }

  const std::string& str() const { return bytes_; }
  Result<GgufHeader> Read() const { return GgufHeader::Read(std::as_bytes(std::span(bytes_)), "test.gguf"); }

 private:
  std::string bytes_;
};

}  // namespace kvcell
