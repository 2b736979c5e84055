// Fuzzes all that loading a model does with the bytes of its file before ggml computes with them.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "model/architecture.h"
#include "model/gguf_check.h"
#include "model/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvcell;
  const Result<GgufHeader> header = GgufHeader::Read(std::as_bytes(std::span(data, size)), "fuzz.gguf");
  if (!header) return 0;
  // The tokenizer is reached even where the model's numbers are wrong.
  (void)Tokenizer::Load(*header, 1 << 20);
  const Result<Hparams> h = ReadHparams(*header);
  if (!h) return 0;
  Weights weights(*header);
  const std::unique_ptr<Architecture> architecture = MakeArchitecture(*h, &weights);
  (void)weights.Finish();
  return 0;
}
