// The KV cache as persistent state: the one door for inference code. Needs no model; an engine embeds this class.
//
// A step: Begin(batch) reserves room and names the positions; for every layer in order, Compute(layer, k, v, q, out)
// appends the step's K and V and attends; Commit() makes the tokens part of their sequences, Abort() undoes the step.
// What a query reads depends on positions alone: its own block and the sinks exactly, earlier blocks as their sealed
// cells stand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcell/codec.h"
#include "kvcell/codec_plan.h"
#include "kvcell/geometry.h"
#include "kvcell/rules.h"
#include "kvcell/status.h"
#include "kvcell/tier.h"

namespace kvcell {

enum class CellState : uint8_t { kActive = 0, kQuantized = 1, kPersisted = 2, kRecovering = 3, kEvicted = 4 };
inline constexpr int kCellStates = 5;
std::string_view CellStateName(CellState state);  // "ACTIVE" ...

using SequenceId = int32_t;

// One layer's rotary position embedding over the whole head: pair i turns by position * base^(-2i/head_dim) * scale /
// factors[i].
struct RopeSpec {
  bool halves = false;  // pairs are (i, i + head_dim/2); else (2i, 2i + 1)
  float base = 10000.0f;
  float scale = 1.0f;
  std::vector<float> factors;  // [head_dim / 2] or empty: 1; none of them 0
};

// How cells that are in the store and not in RAM are attended.
enum class FileReads : uint8_t {
  // In the file, mapped, while the system has its pages at hand; streamed while steps have to wait for the disk. Mapped
  // cells are checked when they are first read, and again whenever the file has changed or pages of it came from the
  // disk. Pages count as resident, though the system may drop them at any time. Takes SIGBUS, which comes where a file
  // is cut off, passing on to an earlier handler what is none of its own. Encrypted stores and files that can't be
  // mapped are streamed.
  kMapped = 0,
  // Read into a ring within the RAM budget, and checked every time.
  kStreamed = 1,
};

struct CacheOptions {
  Geometry geometry;                     // [n_layers]
  CodecSpec codec;                       // of sealed blocks
  std::vector<CodecRange> codec_ranges;  // other codecs for some layers and KV heads
  int32_t sinks = 4;  // first tokens kept exact for every query, 0..64. More: closer to f16, bytes per sequence.
  // Sealed blocks before a query's own that it reads exactly. Each costs one f16 block per sequence.
  int32_t recent_blocks = 0;
  int32_t max_step_tokens = 512;  // most tokens per step, all sequences together; sizes the exact scratch
  int32_t max_sequences = 1;      // live at once, forks included; exact cells are set aside for each
  int32_t max_threads = 0;        // most parts of a Compute; 0: as many as there are processors
  uint64_t ram_budget = 0;  // bytes of KV memory, never passed, at most 2^46; 0: what the rules say, or as much as the
                            // context takes. Less: older cells are attended from the store, slower.
  // What moves cells between states, and when; null: as the profile `balanced` does, with the codec, sinks and
  // recent_blocks above. Rules that are given and name a codec, sinks or recent_blocks win over these fields; every
  // profile names them.
  std::shared_ptr<const Rules> rules;
  // How the model turns q and k by position: needed where rules cut the past to a window, since positions are then
  // renumbered by turning the query. [n_layers] or empty.
  std::vector<RopeSpec> rope;
  size_t trace_records = 0;  // newest transitions kept for Cache::Trace; 0: none
  // Most bytes of sealed blocks that no sequence uses any more and that stay in RAM for prompts that begin alike,
  // within ram_budget; they go first when it fills up. 0: none; live sequences share all the same. More: fewer prompts
  // computed twice.
  uint64_t prefix_bytes = 0;
  int32_t prefix_roots = 8;  // most different beginnings among these; room for their exact sinks is set aside
  // Where cells go beyond RAM instead of a store: a tier of the caller's own (kvcell/tier.h). Such a cache has no
  // store, and so no sessions. Shared with work off the token path; it outlives the cache.
  std::shared_ptr<CellTier> tier;
  std::string store;  // directory; needed for sessions and for a budget smaller than the context; "": none
  FileReads file_reads = FileReads::kMapped;
  uint8_t durability = 1;  // 0 none, 1 process (survives kill -9), 2 power (survives power loss)
  // Secret of an encrypted store, 32 bytes and more; "": not encrypted. Its cells are read through RAM always.
  std::string store_key;
  // Tenant: sessions and blocks of others are neither seen nor shared; "": the common one.
  std::string name_space;
  // Most bytes of the store's files; 0: no cap. Before it is passed, sessions that were not used for the longest lose
  // cells, from their end.
  uint64_t disk_cap = 0;
  int64_t ttl_seconds = 0;              // sessions not used for so long are removed; 0: never; not below 0
  uint64_t scrub_bytes_per_second = 0;  // stored cells are checked in the background at this rate; 0: not at all
  // All that decides whether stored cells may be read and that the cache can't know: weights, tokenizer, RoPE ... as
  // named fields. Geometry, codec, exactness and format version are added by the cache.
  std::vector<std::pair<std::string, std::string>> identity;
  std::string model_name;  // for people
};

// Bytes of KV memory a configuration takes for `n_sequences` sequences of `context` tokens, exactly as the cache
// allocates.
struct MemoryPlan {
  uint64_t cells = 0;     // of the cells at full context, coded where rules let them be: what Stats then calls kv_bytes
  uint64_t coded = 0;     // sealed cells
  uint64_t exact = 0;     // open blocks, sinks, replicas; taken at the start
  uint64_t scratch = 0;   // exact cells of one step and streaming rings; taken at the start
  uint64_t metadata = 0;  // block and cell tables
  uint64_t total = 0;     // coded + exact + scratch, and no less than `minimum`: what ram_budget bounds
  uint64_t minimum = 0;   // the smallest ram_budget that works (with a store). A layer's whole window counts, however
                          // short the context: for no window give 0, not a large one.
  uint64_t f16 = 0;       // the same tokens in f16
};
Result<MemoryPlan> PlanMemory(const CacheOptions& options, int64_t context, int32_t n_sequences);

struct StepItem {
  SequenceId sequence = 0;
  std::span<const Token> tokens;  // appended by this step, at the sequence's end
  // The tokens are a guess that Trim may take back (speculative decoding): nobody else is given them. Until a Trim or a
  // step without `draft` has settled what stays, Save is refused and Publish leaves them out.
  bool draft = false;
};

struct CellCounts {
  std::array<uint64_t, kCellStates> by_state{};
};

struct CacheStats {
  CellCounts cells;
  uint64_t ram_bytes = 0;  // allocated KV memory, measured: arena pages in use
  uint64_t ram_peak_bytes = 0;
  uint64_t file_bytes = 0;                 // of cells in the store that this cache's sequences refer to
  uint64_t kv_bytes = 0;                   // of all cells, coded and exact, wherever they are
  uint64_t f16_bytes = 0;                  // the same tokens in f16
  double bits_per_element = 0;             // of sealed cells, the mean over layers and KV heads; known before any is
  uint64_t reads_ram = 0, reads_file = 0;  // cells attended
  uint64_t reads_mapped = 0;               // of reads_file, those in the mapped file
  uint64_t reads_shared = 0;               // cells that were not read again because one pass served several sequences
  uint64_t prefix_bytes = 0;       // of sealed blocks that no sequence uses, kept for prompts to come; not in kv_bytes
  uint64_t approximate_reads = 0;  // coded cells read where recent_blocks promised exact ones (after a cut)
  uint64_t transitions = 0;
  int32_t pressure = 0;               // 0 none, 1 soft, 2 hard: what rules see now
  double ram_fill = 0;                // of the room for cells, 0..1
  uint64_t misses_streamed = 0;       // reads that had to go to the store: the cell was PERSISTED
  uint64_t misses_recovering = 0;     // the same while it was on its way in
  uint64_t evicted_skips = 0;         // cells within reach of a query that rules had given up
  uint64_t thrashed = 0, damped = 0;  // blocks put to rest after going to and fro; replicas not made because of that
  uint64_t waits = 0;                 // steps that waited for room
  double longest_wait_ms = 0;
  uint64_t jobs = 0, failed_jobs = 0;                  // batches of work off the token path
  std::array<uint64_t, kCellStates> bytes_by_state{};  // of cells; exact replicas and sinks count as ACTIVE
  uint64_t saturated = 0, not_finite = 0;              // values that append had to change: beyond f16; NaN, infinite
  // What this cache's store took from sessions for its cap or time to live: removed whole; blocks of these and others.
  uint64_t removed_sessions = 0, removed_blocks = 0;
};

// How often cells moved along one edge of the state machine.
struct TransitionCount {
  std::string event, from, to;  // "none" before a cell exists
  uint64_t n = 0;
};

// One cell, for inspection.
struct CellInfo {
  int32_t layer = 0, head = 0;
  int64_t token_start = 0, token_end = 0;
  CellState state = CellState::kActive;
  bool durable = false;
  std::string k_precision, v_precision;  // "f16", "int4"
  std::string tier;                      // "ram", "file"; another tier's own name
  std::string storage_path;              // "" in RAM
  uint64_t offset = 0, length = 0, checksum = 0;
  uint32_t refs = 0, reads = 0;
  int64_t last_access = 0;  // step number
};

// What a sequence began with instead of computing it.
struct PrefixUse {
  // Why there is no more of it.
  enum class End : uint8_t {
    kWhole,          // all that can be reused: every whole block before the last token
    kNothing,        // nobody has stored or is using anything that begins like this
    kEnds,           // what is there ends here
    kDiffers,        // the nearest other prompt has another token at `differs_at`
    kEvicted,        // more was stored and has been given up for space
    kOtherIdentity,  // stored for another model, codec or setting; `note` names the field
    kWindow,         // sliding-window layers have passed the cells that they would need here
    kReplicas,       // recent_blocks wants exact cells that are not there
    kDamaged,        // the next block failed its checks; `note` says where
  };
  int64_t tokens = 0;      // a multiple of 64; positions [0, tokens) are there
  int64_t from_store = 0;  // of these, read from the store
  int64_t matched = 0;     // tokens of whole blocks that agreed, before windows and replicas had their say
  End end = End::kNothing;
  int64_t differs_at = -1;
  std::string note = {};  // one sentence for people; "" with kWhole
};

// A session brought back from the store.
struct OpenedSession {
  SequenceId sequence = 0;
  std::vector<Token> tokens;  // as saved; positions [0, usable) are in the sequence, the rest must be appended again
  int64_t usable = 0;
  std::vector<float> logits;  // of the last token; empty unless usable == tokens.size()
  std::string extras;
  std::string notice;    // what the user should know of the store, though the session is sound; "" otherwise
  std::string note;      // why usable < tokens.size(): which cell of which file is damaged; "" otherwise
  bool created = false;  // the store had no such session: an empty one that holds the name
};

// Thread-compatible: one thread drives it; Compute's parts alone may run on several.
class Cache {
 public:
  // kInvalidArgument (geometry, options), kOutOfBudget naming the smallest budget that would do, or what the store's
  // opening gives. Reserves address space; pages are taken as cells come.
  static Result<std::unique_ptr<Cache>> Open(const CacheOptions& options);
  virtual ~Cache() = default;

