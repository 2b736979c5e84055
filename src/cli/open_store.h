// A store as commands open it: with the namespace, limits and key that the options name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cli/options.h"
#include "kvcell/status.h"
#include "store/store.h"

namespace kvcell::cli {

enum class StoreUse : uint8_t {
  kLook,    // nothing is written
  kChange,  // it must be there
  kMake,    // it is made where it is missing
};

Result<std::unique_ptr<Store>> OpenStore(const Options& options, StoreUse use);

// The store's secret, from --key-file, --key-command or KVCELL_KEY; "" where none is given. kInvalidArgument.
Result<std::string> ReadStoreKey(const Options& options);

}  // namespace kvcell::cli
