// The outputs of a weight and the panels they come in.
#pragma once

#include <algorithm>

#include "abi.h"
#include "vec.h"

namespace forerun {

// Outputs come in panels of two vectors: number p holds outputs p * kLanes onwards of the first half
// of the weight's rows and the same of the second half, so that gate and up of an MLP, or any two
// halves, meet in registers.
struct PackedShape {
  int64_t out_features, in_features;
  int64_t half;   // outputs before the second half: a multiple of kLanes
  int64_t units;  // units of one input row, of which there is a whole number

  template <class T>
  static PackedShape of(int64_t out_features, int64_t in_features) {
    return {out_features, in_features, round_up((out_features + 1) / 2, kLanes),
            in_features / kPerUnit<T>};
  }
  int64_t num_panels() const { return half / kLanes; }
  int64_t panel_size() const { return units * 2; }  // vectors
};

// The outputs of one panel, of which the last ones of either half may not exist.
struct PanelColumns {
  int64_t first, second;
  int64_t first_count, second_count;
  PanelColumns(const PackedShape &shape, int64_t panel)
      : first(panel * kLanes),
        second(shape.half + first),
        first_count(std::min<int64_t>(shape.out_features - first, kLanes)),
        second_count(std::min<int64_t>(shape.out_features - second, kLanes)) {}
};

}  // namespace forerun
