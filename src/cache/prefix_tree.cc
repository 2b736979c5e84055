#include "cache/prefix_tree.h"

#include <algorithm>
#include <utility>

#include "base/checksum.h"

namespace kvcell {

PrefixTree::PrefixTree() : buckets_(64) {}

PrefixTree::~PrefixTree() {
  for (PrefixNode* node : buckets_) {
    while (node != nullptr) delete std::exchange(node, node->next);
  }
}

bool PrefixTree::ChildFirst::operator()(const PrefixNode* a, const PrefixNode* b) const {
  if (a->idle_since != b->idle_since) return a->idle_since < b->idle_since;
  if (a->depth != b->depth) return a->depth > b->depth;
  return a < b;
}

uint64_t PrefixTree::HashOf(const PrefixNode* parent, std::span<const Token, kBlockTokens> tokens) {
  // The parent's own hash stands for all that is before.
  const uint64_t past = parent == nullptr ? 0 : parent->hash;
  return Address64(std::as_bytes(tokens)) ^ (past * 0x9e3779b97f4a7c15u + 0x94d049bb133111ebu);
}

PrefixNode* PrefixTree::Child(const PrefixNode* parent, std::span<const Token, kBlockTokens> tokens) const {
  const uint64_t hash = HashOf(parent, tokens);
  for (PrefixNode* node = buckets_[hash & (buckets_.size() - 1)]; node != nullptr; node = node->next) {
    if (node->hash == hash && node->parent == parent && std::ranges::equal(node->block->tokens, tokens)) return node;
  }
  return nullptr;
}

std::vector<PrefixNode*> PrefixTree::Find(std::span<const Token> tokens, size_t most) const {
  std::vector<PrefixNode*> chain;
  most = std::min(most, tokens.size() / kBlockTokens);
  const PrefixNode* parent = nullptr;
  while (chain.size() < most) {
    PrefixNode* node = Child(parent, tokens.subspan(chain.size() * kBlockTokens).first<kBlockTokens>());
    if (node == nullptr) break;
    chain.push_back(node);
    parent = node;
  }
  return chain;
}

int PrefixTree::Nearest(const PrefixNode* parent, std::span<const Token> rest) const {
  int nearest = -1;
  const auto mine = rest.first(std::min<size_t>(rest.size(), kBlockTokens));
  for (const PrefixNode* node = parent == nullptr ? roots_ : parent->first_child; node != nullptr;
       node = node->sibling) {
    const auto [at, theirs] = std::ranges::mismatch(mine, node->block->tokens);
    nearest = std::max(nearest, static_cast<int>(at - mine.begin()));
  }
  return nearest;
}

PrefixNode* PrefixTree::Insert(PrefixNode* parent, Block* block) {
  if (size_ >= buckets_.size()) Grow();
  auto* node = new PrefixNode;
  node->block = block;
  node->parent = parent;
  node->depth = parent == nullptr ? 0 : parent->depth + 1;
  node->hash = HashOf(parent, block->tokens);
  PrefixNode*& bucket = buckets_[node->hash & (buckets_.size() - 1)];
  node->next = bucket;
  bucket = node;
  PrefixNode*& siblings = parent == nullptr ? roots_ : parent->first_child;
  node->sibling = siblings;
  siblings = node;
  if (parent != nullptr) ++parent->n_children;
  block->prefix = node;
  ++size_;
  return node;
}

Block* PrefixTree::Remove(PrefixNode* node) {
  IsUsed(node);
  PrefixNode** at = &buckets_[node->hash & (buckets_.size() - 1)];
  while (*at != node) at = &(*at)->next;
  *at = node->next;
  at = node->parent == nullptr ? &roots_ : &node->parent->first_child;
  while (*at != node) at = &(*at)->sibling;
  *at = node->sibling;
  if (node->parent != nullptr) --node->parent->n_children;
  Block* block = node->block;
  block->prefix = nullptr;
  delete node;
  --size_;
  return block;
}

void PrefixTree::Grow() {
  std::vector<PrefixNode*> grown(buckets_.size() * 2);
  for (PrefixNode* node : buckets_) {
    while (node != nullptr) {
      PrefixNode* next = node->next;
      PrefixNode*& bucket = grown[node->hash & (grown.size() - 1)];
      node->next = bucket;
      bucket = node;
      node = next;
    }
  }
  buckets_ = std::move(grown);
}

void PrefixTree::BecomesIdle(PrefixNode* node) {
  if (node->idle_since != 0) return;
  // A chain is given back from its end on and its parts become idle together or later, so that a parent is never before
  // a child.
  node->idle_since = ++tick_;
  idle_.insert(node);
  if (node->parent == nullptr) ++n_idle_roots_;
}

void PrefixTree::IsUsed(PrefixNode* node) {
  if (node->idle_since == 0) return;
  idle_.erase(node);
  node->idle_since = 0;
  if (node->parent == nullptr) --n_idle_roots_;
}

PrefixNode* PrefixTree::FirstIdle() const { return idle_.empty() ? nullptr : *idle_.begin(); }

}  // namespace kvcell
