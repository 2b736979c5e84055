// The cell map of a stored session, from the identity that it was saved with: for those who read cells without a model.
#pragma once

#include "cell/cell_map.h"
#include "store/store.h"

namespace kvcell {

// kMismatch where the session does not say what a cache says, kCorruption where that can't be read.
Result<CellMap> StoredCellMap(const SessionRecord& record);

}  // namespace kvcell
