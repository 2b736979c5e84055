// The blocks in RAM by the tokens they hold: a radix tree whose edges are blocks of 64 token ids, so that a prompt
// finds the longest chain of blocks that somebody has computed. Compared token by token; a hash only says where to
// look.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "cell/block.h"
#include "kvcell/geometry.h"

namespace kvcell {

// A block's place in the tree.
struct PrefixNode {
  Block* block = nullptr;
  PrefixNode* parent = nullptr;       // null: the block is at position 0
  PrefixNode* next = nullptr;         // in the bucket
  PrefixNode* first_child = nullptr;  // children as a list, to tell where a prompt differs
  PrefixNode* sibling = nullptr;
  uint64_t hash = 0;        // of parent and tokens
  uint64_t idle_since = 0;  // tick; 0: a sequence uses the block
  uint32_t depth = 0;       // blocks before it
  uint32_t n_children = 0;
};

// Holds a reference on every block in it, which the owner counts and gives back. Not thread-safe.
class PrefixTree {
 public:
  PrefixTree();
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The block of these tokens that follows `parent` (null: at position 0); null where there is none. O(1).
  PrefixNode* Child(const PrefixNode* parent, std::span<const Token, kBlockTokens> tokens) const;
  // The longest chain that `tokens` begins with, at most `most` blocks.
  std::vector<PrefixNode*> Find(std::span<const Token> tokens, size_t most) const;
  // How many tokens of `rest` the nearest block after `parent` shares with it; -1 where nothing follows.
  int Nearest(const PrefixNode* parent, std::span<const Token> rest) const;

  // Puts a block in, which Child has not found; its `prefix` then points to its node.
  PrefixNode* Insert(PrefixNode* parent, Block* block);
  // Takes a block without children out; the caller gives the tree's reference back.
  Block* Remove(PrefixNode* node);

  // No sequence uses the block any more, or one does again.
  void BecomesIdle(PrefixNode* node);
  void IsUsed(PrefixNode* node);
  // The block to give up first: of those unused, the longest so, and the end of its chain. Null: none may go.
  PrefixNode* FirstIdle() const;
  size_t n_idle() const { return idle_.size(); }
  size_t n_idle_roots() const { return n_idle_roots_; }
  size_t size() const { return size_; }

 private:
  struct ChildFirst {
    bool operator()(const PrefixNode* a, const PrefixNode* b) const;
  };
  static uint64_t HashOf(const PrefixNode* parent, std::span<const Token, kBlockTokens> tokens);
  void Grow();

  std::vector<PrefixNode*> buckets_;  // a power of two
  PrefixNode* roots_ = nullptr;
  size_t size_ = 0;
  uint64_t tick_ = 0;
  std::set<PrefixNode*, ChildFirst> idle_;
  size_t n_idle_roots_ = 0;
};

}  // namespace kvcell
