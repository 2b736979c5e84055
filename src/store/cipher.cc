#include "store/cipher.h"

#include <fmt/format.h>
#include <sodium.h>

#include <algorithm>
#include <cstring>

namespace kvcell {
namespace {

constexpr size_t kKeyBytes = crypto_aead_xchacha20poly1305_ietf_KEYBYTES;
static_assert(kNonceBytes == crypto_aead_xchacha20poly1305_ietf_NPUBBYTES);
static_assert(kTagBytes == crypto_aead_xchacha20poly1305_ietf_ABYTES);
static_assert(kCellSealBytes >= kSealBytes);

const uint8_t* Bytes(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }
uint8_t* Bytes(std::byte* bytes) { return reinterpret_cast<uint8_t*>(bytes); }

bool Started() {
  static const bool started = ::sodium_init() >= 0;
  return started;
}

Status NotStarted() {
  return Status(StatusCode::kInternal, "libsodium can't start: the system gives no random numbers");
}

void EncryptDetached(const uint8_t* key, const uint8_t* nonce, std::span<const std::byte> plain,
                     std::span<const std::byte> about, std::byte* to, uint8_t* tag) {
  (void)crypto_aead_xchacha20poly1305_ietf_encrypt_detached(Bytes(to), tag, nullptr, Bytes(plain.data()), plain.size(),
                                                            Bytes(about.data()), about.size(), nullptr, nonce, key);
}

bool DecryptDetached(const uint8_t* key, const uint8_t* nonce, std::span<const std::byte> sealed,
                     std::span<const std::byte> about, const uint8_t* tag, std::byte* to) {
  return crypto_aead_xchacha20poly1305_ietf_decrypt_detached(Bytes(to), nullptr, Bytes(sealed.data()), sealed.size(),
                                                             tag, Bytes(about.data()), about.size(), nonce, key) == 0;
}

// The key that seals a store's own: the secret is random, so a fast hash is enough.
std::array<uint8_t, kKeyBytes> BoxKey(std::string_view secret, std::span<const uint8_t> salt) {
  std::array<uint8_t, kKeyBytes> key{};
  crypto_generichash_state state;
  (void)crypto_generichash_init(&state, nullptr, 0, key.size());
  constexpr std::string_view kUse = "kvcell store key";
  (void)crypto_generichash_update(&state, reinterpret_cast<const uint8_t*>(kUse.data()), kUse.size());
  (void)crypto_generichash_update(&state, salt.data(), salt.size());
  (void)crypto_generichash_update(&state, reinterpret_cast<const uint8_t*>(secret.data()), secret.size());
  (void)crypto_generichash_final(&state, key.data(), key.size());
  ::sodium_memzero(&state, sizeof(state));
  return key;
}

}  // namespace

struct Cipher::Keys {
  std::array<uint8_t, kKeyBytes> cells{};
  std::array<uint8_t, kKeyBytes> values{};
  std::array<uint8_t, kKeyBytes> names{};

  explicit Keys(const std::array<uint8_t, crypto_kdf_KEYBYTES>& master) {
    constexpr const char* kContext = "kvcell_1";  // 8 bytes, as the function takes
    (void)crypto_kdf_derive_from_key(cells.data(), cells.size(), 1, kContext, master.data());
    (void)crypto_kdf_derive_from_key(values.data(), values.size(), 2, kContext, master.data());
    (void)crypto_kdf_derive_from_key(names.data(), names.size(), 3, kContext, master.data());
  }
  ~Keys() { ::sodium_memzero(this, sizeof(*this)); }
};

Cipher::~Cipher() = default;

Status Cipher::CheckSecret(std::string_view secret) {
  if (secret.size() >= kLeastSecretBytes) return OkStatus();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("a store's key has {} bytes, fewer than {}: make one with `head -c 32 /dev/urandom >FILE`",
                            secret.size(), kLeastSecretBytes));
}

