// What a shape's slots are to a model's heads.
#pragma once

#include <cstdint>

#include "store/store.h"

namespace kvcell {

// The head that a slot's first cell belongs to: a layer whose heads have several sizes has several slots, one after the
// other, in order of heads.
inline uint16_t FirstHead(const CellSetShape& shape, size_t slot) {
  uint16_t head = 0;
  for (size_t i = slot; i > 0 && shape.layers[i - 1].layer == shape.layers[slot].layer; --i) {
    head = static_cast<uint16_t>(head + shape.layers[i - 1].n_cells);
  }
  return head;
}

}  // namespace kvcell
