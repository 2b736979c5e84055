// The checked reader of GGUF headers: lengths are compared with the bytes that are left before anything is allocated.
#include "model/gguf_check.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace kvcell {
namespace {

constexpr uint64_t kMaxKeyBytes = 65535;  // the format's own limit
constexpr uint32_t kMinAlignment = 8;     // the format's own
constexpr uint32_t kMaxAlignment = 1u << 16;
constexpr int64_t kMaxDimension = int64_t{1} << 40;

// Bytes of one element, 0 for strings and arrays.
size_t TypeBytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

template <typename T>
T Load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

std::string Printable(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 80)) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  return out;
}

std::optional<int64_t> AsInt(const GgufValue& value) {
  switch (value.type) {
    case GgufType::kUint8:
      return Load<uint8_t>(value.data.data());
    case GgufType::kUint16:
      return Load<uint16_t>(value.data.data());
    case GgufType::kUint32:
      return Load<uint32_t>(value.data.data());
    case GgufType::kInt32:
      return Load<int32_t>(value.data.data());
    case GgufType::kUint64: {
      const auto v = Load<uint64_t>(value.data.data());
      if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(v);
    }
    case GgufType::kInt64:
      return Load<int64_t>(value.data.data());
    default:
      return std::nullopt;
  }
}

}  // namespace

// Walks the header once.
class GgufReader {
 public:
  GgufReader(std::span<const std::byte> file, std::string path) : file_(file) { header_.path_ = std::move(path); }

  Status Run() {
    uint64_t n_tensors = 0;
    uint64_t n_keys = 0;
    KVCELL_RETURN_IF_ERROR(Preamble(&n_tensors, &n_keys));
    for (uint64_t i = 0; i < n_keys; ++i) KVCELL_RETURN_IF_ERROR(Entry(i));
    KVCELL_RETURN_IF_ERROR(Alignment());
    for (uint64_t i = 0; i < n_tensors; ++i) KVCELL_RETURN_IF_ERROR(Tensor(i));
    return TensorData();
  }

  GgufHeader Take() { return std::move(header_); }

 private:
  size_t left() const { return file_.size() - at_; }
  Status Bad(std::string_view what) const { return header_.Bad(what); }
  Status Truncated(std::string_view where) const {
    return Bad(fmt::format("the file ends inside {} (at byte {})", where, file_.size()));
  }

  template <typename T>
  Status Number(std::string_view where, T* out) {
    if (left() < sizeof(T)) return Truncated(where);
    *out = Load<T>(file_.data() + at_);
    at_ += sizeof(T);
    return OkStatus();
  }

  Status Text(std::string_view where, uint64_t limit, std::string_view* out) {
    uint64_t length = 0;
    KVCELL_RETURN_IF_ERROR(Number(where, &length));
    if (length > limit) return Bad(fmt::format("{} is {} bytes long, more than {}", where, length, limit));
    if (length > left()) return Truncated(where);
    *out = {reinterpret_cast<const char*>(file_.data() + at_), static_cast<size_t>(length)};
    at_ += static_cast<size_t>(length);
    return OkStatus();
  }

  Status Preamble(uint64_t* n_tensors, uint64_t* n_keys) {
    if (left() < 4) return Bad("it is too short to be a GGUF file");
    const std::string_view magic(reinterpret_cast<const char*>(file_.data()), 4);
    if (magic == "FUGG") return Bad("wrong byte order (the magic is reversed)");
    if (magic != "GGUF") return Bad("it is not a GGUF file (its first bytes are not `GGUF`)");
    at_ = 4;
    uint32_t version = 0;
    KVCELL_RETURN_IF_ERROR(Number("the version", &version));
    if (version != 0 && (version & 0xffffu) == 0)
      return Bad("wrong byte order (it was written for a big-endian machine)");
    if (version != 2 && version != 3)
      return {StatusCode::kUnsupported,
              fmt::format("{}: GGUF version {}, where kvcell reads 2 and 3; convert the model again", header_.path_,
                          version)};
    KVCELL_RETURN_IF_ERROR(Number("the number of tensors", n_tensors));
    KVCELL_RETURN_IF_ERROR(Number("the number of keys", n_keys));
    // The smallest entry of each kind takes this many bytes: a count that can't fit is refused before it is used.
    if (*n_keys > left() / 13) return Bad(fmt::format("{} keys can't fit into the file", *n_keys));
    if (*n_tensors > left() / 33) return Bad(fmt::format("{} tensors can't fit into the file", *n_tensors));
    return OkStatus();
  }

