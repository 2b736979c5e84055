// The list of architectures that kvcell has.
#include "model/architecture.h"

#include <fmt/format.h>

#include <array>

namespace kvcell {
namespace {

struct Entry {
  std::string_view name;
  Status (*read)(const GgufHeader& header, Hparams* h);  // null: nothing beyond what all share
  std::unique_ptr<Architecture> (*make)(const Hparams& h, Weights* weights);
};
constexpr std::array<Entry, 4> kArchitectures = {{
    {"llama", nullptr, MakeLlama},
    {"qwen2", nullptr, MakeQwen2},
    {"qwen3", nullptr, MakeQwen3},
    {"gemma3", ReadGemma3Hparams, MakeGemma3},
}};

const Entry* FindArchitecture(std::string_view name) {
  for (const Entry& entry : kArchitectures)
    if (entry.name == name) return &entry;
  return nullptr;
}

}  // namespace

Result<Hparams> ReadHparams(const GgufHeader& header) {
  std::string name;
  KVCELL_FAIL_IF_ERROR(header.String("general.architecture", GgufNeed::kRequired, &name));
  const Entry* entry = FindArchitecture(name);
  if (entry == nullptr)
    return Fail(
        StatusCode::kUnsupported,
        fmt::format("{}: architecture `{}`, where kvcell has llama, qwen2, qwen3 and gemma3; choose another model",
                    header.path(), name.substr(0, 40)));
  int64_t splits = 1;
  KVCELL_FAIL_IF_ERROR(header.Int("split.count", 0, 1 << 16, GgufNeed::kOptional, &splits));
  if (splits > 1)
    return Fail(StatusCode::kUnsupported,
                fmt::format("{}: one of {} parts of a model; join them first (llama-gguf-split --merge)", header.path(),
                            splits));
  Result<Hparams> h = ReadCommonHparams(header, name);
  if (h && entry->read != nullptr) KVCELL_FAIL_IF_ERROR(entry->read(header, &*h));
  return h;
}

std::unique_ptr<Architecture> MakeArchitecture(const Hparams& h, Weights* weights) {
  return FindArchitecture(h.architecture)->make(h, weights);
}

}  // namespace kvcell
