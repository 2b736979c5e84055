// Sampling: greedy, or libllama's sampler chain with a draw that depends on seed and position alone.
#include <llama.h>

#include <cmath>
#include <memory>

#include "model/model.h"

namespace kvcell {
namespace {

Token Greedy(std::span<const float> logits) {
  size_t best = 0;
  // Ties: the lowest id. NaN loses against any number.
  for (size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) best = i;
  return static_cast<Token>(best);
}

// SplitMix64 over both, so that neighbouring positions get unrelated draws.
uint32_t DrawSeed(uint32_t seed, int64_t position) {
  uint64_t z = (uint64_t{seed} << 32) ^ static_cast<uint64_t>(position);
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  const auto out = static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  return out == LLAMA_DEFAULT_SEED ? 0 : out;  // libllama takes that value as `choose at random`
}

}  // namespace

Token Sampler::Sample(std::span<const float> logits, int64_t position) const {
  if (options_.temperature <= 0.0f) return Greedy(logits);
  std::vector<llama_token_data> data(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) data[i] = {static_cast<llama_token>(i), logits[i], 0.0f};
  llama_token_data_array candidates{data.data(), data.size(), -1, false};

  const std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)> chain(
      llama_sampler_chain_init(llama_sampler_chain_default_params()), llama_sampler_free);
  if (options_.top_k > 0) llama_sampler_chain_add(chain.get(), llama_sampler_init_top_k(options_.top_k));
  if (options_.top_p < 1.0f) llama_sampler_chain_add(chain.get(), llama_sampler_init_top_p(options_.top_p, 1));
  if (options_.min_p > 0.0f) llama_sampler_chain_add(chain.get(), llama_sampler_init_min_p(options_.min_p, 1));
  llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(options_.temperature));
  llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(DrawSeed(options_.seed, position)));
  llama_sampler_apply(chain.get(), &candidates);
  return candidates.selected >= 0 ? candidates.data[candidates.selected].id : Greedy(logits);
}

}  // namespace kvcell
