#include "store/portable.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "store/bytes.h"
#include "store/index.h"
#include "store/segment_format.h"
#include "store/store_impl.h"

namespace kvcell {
namespace {

constexpr uint64_t kExportMagic = 0x54524f5058455356;  // "VSEXPORT"
constexpr uint32_t kExportVersion = 1;
constexpr uint64_t kHeaderBytes = 64;
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 20;
constexpr uint64_t kMaxSectionBytes = 1'000'000'000;  // of all but cells: what an index row can hold
constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kBlockEntryBytes = 32;  // key, generation, which cells there are, zeros

// In this order in the file, each at the next multiple of 64 bytes.
constexpr std::array<const char*, 10> kSections = {"session", "identity", "tokens", "blocks", "exact",
                                                   "logits",  "extras",   "shape0", "shape1", "cells0"};
constexpr const char* kLastSection = "cells1";
constexpr size_t kSectionCount = kSections.size() + 1;
constexpr size_t kCells0 = 9;
const char* SectionName(size_t i) { return i < kSections.size() ? kSections.at(i) : kLastSection; }

std::string Hex(const Digest128& digest) {
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

tl::unexpected<Status> Damaged(const ByteSource& file, std::string_view what) {
  return Fail(StatusCode::kCorruption, fmt::format("{}: {}; export the session again", file.path(), what));
}

// Sections one after the other through a buffer, with the digest of each.
class SectionWriter {
 public:
  explicit SectionWriter(ByteSink& file) : file_(file) { buffer_.reserve(kBufferBytes); }

  Status Append(std::span<const std::byte> bytes) {
    digest_.Update(bytes);
    section_bytes_ += bytes.size();
    return Put(bytes);
  }
  Status EndSection(std::string_view name) {
    manifest_.push_back(
        {{"name", name}, {"offset", start_}, {"bytes", section_bytes_}, {"xxh3_128", Hex(digest_.Digest())}});
    static constexpr std::array<std::byte, 64> kPadding{};
    const uint64_t end = start_ + section_bytes_;
    KVCELL_RETURN_IF_ERROR(Put(std::span(kPadding).first(static_cast<size_t>(RoundUp(end, 64) - end))));
    start_ = RoundUp(end, 64);
    section_bytes_ = 0;
    digest_ = Checksum128Stream();
    return OkStatus();
  }
  Status Flush() {
    KVCELL_RETURN_IF_ERROR(file_.WriteAt(at_, buffer_));
    at_ += buffer_.size();
    buffer_.clear();
    return OkStatus();
  }
  uint64_t position() const { return start_; }
  nlohmann::json& manifest() { return manifest_; }

 private:
  Status Put(std::span<const std::byte> bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return buffer_.size() < kBufferBytes ? OkStatus() : Flush();
  }

  ByteSink& file_;
  std::vector<std::byte> buffer_;
  uint64_t at_ = kHeaderBytes;
  uint64_t start_ = kHeaderBytes;
  uint64_t section_bytes_ = 0;
  Checksum128Stream digest_;
  nlohmann::json manifest_ = nlohmann::json::array();
};

std::vector<std::byte> MakeHeader(uint64_t manifest_offset, std::span<const std::byte> manifest) {
  const Digest128 digest = Checksum128(manifest);
  ByteWriter out;
  out.Put(kExportMagic).Put(kExportVersion).Put(kByteOrderMark).Put(manifest_offset).Put(uint64_t{manifest.size()});
  out.Raw(std::as_bytes(std::span(digest))).Put(uint64_t{0});
  out.Put(Checksum64(out.bytes()));
  return std::move(out.bytes());
}

std::vector<std::byte> MakeBlockTable(const ExportedSession& session) {
  std::array<std::vector<bool>, 2> has;
  for (size_t kind = 0; kind < 2; ++kind) {
    has[kind].resize(session.record.blocks.size());
    for (const uint32_t block : session.with_cells[kind]) has[kind][block] = true;
  }
  ByteWriter out;
  for (size_t i = 0; i < session.record.blocks.size(); ++i) {
    const BlockRecord& block = session.record.blocks[i];
    out.Raw(std::as_bytes(std::span(block.key))).Put(block.generation);
    out.Put(uint8_t{has[0][i]}).Put(uint8_t{has[1][i]}).PadTo(kBlockEntryBytes);
  }
  return std::move(out.bytes());
}

Status WriteCells(SectionWriter* out, const ExportedSession& session, size_t kind, const RunReader& read) {
  std::vector<std::byte> run;
  const auto& layers = session.shapes[kind].layers;
  for (size_t slot = 0; slot < layers.size(); ++slot) {
    run.resize(size_t{layers[slot].n_cells} * layers[slot].cell_bytes);
    for (const uint32_t block : session.with_cells[kind]) {
      KVCELL_RETURN_IF_ERROR(read(kind, block, slot, run));
      KVCELL_RETURN_IF_ERROR(out->Append(run));
    }
  }
  return OkStatus();
}

// The manifest's sections, found to follow one another from the header to the manifest without a gap or an overlap.
Result<std::array<ExportSection, kSectionCount>> ParseManifest(const ByteSource& file, std::string_view text,
                                                               uint64_t end) {
  const auto manifest = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto list = manifest.is_object() ? manifest.find("sections") : manifest.end();
  if (!manifest.is_object() || list == manifest.end() || !list->is_array() || list->size() != kSectionCount) {
    return Damaged(file, "the manifest has no list of sections");
  }
  std::array<ExportSection, kSectionCount> sections;
  uint64_t at = kHeaderBytes;
  for (size_t i = 0; i < kSectionCount; ++i) {
    const auto& entry = (*list)[i];
    const auto field = [&](const char* key) -> const nlohmann::json* {
      const auto found = entry.is_object() ? entry.find(key) : entry.end();
      return entry.is_object() && found != entry.end() ? &*found : nullptr;
    };
    const auto* name = field("name");
    const auto* offset = field("offset");
    const auto* bytes = field("bytes");
    const auto* digest = field("xxh3_128");
    if (!name || !offset || !bytes || !digest || *name != SectionName(i) || !offset->is_number_unsigned() ||
        !bytes->is_number_unsigned() || !digest->is_string()) {
      return Damaged(file, fmt::format("the manifest's section '{}' is malformed", SectionName(i)));
    }
    sections[i].offset = offset->get<uint64_t>();
    sections[i].bytes = bytes->get<uint64_t>();
    if (sections[i].offset != at || sections[i].bytes > end - at ||
        (i < kCells0 && sections[i].bytes > kMaxSectionBytes)) {
      return Damaged(file, fmt::format("section '{}' has a wrong place or size", SectionName(i)));
    }
    const std::string& hex = digest->get_ref<const std::string&>();
    for (size_t b = 0; b < sections[i].digest.size() && hex.size() == 32; ++b) {
      sections[i].digest[b] = static_cast<uint8_t>(std::strtoul(hex.substr(2 * b, 2).c_str(), nullptr, 16));
    }
    if (Hex(sections[i].digest) != hex)
      return Damaged(file, fmt::format("section '{}' has no checksum", SectionName(i)));
    at = RoundUp(at + sections[i].bytes, 64);
    if (at > end) return Damaged(file, fmt::format("section '{}' passes the manifest", SectionName(i)));
  }
  if (at != end) return Damaged(file, "bytes lie between the sections and the manifest");
  return sections;
}

Result<std::array<ExportSection, kSectionCount>> ReadSections(const ByteSource& file) {
  const auto bytes_there = file.Bytes();
  if (!bytes_there) return Fail(bytes_there.error());
  const uint64_t file_bytes = *bytes_there;
  std::array<std::byte, kHeaderBytes> bytes{};
  const auto n = file.ReadAt(0, bytes);
  if (!n) return Fail(n.error());
  if (*n < kHeaderBytes) return Damaged(file, "the file is shorter than its header");
  ByteReader in(bytes);
  const auto magic = in.Take<uint64_t>();
  const auto version = in.Take<uint32_t>();
  const auto order = in.Take<uint32_t>();
  if (magic == __builtin_bswap64(kExportMagic) ||
      (magic == kExportMagic && order == __builtin_bswap32(kByteOrderMark))) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} has the wrong byte order: it comes from another kind of machine", file.path()));
  }
  if (magic != kExportMagic) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} is not an exported kvcell session: choose another file", file.path()));
  }
  if (version != kExportVersion) {
    return Fail(StatusCode::kMismatch,
                fmt::format("{} has export format {}, this program reads {}: use the program that wrote it",
                            file.path(), version, kExportVersion));
  }
  const auto manifest_offset = in.Take<uint64_t>();
  const auto manifest_bytes = in.Take<uint64_t>();
  if (manifest_offset < kHeaderBytes || manifest_offset > file_bytes || manifest_bytes > kMaxManifestBytes ||
      manifest_bytes != file_bytes - manifest_offset) {
    return Damaged(file, "the header's sizes don't fit the file: it is cut off or damaged");
  }
  std::vector<std::byte> manifest(static_cast<size_t>(manifest_bytes));
  const auto got = file.ReadAt(manifest_offset, manifest);
  if (!got) return Fail(got.error());
  if (*got != manifest.size() || !std::ranges::equal(MakeHeader(manifest_offset, manifest), bytes)) {
    return Damaged(file, "the header or the manifest fails its checksum");
  }
  auto sections =
      ParseManifest(file, {reinterpret_cast<const char*>(manifest.data()), manifest.size()}, manifest_offset);
  // No digest covers what lies between sections: it must be what every export has there.
  for (size_t i = 0; sections && i < kSectionCount; ++i) {
    const uint64_t end = (*sections)[i].offset + (*sections)[i].bytes;
    std::array<std::byte, 64> padding{};
    const auto part = std::span(padding).first(static_cast<size_t>(RoundUp(end, 64) - end));
    const auto read = file.ReadAt(end, part);
    if (!read) return Fail(read.error());
    if (std::ranges::any_of(part, [](std::byte byte) { return byte != std::byte{0}; })) {
      return Damaged(file, fmt::format("the bytes behind section '{}' are not zero", SectionName(i)));
    }
  }
  return sections;
}

