#include "lab/tune.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <utility>

#include "kvcell/cache.h"
#include "kvcell/codec_plan.h"
#include "lab/answers.h"
#include "lab/codec_error.h"
#include "lab/divergence.h"
#include "lab/kv_data.h"
#include "lab/layered_cache.h"
#include "lab/statistics.h"
#include "model/model.h"

namespace kvcell {
namespace {

constexpr int64_t kChunk = 64;
constexpr int kRounds = 4;  // of choosing by estimate and measuring

class Tuner {
 public:
  explicit Tuner(const TuneOptions& options) : options_(options) {}

  Result<TuneResult> Run() {
    KVCELL_FAIL_IF_ERROR(Load());
    const size_t n = model_->facts().geometry.size();
    total_ = static_cast<int64_t>(n) + 2 + kRounds;
    const size_t smallest = specs_.size() - 1;
    TuneResult result{.model = model_->facts().name};
    auto finest = Measure(std::vector<size_t>(n, 0));
    if (!finest) return Fail(finest.error());
    auto all_smallest = Measure(std::vector<size_t>(n, smallest));
    if (!all_smallest) return Fail(all_smallest.error());
    result.kld_finest = *finest;
    result.sinks = options_.sinks;
    result.kld_smallest = *all_smallest;
    std::vector<size_t> choice(n, smallest);
    const bool by_bits = options_.bits_limit > 0;
    if (by_bits && Bits(choice) > options_.bits_limit) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("even {} in every layer takes {:.3f} bits, above the limit "
                                                            "of {:.3f}; raise the limit, or name smaller codecs",
                                                            names_[smallest], Bits(choice), options_.bits_limit));
    }
    if (!by_bits && *finest > options_.kld_limit) {
      return Fail(
          StatusCode::kInvalidArgument,
          fmt::format("even {} in every layer diverges by {:.3g}, above the limit of {:.3g}; raise the limit, or "
                      "name finer codecs",
                      names_[0], *finest, options_.kld_limit));
    }
    result.kld = *all_smallest;
    if (by_bits || *all_smallest > options_.kld_limit) {
      auto chosen = by_bits ? ChooseWithinBits(*finest) : Choose(*finest);
      if (!chosen) return Fail(chosen.error());
      std::tie(choice, result.kld) = *std::move(chosen);
    }
    for (size_t l = 0; l < n; ++l) {
      // A layer's own codec where a preset means different ones, so that the rules say what was measured.
      const CodecSpec& spec = specs_[choice[l]];
      const CodecSpec own = CodecOfLayer(spec, l, n);
      result.codec_by_layer.push_back(spec.early_v ? CodecText(own) : names_[choice[l]]);
    }
    result.bits = Bits(choice);
    result.rules = RulesText(result);
    if (options_.on_probe) options_.on_probe(total_, total_);
    return result;
  }

