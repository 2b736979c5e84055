// Reads the header of a GGUF file without trusting a byte of it, before ggml or libllama touch the file: they may
// assert.
#pragma once

#include <ggml.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

// Value types of GGUF metadata, as numbered in the file.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// One metadata value, as it lies in the file.
struct GgufValue {
  GgufType type = GgufType::kUint8;
  GgufType element = GgufType::kUint8;  // of an array
  uint64_t count = 1;                   // elements of an array
  std::span<const std::byte> data;      // of the value, or of the array's elements
  std::span<const std::byte> entry;     // key, type and value: what a copy of this entry consists of
};

struct GgufTensor {
  std::string name;
  std::array<int64_t, 4> ne{1, 1, 1, 1};  // the first dimension is the one that lies contiguous
  int n_dims = 1;
  ggml_type type = GGML_TYPE_F32;
  std::span<const std::byte> data;
  int64_t elements() const { return ne[0] * ne[1] * ne[2] * ne[3]; }
};

enum class GgufNeed { kOptional, kRequired };

// A header that passed all checks: every span lies inside the file, every name is there once, every tensor's data is
// aligned and whole. Keeps pointers into the bytes it was read from; thread-safe.
class GgufHeader {
 public:
  // kCorruption naming the field (also `wrong byte order`), kUnsupported for a version or a tensor type that kvcell has
  // not. O(size of the header); allocates only what the bytes present can fill.
  static Result<GgufHeader> Read(std::span<const std::byte> file, const std::string& path);

  const std::string& path() const { return path_; }
  uint32_t alignment() const { return alignment_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(std::string_view name) const;
  // The values of an f32 tensor of n elements; empty where the file has none or has another of that name.
  std::vector<float> F32Values(std::string_view name, size_t n) const;
  // Keys in file order.
  const std::vector<std::string>& keys() const { return keys_; }
  const GgufValue* Find(std::string_view key) const;

  // Typed reads. An absent optional key leaves `out` as it is; a wrong type or a value outside [low, high] is
  // kCorruption.
  Status Int(std::string_view key, int64_t low, int64_t high, GgufNeed need, int64_t* out) const;
  Status Float(std::string_view key, float low, float high, GgufNeed need, float* out) const;
  Status String(std::string_view key, GgufNeed need, std::string* out) const;
  // A number for all layers, or an array with one for each.
  Status IntPerLayer(std::string_view key, int64_t n_layers, int64_t low, int64_t high, GgufNeed need,
                     std::vector<int32_t>* out) const;
  // The strings of an array; views into the file.
  Status Strings(std::string_view key, GgufNeed need, std::vector<std::string_view>* out) const;

  // kCorruption with one sentence about a field of this file.
  Status Bad(std::string_view what) const;

 private:
  std::string path_;
  uint32_t alignment_ = 32;
  std::vector<std::string> keys_;
  std::unordered_map<std::string, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string, size_t> tensor_index_;

  friend class GgufReader;
};

}  // namespace kvcell
