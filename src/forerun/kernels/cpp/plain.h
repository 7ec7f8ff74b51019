// y = x W^T over a weight of floats or bfloat16 packed once.
//
// For every unit of the input size (one float, or two bfloat16) a panel stores kLanes units of its
// first vector, then of its second. Weights stream through once per row tile, whose rows stand side
// by side unit by unit. Every output is one sum over the input in ascending order, whatever the
// number of rows, the tile or the thread: a row's result does not depend on the rows computed with
// it.
#pragma once

#include <algorithm>
#include <utility>

#include "shape.h"
#include "team.h"

namespace forerun {

// Rows whose sums fit into registers with what else is needed.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 4;
#endif

// How far ahead of its use a weight is fetched into the second-level cache (measured: 2 KB are too
// late once several rows slow the stream down, 16 KB no better), and the largest panel that may be
// fetched as a whole while the one before it is in use.
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kWholeAheadBytes = 256 * 1024;

// Rows 0 .. num_rows - 1 cut into tiles of nearly equal size.
struct Tiles {
  int64_t num_rows, count;
  explicit Tiles(int64_t rows) : num_rows(rows), count((rows + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t tile) const { return num_rows * tile / count; }
};

// Put the rows of every tile side by side: unit u of row r of a tile of R rows goes to u * R + r.
// (Transposing whole vectors in registers instead was measured slower.)
template <class T>
inline void pack_rows(const T *x, int64_t stride, int64_t num_rows, int64_t units, Share share,
                      uint32_t *to) {
  const Tiles tiles(num_rows);
  for (int64_t t = 0; t < tiles.count; t++) {
    const int64_t begin = tiles.begin(t), rows = tiles.begin(t + 1) - begin;
    uint32_t *tile = to + begin * units;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t u = share.from; u < share.to; u++)
        tile[u * rows + r] = read<uint32_t>(x + (begin + r) * stride + u * kPerUnit<T>);
  }
}

// What to fetch while a tile is multiplied: from `early` on for the first units, from `late` on for
// the last `late_units`, `step` bytes further with every unit.
struct Ahead {
  const char *early, *late;
  int64_t late_units, step;

  // The only tile of a panel fetches from memory as it goes, and the beginning of the next panel.
  // Of several, which read the panel from the cache, each fetches its part of the next panel.
  Ahead(const Units *panel, const Units *next, int64_t units, int64_t tile, int64_t num_tiles) {
    const int64_t unit_bytes = 2 * sizeof(Units), bytes = units * unit_bytes;
    late = reinterpret_cast<const char *>(next);
    if (num_tiles > 1 && bytes <= kWholeAheadBytes) {
      early = late + bytes * tile / num_tiles;
      late_units = 0;
      step = unit_bytes / num_tiles;
    } else {
      early = reinterpret_cast<const char *>(panel) + kAheadBytes;
      late_units = std::min(units, kAheadBytes / unit_bytes);
      step = unit_bytes;
    }
  }
};

// Add the products of R rows with some units of a panel.
template <class T, int R>
inline void add_products(const uint32_t *x, const Units *panel, int64_t units, const char *ahead,
                         int64_t step, Floats sums[R][2]) {
  for (int64_t u = 0; u < units; u++, x += R, panel += 2, ahead += step) {
    for (size_t byte = 0; byte < 2 * sizeof(Units); byte += 64)
      __builtin_prefetch(ahead + byte, 0, 2);
    const Units first = panel[0], second = panel[1];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Units row = splat_unit(x[r]);
      sums[r][0] = dot_units<T>(sums[r][0], first, row);
      sums[r][1] = dot_units<T>(sums[r][1], second, row);
    }
  }
}

// Call f(row, sums of its two vectors) for every row of a tile.
template <class T, int R, class F>
inline void run_tile(const uint32_t *x, const Units *panel, int64_t units, const Ahead &ahead,
                     F &f) {
  const int64_t early = units - ahead.late_units;
  Floats sums[R][2] = {};
  add_products<T, R>(x, panel, early, ahead.early, ahead.step, sums);
  add_products<T, R>(x + early * R, panel + early * 2, ahead.late_units, ahead.late, ahead.step,
                     sums);
  for (int r = 0; r < R; r++) f(r, sums[r]);
}

template <class T, class F, int... R>
inline void choose_tile(int64_t rows, const uint32_t *x, const Units *panel, int64_t units,
                        const Ahead &ahead, F &f, std::integer_sequence<int, R...>) {
  (void)((rows == R + 1 && (run_tile<T, R + 1>(x, panel, units, ahead, f), true)) || ...);
}

// Call f(panel number, row, sums) for every row and every panel of a share. `x` holds the tiles;
// `after` is what this thread reads next, if that is known.
template <class T, class F>
inline void multiply_panels(const uint32_t *x, const Units *panels, const PackedShape &shape,
                            int64_t num_rows, Share share, const Units *after, F f) {
  const Tiles tiles(num_rows);
  for (int64_t p = share.from; p < share.to; p++) {
    const Units *panel = panels + p * shape.panel_size();
    const Units *next = p + 1 < share.to || after == nullptr ? panel + shape.panel_size() : after;
    for (int64_t t = 0; t < tiles.count; t++) {
      const int64_t begin = tiles.begin(t);
      auto emit = [&](int64_t row, const Floats sums[2]) { f(p, begin + row, sums); };
      choose_tile<T>(tiles.begin(t + 1) - begin, x + begin * shape.units, panel, shape.units,
                     Ahead(panel, next, shape.units, t, tiles.count), emit,
                     std::make_integer_sequence<int, kTileRows>{});
    }
  }
}

}  // namespace forerun
