// Where each byte of a cell lies: the one layout that RAM, the store's files and the kernels share (docs/format.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcell/codec.h"
#include "kvcell/geometry.h"
#include "kvcell/status.h"

namespace kvcell {

// The first 64 bytes of every sealed cell. Little-endian. `checksum` is XXH3-64 over the cell's other bytes (header fields
// before it, and everything after the header), so it covers payload, key, place and generation.
struct CellHeader {
  uint32_t magic;        // kCellMagic
  uint16_t version;      // kCellVersion
  uint16_t layer;
  uint16_t head;         // KV head
  uint16_t first_token;  // tokens [0, first_token) hold no codes: they are sinks, kept exactly elsewhere
  uint32_t bytes;        // of the whole cell, header included
  uint8_t block_key[16]; // the block's key (digest of identity, parent block and token ids); zero until it has one
  uint64_t position;     // of the block's first token
  uint64_t generation;   // of the write that made these bytes; zero until stored
  uint64_t reserved;     // zero
  uint64_t checksum;     // zero until sealed with a key
};
static_assert(sizeof(CellHeader) == 64);
inline constexpr uint32_t kCellMagic = 0x4c43564b;  // "KVCL"
inline constexpr uint16_t kCellVersion = 1;

// Byte offsets of one side within its cell; every plane starts 64-byte aligned.
struct SideLayout {
  SideSpec spec;
  int32_t dim = 0;         // head_dim
  int32_t dim_padded = 0;  // a multiple of 16; padding holds the code of zero
  int32_t n_groups = 0;    // scales per token along the head (1 where a group covers whole rows)
  int32_t rows_per_scale = 1;
  uint32_t codes = 0;
  uint32_t scales = 0;     // f16 [n_groups][kBlockTokens / rows_per_scale]
  uint32_t channel_offset = 0;  // f16 or int8 [dim_padded]; absent where the spec has none
  uint32_t end = 0;
};

struct CellLayout {
  SideLayout k;
  SideLayout v;
  uint32_t bytes = 0;  // of the whole cell, a multiple of 64
};

// kInvalidArgument where a side can't be coded at this head_dim (< 1 or > 1024).
Result<CellLayout> MakeCellLayout(const CodecSpec& spec, int head_dim_k, int head_dim_v);

// An exact (f16) cell: K transposed, [dk][n_tokens], so that tokens lie along the vector lanes; V as rows, [n_tokens][dv].
// Open blocks (n_tokens = 64), sinks (16) and replicas have it; it carries no header.
struct ExactLayout {
  int32_t n_tokens = 0;  // a multiple of 16
  int32_t dk = 0;
  int32_t dv = 0;        // rows of V are padded to a multiple of 16: dv_padded
  int32_t dv_padded = 0;
  uint32_t v = 0;        // byte offset of V, 64-byte aligned
  uint32_t bytes = 0;    // a multiple of 64
};
ExactLayout MakeExactLayout(int n_tokens, int head_dim_k, int head_dim_v);

}  // namespace kvcell