Result<std::vector<std::byte>> ReadSection(const ByteSource& file, const ExportSection& section,
                                           std::string_view name) {
  std::vector<std::byte> bytes(static_cast<size_t>(section.bytes));
  const auto n = file.ReadAt(section.offset, bytes);
  if (!n) return Fail(n.error());
  if (*n != bytes.size() || Checksum128(bytes) != section.digest) {
    return Damaged(file, fmt::format("section '{}' fails its checksum", name));
  }
  return bytes;
}

template <typename Vector>
bool CopyTo(std::span<const std::byte> bytes, Vector* to) {
  using Value = typename Vector::value_type;
  if (bytes.size() % sizeof(Value) != 0) return false;
  to->resize(bytes.size() / sizeof(Value));
  if (!bytes.empty()) std::memcpy(to->data(), bytes.data(), bytes.size());
  return true;
}

bool ParseBlockTable(std::span<const std::byte> table, ExportedSession* session) {
  const auto& tokens = session->record.tokens;
  if (table.size() % kBlockEntryBytes != 0 || table.size() / kBlockEntryBytes > tokens.size() / kBlockTokens)
    return false;
  ByteReader in(table);
  for (uint32_t i = 0; !in.at_end(); ++i) {
    BlockRecord block;
    std::memcpy(block.key.data(), in.Raw(block.key.size()).data(), block.key.size());
    block.generation = in.Take<uint64_t>();
    for (size_t kind = 0; kind < 2; ++kind) {
      const auto has = in.Take<uint8_t>();
      if (has > 1) return false;
      if (has == 1) session->with_cells[kind].push_back(i);
    }
    in.Raw(kBlockEntryBytes - block.key.size() - sizeof(uint64_t) - 2);
    std::copy_n(tokens.begin() + static_cast<ptrdiff_t>(i) * kBlockTokens, kBlockTokens, block.tokens.begin());
    session->record.blocks.push_back(block);
  }
  return in.ok();
}

