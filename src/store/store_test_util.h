// What the store's tests share: a fresh directory, sessions with recognisable cells and an oracle that checks them.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "store/store.h"

namespace kvcell::test {

// A directory that goes with the test, and the path of a store in it that isn't there yet.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    // In memory where possible: thousands of syncs cost nothing there. TMPDIR chooses a disk.
    const bool in_memory = ::getenv("TMPDIR") == nullptr && ::access("/dev/shm", W_OK) == 0;
    std::string pattern =
        (in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/kvcell-store-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string store() const { return path_ + "/store"; }

 private:
  std::string path_;
};

// Two shapes as a small model has them: three full layers, two sliding-window ones of another size.
inline std::array<CellSetShape, 2> SmallShapes() {
  return {CellSetShape{{{0, 2, 128}, {2, 1, 192}, {4, 3, 64}}}, CellSetShape{{{1, 2, 256}, {3, 1, 64}}}};
}

// A cell's bytes: its key, place and number, a text to grep for, and a checksum over all of it.
inline std::vector<std::byte> MakeCell(const BlockKey& key, uint16_t layer, uint16_t head, int64_t position,
                                       uint64_t generation, size_t bytes) {
  std::vector<std::byte> cell(bytes, std::byte{0x5a});
  const std::string mark = fmt::format("CELL{}", position);
  std::memcpy(cell.data(), key.data(), key.size());
  std::memcpy(cell.data() + 16, &position, 8);
  std::memcpy(cell.data() + 24, &generation, 8);
  std::memcpy(cell.data() + 32, &layer, 2);
  std::memcpy(cell.data() + 34, &head, 2);
  std::memcpy(cell.data() + 36, mark.data(), std::min<size_t>(mark.size(), 20));
  const uint64_t checksum = Checksum64(std::span(cell).subspan(0, 56));
  std::memcpy(cell.data() + 56, &checksum, 8);
  for (size_t i = 64; i < bytes; ++i) cell[i] = static_cast<std::byte>(checksum >> (i % 8 * 8));
  return cell;
}

inline Status VerifyTestCell(std::span<const std::byte> cell, uint16_t layer, uint16_t head, int64_t position,
                             const BlockKey& key) {
  uint64_t generation = 0;
  std::memcpy(&generation, cell.data() + 24, 8);
  const auto expected = MakeCell(key, layer, head, position, generation, cell.size());
  if (std::memcmp(expected.data(), cell.data(), cell.size()) == 0) return OkStatus();
  return Status(StatusCode::kCorruption,
                fmt::format("cell of layer {} head {} position {} differs", layer, head, position));
}

// Tokens that a seed decides; those of two seeds differ from the first on, or from `shared` on where that is given.
inline std::vector<Token> MakeTokens(int seed, size_t n, size_t shared = 0) {
  std::vector<Token> tokens(n);
  for (size_t i = 0; i < n; ++i)
    tokens[i] = static_cast<Token>(i * 7919 + (i < shared ? 0 : static_cast<size_t>(seed) * 1000003));
  return tokens;
}

// Digest of all tokens up to a block's end, as `cache` chains them.
inline BlockKey KeyAt(const std::vector<Token>& tokens, size_t block) {
  return Checksum128(std::as_bytes(std::span(tokens).first((block + 1) * kBlockTokens)));
}

// Appends the blocks [from, to) of a session as one extent per shape. Windowed cells only for the last two blocks.
inline Status AppendBlocks(Store& store, SessionRecord* record, size_t from, size_t to) {
  const auto shapes = SmallShapes();
  const auto generation = store.NextGeneration();
  if (!generation) return generation.error();
  for (size_t i = from; i < to; ++i) {
    BlockRecord block;
    block.key = KeyAt(record->tokens, i);
    block.generation = *generation;
    std::copy_n(record->tokens.begin() + static_cast<ptrdiff_t>(i * kBlockTokens), kBlockTokens, block.tokens.begin());
    record->blocks.push_back(block);
  }
  for (size_t kind = 0; kind < 2; ++kind) {
    const size_t first = kind == 0 ? from : std::max(from, to - std::min<size_t>(2, to - from));
    if (first == to) continue;
    std::vector<std::byte> cell;
    const auto places = store.CreateCells(
        shapes[kind], static_cast<uint32_t>(to - first), [&](size_t slot, uint32_t block, uint16_t head) {
          const auto& layer = shapes[kind].layers[slot];
          cell = MakeCell(record->blocks[first + block].key, layer.layer, head,
                          static_cast<int64_t>((first + block) * kBlockTokens), *generation, layer.cell_bytes);
          return cell.data();
        });
    if (!places) return places.error();
    for (size_t i = first; i < to; ++i) record->blocks[i].places[kind] = (*places)[i - first];
  }
  return OkStatus();
}

inline SessionRecord MakeSession(const std::string& name, std::vector<Token> tokens) {
  SessionRecord record;
  record.name = name;
  record.model = "test-model";
  record.identity = {{"weights", "3f"}, {"codec", "i4"}};
  record.tokens = std::move(tokens);
  record.exact.assign(1000 + record.tokens.size() % 64,
                      static_cast<std::byte>(record.tokens.empty() ? 1 : record.tokens.back()));
  record.logits.assign(record.tokens.size() % 7, 0.5f);
  record.extras = fmt::format("{{\"n\":{}}}", record.tokens.size());
  return record;
}

// Makes and saves a session of these tokens, all its whole blocks sealed; the record holds its blocks.
inline Result<SessionRecord> SaveSession(Store& store, const std::string& name, std::vector<Token> tokens) {
  SessionRecord record = MakeSession(name, std::move(tokens));
  Status status = AppendBlocks(store, &record, 0, record.tokens.size() / kBlockTokens);
  const auto shapes = SmallShapes();
  if (status.ok()) status = store.Commit(&record, shapes.data());
  if (status.ok()) return record;
  for (const auto& block : record.blocks) store.Release(block);
  return Fail(status);
}

// Loads a session and checks everything of it against the tokens; the first difference, "" where there is none.
inline std::string CheckSession(Store& store, const std::string& name, const std::vector<Token>& tokens) {
  auto loaded = store.Load(name);
  if (!loaded) return loaded.error().message();
  const SessionRecord expected = MakeSession(name, tokens);
  std::string wrong = loaded->damage;
  if (loaded->tokens != tokens) wrong += " tokens differ";
  if (loaded->exact != expected.exact || loaded->logits != expected.logits || loaded->extras != expected.extras)
    wrong += " data differ";
  if (loaded->identity != expected.identity || loaded->model != expected.model) wrong += " identity differs";
  if (loaded->blocks.size() != tokens.size() / kBlockTokens) wrong += fmt::format(" {} blocks", loaded->blocks.size());
  const auto shapes = SmallShapes();
  std::vector<std::byte> cell;
  for (size_t i = 0; i < loaded->blocks.size(); ++i) {
    const BlockRecord& block = loaded->blocks[i];
    if (block.key != KeyAt(tokens, i)) wrong += fmt::format(" key of block {} differs", i);
    if (!block.places[0]) wrong += fmt::format(" block {} has no cells", i);
    for (size_t kind = 0; kind < 2; ++kind) {
      if (!block.places[kind]) continue;
      for (size_t slot = 0; slot < shapes[kind].layers.size(); ++slot) {
        const auto& layer = shapes[kind].layers[slot];
        cell.resize(layer.cell_bytes);
        for (uint16_t head = 0; head < layer.n_cells; ++head) {
          Status status = store.ReadCells(shapes[kind], *block.places[kind], slot, head, 1, cell.data());
          if (status.ok())
            status = VerifyTestCell(cell, layer.layer, head, static_cast<int64_t>(i * kBlockTokens), block.key);
          if (!status.ok()) wrong += " " + status.message();
        }
      }
    }
  }
  for (const auto& block : loaded->blocks) store.Release(block);
  return wrong;
}

inline std::unique_ptr<Store> OpenStore(const std::string& path, StoreOptions options = {}) {
  auto store = Store::Open(path, options);
  EXPECT_TRUE(store) << store.error().message();
  return store ? std::move(*store) : nullptr;
}

// Whether any file below a path has these bytes.
inline bool AnyFileContains(const std::string& path, const std::string& bytes) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    if (all.find(bytes) != std::string::npos) return true;
  }
  return false;
}

}  // namespace kvcell::test
