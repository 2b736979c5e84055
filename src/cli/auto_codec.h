// `--codec auto`: the codecs by layer that `kvcell tune` finds for a model, measured when they are first asked for.
#pragma once

#include <memory>
#include <string>

#include "cli/options.h"
#include "kvcell/rules.h"
#include "kvcell/status.h"

namespace kvcell::cli {

inline constexpr std::string_view kAutoCodec = "auto";

// The rules that `tune` gives with its own defaults for the model's content, kept in DefaultDigestFolder under its
// digest; what lies there and can't be used is told and measured again. kInvalidArgument where no model is named or
// there is no folder, kCancelled, or what Tune gives.
Result<std::shared_ptr<const Rules>> AutoRules(const Options& options);

}  // namespace kvcell::cli