  virtual const CacheOptions& options() const = 0;

  // A new empty sequence; kOutOfBudget past max_sequences. Numbers of freed sequences are given again.
  virtual Result<SequenceId> Create() = 0;
  // A sequence that shares all of `parent`'s past; O(blocks), no bytes copied but the open block's on the first write.
  virtual Result<SequenceId> Fork(SequenceId parent) = 0;
  virtual Status Free(SequenceId sequence) = 0;
  // Cuts the sequence to at most `length` tokens and returns the position from which the caller must append again:
  // `length` itself, or the start of the block that a cut inside a sealed block falls into.
  virtual Result<int64_t> Trim(SequenceId sequence, int64_t length) = 0;
  // After a step that ended with kCorruption: checks the sequence's cells in the store that are not in RAM, cuts it
  // before the first block that is damaged or gone, and returns the position from which the caller must append again;
  // the sequence's length where all are sound, as they are where the file alone was cut off behind them. Nobody else is
  // given the blocks that were cut. `note`, where given, says which cell of which file was wrong. Reads all of
  // them; where that fails for now (kIoError) nothing is cut.
  virtual Result<int64_t> CutToSound(SequenceId sequence, std::string* note) = 0;
  virtual int64_t Length(SequenceId sequence) const = 0;
  // Valid until the sequence changes.
  virtual std::span<const Token> Tokens(SequenceId sequence) const = 0;

