// Rows of the store's prefix tree, beside the index's own: which stored block follows which, for whom, and which are
// kept in their own right. One class method per statement; every row that comes back has passed its checksum. Where the
// store is encrypted, identities, models and exact cells are sealed, and what is searched for are keyed digests.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcell/status.h"
#include "store/cipher.h"
#include "store/sqlite.h"
#include "store/store.h"

namespace kvcell {

// Of blocks that belong to one session alone: no identity has this number, so that nobody finds them.
inline constexpr int64_t kOwnSpace = -1;

// One stored block in the tree. A block has one place in it: its past and its identity are part of what it is.
struct PrefixRow {
  int64_t block = 0;   // row id of the block
  int64_t space = 0;   // of its identity
  int64_t parent = 0;  // row id of the block before; 0 at position 0
  int64_t depth = 0;   // blocks before it
  bool held = false;   // kept in its own right, not only while a session uses the block
  bool pinned = false;
  uint64_t content = 0;   // address of the tokens, at position 0 only: finds the same beginning under other identities
  int64_t last_used = 0;  // unix seconds; for people and eviction, not covered by the checksum
};

enum class PrefixBytes : uint8_t { kSinks = 0, kReplicas = 1 };

// The statements that make the tables, part of the index's format from 2 on.
extern const char* const kPrefixSchema;

// Thread-compatible; methods run inside the caller's transaction. Made by Index::prefixes.
class PrefixIndex {
 public:
  // `cipher` may be null: the store is not encrypted.
  PrefixIndex(Database& database, const StoreId& store_id, const Cipher* cipher)
      : database_(database), store_id_(store_id), cipher_(cipher) {}

  // Makes the tables where they are missing.
  Status Found();
  // False in a store of format 1 that is open for inspection only.
  Result<bool> IsThere();
  // What a chain's beginning is found by under other identities.
  uint64_t ContentOf(std::span<const Token> first_block) const;

  // The number of an identity; nothing where nobody stored anything under it.
  Result<std::optional<int64_t>> FindSpace(const Identity& identity);
  Result<int64_t> MakeSpace(const Identity& identity, const std::string& model);
  struct Space {
    Identity identity;
    std::string model;
  };
  Result<std::optional<Space>> ReadSpace(int64_t space);

  // Nothing where there is no row, or a damaged one.
  Result<std::optional<PrefixRow>> Find(int64_t block);
  Status Write(const PrefixRow& node);
  // All, parents before children; damaged rows are left out and counted.
  Result<std::vector<PrefixRow>> List(int64_t* damaged);
  // Blocks that follow `parent`, the last used first, at most `most`.
  Result<std::vector<int64_t>> Children(int64_t space, int64_t parent, int most);
  // First blocks of any identity whose content has this address.
  Result<std::vector<PrefixRow>> Roots(uint64_t content, int most);
  Status Touch(std::span<const int64_t> blocks, int64_t now);
  Result<int64_t> CountSessions(int64_t block);
  // Held blocks without held children, not pinned, the longest unused first; of those last used at `before` or earlier.
  Result<std::vector<int64_t>> Evictable(int64_t before, int64_t most);
  // Blocks that follow `parent` and are kept in their own right.
  Result<int64_t> CountHeldChildren(int64_t parent);
  // Of a block that is deleted.
  Status Forget(int64_t block);

  Result<std::optional<std::vector<std::byte>>> ReadBytes(int64_t block, PrefixBytes kind);
  // False where bytes of this kind are there and fail their checksum.
  Result<bool> CheckBytes(int64_t block, PrefixBytes kind);
  Status WriteBytes(int64_t block, PrefixBytes kind, std::span<const std::byte> bytes);

  // Remembers for a while that a block has been given up for space, by the key that its row was found by.
  Status NoteEvicted(std::span<const std::byte> stored_key);
  Status ForgetEvicted(std::span<const std::byte> stored_key);
  Result<bool> WasEvicted(std::span<const std::byte> stored_key);

 private:
  SealedFor About(std::string_view table, int64_t row, uint64_t column) const;
  // The column that an identity is found by: itself, or a keyed digest of it.
  std::vector<std::byte> FoundBy(std::span<const std::byte> identity) const;

  Database& database_;
  const StoreId& store_id_;
  const Cipher* cipher_;
};

}  // namespace kvcell