  Status Entry(uint64_t index) {
    const size_t begin = at_;
    std::string_view key;
    KVCELL_RETURN_IF_ERROR(Text(fmt::format("key {}", index), kMaxKeyBytes, &key));
    if (key.empty() || key.find('\0') != std::string_view::npos)
      return Bad(fmt::format("key {} is empty or has a NUL", index));
    const std::string name = Printable(key);
    GgufValue value;
    KVCELL_RETURN_IF_ERROR(Type(name, &value.type));
    if (value.type == GgufType::kArray) {
      KVCELL_RETURN_IF_ERROR(Type(name, &value.element));
      if (value.element == GgufType::kArray)
        return Bad(fmt::format("{} is an array of arrays, which no model has", name));
      KVCELL_RETURN_IF_ERROR(Number(name, &value.count));
    } else {
      value.element = value.type;
    }
    const size_t payload = at_;
    KVCELL_RETURN_IF_ERROR(Elements(name, value.element, value.count));
    value.data = file_.subspan(payload, at_ - payload);
    value.entry = file_.subspan(begin, at_ - begin);
    if (!header_.values_.emplace(std::string(key), value).second) return Bad(fmt::format("{} is there twice", name));
    header_.keys_.emplace_back(key);
    return OkStatus();
  }

  Status Type(const std::string& key, GgufType* out) {
    uint32_t type = 0;
    KVCELL_RETURN_IF_ERROR(Number(key, &type));
    if (type > static_cast<uint32_t>(GgufType::kFloat64))
      return Bad(fmt::format("{} has the unknown value type {}", key, type));
    *out = static_cast<GgufType>(type);
    return OkStatus();
  }

  // Steps over `count` elements after checking that they are there.
  Status Elements(const std::string& key, GgufType type, uint64_t count) {
    const size_t bytes = TypeBytes(type);
    if (type == GgufType::kString) {
      if (count > left() / 8) return Truncated(key);
      for (uint64_t i = 0; i < count; ++i) {
        std::string_view text;
        KVCELL_RETURN_IF_ERROR(Text(key, std::numeric_limits<int32_t>::max(), &text));
      }
      return OkStatus();
    }
    if (count > left() / bytes) return Truncated(key);
    const auto end = at_ + static_cast<size_t>(count) * bytes;
    if (type == GgufType::kBool) {
      for (size_t i = at_; i < end; ++i)
        if (file_[i] > std::byte{1}) return Bad(fmt::format("{} holds a truth value that is neither 0 nor 1", key));
    }
    at_ = end;
    return OkStatus();
  }

  Status Alignment() {
    const GgufValue* value = header_.Find("general.alignment");
    if (value == nullptr) return OkStatus();
    if (value->type != GgufType::kUint32) return Bad("general.alignment is not a 32-bit unsigned number");
    const auto alignment = Load<uint32_t>(value->data.data());
    if (!std::has_single_bit(alignment) || alignment < kMinAlignment || alignment > kMaxAlignment)
      return Bad(fmt::format("general.alignment is {}, not a power of two in {}..{}", alignment, kMinAlignment,
                             kMaxAlignment));
    header_.alignment_ = alignment;
    return OkStatus();
  }

  Status Tensor(uint64_t index) {
    GgufTensor tensor;
    std::string_view name;
    KVCELL_RETURN_IF_ERROR(Text(fmt::format("the name of tensor {}", index), GGML_MAX_NAME - 1, &name));
    if (name.empty() || name.find('\0') != std::string_view::npos)
      return Bad(fmt::format("the name of tensor {} is empty or has a NUL", index));
    tensor.name = Printable(name);
    KVCELL_RETURN_IF_ERROR(Shape(&tensor));
    uint64_t bytes = 0;
    KVCELL_RETURN_IF_ERROR(TensorType(&tensor, &bytes));
    uint64_t offset = 0;
    KVCELL_RETURN_IF_ERROR(Number(tensor.name, &offset));
    if (!header_.tensor_index_.emplace(tensor.name, header_.tensors_.size()).second)
      return Bad(fmt::format("tensor {} is there twice", tensor.name));
    header_.tensors_.push_back(std::move(tensor));
    extents_.emplace_back(offset, bytes);
    return OkStatus();
  }