  // Fills an empty sequence with the longest prefix of `tokens` that a live sequence, a kept block or the store has,
  // the last token left out, since its logits are wanted; append from PrefixUse::tokens on. The result of every later
  // step is what it would be had all been computed. Blocks are compared token by token and verified as they come in;
  // finding nothing is no error. O(blocks). kInvalidArgument where the sequence is not empty.
  virtual Result<PrefixUse> Reuse(SequenceId sequence, std::span<const Token> tokens) = 0;
  // Puts the sequence's sealed blocks into the store's prefix tree, for Reuse in any process; complete or not at all.
  // Blocks that the store has already are not written again.
  virtual Status Publish(SequenceId sequence) = 0;
  // Tokens for which there is RAM beside what is in use, kept prefixes counted as free; the largest number with a
  // store, to which older cells can leave.
  virtual int64_t Room() const = 0;

  // Starts a step. Room for all its cells is found now, by moving older cells to the store if need be: kOutOfBudget or
  // kNoSpace change nothing. The step's rows are the items' tokens in order.
  virtual Status Begin(std::span<const StepItem> items) = 0;
  // Every layer of every step; one that a sequence's first step leaves out may be left out for good, for callers that
  // split the layers among caches. Appends K and V of the step's rows to layer `layer` and attends: k [n_rows,
  // n_kv_heads, dk], v [n_rows, n_kv_heads, dv], q [n_rows, n_heads, dk] in f32, after RoPE; out [n_rows, n_heads, dv].
  // Layers in order, each once. To run on several threads, all of parts 0..n_parts-1 are called with the same arguments
  // at the same time (they meet at a barrier inside). Errors are kept for Commit; out then means nothing.
  virtual void Compute(int layer, const float* k, const float* v, const float* q, float* out, int part = 0,
                       int n_parts = 1) noexcept = 0;
  // The same in two calls, on one thread.
  virtual Status Append(int layer, const float* k, const float* v) = 0;
  virtual Status Attend(int layer, const float* q, float* out) = 0;
  // Ends the step. An error (kIoError, kCorruption from a cell on its way in, kInvalidArgument where a layer was left
  // out) means that the step counts as aborted.
  virtual Status Commit() = 0;
  virtual void Abort() = 0;

