// Mapping of model files, and shape and type checks of their tensors.
#include "model/weights.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <ggml-cpu.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/file.h"

namespace kvcell {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

Result<WeightsFile> WeightsFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return Fail(ErrnoStatus(errno, "open", path));
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return Fail(ErrnoStatus(errno, "open", path));
  if (!S_ISREG(info.st_mode))
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("{}: not a regular file; give the path of a GGUF file", path));
  if (info.st_size == 0)
    return Fail(StatusCode::kCorruption, fmt::format("{}: the file is empty; get the model file again", path));
  const auto size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return Fail(ErrnoStatus(errno, "open", path));
  return WeightsFile(std::span(static_cast<const std::byte*>(data), size), info);
}

WeightsFile::WeightsFile(WeightsFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})), info_(other.info_) {}

WeightsFile::~WeightsFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Weights::Weights(const GgufHeader& header) : header_(header) {
  ggml_init_params params{};
  params.mem_size = ggml_tensor_overhead() * (header.tensors().size() + 1);
  params.no_alloc = true;
  context_ = ggml_init(params);
  if (context_ == nullptr) Fail(StatusCode::kInternal, "no memory for the table of its tensors");
}

Weights::~Weights() { ggml_free(context_); }

ggml_tensor* Weights::Matrix(std::string_view name, int64_t in, int64_t out) {
  return Take(name, true, in, out, false);
}
ggml_tensor* Weights::OptionalMatrix(std::string_view name, int64_t in, int64_t out) {
  return Take(name, false, in, out, false);
}
ggml_tensor* Weights::Vector(std::string_view name, int64_t n) { return Take(name, true, n, 1, true); }
ggml_tensor* Weights::OptionalVector(std::string_view name, int64_t n) { return Take(name, false, n, 1, true); }

void Weights::Multiply(ggml_tensor* vector, std::span<const float> factors) {
  if (vector == nullptr) return;
  const auto* values = static_cast<const float*>(vector->data);
  auto product = std::make_unique<float[]>(factors.size());
  for (size_t i = 0; i < factors.size(); ++i) product[i] = values[i] * factors[i];
  vector->data = product.get();
  changed_.push_back(std::move(product));
}

ggml_tensor* Weights::Take(std::string_view name, bool required, int64_t ne0, int64_t ne1, bool vector) {
  if (!status_.ok()) return nullptr;
  const GgufTensor* tensor = header_.FindTensor(name);
  if (tensor == nullptr) {
    if (required) Fail(StatusCode::kCorruption, fmt::format("tensor {} is missing", name));
    return nullptr;
  }
  if (tensor->ne != std::array<int64_t, 4>{ne0, ne1, 1, 1}) {
    Fail(StatusCode::kCorruption, fmt::format("tensor {} is {} x {} x {} x {}, not {} x {}", name, tensor->ne[0],
                                              tensor->ne[1], tensor->ne[2], tensor->ne[3], ne0, ne1));
    return nullptr;
  }
  if (vector ? tensor->type != GGML_TYPE_F32 : ggml_get_type_traits_cpu(tensor->type)->vec_dot == nullptr) {
    Fail(StatusCode::kUnsupported,
         fmt::format("tensor {} has type {}, {}", name, ggml_type_name(tensor->type),
                     vector ? "where kvcell takes f32 for norms and biases" : "which ggml can't multiply"));
    return nullptr;
  }
  taken_.insert(tensor->name);
  ggml_tensor* out =
      vector ? ggml_new_tensor_1d(context_, tensor->type, ne0) : ggml_new_tensor_2d(context_, tensor->type, ne0, ne1);
  ggml_set_name(out, tensor->name.c_str());
  // ggml only reads weights; the mapping is read-only, so a write would be seen at once.
  out->data = const_cast<std::byte*>(tensor->data.data());
  return out;
}

Status Weights::Finish() {
  if (!status_.ok()) return status_;
  for (const GgufTensor& tensor : header_.tensors()) {
    if (!taken_.contains(tensor.name)) {
      Fail(StatusCode::kUnsupported,
           fmt::format("tensor {} is none that kvcell's definition of this architecture uses", tensor.name));
      break;
    }
  }
  return status_;
}

void Weights::Fail(StatusCode code, std::string_view what) {
  if (!status_.ok()) return;
  status_ = code == StatusCode::kCorruption
                ? header_.Bad(what)
                : Status(code, fmt::format("{}: {}; choose another model file", header_.path(), what));
}

}  // namespace kvcell
