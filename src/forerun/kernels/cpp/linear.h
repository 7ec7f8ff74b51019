// y = x W^T for any number of rows, over a packed weight of any format.
#pragma once

#include "plain.h"
#include "quantised.h"

namespace forerun {

inline Floats add_bias(Floats sum, const float *bias, int64_t column, int64_t count) {
  return bias == nullptr ? sum : sum + load(bias + column, count);
}

// Rows [num_rows, in_features], `stride` apart, and memory for another form of them.
template <class T>
struct Input {
  const T *x;
  int64_t stride, num_rows;
  void *scratch;  // [num_rows, in_features] numbers of type T
};

template <class T>
inline PackedShape find_shape(const PackedWeight &weight) {
  return PackedShape::of<T>(weight.out_features, weight.in_features);
}

inline bool is_present(const PackedWeight &weight) { return weight.num_parts > 0; }
inline bool is_plain(const PackedWeight &weight) { return weight.parts[0].format == kPlain; }

// Where a thread begins to read the panels of a weight, or (second) their second vectors; null if
// the weight is absent.
template <class T>
inline const char *find_start(const Team &team, const PackedWeight *weight, bool second) {
  if (weight == nullptr || !is_present(*weight)) return nullptr;
  const PackedShape shape = find_shape<T>(*weight);
  const int64_t panel = team.share(shape.num_panels()).from;
  if (is_plain(*weight))
    return static_cast<const char *>(weight->parts[0].panels) +
           panel * shape.panel_size() * static_cast<int64_t>(sizeof(Units));
  return find_panel(*weight, panel + second * shape.num_panels()).data;
}

// What a thread reads of one half of a weight, and of the next one.
template <class T>
inline Stream find_stream(const Team &team, const PackedWeight &weight, const PackedWeight *next,
                          bool second) {
  const int64_t panels = find_shape<T>(weight).num_panels();
  const int64_t vectors = (weight.out_features + kLanes - 1) / kLanes;
  const int64_t end = team.share(panels).to + second * panels;
  return {find_panel(weight, std::min(end, vectors)).data, find_start<T>(team, next, second)};
}

// The sums of one panel's two vectors with one row, biases added.
template <class F>
inline void emit_sums(const PackedWeight &weight, const PanelColumns &at, int64_t row, Floats first,
                      Floats second, F &f) {
  if (at.second_count > 0) second = add_bias(second, weight.bias, at.second, at.second_count);
  f(at, row, add_bias(first, weight.bias, at.first, at.first_count), second);
}

template <class T, class F>
inline void multiply_plain(const Team &team, const PackedWeight &weight, const Input<T> &input,
                           const PackedWeight *after, F f) {
  const PackedShape shape = find_shape<T>(weight);
  const uint32_t *rows = reinterpret_cast<const uint32_t *>(input.x);
  if (input.num_rows > 1) {  // one row is its own tile
    pack_rows<T>(input.x, input.stride, input.num_rows, shape.units, team.share(shape.units),
                 static_cast<uint32_t *>(input.scratch));
    rows = static_cast<const uint32_t *>(input.scratch);
    team.wait();
  }
  multiply_panels<T>(rows, static_cast<const Units *>(weight.parts[0].panels), shape,
                     input.num_rows, team.share(shape.num_panels()),
                     reinterpret_cast<const Units *>(find_start<T>(team, after, false)),
                     [&](int64_t panel, int64_t row, const Floats sums[2]) {
                       emit_sums(weight, PanelColumns(shape, panel), row, sums[0], sums[1], f);
                     });
}

// The sums of one vector of outputs with the rows of a tile; zeros for a vector that does not exist.
inline void multiply_vector(const PackedWeight &weight, int64_t vector, const RowGroup *rows,
                            int64_t num_rows, const Stream &stream, Floats *sums) {
  if (vector * kLanes >= weight.out_features) {
    std::fill_n(sums, num_rows, Floats{});
    return;
  }
  const Panel panel = find_panel(weight, vector);
  choose_format(panel.format, [&](auto format) {
    multiply_panel<decltype(format)>(rows, num_rows, panel.data, weight.in_features / kGroupSize,
                                     stream, sums);
  });
}

template <class T, class F>
inline void multiply_quantised(const Team &team, const PackedWeight &weight,
                               const Input<T> &input, const PackedWeight *after, F f) {
  const PackedShape shape = find_shape<T>(weight);
  const int64_t num_groups = weight.in_features / kGroupSize, panels = shape.num_panels();
  const int64_t num_rows = input.num_rows;
  const Share share = team.share(panels);
  auto *rows = static_cast<RowGroup *>(input.scratch);
  quantise_rows(input.x, input.stride, num_rows, num_groups, team.share(num_groups), rows);
  team.wait();
  Floats sums[2][kRowTile];
  for (int64_t begin = 0; begin < num_rows; begin += kRowTile) {
    const int64_t tile_rows = std::min(kRowTile, num_rows - begin);
    const PackedWeight *next = begin + tile_rows < num_rows ? &weight : after;
    const Stream streams[2] = {find_stream<T>(team, weight, next, false),
                               find_stream<T>(team, weight, next, true)};
    for (int64_t p = share.from; p < share.to; p++) {
      for (int64_t half = 0; half < 2; half++)
        multiply_vector(weight, p + half * panels, rows + begin * num_groups, tile_rows,
                        streams[half], sums[half]);
      const PanelColumns at(shape, p);
      for (int64_t r = 0; r < tile_rows; r++)
        emit_sums(weight, at, begin + r, sums[0][r], sums[1][r], f);
    }
  }
}

// All threads of a team together: f(columns, row, first sum, second sum) with the bias added. Rows
// of x may be written by other threads right before; results are complete when the threads meet
// again. `after` is the weight that will be read next, if that is known.
template <class T, class F>
inline void multiply(const Team &team, const PackedWeight &weight, const Input<T> &input,
                     const PackedWeight *after, F f) {
  team.wait();
  if (is_plain(weight))
    multiply_plain<T>(team, weight, input, after, f);
  else
    multiply_quantised<T>(team, weight, input, after, f);
}

// Write row `row` of a weight, as it was before packing (linear.cpp).
template <class T>
void read_weight_row(const PackedWeight &weight, int64_t row, T *to);

// A multiplication whose results are stored as rows of `Out`.
template <class T, class Out>
inline void multiply_into(const Team &team, const PackedWeight &weight, const Input<T> &input,
                          const PackedWeight *after, Out *out) {
  multiply<T>(team, weight, input, after,
              [&](const PanelColumns &at, int64_t row, Floats first, Floats second) {
                Out *to = out + row * weight.out_features;
                store(to + at.first, first, at.first_count);
                if (at.second_count > 0) store(to + at.second, second, at.second_count);
              });
}

}  // namespace forerun
