#include "lab/stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>
#include <utility>

#include "cell/rules.h"
#include "kvcell/cache.h"
#include "lab/divergence.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

using Clock = std::chrono::steady_clock;

// Losses of tokens[1..] from the logits of all rows of a step; the first row's predecessor is `before`.
double BlockLoss(std::span<const float> logits, std::span<const float> before, std::span<const Token> tokens,
                 size_t n_vocab) {
  double loss = before.empty() ? 0.0 : -LogProbability(before, tokens[0]);
  for (size_t i = 1; i < tokens.size(); ++i)
    loss -= LogProbability(logits.subspan((i - 1) * n_vocab, n_vocab), tokens[i]);
  return loss;
}

}  // namespace

Result<StreamResult> MeasureStream(const StreamOptions& options) {
  StreamResult result;
  result.window = options.rules->WindowOf(0);
  if (result.window == 0)
    return Fail(StatusCode::kInvalidArgument, "these rules have no window; --profile edge has one");
  auto model = Model::Load(options.model, {.n_threads = options.n_threads, .max_batch = 512});
  if (!model) return Fail(model.error());
  auto text = (*model)->Tokenize(options.text, true, false);
  if (!text) return Fail(text.error());
  if (text->size() < kBlockTokens) return Fail(StatusCode::kInvalidArgument, "the text has less than 64 tokens");
  const auto token_at = [&](int64_t i) { return (*text)[static_cast<size_t>(i) % text->size()]; };
  const auto n_vocab = static_cast<size_t>((*model)->facts().n_vocab);

  CacheOptions cache_options;
  cache_options.geometry = (*model)->facts().geometry;
  cache_options.rope = (*model)->facts().rope;
  cache_options.codec = *ParseCodec("i4");
  cache_options.rules = options.rules;
  cache_options.max_step_tokens = 512;
  auto stream = Cache::Open(cache_options);
  if (!stream) return Fail(stream.error());
  CacheOptions fresh_options = cache_options;
  auto whole = std::make_shared<Rules>(*options.rules);  // the same but for the window
  whole->windows.clear();
  fresh_options.rules = whole;
  auto fresh = Cache::Open(fresh_options);
  if (!fresh) return Fail(fresh.error());
  const auto sequence = (*stream)->Create();
  if (!sequence) return Fail(sequence.error());

  const int64_t n_blocks = options.tokens / kBlockTokens;
  const int64_t window_blocks = (result.window + kBlockTokens - 1) / kBlockTokens;
  const int64_t sinks = (*stream)->options().sinks;
  const int64_t first_scored = (window_blocks + 1 + options.every) / options.every * options.every;
  if (n_blocks <= first_scored) {
    return Fail(
        StatusCode::kInvalidArgument,
        fmt::format("{} tokens are too few to compare with recomputing: behind the window of {} the first block "
                    "that counts ends at {}; give more, or a smaller --every",
                    options.tokens, result.window, (first_scored + 1) * kBlockTokens));
  }
  double loss_stream = 0, loss_fresh = 0, part_seconds = 0;
  std::vector<double> excess;  // loss per token that the stream has over recomputing, of each block
  int64_t part_tokens = 0;
  std::vector<float> logits, last;
  for (int64_t b = 0; b < n_blocks; ++b) {
    if (options.should_stop && options.should_stop()) return Fail(StatusCode::kCancelled, "stopped");
    std::vector<Token> block;
    for (int64_t i = 0; i < kBlockTokens; ++i) block.push_back(token_at(b * kBlockTokens + i));
    const bool scores = b > window_blocks + 1 && b % options.every == 0;
    const auto start = Clock::now();
    const ModelStep step{.sequence = *sequence, .tokens = block, .want_logits = true, .want_all_logits = true};
    KVCELL_FAIL_IF_ERROR((*model)->Forward(stream->get(), {&step, 1}, &logits));
    part_seconds += std::chrono::duration<double>(Clock::now() - start).count();
    part_tokens += kBlockTokens;
    if (scores) {
      const double streamed = BlockLoss(logits, last, block, n_vocab);
      // Sinks, the window and the block itself, as if nothing else had ever been.
      std::vector<Token> context;
      for (int64_t i = 0; i < sinks; ++i) context.push_back(token_at(i));
      for (int64_t i = (b - window_blocks) * kBlockTokens; i < b * kBlockTokens; ++i) context.push_back(token_at(i));
      const auto again = (*fresh)->Create();
      if (!again) return Fail(again.error());
      std::vector<float> before, own;
      for (size_t at = 0; at < context.size(); at += 512) {
        const size_t n = std::min<size_t>(512, context.size() - at);
        const ModelStep feed{.sequence = *again, .tokens = std::span(context).subspan(at, n), .want_logits = true};
        KVCELL_FAIL_IF_ERROR((*model)->Forward(fresh->get(), {&feed, 1}, &before));
      }
      const ModelStep own_step{.sequence = *again, .tokens = block, .want_logits = true, .want_all_logits = true};
      KVCELL_FAIL_IF_ERROR((*model)->Forward(fresh->get(), {&own_step, 1}, &own));
      const double recomputed = BlockLoss(own, before, block, n_vocab);
      loss_stream += streamed;
      loss_fresh += recomputed;
      excess.push_back((streamed - recomputed) / static_cast<double>(kBlockTokens));
      KVCELL_FAIL_IF_ERROR((*fresh)->Free(*again));
      result.scored += kBlockTokens;
    }
    last.assign(logits.end() - static_cast<std::ptrdiff_t>(n_vocab), logits.end());
    if ((b + 1) * 8 / n_blocks != b * 8 / n_blocks) {
      result.parts.push_back({(b + 1) * kBlockTokens, (*stream)->Stats().ram_bytes,
                              part_seconds > 0 ? static_cast<double>(part_tokens) / part_seconds : 0.0});
      part_seconds = 0;
      part_tokens = 0;
    }
    if (options.on_block) options.on_block(b + 1, n_blocks);
  }
  result.tokens = n_blocks * kBlockTokens;
  if (result.scored > 0) {
    result.ppl_stream = std::exp(loss_stream / static_cast<double>(result.scored));
    result.ppl_recomputed = std::exp(loss_fresh / static_cast<double>(result.scored));
    result.ratio_se = result.ppl_stream / result.ppl_recomputed * StandardError(excess);
  }
  return result;
}

}  // namespace kvcell
