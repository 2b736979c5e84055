#include "process_tier.h"

#include <fmt/format.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <utility>

#include "attention/attention.h"
#include "codec/cell_codec.h"

namespace kvcell {
namespace {

constexpr size_t kMostFloats = size_t{1} << 20;
constexpr size_t kMostBytes = size_t{8} << 20;
constexpr size_t kMostCells = 4096;
constexpr size_t kMostRows = 4096;

enum class Question : int32_t { kCreate, kDestroy, kRead, kAttend, kEnd };

}  // namespace

// One question and its answer. Who asks fills it in and posts `asked`; who answers posts `answered`.
struct ProcessTier::Mailbox {
  sem_t asked, answered;
  Lie lie;
  Question question;
  bool ok;
  uint64_t extent;
  uint32_t block;
  uint32_t slot, head, n;  // n: cells to read
  int32_t model_layer, model_head, n_rows, dk, dv;
  float scale, softcap;
  uint32_t n_cells;
  TierQuery::Cell cells[kMostCells];
  int64_t begin[kMostRows], end[kMostRows];
  float q[kMostFloats];
  uint32_t n_answered;
  float max[kMostRows], sum[kMostRows], values[kMostFloats];
  uint64_t n_bytes;
  alignas(64) std::byte bytes[kMostBytes];
};

namespace {

// What runs in the other process.
class Holder {
 public:
  Holder(const CellMap& map, ProcessTier::Mailbox* box) : map_(map), box_(box) {}

  void Serve() {
    while (true) {
      while (sem_wait(&box_->asked) != 0) {
      }
      box_->ok = true;
      switch (box_->question) {
        case Question::kCreate:
          cells_[{box_->extent, box_->block}][box_->slot].assign(box_->bytes, box_->bytes + box_->n_bytes);
          break;
        case Question::kDestroy:
          cells_.erase({box_->extent, box_->block});
          break;
        case Question::kRead:
          Read();
          break;
        case Question::kAttend:
          Attend();
          break;
        case Question::kEnd:
          _exit(0);
      }
      sem_post(&box_->answered);
    }
  }

 private:
  const std::vector<std::byte>* Find(uint64_t extent, uint32_t block, uint32_t slot) const {
    const auto found = cells_.find({extent, block});
    if (found == cells_.end()) return nullptr;
    const auto in_slot = found->second.find(slot);
    return in_slot == found->second.end() ? nullptr : &in_slot->second;
  }

  void Read() {
    const std::vector<std::byte>* bytes = Find(box_->extent, box_->block, box_->slot);
    box_->ok = bytes != nullptr && (box_->head + box_->n) * box_->n_bytes <= bytes->size();
    if (box_->ok) std::memcpy(box_->bytes, bytes->data() + box_->head * box_->n_bytes, box_->n * box_->n_bytes);
  }

  void Attend() {
    const LayerCells& layer = map_.layers[static_cast<size_t>(box_->model_layer)];
    const auto model_head = static_cast<uint16_t>(box_->model_head);
    const HeadContext head{.dk = box_->dk,
                           .dv = box_->dv,
                           .scale = box_->scale,
                           .softcap = box_->softcap,
                           .coded = layer.coded(model_head)};
    std::vector<CellRef> refs;
    for (uint32_t c = 0; c < box_->n_cells; ++c) {
      const TierQuery::Cell& cell = box_->cells[c];
      const std::vector<std::byte>* bytes = Find(cell.place.offset, cell.place.index, box_->slot);
      if (bytes == nullptr) {
        box_->ok = false;
        return;
      }
      refs.push_back({.bytes = bytes->data() + box_->head * head.coded.bytes,
                      .position = cell.position,
                      .first = static_cast<int16_t>(cell.first),
                      .last = kBlockTokens});
    }
    std::vector<const float*> q;
    for (int32_t r = 0; r < box_->n_rows; ++r) q.push_back(box_->q + static_cast<size_t>(r * box_->dk));
    PreparedQueries queries;
    queries.Prepare(head, {.n_rows = box_->n_rows, .q = q.data(), .begin = box_->begin, .end = box_->end});
    Partial state;
    state.Reset(head, box_->n_rows);
    ::kvcell::Attend(queries, refs, &state);
    TierPartial partial;
    ToTierPartial(head, state, &partial);
    box_->n_answered = static_cast<uint32_t>(box_->n_rows) - (box_->lie == ProcessTier::Lie::kTooFewRows ? 1 : 0);
    std::ranges::copy(partial.max, box_->max);
    std::ranges::copy(partial.sum, box_->sum);
    std::ranges::copy(partial.values, box_->values);
    if (box_->lie == ProcessTier::Lie::kNotANumber) box_->values[0] = std::nanf("");
  }

