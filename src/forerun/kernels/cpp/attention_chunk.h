// Attention of one block of rows' query vectors over one chunk of its positions, for one KV head.
//
// Queries m = row * group + head share every key they read. Keys are transposed tile by tile
// (kLanes positions), so that one vector holds the scores of kLanes positions; values are packed so
// that one unit holds what one multiplication needs. Few queries use both as they come, more of
// them a copy. Neither the tiles nor the order of sums depends on how many rows there are: positions
// a row must not see weigh exactly 0.
// T is the model's type, S the pool's, C what is multiplied: see units.h.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "queries.h"
#include "units.h"

namespace forerun {

// Call f(size, m) for queries m .. m + size - 1 at a time; size is a compile-time number.
template <class F>
inline void for_groups(int64_t num_queries, F f) {
  int64_t m = 0;
  for (; m + kQueryGroup <= num_queries; m += kQueryGroup)
    f(std::integral_constant<int, kQueryGroup>{}, m);
  const int64_t rest = num_queries - m;
  if (rest == 1) f(std::integral_constant<int, 1>{}, m);
  if (rest == 2) f(std::integral_constant<int, 2>{}, m);
  if (rest == 3) f(std::integral_constant<int, 3>{}, m);
}

// Sums of products of numbers of C.
template <class C>
using Sums = std::conditional_t<kIsWhole<C>, Ints, Floats>;

inline Floats as_floats(Floats sums) { return sums; }
inline Floats as_floats(Ints sums) { return to_floats(sums); }

template <class C>
inline void accumulate(Sums<C> &sums, Units a, Units b) {
  if constexpr (kIsWhole<C>) sums = dot_words(sums, a, b);
  else sums = dot_units<C>(sums, a, b);
}

// A vector that several products share. GCC 12 would read it again for each; loads are the limit.
inline Units read_once(const void *from) {
  Units result = read<Units>(from);
  asm("" : "+v"(result));
  return result;
}

// Products of N queries with the keys of one tile; two sums each, to hide the latency of adding.
template <class C, int N>
inline void score_group(const C *const queries[N], const Units *tile, int64_t num_units,
                        Floats scores[N]) {
  Sums<C> even[N] = {}, odd[N] = {};
  int64_t u = 0;
  for (; u + 1 < num_units; u += 2) {
    const Units first = read_once(tile + u), second = read_once(tile + u + 1);
    for (int n = 0; n < N; n++) {
      const C *query = queries[n] + u * kPerUnit<C>;
      accumulate<C>(even[n], first, splat_unit(read<uint32_t>(query)));
      accumulate<C>(odd[n], second, splat_unit(read<uint32_t>(query + kPerUnit<C>)));
    }
  }
  for (int n = 0; n < N; n++) {
    if (u < num_units)
      accumulate<C>(even[n], tile[u], splat_unit(read<uint32_t>(queries[n] + u * kPerUnit<C>)));
    scores[n] = as_floats(even[n] + odd[n]);
  }
}

// The same from rows as they lie in the pool: for few queries, which do not pay for a tile.
template <class C, class S, int N>
inline void score_rows(const C *const queries[N], const S *rows, int64_t head_dim,
                       Floats scores[N]) {
  Sums<C> sums[N][2] = {};
  for_units<C>(rows, head_dim, [&](int64_t unit, Units numbers) {
    for (int n = 0; n < N; n++)
      accumulate<C>(sums[n][unit % 2], numbers,
                    splat_unit(read<uint32_t>(queries[n] + unit * kPerUnit<C>)));
  });
  for (int n = 0; n < N; n++) scores[n] = as_floats(sums[n][0] + sums[n][1]);
}

// Hide the scores of those of kLanes positions that the query's row must not see.
inline Floats mask_scores(const Query &query, int64_t position, Floats scores) {
  if (query.oldest <= position && position + kLanes - 1 <= query.newest) return scores;
  Ints offset;
  for (int i = 0; i < kLanes; i++) offset[i] = i;
  const int64_t last = std::min<int64_t>(query.newest - position, kLanes);
  const int64_t start = std::max<int64_t>(query.oldest - position, -1);
  const Ints seen = (offset <= Ints{} + static_cast<int32_t>(last)) &
                    (offset >= Ints{} + static_cast<int32_t>(start));
  return seen ? scores : splat(-__builtin_inff());
}

// Scores of N queries with the keys of one tile, from its rows or (IsFew false) its units.
template <class C, class S, int N, bool IsFew>
inline void score_queries(const AttentionParams &p, const Query *queries, const Tile<S> &rows,
                          const Units *tile, int64_t position, float *to) {
  const C *numbers[N];
  for (int n = 0; n < N; n++) numbers[n] = static_cast<const C *>(queries[n].numbers);
  Floats scores[N];
  if constexpr (IsFew) score_rows<C, S, N>(numbers, rows.keys, p.head_dim, scores);
  else score_group<C, N>(numbers, tile, count_units<C>(p.head_dim), scores);
  for (int n = 0; n < N; n++) {
    Floats scale = splat(queries[n].scale);
    if constexpr (kIsInt8<S>) scale *= load(rows.key_scales);
    write(to + n * p.chunk_size, mask_scores(queries[n], position, scores[n] * scale));
  }
}

// Scores of a chunk, whose values' rows are listed. `following` is what this thread will probably
// compute next: it travels from memory meanwhile, in bursts that memory keeps up with. Flat: GCC
// stops inlining in functions of this size, and sums would live in memory.
template <class C, class S, bool IsFew>
[[gnu::flatten]] void score_chunk(const AttentionParams &p, const Span &span,
                                  const Span &following, const Scratch &scratch) {
  const int64_t length = span.end - span.begin;
  const int64_t burst = (following.end - following.begin + length - 1) / length;
  Cursor cursor(p, span), next_keys(p, following), next_values(p, following);
  Units *tile = scratch.tile;
  for (int64_t at = 0; at < length; at += kLanes) {
    prefetch_tiles<S>(p, next_keys, burst, p.keys, p.key_scales);
    const int64_t position = span.begin + at, from = std::max<int64_t>(span.low - position, 0);
    const Tile<S> rows = find_tile<S>(p, from, cursor, scratch.find_copy<S>(p, at));
    scratch.value_rows[at / kLanes] = rows.values;
    if constexpr (kIsInt8<S>) write(scratch.value_scales + at, load(rows.value_scales));
    if constexpr (!IsFew)
      for_units<C>(rows.keys, p.head_dim, [=](int64_t unit, Units keys) { tile[unit] = keys; });
    for_groups(span.num_queries, [&](auto size, int64_t m) {
      score_queries<C, S, size(), IsFew>(p, scratch.queries + m, rows, tile, position,
                                         scratch.scores + m * p.chunk_size + at);
    });
    prefetch_tiles<S>(p, next_values, burst, p.values, p.value_scales);
  }
}

// What became of one query's scores: their maximum, the sum of the weights e^(s - max), and what
// the weights in the type that is multiplied are multiples of.
struct Weighed {
  float top, sum, step;
};

inline float find_top(const float *scores, int64_t length) {
  Floats largest = splat(-__builtin_inff());
  for (int64_t k = 0; k < length; k += kLanes) largest = maximum(largest, load(scores + k));
  return max_lanes(largest);
}

// A row that sees nothing here has weights e^(-inf - 0) = 0.
inline float find_base(float top) { return top == -__builtin_inff() ? 0.0f : top; }

// Weights rounded to T, and their sum as rounded: their errors cancel as far as values agree.
template <class T>
inline Weighed weigh_scores(const float *scores, T *probs, int64_t length) {
  const float top = find_top(scores, length), base = find_base(top);
  Floats sum{};
  for (int64_t k = 0; k < length; k += kLanes) {
    store(probs + k, exp(load(scores + k) - base));
    sum += load(probs + k);
  }
  return {top, sum_lanes(sum), 1.0f};
}

// Weights times the scales of int8 values: in float32, or in 15 bits of the largest. The sum is of
// the weights as computed: what rounding takes off their products is next to nothing. A NaN or an
// infinity among these becomes the step, and so all sums.
template <class C>
inline Weighed weigh_scaled(float *scores, const float *value_scales, C *probs, int64_t length) {
  const float top = find_top(scores, length), base = find_base(top);
  Floats sum{};
  Ints bits{};
  for (int64_t k = 0; k < length; k += kLanes) {
    const Floats weight = exp(load(scores + k) - base), scaled = weight * load(value_scales + k);
    sum += weight;
    if constexpr (kPerUnit<C> == 1) {
      write(probs + k, scaled);
    } else {
      write(scores + k, scaled);
      bits = maximum(bits, magnitude_bits(scaled));
    }
  }
  if constexpr (kPerUnit<C> == 1) return {top, sum_lanes(sum), 1.0f};
  const float largest = max_magnitude(bits), inverse = invert_scale(largest, kWordLimit);
  for (int64_t k = 0; k < length; k += kLanes)
    write(probs + k, to_words(round_to_ints(load(scores + k) * inverse)));
  return {top, sum_lanes(sum), largest / kWordLimit};
}

// Write sums of D vectors of for_values, every dimension in its place.
template <class C, int D>
inline void unpack_sums(const Sums<C> sums[D], float step, float *to) {
  constexpr int rows = kRowsPerStep<C>;
  for (int vector = 0; vector < D; vector++) {
    float part[kLanes];
    if constexpr (kIsWhole<C>) write(part, to_floats(sums[vector]) * step);
    else write(part, sums[vector]);
    float *first = to + vector / rows * rows * kLanes + vector % rows * 4;
    for (int i = 0; i < kLanes; i += 4) std::memcpy(first + rows * i, part + i, 4 * sizeof(float));
  }
}

// Values of a chunk, numbers `from` onwards of each: as they lie in the pool, or packed. take calls
// f(row, vector, numbers) for the units of the tile at row `k`, `row` being the first of a unit's.
template <class C, class S, int D>
struct ListedValues {
  const void *const *tiles;  // [tiles of a chunk] where rows of kLanes positions lie
  int64_t size, from;

