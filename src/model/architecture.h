// What a model architecture is to the rest of the layer: its numbers, its weights, its graph.
#pragma once

#include <ggml.h>

#include <memory>
#include <string>

#include "model/graph.h"
#include "model/hparams.h"
#include "model/weights.h"

namespace kvcell {

class Architecture {
 public:
  virtual ~Architecture() = default;
  // Adds one step's nodes. Returns the logits [n_vocab, n_wanted], or the last layer's attention where none are wanted.
  virtual ggml_tensor* Build(GraphBuilder* g) const = 0;
};

// Each lies in the file arch_NAME.cc. Problems with weights are kept by `weights`.
std::unique_ptr<Architecture> MakeLlama(const Hparams& h, Weights* weights);
std::unique_ptr<Architecture> MakeQwen2(const Hparams& h, Weights* weights);
std::unique_ptr<Architecture> MakeQwen3(const Hparams& h, Weights* weights);
std::unique_ptr<Architecture> MakeGemma3(const Hparams& h, Weights* weights);
// Windows, local RoPE and the scale of Gemma 3, on top of what all architectures share.
Status ReadGemma3Hparams(const GgufHeader& header, Hparams* h);

// The model's numbers, by its general.architecture. kUnsupported names the architectures that kvcell has.
Result<Hparams> ReadHparams(const GgufHeader& header);
// `h` must outlive the result.
std::unique_ptr<Architecture> MakeArchitecture(const Hparams& h, Weights* weights);

}  // namespace kvcell
