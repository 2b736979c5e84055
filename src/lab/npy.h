// Arrays as NumPy's .npy files, version 1.0: what `lab export` writes and reads back.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvcell/status.h"

namespace kvcell {

// Writes `values` in C order under the type that `descr` names: "<f2" (rounded to nearest even), "<f4".
Status WriteNpy(const std::string& path, const std::string& descr, const std::vector<int64_t>& shape,
                std::span<const float> values);
Status WriteNpy(const std::string& path, const std::vector<int64_t>& shape, std::span<const int64_t> values);

struct NpyArray {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
// Reads "<f2" and "<f4" in C order. kNotFound; kCorruption naming what is wrong, for anything else.
Result<NpyArray> ReadNpy(const std::string& path);

}  // namespace kvcell