// The bytes of a cells section in file order, with its digest.
class SectionReader {
 public:
  SectionReader(const ByteSource& file, const ExportSection& section)
      : file_(file), at_(section.offset), left_(section.bytes) {}

  // Null after an error or the end.
  const std::byte* Take(size_t bytes) {
    if (!status_.ok() || bytes > left_ + buffered_.size()) return nullptr;
    if (bytes > buffered_.size()) Fill(bytes);
    if (!status_.ok()) return nullptr;
    const std::byte* taken = buffered_.data();
    buffered_ = buffered_.subspan(bytes);
    return taken;
  }
  const Status& status() const { return status_; }
  Digest128 digest() const { return digest_.Digest(); }

 private:
  void Fill(size_t bytes) {
    if (!buffered_.empty()) std::memmove(buffer_.data(), buffered_.data(), buffered_.size());
    const size_t kept = buffered_.size();
    const size_t more = static_cast<size_t>(std::min<uint64_t>(left_, std::max(kBufferBytes, bytes) - kept));
    buffer_.resize(kept + more);
    const auto part = std::span(buffer_).subspan(kept);
    const auto n = file_.ReadAt(at_, part);
    if (!n) {
      status_ = n.error();
    } else if (*n != more) {
      status_ = Damaged(file_, "the file ends too early").value();
    }
    digest_.Update(part);
    at_ += more;
    left_ -= more;
    buffered_ = buffer_;
  }

  const ByteSource& file_;
  uint64_t at_;
  uint64_t left_;
  std::vector<std::byte> buffer_;
  std::span<const std::byte> buffered_;
  Checksum128Stream digest_;
  Status status_;
};

}  // namespace

