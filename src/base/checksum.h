// Checksums of stored bytes: XXH3 in 64 and 128 bits, at once or piece by piece. They find damage, not forgery.
#pragma once

#include <xxhash.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace kvcell {

using Digest128 = std::array<uint8_t, 16>;

// The canonical (big-endian) form, so that digests are the same bytes on every machine.
inline Digest128 ToDigest(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Digest128 digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = canonical.digest[i];
  return digest;
}

inline uint64_t Checksum64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }
inline Digest128 Checksum128(std::span<const std::byte> bytes) {
  return ToDigest(XXH3_128bits(bytes.data(), bytes.size()));
}

// A build with KVCELL_COLLIDING_HASHES gives every address below the same value: tests run in it to show that things
// found by an address are compared in full, whatever the address says. Checksums that find damage stay as they are.
#ifdef KVCELL_COLLIDING_HASHES
inline constexpr bool kHashesCollide = true;
#else
inline constexpr bool kHashesCollide = false;
#endif
// Where something is looked for, never whether it is the thing.
inline uint64_t Address64(std::span<const std::byte> bytes) { return kHashesCollide ? 7 : Checksum64(bytes); }
inline Digest128 Address128(const Digest128& digest) { return kHashesCollide ? Digest128{7} : digest; }

// A 128-bit checksum of bytes that come in pieces. Thread-compatible.
class Checksum128Stream {
 public:
  Checksum128Stream() : state_(XXH3_createState()) { XXH3_128bits_reset(state_.get()); }
  void Update(std::span<const std::byte> bytes) { XXH3_128bits_update(state_.get(), bytes.data(), bytes.size()); }
  Digest128 Digest() const { return ToDigest(XXH3_128bits_digest(state_.get())); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

}  // namespace kvcell