  Status Shape(GgufTensor* tensor) {
    uint32_t n_dims = 0;
    KVCELL_RETURN_IF_ERROR(Number(tensor->name, &n_dims));
    if (n_dims < 1 || n_dims > 4)
      return Bad(fmt::format("tensor {} has {} dimensions, not 1 to 4", tensor->name, n_dims));
    tensor->n_dims = static_cast<int>(n_dims);
    int64_t elements = 1;
    for (uint32_t d = 0; d < n_dims; ++d) {
      uint64_t n = 0;
      KVCELL_RETURN_IF_ERROR(Number(tensor->name, &n));
      if (n == 0 || n > static_cast<uint64_t>(kMaxDimension))
        return Bad(fmt::format("dimension {} of tensor {} is {}", d, tensor->name, n));
      tensor->ne[d] = static_cast<int64_t>(n);
      if (tensor->ne[d] > (int64_t{1} << 56) / elements)
        return Bad(fmt::format("tensor {} has more elements than any file can hold", tensor->name));
      elements *= tensor->ne[d];
    }
    return OkStatus();
  }

  Status TensorType(GgufTensor* tensor, uint64_t* bytes) {
    uint32_t type = 0;
    KVCELL_RETURN_IF_ERROR(Number(tensor->name, &type));
    // Numbers of types that ggml has dropped have no size.
    if (type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) <= 0 ||
        ggml_type_size(static_cast<ggml_type>(type)) == 0)
      return Bad(fmt::format("tensor {} has the unknown type {}", tensor->name, type));
    tensor->type = static_cast<ggml_type>(type);
    const int64_t block = ggml_blck_size(tensor->type);
    if (tensor->ne[0] % block != 0)
      return Bad(fmt::format("rows of tensor {} have {} elements, not a multiple of {}'s block of {}", tensor->name,
                             tensor->ne[0], ggml_type_name(tensor->type), block));
    const auto blocks = static_cast<uint64_t>(tensor->elements() / block);
    const uint64_t block_bytes = ggml_type_size(tensor->type);
    if (blocks > file_.size() / block_bytes) return Truncated(fmt::format("tensor {}", tensor->name));
    *bytes = blocks * block_bytes;
    return OkStatus();
  }

  Status TensorData() {
    if (header_.tensors_.empty()) return OkStatus();
    const uint64_t alignment = header_.alignment_;
    const uint64_t begin = (at_ + alignment - 1) / alignment * alignment;
    for (size_t i = 0; i < extents_.size(); ++i) {
      const auto [offset, bytes] = extents_[i];
      GgufTensor& tensor = header_.tensors_[i];
      if (offset % alignment != 0)
        return Bad(fmt::format("the data of tensor {} is not aligned to {}", tensor.name, alignment));
      if (begin > file_.size() || offset > file_.size() - begin || bytes > file_.size() - begin - offset)
        return Truncated(fmt::format("tensor {}", tensor.name));
      tensor.data = file_.subspan(static_cast<size_t>(begin + offset), static_cast<size_t>(bytes));
    }
    return OkStatus();
  }

  std::span<const std::byte> file_;
  size_t at_ = 0;
  GgufHeader header_;
  std::vector<std::pair<uint64_t, uint64_t>> extents_;  // offset and bytes by tensor
};

Result<GgufHeader> GgufHeader::Read(std::span<const std::byte> file, const std::string& path) {
  GgufReader reader(file, path);
  KVCELL_FAIL_IF_ERROR(reader.Run());
  return reader.Take();
}

Status GgufHeader::Bad(std::string_view what) const {
  return {StatusCode::kCorruption, fmt::format("{}: {}; get the model file again, or choose another one", path_, what)};
}