 private:
  Status Load() {
    if (options_.codecs.empty()) return Status(StatusCode::kInvalidArgument, "tune needs codecs to choose from");
    path_ = options_.model;
    if (options_.weights_f32) {
      auto copy = F32CopyOf(path_);
      if (!copy) return copy.error();
      path_ = *std::move(copy);
    }
    auto model = Model::Load(path_, {.n_threads = options_.n_threads, .max_batch = static_cast<int32_t>(kChunk)});
    if (!model) return model.error();
    model_ = std::move(*model);
    text_ = options_.text;
    if (text_.empty()) {
      for (const Question& q : FixedQuestions()) text_ += q.context + "\n" + q.text + "\n";
    }
    auto tokens = model_->Tokenize(text_, /*special=*/true, /*parse=*/false);
    if (!tokens) return tokens.error();
    tokens_ = std::move(*tokens);
    if (options_.context < 2 * kBlockTokens || static_cast<int64_t>(tokens_.size()) < options_.context) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format(
              "the probe takes {} tokens, at least {}; the text has {}: give a longer one, or a smaller --context",
              options_.context, 2 * kBlockTokens, tokens_.size()));
    }
    if (const int64_t most = model_->facts().context_train; most > 0 && options_.context > most) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("a probe of {} tokens is beyond the {} that the model was trained for; give a smaller "
                                "--context",
                                options_.context, most));
    }
    tokens_.resize(static_cast<size_t>(options_.context));
    const Geometry& geometry = model_->facts().geometry;
    for (const std::string& name : options_.codecs) {
      auto spec = ParseCodec(name);
      if (!spec) return spec.error();
      order_.push_back({*CodecBitsPerElement(*spec, geometry[0].head_dim_k, geometry[0].head_dim_v), name});
    }
    std::sort(order_.begin(), order_.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [unused, name] : order_) {
      names_.push_back(name);
      specs_.push_back(*ParseCodec(name));
      std::vector<double>& bits = bits_.emplace_back();
      for (size_t l = 0; l < geometry.size(); ++l) {
        const CodecSpec codec = CodecOfLayer(specs_.back(), l, geometry.size());
        bits.push_back(*CodecBitsPerElement(codec, geometry[l].head_dim_k, geometry[l].head_dim_v));
      }
    }
    std::vector<std::unique_ptr<Cache>> caches;
    for (size_t c = 0; c <= specs_.size(); ++c) {
      CacheOptions cache;
      cache.codec = c < specs_.size() ? specs_[c] : *ParseCodec("f16");
      cache.geometry = geometry;
      cache.sinks = options_.sinks;
      cache.max_step_tokens = static_cast<int32_t>(kChunk);
      auto opened = Cache::Open(cache);
      if (!opened) return opened.error();
      caches.push_back(std::move(*opened));
    }
    f16_ = specs_.size();
    cache_ = std::make_unique<LayeredCache>(std::move(caches), std::vector<size_t>(geometry.size(), f16_));
    return Feed(&reference_);
  }

  // Logits of the scored half under the choice in force.
  Status Feed(std::vector<float>* logits) {
    logits->clear();
    auto sequence = cache_->Create();
    if (!sequence) return sequence.error();
    std::vector<float> part;
    for (int64_t at = 0; at < options_.context; at += kChunk) {
      if (options_.should_stop && options_.should_stop()) {
        return Status(StatusCode::kCancelled, "measuring codecs was stopped; nothing of it is kept");
      }
      const int64_t count = std::min(kChunk, options_.context - at);
      const bool scored = at >= options_.context / 2;
      const ModelStep step{
          .sequence = *sequence,
          .tokens = std::span<const Token>(tokens_).subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
          .want_all_logits = scored};
      KVCELL_RETURN_IF_ERROR(model_->Forward(cache_.get(), {&step, 1}, &part));
      if (scored) logits->insert(logits->end(), part.begin(), part.end());
    }
    return cache_->Free(*sequence);
  }

  Result<double> Measure(const std::vector<size_t>& choice) {
    if (options_.on_probe) options_.on_probe(std::min(probe_++, total_), total_);
    cache_->SetChoice(choice);
    std::vector<float> logits;
    KVCELL_FAIL_IF_ERROR(Feed(&logits));
    return MeanDivergence(reference_, logits, static_cast<size_t>(model_->facts().n_vocab));
  }

  // The choice of fewest bits that was measured to stay under the limit, and its divergence. `floor` is that of the
  // finest codec everywhere: what rounding alone does to a model whose products round, and no choice gets below.
  // Estimates add up what layers lose alone; how far the sum is off is learnt from each measurement.
  Result<std::pair<std::vector<size_t>, double>> Choose(double floor) {
    const size_t n = model_->facts().geometry.size(), smallest = specs_.size() - 1;
    auto losses = Losses(floor);
    if (!losses) return Fail(losses.error());
    std::pair<std::vector<size_t>, double> best{std::vector<size_t>(n, 0), floor};
    std::vector<size_t> last;
    double scale = 1;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<size_t> choice(n, smallest);
      while (floor + scale * Estimate(*losses, choice) > options_.kld_limit && Refine(*losses, &choice)) {
      }
      if (choice == last) break;
      last = choice;
      auto kld = Measure(choice);
      if (!kld) return Fail(kld.error());
      if (*kld <= options_.kld_limit && Bits(choice) < Bits(best.first)) best = {choice, *kld};
      const double estimate = Estimate(*losses, choice);
      if (estimate <= 0) break;
      scale = std::clamp(std::max(0.0, *kld - floor) / estimate, scale / 4, scale * 4);
    }
    return best;
  }

  // The choice that is estimated to diverge least within bits_limit, and what it was measured to.
  Result<std::pair<std::vector<size_t>, double>> ChooseWithinBits(double floor) {
    auto losses = Losses(floor);
    if (!losses) return Fail(losses.error());
    std::vector<size_t> choice(model_->facts().geometry.size(), specs_.size() - 1);
    while (Refine(*losses, &choice)) {
    }
    auto kld = Measure(choice);
    if (!kld) return Fail(kld.error());
    return std::pair(choice, *kld);
  }

  // Per element, over all layers.
  double Bits(const std::vector<size_t>& choice) const {
    double bits = 0, elements = 0;
    for (size_t l = 0; l < choice.size(); ++l) {
      bits += Weight(l) * bits_[choice[l]][l];
      elements += Weight(l);
    }
    return bits / elements;
  }

  double BitsWith(std::vector<size_t> choice, size_t layer, size_t codec) const {
    choice[layer] = codec;
    return Bits(choice);
  }

  // [codec][layer]: what each layer adds to the divergence under each codec, beyond the floor.
  Result<std::vector<std::vector<double>>> Losses(double floor) {
    const size_t n = model_->facts().geometry.size(), smallest = specs_.size() - 1;
    std::vector<double> alone;
    for (size_t l = 0; l < n; ++l) {
      std::vector<size_t> choice(n, f16_);
      choice[l] = smallest;
      auto kld = Measure(choice);
      if (!kld) return Fail(kld.error());
      alone.push_back(std::max(0.0, *kld - floor));
    }
    // A probe is short, and what one layer loses on it hangs on few positions: half of what was measured, half of what
    // the layers lose in the mean, says more about another text than the measurement alone.
    const double mean = Mean(alone);
    for (double& loss : alone) loss = 0.5 * (loss + mean);
    return Scaled(alone);
  }

  // What a layer loses under the other codecs, in proportion to what they do to its own attention outputs.
  Result<std::vector<std::vector<double>>> Scaled(const std::vector<double>& alone) const {
    const auto values = CaptureKv({.model = path_,
                                   .text = text_,
                                   .tokens = options_.context,
                                   .n_threads = options_.n_threads,
                                   .should_stop = options_.should_stop});
    if (!values) return Fail(values.error());
    const auto errors =
        MeasureCodecErrors(*values, {.codecs = names_, .sinks = options_.sinks, .should_stop = options_.should_stop});
    if (!errors) return Fail(errors.error());
    std::vector<std::vector<double>> losses;
    for (const CodecError& e : *errors) {
      std::vector<double>& row = losses.emplace_back();
      for (size_t l = 0; l < alone.size(); ++l) {
        row.push_back(alone[l] * e.layers[l].output / std::max(errors->back().layers[l].output, 1e-30));
      }
    }
    return losses;
  }

  static double Estimate(const std::vector<std::vector<double>>& losses, const std::vector<size_t>& choice) {
    double sum = 0;
    for (size_t l = 0; l < choice.size(); ++l) sum += losses[choice[l]][l];
    return sum;
  }

  double Weight(size_t layer) const {
    const LayerGeometry& g = model_->facts().geometry[layer];
    return static_cast<double>(g.n_kv_heads) * (g.head_dim_k + g.head_dim_v);
  }

  // Makes the layer finer that gains most for each bit; false where none can be or bits_limit leaves no room.
  bool Refine(const std::vector<std::vector<double>>& losses, std::vector<size_t>* choice) const {
    size_t best = choice->size(), best_codec = 0;
    double best_gain = -1;
    for (size_t l = 0; l < choice->size(); ++l) {
      const size_t now = (*choice)[l];
      for (size_t c = 0; c < now; ++c) {
        if (options_.bits_limit > 0 && BitsWith(*choice, l, c) > options_.bits_limit) continue;
        const double cost = Weight(l) * std::max(1e-9, bits_[c][l] - bits_[now][l]);
        const double gain = (losses[now][l] - losses[c][l]) / cost;
        if (gain > best_gain) {
          best_gain = gain;
          best = l;
          best_codec = c;
        }
      }
    }
    if (best == choice->size()) return false;
    (*choice)[best] = best_codec;
    return true;
  }

  const TuneOptions& options_;
  std::string path_, text_;  // as measured
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
  std::vector<std::pair<double, std::string>> order_;
  std::vector<std::string> names_;         // finest first
  std::vector<CodecSpec> specs_;           // likewise
  std::vector<std::vector<double>> bits_;  // [codec][layer]
  size_t f16_ = 0;
  std::unique_ptr<LayeredCache> cache_;
  std::vector<float> reference_;
  int64_t probe_ = 0, total_ = 0;
};

}  // namespace

