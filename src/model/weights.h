// A model file mapped into memory, and its tensors by name with their shapes checked.
#pragma once

#include <ggml.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "kvcell/status.h"
#include "model/gguf_check.h"

namespace kvcell {

// The whole file, read-only. A file that shrinks while it is mapped ends the process at the next touch: replace model
// files by renaming over them, never in place.
class WeightsFile {
 public:
  // kNotFound, kPermission, kIoError; kInvalidArgument for what is not a regular file.
  static Result<WeightsFile> Open(const std::string& path);
  WeightsFile(WeightsFile&& other) noexcept;
  WeightsFile& operator=(WeightsFile&&) = delete;
  ~WeightsFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  const struct stat& info() const { return info_; }  // when it was opened

 private:
  WeightsFile(std::span<const std::byte> bytes, const struct stat& info) : bytes_(bytes), info_(info) {}
  std::span<const std::byte> bytes_;
  struct stat info_;
};

// Hands out tensors of a checked file as ggml tensors over the mapping, without copying but for Multiply. The first
// problem is kept for status(), so that an architecture can list what it needs without a check at each line; after a
// problem null is returned.
class Weights {
 public:
  explicit Weights(const GgufHeader& header);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  ggml_tensor* Matrix(std::string_view name, int64_t in, int64_t out);
  ggml_tensor* OptionalMatrix(std::string_view name, int64_t in, int64_t out);
  // Norms, biases and frequency factors: always f32.
  ggml_tensor* Vector(std::string_view name, int64_t n);
  ggml_tensor* OptionalVector(std::string_view name, int64_t n);

  // Multiplies a vector from here by `factors`, of its size, in a copy that lives as long as this. Does nothing to
  // null.
  void Multiply(ggml_tensor* vector, std::span<const float> factors);

  // kCorruption (missing, wrong shape) or kUnsupported (type that ggml can't multiply; a tensor that the architecture
  // did not ask for, which would silently be left out of the computation).
  Status Finish();

 private:
  ggml_tensor* Take(std::string_view name, bool required, int64_t ne0, int64_t ne1, bool vector);
  void Fail(StatusCode code, std::string_view what);

  const GgufHeader& header_;
  ggml_context* context_ = nullptr;
  std::unordered_set<std::string> taken_;
  std::vector<std::unique_ptr<float[]>> changed_;
  Status status_;
};

}  // namespace kvcell