const GgufTensor* GgufHeader::FindTensor(std::string_view name) const {
  const auto it = tensor_index_.find(std::string(name));
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

std::vector<float> GgufHeader::F32Values(std::string_view name, size_t n) const {
  const GgufTensor* tensor = FindTensor(name);
  if (tensor == nullptr || tensor->type != GGML_TYPE_F32 || tensor->data.size() != n * sizeof(float)) return {};
  std::vector<float> values(n);
  std::memcpy(values.data(), tensor->data.data(), tensor->data.size());
  return values;
}

const GgufValue* GgufHeader::Find(std::string_view key) const {
  const auto it = values_.find(std::string(key));
  return it == values_.end() ? nullptr : &it->second;
}

Status GgufHeader::Int(std::string_view key, int64_t low, int64_t high, GgufNeed need, int64_t* out) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return need == GgufNeed::kRequired ? Bad(fmt::format("{} is missing", key)) : OkStatus();
  const std::optional<int64_t> number = AsInt(*value);
  if (!number) return Bad(fmt::format("{} is not a whole number", key));
  if (*number < low || *number > high) return Bad(fmt::format("{} is {}, not in {}..{}", key, *number, low, high));
  *out = *number;
  return OkStatus();
}

Status GgufHeader::Float(std::string_view key, float low, float high, GgufNeed need, float* out) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return need == GgufNeed::kRequired ? Bad(fmt::format("{} is missing", key)) : OkStatus();
  if (value->type != GgufType::kFloat32) return Bad(fmt::format("{} is not a 32-bit float", key));
  const auto number = Load<float>(value->data.data());
  if (!(number >= low && number <= high)) return Bad(fmt::format("{} is {}, not in {}..{}", key, number, low, high));
  *out = number;
  return OkStatus();
}

Status GgufHeader::String(std::string_view key, GgufNeed need, std::string* out) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return need == GgufNeed::kRequired ? Bad(fmt::format("{} is missing", key)) : OkStatus();
  if (value->type != GgufType::kString) return Bad(fmt::format("{} is not a string", key));
  out->assign(reinterpret_cast<const char*>(value->data.data() + 8), value->data.size() - 8);
  return OkStatus();
}

Status GgufHeader::IntPerLayer(std::string_view key, int64_t n_layers, int64_t low, int64_t high, GgufNeed need,
                               std::vector<int32_t>* out) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return need == GgufNeed::kRequired ? Bad(fmt::format("{} is missing", key)) : OkStatus();
  if (value->type != GgufType::kArray) {
    int64_t number = 0;
    KVCELL_RETURN_IF_ERROR(Int(key, low, high, need, &number));
    out->assign(static_cast<size_t>(n_layers), static_cast<int32_t>(number));
    return OkStatus();
  }
  if (value->element != GgufType::kUint32 && value->element != GgufType::kInt32)
    return Bad(fmt::format("{} is not an array of 32-bit numbers", key));
  if (value->count != static_cast<uint64_t>(n_layers))
    return Bad(fmt::format("{} has {} entries for {} layers", key, value->count, n_layers));
  out->clear();
  for (size_t i = 0; i < static_cast<size_t>(n_layers); ++i) {
    const auto bits = Load<uint32_t>(value->data.data() + 4 * i);
    const int64_t number = value->element == GgufType::kUint32 ? int64_t{bits} : int64_t{static_cast<int32_t>(bits)};
    if (number < low || number > high)
      return Bad(fmt::format("entry {} of {} is {}, not in {}..{}", i, key, number, low, high));
    out->push_back(static_cast<int32_t>(number));
  }
  return OkStatus();
}

Status GgufHeader::Strings(std::string_view key, GgufNeed need, std::vector<std::string_view>* out) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return need == GgufNeed::kRequired ? Bad(fmt::format("{} is missing", key)) : OkStatus();
  if (value->type != GgufType::kArray || value->element != GgufType::kString)
    return Bad(fmt::format("{} is not an array of strings", key));
  out->clear();
  out->reserve(static_cast<size_t>(value->count));
  const std::byte* at = value->data.data();
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto length = static_cast<size_t>(Load<uint64_t>(at));
    out->emplace_back(reinterpret_cast<const char*>(at + 8), length);
    at += 8 + length;
  }
  return OkStatus();
}

}  // namespace kvcell