Result<std::unique_ptr<Cipher>> Cipher::Make(std::string_view secret, std::span<const uint8_t> salt,
                                             std::vector<std::byte>* box) {
  KVCELL_FAIL_IF_ERROR(CheckSecret(secret));
  if (!Started()) return Fail(NotStarted());
  std::array<uint8_t, crypto_kdf_KEYBYTES> master{};
  crypto_kdf_keygen(master.data());
  auto key = BoxKey(secret, salt);
  box->resize(master.size() + kSealBytes);
  ::randombytes_buf(box->data(), kNonceBytes);
  EncryptDetached(key.data(), Bytes(box->data()), std::as_bytes(std::span(master)), std::as_bytes(salt),
                  box->data() + kNonceBytes, Bytes(box->data() + kNonceBytes + master.size()));
  std::unique_ptr<Cipher> cipher(new Cipher);
  cipher->keys_ = std::make_unique<Keys>(master);
  ::sodium_memzero(master.data(), master.size());
  ::sodium_memzero(key.data(), key.size());
  return cipher;
}

Result<std::unique_ptr<Cipher>> Cipher::Open(std::string_view secret, std::span<const uint8_t> salt,
                                             std::span<const std::byte> box, const std::string& what) {
  KVCELL_FAIL_IF_ERROR(CheckSecret(secret));
  if (!Started()) return Fail(NotStarted());
  std::array<uint8_t, crypto_kdf_KEYBYTES> master{};
  auto key = BoxKey(secret, salt);
  const bool opens = box.size() == master.size() + kSealBytes &&
                     DecryptDetached(key.data(), Bytes(box.data()), box.subspan(kNonceBytes, master.size()),
                                     std::as_bytes(salt), Bytes(box.data() + kNonceBytes + master.size()),
                                     std::as_writable_bytes(std::span(master)).data());
  ::sodium_memzero(key.data(), key.size());
  if (!opens) {
    return Fail(StatusCode::kPermission,
                fmt::format("the key given does not open {}: give the one that it was made with", what));
  }
  std::unique_ptr<Cipher> cipher(new Cipher);
  cipher->keys_ = std::make_unique<Keys>(master);
  ::sodium_memzero(master.data(), master.size());
  return cipher;
}

std::vector<std::byte> Cipher::Seal(std::span<const std::byte> plain, SealedFor about) const {
  std::vector<std::byte> sealed(plain.size() + kSealBytes);
  ::randombytes_buf(sealed.data(), kNonceBytes);
  EncryptDetached(keys_->values.data(), Bytes(sealed.data()), plain, about.bytes(), sealed.data() + kNonceBytes,
                  Bytes(sealed.data() + kNonceBytes + plain.size()));
  return sealed;
}

std::optional<std::vector<std::byte>> Cipher::Unseal(std::span<const std::byte> sealed, SealedFor about) const {
  if (sealed.size() < kSealBytes) return std::nullopt;
  std::vector<std::byte> plain(sealed.size() - kSealBytes);
  const bool opens =
      DecryptDetached(keys_->values.data(), Bytes(sealed.data()), sealed.subspan(kNonceBytes, plain.size()),
                      about.bytes(), Bytes(sealed.data() + kNonceBytes + plain.size()), plain.data());
  if (!opens) return std::nullopt;
  return plain;
}

void Cipher::SealCell(std::span<const std::byte> cell, SealedFor about, std::byte* to) const {
  std::byte* const nonce = to + cell.size();
  ::randombytes_buf(nonce, kNonceBytes);
  EncryptDetached(keys_->cells.data(), Bytes(nonce), cell, about.bytes(), to, Bytes(nonce + kNonceBytes));
  std::memset(nonce + kSealBytes, 0, kCellSealBytes - kSealBytes);
}

bool Cipher::UnsealCell(std::span<const std::byte> sealed, SealedFor about, std::byte* to) const {
  if (sealed.size() < kCellSealBytes) return false;
  const auto cell = sealed.first(sealed.size() - kCellSealBytes);
  const auto padding = sealed.subspan(cell.size() + kSealBytes);
  const std::byte* const nonce = sealed.data() + cell.size();
  return DecryptDetached(keys_->cells.data(), Bytes(nonce), cell, about.bytes(), Bytes(nonce + kNonceBytes), to) &&
         std::ranges::all_of(padding, [](std::byte b) { return b == std::byte{0}; });
}

std::array<uint8_t, 16> Cipher::Name(std::span<const std::byte> bytes) const {
  std::array<uint8_t, 16> name{};
  (void)crypto_generichash(name.data(), name.size(), Bytes(bytes.data()), bytes.size(), keys_->names.data(),
                           keys_->names.size());
  return name;
}

}  // namespace kvcell