Status WriteExport(ByteSink& file, const ExportedSession& session, const RunReader& read) {
  const SessionRecord& record = session.record;
  ByteWriter names;
  names.Sized(record.name).Sized(record.model);
  const auto identity = MakeIdentityBytes(record.identity);
  const auto blocks = MakeBlockTable(session);
  const std::array<std::vector<std::byte>, 2> shapes = {MakeShapeBytes(session.shapes[0]),
                                                        MakeShapeBytes(session.shapes[1])};
  const std::array<std::span<const std::byte>, kCells0> parts = {names.bytes(),
                                                                 identity,
                                                                 std::as_bytes(std::span(record.tokens)),
                                                                 blocks,
                                                                 record.exact,
                                                                 std::as_bytes(std::span(record.logits)),
                                                                 std::as_bytes(std::span(record.extras)),
                                                                 shapes[0],
                                                                 shapes[1]};
  SectionWriter out(file);
  for (size_t i = 0; i < kSectionCount; ++i) {
    KVCELL_RETURN_IF_ERROR(i < kCells0 ? out.Append(parts.at(i)) : WriteCells(&out, session, i - kCells0, read));
    KVCELL_RETURN_IF_ERROR(out.EndSection(SectionName(i)));
  }
  KVCELL_RETURN_IF_ERROR(out.Flush());
  nlohmann::json fields = nlohmann::json::array();
  for (const auto& [name, value] : record.identity) fields.push_back({name, value});
  const nlohmann::json manifest = {
      {"format", "kvcell-session"},     {"version", kExportVersion},     {"name", record.name},
      {"model", record.model},          {"identity", std::move(fields)}, {"tokens", record.tokens.size()},
      {"blocks", record.blocks.size()}, {"last_used", record.last_used}, {"sections", std::move(out.manifest())}};
  const std::string text = manifest.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  const auto text_bytes = std::as_bytes(std::span(text));
  KVCELL_RETURN_IF_ERROR(file.WriteAt(out.position(), text_bytes));
  KVCELL_RETURN_IF_ERROR(file.WriteAt(0, MakeHeader(out.position(), text_bytes)));
  return file.Finish();
}

Result<ExportedSession> ReadExport(const ByteSource& file) {
  const auto sections = ReadSections(file);
  if (!sections) return Fail(sections.error());
  std::array<std::vector<std::byte>, kCells0> parts;
  for (size_t i = 0; i < kCells0; ++i) {
    auto part = ReadSection(file, (*sections)[i], SectionName(i));
    if (!part) return Fail(part.error());
    parts[i] = std::move(*part);
  }
  ExportedSession session;
  SessionRecord& record = session.record;
  ByteReader names(parts[0]);
  record.name = names.Text();
  record.model = names.Text();
  const auto identity = ParseIdentityBytes(parts[1]);
  if (!names.at_end() || !identity || !CopyTo(parts[2], &record.tokens) || !ParseBlockTable(parts[3], &session) ||
      !CopyTo(parts[5], &record.logits) || !CopyTo(parts[6], &record.extras)) {
    return Damaged(file, "a section's content is malformed");
  }
  record.identity = *identity;
  record.exact = std::move(parts[4]);
  for (size_t kind = 0; kind < 2; ++kind) {
    session.cells[kind] = (*sections)[kCells0 + kind];
    const auto& shape_bytes = parts[7 + kind];
    const auto shape = ParseShapeBytes(shape_bytes);
    const size_t n_blocks = session.with_cells[kind].size();
    if (shape_bytes.empty() && n_blocks == 0 && session.cells[kind].bytes == 0) continue;
    const auto bytes = shape ? CheckedMul(*BlockBytes(*shape), n_blocks) : std::nullopt;
    if (!bytes || *bytes != session.cells[kind].bytes)
      return Damaged(file, fmt::format("section 'cells{}' has a wrong size", kind));
    session.shapes[kind] = *shape;
  }
  return session;
}

// Files of the store itself are never opened beside SQLite (see OpenIndex), nor is anything put between them.
Status StoreImpl::CheckOutside(const std::string& path) const {
  std::error_code error;
  const auto real = std::filesystem::weakly_canonical(path, error);
  if (error || !real.string().starts_with(path_ + "/")) return OkStatus();
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} lies inside the store {}: choose a path outside", path, path_));
}

