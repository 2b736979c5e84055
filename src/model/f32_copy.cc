// Copies a GGUF file with every tensor turned to f32.
#include <fmt/format.h>
#include <ggml.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/file.h"
#include "model/gguf_check.h"
#include "model/model.h"
#include "model/weights.h"

namespace kvcell {
namespace {

constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

// A file under a temporary name beside its final one; removed unless Finish succeeded.
class Output {
 public:
  explicit Output(const std::string& path)
      : path_(path),
        temporary_(fmt::format("{}.{}.tmp", path, getpid())),
        file_(std::fopen(temporary_.c_str(), "wbx")) {}
  ~Output() {
    if (file_ != nullptr) std::fclose(file_);
    if (!finished_) std::remove(temporary_.c_str());
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool is_open() const { return file_ != nullptr; }
  Status Error() const { return ErrnoStatus(errno, "write", path_); }
  Status Write(const void* data, size_t bytes) {
    if (bytes > 0 && std::fwrite(data, 1, bytes, file_) != bytes) return Error();
    at_ += bytes;
    return OkStatus();
  }
  template <typename T>
  Status Number(T value) {
    return Write(&value, sizeof(value));
  }
  Status PadTo(uint64_t alignment) {
    static constexpr std::array<char, 256> kZeros{};
    while (at_ % alignment != 0)
      KVCELL_RETURN_IF_ERROR(Write(kZeros.data(), std::min<uint64_t>(kZeros.size(), alignment - at_ % alignment)));
    return OkStatus();
  }
  Status Finish() {
    const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
    if (!closed || std::rename(temporary_.c_str(), path_.c_str()) != 0) return Error();
    finished_ = true;
    return OkStatus();
  }

 private:
  std::string path_;
  std::string temporary_;
  FILE* file_;
  uint64_t at_ = 0;
  bool finished_ = false;
};

uint64_t Pad(uint64_t bytes, uint64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

Status WriteHeader(const GgufHeader& header, Output* out) {
  KVCELL_RETURN_IF_ERROR(out->Write("GGUF", 4));
  KVCELL_RETURN_IF_ERROR(out->Number(uint32_t{3}));
  KVCELL_RETURN_IF_ERROR(out->Number(uint64_t{header.tensors().size()}));
  KVCELL_RETURN_IF_ERROR(out->Number(uint64_t{header.keys().size()}));
  for (const std::string& key : header.keys()) {
    const auto entry = header.Find(key)->entry;
    KVCELL_RETURN_IF_ERROR(out->Write(entry.data(), entry.size()));
  }
  uint64_t offset = 0;
  for (const GgufTensor& tensor : header.tensors()) {
    KVCELL_RETURN_IF_ERROR(out->Number(uint64_t{tensor.name.size()}));
    KVCELL_RETURN_IF_ERROR(out->Write(tensor.name.data(), tensor.name.size()));
    KVCELL_RETURN_IF_ERROR(out->Number(static_cast<uint32_t>(tensor.n_dims)));
    for (int d = 0; d < tensor.n_dims; ++d)
      KVCELL_RETURN_IF_ERROR(out->Number(static_cast<uint64_t>(tensor.ne[static_cast<size_t>(d)])));
    KVCELL_RETURN_IF_ERROR(out->Number(static_cast<uint32_t>(GGML_TYPE_F32)));
    KVCELL_RETURN_IF_ERROR(out->Number(offset));
    offset += Pad(static_cast<uint64_t>(tensor.elements()) * sizeof(float), header.alignment());
  }
  return out->PadTo(header.alignment());
}

Status WriteTensor(const GgufTensor& tensor, uint64_t alignment, std::vector<float>* buffer, Output* out) {
  const auto* bytes = reinterpret_cast<const char*>(tensor.data.data());
  if (tensor.type == GGML_TYPE_F32) {
    KVCELL_RETURN_IF_ERROR(out->Write(bytes, tensor.data.size()));
    return out->PadTo(alignment);
  }
  const ggml_type_traits* traits = ggml_get_type_traits(tensor.type);
  const int64_t block = ggml_blck_size(tensor.type);
  const int64_t step = std::max<int64_t>(kElementsAtOnce / block, 1) * block;
  for (int64_t done = 0; done < tensor.elements(); done += step) {
    const int64_t n = std::min(step, tensor.elements() - done);
    buffer->resize(static_cast<size_t>(n));
    traits->to_float(bytes + static_cast<size_t>(done / block) * ggml_type_size(tensor.type), buffer->data(), n);
    KVCELL_RETURN_IF_ERROR(out->Write(buffer->data(), static_cast<size_t>(n) * sizeof(float)));
  }
  return out->PadTo(alignment);
}

}  // namespace

Status WriteF32Copy(const std::string& from, const std::string& to) {
  const Result<WeightsFile> file = WeightsFile::Open(from);
  if (!file) return file.error();
  const Result<GgufHeader> header = GgufHeader::Read(file->bytes(), from);
  if (!header) return header.error();
  for (const GgufTensor& tensor : header->tensors()) {
    if (tensor.type != GGML_TYPE_F32 && ggml_get_type_traits(tensor.type)->to_float == nullptr)
      return {StatusCode::kUnsupported,
              fmt::format("{}: tensor {} has type {}, which ggml can't turn to f32; choose another model", from,
                          tensor.name, ggml_type_name(tensor.type))};
  }
  Output out(to);
  if (!out.is_open()) return out.Error();
  KVCELL_RETURN_IF_ERROR(WriteHeader(*header, &out));
  std::vector<float> buffer;
  for (const GgufTensor& tensor : header->tensors())
    KVCELL_RETURN_IF_ERROR(WriteTensor(tensor, header->alignment(), &buffer, &out));
  return out.Finish();
}

}  // namespace kvcell