  const CellMap& map_;
  ProcessTier::Mailbox* box_;
  std::map<std::pair<uint64_t, uint32_t>, std::map<uint32_t, std::vector<std::byte>>> cells_;  // [place][slot]
};

}  // namespace

Result<std::shared_ptr<ProcessTier>> ProcessTier::Start(const CellMap& map) {
  void* memory = ::mmap(nullptr, sizeof(Mailbox), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Fail(StatusCode::kIoError, "no shared memory for the other process");
  std::shared_ptr<ProcessTier> tier(new ProcessTier);
  tier->box_ = static_cast<Mailbox*>(memory);
  sem_init(&tier->box_->asked, 1, 0);
  sem_init(&tier->box_->answered, 1, 0);
  const pid_t parent = ::getpid();
  tier->pid_ = ::fork();
  if (tier->pid_ < 0) return Fail(StatusCode::kIoError, "no process for the tier");
  if (tier->pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) _exit(1);
    Holder(map, tier->box_).Serve();
  }
  return tier;
}

ProcessTier::~ProcessTier() {
  if (pid_ > 0) {
    box_->question = Question::kEnd;
    sem_post(&box_->asked);
    ::waitpid(pid_, nullptr, 0);
  }
  ::munmap(box_, sizeof(Mailbox));
}

void ProcessTier::SetLie(Lie lie) {
  const std::lock_guard lock(mutex_);
  box_->lie = lie;
}

Status ProcessTier::Ask() {
  const Status died(StatusCode::kIoError, fmt::format("process {}, which holds cells, has died", pid_));
  if (pid_ < 0) return died;
  sem_post(&box_->asked);
  while (true) {
    timespec until{};
    ::clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    if (sem_timedwait(&box_->answered, &until) == 0) break;
    if (::waitpid(pid_, nullptr, WNOHANG) == 0) continue;  // slow, or a signal
    pid_ = -1;
    return died;
  }
  return box_->ok ? OkStatus() : Status(StatusCode::kCorruption, "the other process has no such cells");
}

Result<std::vector<BlockPlace>> ProcessTier::CreateCells(const CellSetShape& shape, uint32_t n_blocks,
                                                         const CellSource& cell) {
  const std::lock_guard lock(mutex_);
  std::vector<BlockPlace> places;
  const uint64_t extent = ++last_extent_;
  for (uint32_t b = 0; b < n_blocks; ++b) {
    places.push_back({.segment = 0, .offset = extent, .n_blocks = n_blocks, .index = b});
  }
  for (uint32_t slot = 0; slot < shape.layers.size(); ++slot) {
    const auto& layer = shape.layers[slot];
    for (uint32_t b = 0; b < n_blocks; ++b) {
      box_->question = Question::kCreate;
      box_->extent = extent;
      box_->block = b;
      box_->slot = slot;
      box_->n_bytes = uint64_t{layer.n_cells} * layer.cell_bytes;
      if (box_->n_bytes > kMostBytes) return Fail(StatusCode::kNoSpace, "the layer's cells don't fit the mailbox");
      for (uint16_t h = 0; h < layer.n_cells; ++h) {
        std::memcpy(box_->bytes + h * layer.cell_bytes, cell(slot, b, h), layer.cell_bytes);
      }
      KVCELL_FAIL_IF_ERROR(Ask());
    }
  }
  return places;
}

void ProcessTier::DestroyCells(const BlockPlace& place) {
  const std::lock_guard lock(mutex_);
  box_->question = Question::kDestroy;
  box_->extent = place.offset;
  box_->block = place.index;
  (void)Ask();  // what has died holds nothing
}

Status ProcessTier::ReadCells(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot,
                              uint16_t head_begin, uint16_t n, std::byte* dst) {
  const std::lock_guard lock(mutex_);
  ++reads_;
  box_->question = Question::kRead;
  box_->extent = place.offset;
  box_->block = place.index;
  box_->slot = static_cast<uint32_t>(layer_slot);
  box_->head = head_begin;
  box_->n = n;
  box_->n_bytes = shape.layers[layer_slot].cell_bytes;
  KVCELL_RETURN_IF_ERROR(Ask());
  std::memcpy(dst, box_->bytes, n * size_t{shape.layers[layer_slot].cell_bytes});
  return OkStatus();
}

Status ProcessTier::ReadRun(const CellSetShape& shape, const BlockPlace& place, size_t layer_slot, uint32_t n_blocks,
                            std::byte* dst) {
  const auto& layer = shape.layers[layer_slot];
  for (uint32_t b = 0; b < n_blocks; ++b) {
    BlockPlace at = place;
    at.index += b;
    KVCELL_RETURN_IF_ERROR(ReadCells(shape, at, layer_slot, 0, layer.n_cells,
                                     dst + static_cast<size_t>(b) * layer.n_cells * layer.cell_bytes));
  }
  return OkStatus();
}

Status ProcessTier::Attend(const TierQuery& query, TierPartial* partial) {
  const std::lock_guard lock(mutex_);
  const auto n_rows = static_cast<size_t>(query.n_rows);
  const size_t n_q = n_rows * static_cast<size_t>(query.head_dim_k), dv = static_cast<size_t>(query.head_dim_v);
  if (query.cells.size() > kMostCells || n_rows > kMostRows || n_q > kMostFloats || n_rows * dv > kMostFloats) {
    return Status(StatusCode::kUnsupported, "the question does not fit the mailbox");
  }
  box_->question = Question::kAttend;
  box_->slot = static_cast<uint32_t>(query.layer_slot);
  box_->head = query.head;
  box_->model_layer = query.shape->layers[query.layer_slot].layer;
  box_->model_head = query.model_head;
  box_->n_rows = query.n_rows;
  box_->dk = query.head_dim_k;
  box_->dv = query.head_dim_v;
  box_->scale = query.scale;
  box_->softcap = query.softcap;
  box_->n_cells = static_cast<uint32_t>(query.cells.size());
  std::ranges::copy(query.cells, box_->cells);
  std::copy_n(query.begin, n_rows, box_->begin);
  std::copy_n(query.end, n_rows, box_->end);
  std::copy_n(query.q, n_q, box_->q);
  KVCELL_RETURN_IF_ERROR(Ask());
  ++answers_;
  const size_t n_answered = std::min<size_t>(box_->n_answered, kMostRows);
  partial->max.assign(box_->max, box_->max + n_answered);
  partial->sum.assign(box_->sum, box_->sum + n_answered);
  partial->values.assign(box_->values, box_->values + n_answered * dv);
  return OkStatus();
}

}  // namespace kvcell
