// A store as commands open it, and the secret of an encrypted one: from a file, a command or the environment.
#include "cli/open_store.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "codec/cell_codec.h"

namespace kvcell::cli {
namespace {

constexpr size_t kLeastBytes = 32;
constexpr size_t kMostBytes = 65536;

int ClosePipe(std::FILE* file) { return ::pclose(file); }

// All of a stream; the newline that programs end their output with is none of the key.
Result<std::string> ReadKey(std::FILE* file, const std::string& from) {
  std::string key;
  std::array<char, 4096> part{};
  while (const size_t n = std::fread(part.data(), 1, part.size(), file)) {
    key.append(part.data(), n);
    if (key.size() > kMostBytes) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("{} gives more than {} bytes: that is no key", from, kMostBytes));
    }
  }
  if (std::ferror(file) != 0) return Fail(StatusCode::kInvalidArgument, fmt::format("{} can't be read", from));
  if (key.size() > kLeastBytes && key.back() == '\n') key.pop_back();
  if (key.size() < kLeastBytes) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("{} gives a key of {} bytes, fewer than {}; make one with `head -c 32 /dev/urandom >FILE`",
                            from, key.size(), kLeastBytes));
  }
  return key;
}

}  // namespace

Result<std::string> ReadStoreKey(const Options& options) {
  if (!options.key_file.empty() && !options.key_command.empty()) {
    return Fail(StatusCode::kInvalidArgument, "--key-file and --key-command both give a key: use one of them");
  }
  if (!options.key_file.empty()) {
    const std::string from = "--key-file " + options.key_file;
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(options.key_file.c_str(), "rbe"),
                                                               [](std::FILE* f) { return std::fclose(f); });
    if (file == nullptr) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("{} can't be opened: check the path and its mode", from));
    }
    return ReadKey(file.get(), from);
  }
  if (!options.key_command.empty()) {
    const std::string from = fmt::format("--key-command '{}'", options.key_command);
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(options.key_command.c_str(), "re"), ClosePipe);
    if (pipe == nullptr) return Fail(StatusCode::kInvalidArgument, fmt::format("{} can't be run", from));
    Result<std::string> key = ReadKey(pipe.get(), from);
    const int status = ::pclose(pipe.release());
    if (status != 0) {
      return Fail(StatusCode::kInvalidArgument, fmt::format("{} failed: run it by hand to see why", from));
    }
    return key;
  }
  const char* key = std::getenv("KVCELL_KEY");
  if (key == nullptr) return std::string();
  const std::string text = key;
  if (text.size() < kLeastBytes) {
    return Fail(StatusCode::kInvalidArgument,
                fmt::format("KVCELL_KEY holds {} bytes, a key has {} or more", text.size(), kLeastBytes));
  }
  return text;
}

Result<std::unique_ptr<Store>> OpenStore(const Options& options, StoreUse use) {
  KVCELL_FAIL_IF_ERROR(CheckStoreKnown(options));
  StoreOptions store_options;
  store_options.durability = static_cast<Durability>(options.durability);
  store_options.create = use == StoreUse::kMake;
  store_options.read_only = use == StoreUse::kLook;
  store_options.name_space = options.name_space;
  store_options.disk_cap = options.disk_cap;
  store_options.ttl_seconds = options.ttl_seconds;
  Result<std::string> key = ReadStoreKey(options);
  if (!key) return Fail(key.error());
  store_options.key = *std::move(key);
  store_options.cell_check = VerifyCell;
  Result<std::unique_ptr<Store>> store = Store::Open(options.store, store_options);
  std::error_code error;
  if (!store && store.error().code() == StatusCode::kNotFound && !std::filesystem::exists(options.store, error)) {
    return Fail(
        StatusCode::kNotFound,
        fmt::format("there is no store at {} yet; `kvcell run` makes one, --store DIR names another", options.store));
  }
  return store;
}

}  // namespace kvcell::cli
