// Small random models in GGUF, written by the tests: every shape that parity with libllama has to hold for.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace kvcell {

struct TinyModelSpec {
  std::string architecture = "llama";
  int n_layers = 2;
  int n_heads = 4;
  int n_kv_heads = 2;
  int head_dim = 64;
  int n_embd = 96;  // qwen2 takes n_heads * head_dim, as libllama wants it
  int n_ff = 160;
  bool tied = true;  // no output.weight
  float rope_base = 10000.0f;
  float rope_linear = 0.0f;   // > 0: linear scaling by this factor
  bool rope_factors = false;  // rope_freqs.weight, as Llama 3.1 has
  int window = 96;            // gemma3: of every layer but each second one
  uint32_t seed = 1;
};

// How a test's name shows it.
inline void PrintTo(const TinyModelSpec& spec, std::ostream* out) {
  *out << spec.architecture << " " << spec.n_heads << "/" << spec.n_kv_heads << "x" << spec.head_dim;
}

// Writes the model; the weights are f32. The test fails where that does not work.
void WriteTinyModel(const TinyModelSpec& spec, const std::string& path);

// A file name in the test's directory for temporary files, unique for this process.
std::string TemporaryPath(const std::string& name);

}  // namespace kvcell
