// Work off the token path: one thread that writes, codes, fetches and replicates; its results change the cell table
// only when the owner takes them in.
#include <utility>

#include "cell/cell_memory.h"
#include "codec/cell_codec.h"

namespace kvcell {

// Starts a job for as many of the blocks as one batch holds; false where nothing was started.
bool CellMemory::Start(JobKind kind, std::vector<Block*> blocks) {
  if (blocks.empty() || under_way_[static_cast<size_t>(kind)] > 0) return false;
  const size_t batch = kind == JobKind::kWrite ? kWriteBatch : kCodeBatch;
  if (kind == JobKind::kWrite) {
    if (options_.tier == nullptr) return false;
    std::erase_if(blocks, [&](const Block* block) { return !NeedsWrite(*block, kFullLayers); });
  }
  if (blocks.size() > batch) blocks.resize(batch);
  if (blocks.empty()) return false;
  Job job{.kind = kind, .blocks = std::move(blocks), .slots = {}, .places = {}, .status = {}};
  if (kind != JobKind::kWrite && !TakeJobSlots(&job)) return false;
  Enqueue(std::move(job));
  return true;
}

// Slots for what the job makes, and the states in which its cells wait for it. False where there is no room, or
// nothing to do.
bool CellMemory::TakeJobSlots(Job* job) {
  const bool coded = job->kind == JobKind::kCode || job->kind == JobKind::kFetch;
  const auto growth = [&] { return coded ? CodedGrowth(job->blocks.size()) : ExactGrowth(job->blocks.size()); };
  while (!job->blocks.empty() && used() + growth() > coded_limit()) job->blocks.pop_back();
  job->slots.assign(job->blocks.size() * map_.n_cells, kNoSlot);
  bool any = false;
  for (size_t b = 0; b < job->blocks.size(); ++b) {
    Block* block = job->blocks[b];
    CellFacts facts = FactsOf(*block);
    if (job->kind == JobKind::kCode) facts.pressure = Pressure::kHard;
    ForEachCell(block, kFullLayers, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      facts.layer = layer.number;
      facts.head = h;
      facts.durable = cell->durable;
      Slot& slot = job->slots[b * map_.n_cells + layer.first_cell + h];
      if (job->kind == JobKind::kCode) {
        if (cell->state != CellState::kActive || cell->coded != kNoSlot || cell->exact == kNoSlot) return;
        const CellRule* rule = rules_->table.Find(CellEvent::kMemoryPressure, cell->state, facts);
        if (rule == nullptr || rule->action != CellAction::kCode) return;
        slot = coded_[layer.run(h).pool]->Take();
      } else {
        const CellState waits = job->kind == JobKind::kFetch ? CellState::kPersisted : CellState::kQuantized;
        if (cell->state != waits || (job->kind == JobKind::kReplicate && cell->coded == kNoSlot)) return;
        const CellAction action = job->kind == JobKind::kFetch ? CellAction::kFetch : CellAction::kReplicate;
        CellEvent event = CellEvent::kReadRequest;
        const CellRule* rule = rules_->table.Find(event, cell->state, facts);
        if (rule == nullptr) rule = rules_->table.Find(event = CellEvent::kCacheMiss, cell->state, facts);
        if (rule == nullptr || rule->action != action) return;
        // A replica that recent_blocks made is there already.
        if (job->kind == JobKind::kReplicate && cell->exact != kNoSlot) return;
        Apply(*block, cell, event, facts);
        slot = job->kind == JobKind::kFetch ? coded_[layer.run(h).pool]->Take() : exact_[layer.exact_pool]->Take();
      }
      any = true;
    });
  }
  NotePeak();
  return any;
}

void CellMemory::GiveJobSlots(const Job& job) {
  if (job.slots.empty()) return;  // a write takes none
  for (size_t b = 0; b < job.blocks.size(); ++b) {
    ForEachCell(job.blocks[b], kFullLayers, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      const Slot slot = job.slots[b * map_.n_cells + layer.first_cell + h];
      if (slot == kNoSlot) return;
      if (job.kind == JobKind::kReplicate) {
        exact_[layer.exact_pool]->Give(slot);
      } else {
        coded_[layer.run(h).pool]->Give(slot);
      }
      // The transition was not completed: the cell is what it was before.
      if (cell->state != CellState::kRecovering) return;
      cell->state = job.kind == JobKind::kFetch ? CellState::kPersisted : CellState::kQuantized;
    });
  }
}

void CellMemory::Enqueue(Job job) {
  for (Block* block : job.blocks) {
    AddRef(block);
    block->busy = true;
  }
  ++under_way_[static_cast<size_t>(job.kind)];
  ++counters_.jobs;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
    ++jobs_under_way_;
  }
  wake_.notify_one();
}

void CellMemory::WorkerLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Run(&job);
    lock.lock();
    finished_.push_back(std::move(job));
    done_.notify_all();
  }
}