  // Stores the sequence under `name` (one transaction; an older session of that name is replaced or stays intact).
  // `durability` is what this save survives, numbered as CacheOptions::durability; nothing: what the cache was opened
  // with.
  virtual Status Save(SequenceId sequence, const std::string& name, std::span<const float> logits,
                      const std::string& extras, std::optional<uint8_t> durability) = 0;
  Status Save(SequenceId sequence, const std::string& name, std::span<const float> logits, const std::string& extras) {
    return Save(sequence, name, logits, extras, std::nullopt);
  }
  // Save without waiting for the store: what goes there is copied now, and one transaction of a thread of its own
  // stores it while steps go on. Cells that are in no file yet are written first, by this call. The calls beside are
  // one at a time: kBusy while the one before is under way (try again some tokens later), and its error if it failed.
  virtual Status BeginSave(SequenceId sequence, const std::string& name, std::span<const float> logits,
                           const std::string& extras, std::optional<uint8_t> durability) = 0;
  // Waits for the save under way, if there is one, and says how the last BeginSave ended; once. Save, Publish, Free and
  // the cache's end wait too.
  virtual Status FinishSave() = 0;
  // Brings a session back. kNotFound, unless `create` makes it an empty one that the first Save stores; kMismatch
  // naming the identity field that differs; kBusy naming the process that holds it. Damage shortens `usable` and is
  // told in `note`. The session stays locked for writing until the sequence is freed or saved under another name.
  virtual Result<OpenedSession> OpenSession(const std::string& name, bool create) = 0;
  Result<OpenedSession> OpenSession(const std::string& name) { return OpenSession(name, /*create=*/false); }

  // Exchanges the rules between two steps: the next transition goes by the new ones. kInvalidArgument where they ask
  // for another codec, sinks, recent_blocks or RAM budget, which a cache has for life; the old rules then stay in
  // force.
  virtual Status SetRules(std::shared_ptr<const Rules> rules) = 0;
  // Asked from outside, done between two steps. Pin: the sequence's cells, those to come too, stay in RAM whatever the
  // rules say; what a fork has too stays as long as one of both is pinned. Persist: hard MEMORY_PRESSURE on its cells
  // alone, which reads do not bring back to RAM until Pin is called either way. Evict: its sealed blocks that lie in
  // [begin, end) are given up and no longer attended, but for those that another sequence uses and for the exact sinks;
  // a session saved then comes back up to the first of them.
  virtual Status Pin(SequenceId sequence, bool pinned) = 0;
  virtual Status Persist(SequenceId sequence) = 0;
  virtual Status Evict(SequenceId sequence, int64_t begin, int64_t end) = 0;
  // Waits for all work off the token path.
  virtual Status Settle() = 0;

  virtual CacheStats Stats() const = 0;
  virtual std::vector<TransitionCount> Transitions() const = 0;
  // The newest transitions in Chrome's trace event format (CacheOptions::trace_records).
  virtual std::string Trace() const = 0;
  virtual std::vector<CellInfo> Inspect(SequenceId sequence) const = 0;
};

}  // namespace kvcell