Status StoreImpl::Export(const std::string& name, const std::string& path) {
  KVCELL_RETURN_IF_ERROR(CheckOutside(path));
  struct stat info = {};
  if (calls_.StatAt(AT_FDCWD, path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} is there and not a regular file: choose another path", path));
  }
  auto loaded = Load(name);
  if (!loaded) return loaded.error();
  ExportedSession session;
  session.record = std::move(*loaded);
  const auto write = [&]() -> Status {
    if (!session.record.damage.empty()) {
      return Status(StatusCode::kCorruption,
                    fmt::format("session '{}' can't be exported: {}", name, session.record.damage));
    }
    for (uint32_t i = 0; i < session.record.blocks.size(); ++i) {
      for (size_t kind = 0; kind < 2; ++kind) {
        const auto& place = session.record.blocks[i].places[kind];
        if (!place) continue;
        const std::lock_guard lock(mutex_);
        const auto extent = ExtentOf(*place);
        if (!extent) return extent.error();
        const auto shape = segments_->Clear(extent->shape);
        if (session.with_cells[kind].empty() && shape) session.shapes[kind] = *shape;
        if (!shape || !SameShape(session.shapes[kind], *shape)) {
          return Status(StatusCode::kCorruption,
                        fmt::format("session '{}' can't be exported: its blocks differ in shape", name));
        }
        session.with_cells[kind].push_back(i);
      }
    }
    const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
    const auto file = File::Open(calls_, AT_FDCWD, temporary, O_RDWR | O_CREAT | O_EXCL, 0600, temporary);
    if (!file) return file.error();
    const auto sink = OpenSink(*file, options_.key);
    Status status =
        !sink ? sink.error()
              : WriteExport(**sink, session, [&](size_t kind, uint32_t block, size_t slot, std::span<std::byte> to) {
                  return ReadRun(session.shapes[kind], *session.record.blocks[block].places[kind], slot, 1, to.data());
                });
    if (status.ok()) status = file->Sync();
    if (status.ok()) {
      const int result = calls_.RenameAt(AT_FDCWD, temporary.c_str(), path.c_str());
      if (result < 0) status = ErrnoStatus(-result, "write", path);
    }
    if (!status.ok()) (void)calls_.UnlinkAt(AT_FDCWD, temporary.c_str());
    return status;
  };
  const Status status = write();
  for (const auto& block : session.record.blocks) Release(block);
  return status;
}

Result<std::string> StoreImpl::Import(const std::string& path, const std::string& as) {
  if (options_.read_only) {
    return Fail(StatusCode::kPermission,
                fmt::format("store {} is open for inspection only: open it for writing", path_));
  }
  KVCELL_FAIL_IF_ERROR(CheckOutside(path));
  const auto file = File::Open(calls_, AT_FDCWD, path, O_RDONLY, 0, path);
  if (!file) return Fail(file.error());
  const auto source = OpenSource(*file, options_.key);
  if (!source) return Fail(source.error());
  auto session = ReadExport(**source);
  if (!session) return Fail(session.error());
  SessionRecord& record = session->record;
  if (!as.empty()) record.name = as;
  KVCELL_FAIL_IF_ERROR(CheckSessionName(record.name));
  const auto session_lock = LockUnlessHeld(record.name);
  if (!session_lock) return Fail(session_lock.error());
  {
    const std::lock_guard lock(mutex_);
    const auto id = index_->SessionId(record.name);
    if (!id) return Fail(id.error());
    if (*id) {
      return Fail(StatusCode::kInvalidArgument,
                  fmt::format("store {} has a session '{}' already: import it under another name", path_, record.name));
    }
  }
  const auto bring_in = [&](size_t kind) -> Status {
    const auto& with_cells = session->with_cells[kind];
    if (with_cells.empty()) return OkStatus();
    SectionReader reader(**source, session->cells[kind]);
    const CellSetShape& shape = session->shapes[kind];
    const auto places =
        CreateCells(shape, static_cast<uint32_t>(with_cells.size()),
                    [&](size_t slot, uint32_t, uint16_t) { return reader.Take(shape.layers[slot].cell_bytes); });
    if (!reader.status().ok()) return reader.status();
    if (!places) return places.error();
    for (size_t i = 0; i < with_cells.size(); ++i) record.blocks[with_cells[i]].places[kind] = (*places)[i];
    if (reader.digest() != session->cells[kind].digest) {
      return Damaged(**source, fmt::format("section 'cells{}' fails its checksum", kind)).value();
    }
    return OkStatus();
  };
  Status status = bring_in(0);
  if (status.ok()) status = bring_in(1);
  if (status.ok()) status = Commit(&record, session->shapes.data());
  for (const auto& block : record.blocks) Release(block);
  if (!status.ok()) return Fail(std::move(status));
  return record.name;
}

}  // namespace kvcell