// f(block, layer, head, slot) for every cell that takes part in a job, until one fails.
template <typename F>
Status CellMemory::ForEachSlot(const Job& job, const F& f) const {
  for (size_t b = 0; b < job.blocks.size(); ++b) {
    for (const LayerCells& layer : map_.layers) {
      for (uint16_t h = 0; h < layer.n_heads; ++h) {
        const Slot slot = job.slots[b * map_.n_cells + layer.first_cell + h];
        if (slot != kNoSlot) KVCELL_RETURN_IF_ERROR(f(*job.blocks[b], layer, h, slot));
      }
    }
  }
  return OkStatus();
}

void CellMemory::Run(Job* job) const {
  switch (job->kind) {
    case JobKind::kWrite:
      job->places = WriteExtent(job->blocks, kFullLayers);
      if (!job->places) job->status = job->places.error();
      return;
    case JobKind::kCode:
      job->status = ForEachSlot(*job, [&](const Block& block, const LayerCells& layer, uint16_t h, Slot slot) {
        Encode(block, layer, h, coded_[layer.run(h).pool]->at(slot));
        return OkStatus();
      });
      return;
    case JobKind::kFetch:
      job->status = ForEachSlot(*job, [&](const Block& block, const LayerCells& layer, uint16_t h, Slot slot) {
        return ReadVerified(block, layer, h, coded_[layer.run(h).pool]->at(slot));
      });
      return;
    case JobKind::kReplicate:
      job->status = ForEachSlot(*job, [&](const Block& block, const LayerCells& layer, uint16_t h, Slot slot) {
        const CellEntry& cell = block.cells[layer.first_cell + h];
        Decode(layer, h, coded(layer, h, cell), exact_[layer.exact_pool]->at(slot));
        return OkStatus();
      });
      return;
  }
}

// Takes in what has been done. Waits up to `wait` for all of it; the first failure is returned.
Status CellMemory::TakeIn(std::chrono::steady_clock::duration wait) {
  std::vector<Job> arrived;
  {
    std::unique_lock lock(mutex_);
    if (wait > std::chrono::seconds(0)) {
      done_.wait_for(lock, wait, [&] { return finished_.size() == jobs_under_way_; });
    }
    arrived.swap(finished_);
    jobs_under_way_ -= arrived.size();
  }
  Status status;
  for (Job& job : arrived) {
    --under_way_[static_cast<size_t>(job.kind)];
    moved_on_ = true;
    for (Block* block : job.blocks) block->busy = false;
    if (job.status.ok()) {
      Complete(&job);
    } else {
      ++counters_.failed_jobs;
      GiveJobSlots(job);
      // A fetch that failed is told by the read that needs the cell; a write by the step that needs the room.
      if (job.kind == JobKind::kWrite && status.ok()) status = job.status;
    }
    for (Block* block : job.blocks) Release(block);
  }
  return status;
}

void CellMemory::Complete(Job* job) {
  if (job->kind == JobKind::kWrite) {
    MarkWritten(job->blocks, kFullLayers, *job->places);
    for (Block* block : job->blocks) block->write_wanted = false;
    return;
  }
  for (size_t b = 0; b < job->blocks.size(); ++b) {
    Block* block = job->blocks[b];
    CellFacts facts = FactsOf(*block);
    if (job->kind == JobKind::kCode) facts.pressure = Pressure::kHard;
    ForEachCell(block, kFullLayers, [&](const LayerCells& layer, uint16_t h, CellEntry* cell) {
      const Slot slot = job->slots[b * map_.n_cells + layer.first_cell + h];
      if (slot == kNoSlot) return;
      facts.layer = layer.number;
      facts.head = h;
      facts.durable = cell->durable;
      switch (job->kind) {
        case JobKind::kCode:
          cell->coded = slot;
          MoveTo(*block, cell, CellEvent::kMemoryPressure, CellState::kQuantized, CellAction::kCode);
          GiveExact(layer, cell);
          break;
        case JobKind::kFetch:
          cell->coded = slot;
          Admit(*block, layer, h, cell, facts);
          break;
        case JobKind::kReplicate:
          cell->exact = slot;
          MoveTo(*block, cell, CellEvent::kWriteBack, CellState::kActive, CellAction::kAdmit);
          break;
        case JobKind::kWrite:
          break;
      }
    });
    if (job->kind == JobKind::kReplicate && block->replica_moves++ == 0) block->first_move_step = step_;
    AddResident(block);
  }
}

// A transition that a rule started and whose bytes have now moved.
void CellMemory::MoveTo(const Block& block, CellEntry* cell, CellEvent event, CellState to, CellAction action) {
  const CellRule rule{.event = event, .from = cell->state, .to = to, .action = action};
  cell->state = to;
  transitions_.Add(rule);
  trace_.Add(rule, block.position);
}

}  // namespace kvcell
