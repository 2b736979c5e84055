// Authenticated encryption of what a store keeps (libsodium): XChaCha20-Poly1305 with random nonces under keys that
// belong to one store, themselves sealed under the user's secret. What stands in the clear is listed in docs/format.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcell/status.h"
#include "store/bytes.h"
#include "store/segment_format.h"

namespace kvcell {

inline constexpr size_t kNonceBytes = 24;
inline constexpr size_t kTagBytes = 16;
inline constexpr size_t kSealBytes = kNonceBytes + kTagBytes;  // a sealed value is longer by these
inline constexpr uint32_t kCellSealBytes = 64;  // a sealed cell: the same, padded, so that cells stay 64-byte aligned
inline constexpr size_t kLeastSecretBytes = 32;

// What is encrypted together with its place, so that sealed bytes moved elsewhere don't open.
using SealedFor = ByteWriter;

// Thread-safe; holds keys in memory that is wiped at the end.
class Cipher {
 public:
  // kInvalidArgument where a secret is too short to be one: 32 bytes and more, random ones.
  static Status CheckSecret(std::string_view secret);
  // New keys for a store (or an export file); `box` becomes them as they are stored, sealed under the secret.
  static Result<std::unique_ptr<Cipher>> Make(std::string_view secret, std::span<const uint8_t> salt,
                                              std::vector<std::byte>* box);
  // kPermission where the secret is not the one that `box` was made with; `what` names whose it is.
  static Result<std::unique_ptr<Cipher>> Open(std::string_view secret, std::span<const uint8_t> salt,
                                              std::span<const std::byte> box, const std::string& what);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // nonce, ciphertext, tag.
  std::vector<std::byte> Seal(std::span<const std::byte> plain, SealedFor about) const;
  // Nothing where the bytes are not what Seal gave for the same place.
  std::optional<std::vector<std::byte>> Unseal(std::span<const std::byte> sealed, SealedFor about) const;

  // A cell of n bytes into n + kCellSealBytes, and back: ciphertext, nonce, tag, zeros.
  void SealCell(std::span<const std::byte> cell, SealedFor about, std::byte* to) const;
  bool UnsealCell(std::span<const std::byte> sealed, SealedFor about, std::byte* to) const;

  // A digest that tells nothing without the key: what rows and lock files are found by.
  std::array<uint8_t, 16> Name(std::span<const std::byte> bytes) const;

 private:
  Cipher() = default;
  struct Keys;
  std::unique_ptr<Keys> keys_;
};

}  // namespace kvcell