  template <class F>
  void take(int64_t k, F f) const {
    const S *rows = static_cast<const S *>(tiles[k / kLanes]);
    for (int i = 0; i < kLanes; i += kRowsPerStep<C>, rows += kRowsPerStep<C> * size)
      for_values<C, D>(rows, size, from, [=](int vector, int unit, Units numbers) {
        f(k + i + unit * kPerUnit<C>, vector, numbers);
      });
  }
};

template <class C, int D>
struct PackedValues {
  uint32_t *units;  // [units of a chunk, D, kLanes]

  uint32_t *find(int64_t row, int vector) const {
    return units + (row / kPerUnit<C> * D + vector) * kLanes;
  }
  template <class F>
  void take(int64_t k, F f) const {
    for (int64_t row = k; row < k + kLanes; row += kPerUnit<C>)
      for (int vector = 0; vector < D; vector++) f(row, vector, read_once(find(row, vector)));
  }
};

// result[n] = sum over the chunk of weight * value, for N queries and D vectors of dimensions.
template <class C, int N, int D, class Values>
inline void sum_values(const AttentionParams &p, const Scratch &scratch, int64_t m, int64_t length,
                       const Values &values, float *result) {
  const C *probs = static_cast<const C *>(scratch.probs) + m * p.chunk_size;
  const int64_t stride = p.chunk_size;
  Sums<C> sums[N][D] = {};
  for (int64_t k = 0; k < length; k += kLanes)
    values.take(k, [&](int64_t row, int vector, Units numbers) {
      for (int n = 0; n < N; n++)
        accumulate<C>(sums[n][vector], numbers,
                      splat_unit(read<uint32_t>(probs + n * stride + row)));
    });
  for (int n = 0; n < N; n++)
    unpack_sums<C, D>(sums[n], scratch.steps[m + n], result + n * padded(p.head_dim));
}

template <class C, class S, int D>
inline void sum_packed(const AttentionParams &p, const Span &span, const Scratch &scratch,
                       int64_t from, float *sums) {
  const int64_t length = span.end - span.begin;
  const ListedValues<C, S, D> listed{scratch.value_rows, p.head_dim, from};
  const PackedValues<C, D> packed{scratch.packed};
  for (int64_t k = 0; k < length; k += kLanes)
    listed.take(k, [=](int64_t row, int vector, Units numbers) {
      write(packed.find(row, vector), numbers);
    });
  for_groups(span.num_queries, [&](auto size, int64_t m) {
    sum_values<C, size(), D>(p, scratch, m, length, packed, sums + m * padded(p.head_dim));
  });
}

// Few queries read values as they lie in the pool, more of them a packed copy. Flat as above.
template <class C, class S, bool IsFew>
[[gnu::flatten]] void sum_chunk(const AttentionParams &p, const Span &span, const Scratch &scratch,
                                float *sums) {
  const int64_t size = p.head_dim, length = span.end - span.begin;
  for (int64_t from = 0; from < size; from += kDimGroup * kLanes, sums += kDimGroup * kLanes) {
    if constexpr (IsFew) {
      const ListedValues<C, S, kDimGroup> listed{scratch.value_rows, size, from};
      for_groups(span.num_queries, [&](auto group, int64_t m) {
        sum_values<C, group(), kDimGroup>(p, scratch, m, length, listed, sums + m * padded(size));
      });
    } else if constexpr (kIsWhole<C>) {
      sum_packed<C, S, kDimGroup>(p, span, scratch, from, sums);
    } else {
      size - from > 2 * kLanes ? sum_packed<C, S, kDimGroup>(p, span, scratch, from, sums)
                               : sum_packed<C, S, 2>(p, span, scratch, from, sums);
    }
  }
}

// Compute one chunk: `sums` [queries, padded head_dim] and `stats` [queries, 2] (max, sum). The
// queries are listed.
template <class T, class S, bool IsFew>
inline void attend_queries(const AttentionParams &p, const Span &span, const Span &following,
                           const Scratch &scratch, float *sums, float *stats) {
  using C = Computed<T, S>;
  const int64_t length = span.end - span.begin;
  score_chunk<C, S, IsFew>(p, span, following, scratch);
  for (int64_t m = 0; m < span.num_queries; m++) {
    C *probs = static_cast<C *>(scratch.probs) + m * p.chunk_size;
    float *scores = scratch.scores + m * p.chunk_size;
    Weighed weighed;
    if constexpr (kIsInt8<S>) weighed = weigh_scaled(scores, scratch.value_scales, probs, length);
    else weighed = weigh_scores(scores, probs, length);
    stats[2 * m] = weighed.top;
    stats[2 * m + 1] = weighed.sum;
    scratch.steps[m] = weighed.step;
  }
  sum_chunk<C, S, IsFew>(p, span, scratch, sums);
}

template <class T, class S>
inline void attend_chunk(const AttentionParams &p, const Span &span, const Span &following,
                         const Scratch &scratch, float *sums, float *stats) {
  // Measured: reading rows again pays for two groups where they need no shuffling across vectors.
  constexpr int64_t most = kIsWhole<Computed<T, S>> ? 2 * kQueryGroup : kQueryGroup;
  if (span.num_queries <= most)
    attend_queries<T, S, true>(p, span, following, scratch, sums, stats);
  else
    attend_queries<T, S, false>(p, span, following, scratch, sums, stats);
}

}  // namespace forerun