Result<TuneResult> Tune(const TuneOptions& options) { return Tuner(options).Run(); }

std::string RulesText(const TuneResult& result) {
  // The codec of most layers stands for all; the others are named.
  std::vector<std::pair<std::string, int>> counts;
  for (const std::string& codec : result.codec_by_layer) {
    auto found = std::find_if(counts.begin(), counts.end(), [&](const auto& c) { return c.first == codec; });
    if (found == counts.end()) found = counts.insert(counts.end(), {codec, 0});
    ++found->second;
  }
  const std::string base = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
                             return a.second < b.second;
                           })->first;
  std::string text = fmt::format(
      "# Codecs by layer for {}, measured by `kvcell tune`: {:.3f} bits per element, mean KL divergence {:.5f}\n"
      "# against the model's own f16 KV ({:.5f} with the smallest codec everywhere).\n"
      "name: tuned\ncodec: \"{}\"\n",
      result.model, result.bits, result.kld, result.kld_smallest, base);
  std::string ranges;
  for (size_t l = 0; l < result.codec_by_layer.size();) {
    size_t end = l;
    while (end + 1 < result.codec_by_layer.size() && result.codec_by_layer[end + 1] == result.codec_by_layer[l]) ++end;
    if (result.codec_by_layer[l] != base) {
      ranges += fmt::format("  - {{layers: {}-{}, codec: \"{}\"}}\n", l, end, result.codec_by_layer[l]);
    }
    l = end + 1;
  }
  if (!ranges.empty()) text += "codecs:\n" + ranges;
  text += fmt::format("exact: {{sinks: {}}}\n", result.sinks);
  text +=
      "rules:\n"
      "  - {event: TOKEN_APPEND,    from: none,       to: ACTIVE}\n"
      "  - {event: TOKEN_APPEND,    from: ACTIVE,     to: QUANTIZED, when: {block: sealed}}\n"
      "  - {event: MEMORY_PRESSURE, from: QUANTIZED,  to: PERSISTED, when: {pressure: hard}}\n"
      "  - {event: CACHE_MISS,      from: PERSISTED,  to: RECOVERING}\n"
      "  - {event: WRITE_BACK,      from: RECOVERING, to: QUANTIZED}\n";
  return text;
}

}  // namespace kvcell
