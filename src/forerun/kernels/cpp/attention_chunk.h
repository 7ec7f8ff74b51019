// Attention of one block of rows' query vectors over one chunk of its positions, for one KV head.
//
// Queries m = row * group + head share every key they read. Keys pass tile by tile (kLanes
// positions) through a transposed copy, so that one vector holds the scores of kLanes positions;
// values are packed so that one unit holds what one multiplication needs. Neither the tiles nor the
// order of sums depends on how many rows there are: positions a row must not see weigh exactly 0.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "vec.h"

namespace forerun {

// Query vectors and vectors of head_dim that are accumulated in registers at once.
constexpr int kQueryGroup = kLanes == 16 ? 4 : 2;
constexpr int kDimGroup = 4;

// Rows of numbers that were read by two vectors of bfloat16 at a time.
inline int64_t padded(int64_t head_dim) { return round_up(head_dim, 2 * kLanes); }

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

// One query vector and the positions its row sees.
struct Query {
  const void *numbers;
  int64_t oldest, newest;
};

// Buffers of one thread.
struct Scratch {
  Units *tile;      // [units of a key, kLanes]
  uint32_t *packed; // [units of a chunk, padded head_dim]
  float *scores;    // [queries, chunk_size]
  void *probs;      // [queries, chunk_size], of the model's type
  Query *queries;   // [queries]

  static int64_t max_queries(const AttentionParams &p) {
    return p.max_count * (p.num_heads / p.num_kv_heads);
  }
  // One unit per number is enough for either type.
  static int64_t floats(const AttentionParams &p) {
    const int64_t dim = padded(p.head_dim);
    const int64_t described = round_up(max_queries(p) * sizeof(Query) / sizeof(float), kLanes);
    return dim * kLanes + p.chunk_size * dim + 2 * max_queries(p) * p.chunk_size + described;
  }
  Scratch(const AttentionParams &p, float *memory) {
    const int64_t dim = padded(p.head_dim);
    tile = reinterpret_cast<Units *>(memory);
    packed = reinterpret_cast<uint32_t *>(memory + dim * kLanes);
    scores = memory + dim * kLanes + p.chunk_size * dim;
    float *weights = scores + max_queries(p) * p.chunk_size;
    probs = weights;
    queries = reinterpret_cast<Query *>(weights + max_queries(p) * p.chunk_size);
  }
};

// The part of a chunk that any row of the block sees; begin and end are multiples of kLanes.
struct Span {
  int64_t block, head;
  int64_t low, high;  // first and last position read
  int64_t begin, end;
  int64_t num_queries;

  Span(const AttentionParams &p, int64_t chunk, int64_t head) : head(head) {
    block = p.chunk_owner[chunk];
    const int64_t context = p.contexts[block];
    const int64_t start =
        p.first[block] + (chunk - p.chunk_begin[block]) * p.chunk_size;
    const int64_t unseen = p.window > 0 ? std::max<int64_t>(context - p.window + 1, 0) : 0;
    low = std::max(start, unseen);
    high = std::min(start + p.chunk_size, p.ends[block]) - 1;
    begin = low / kLanes * kLanes;
    end = round_up(high + 1, kLanes);
    num_queries = p.counts[block] * (p.num_heads / p.num_kv_heads);
  }
};

// Where the K and V rows of kLanes positions lie in their pools.
struct Rows {
  int64_t offset[kLanes];
};

// Positions outside low .. high may hold anything: they get the row of the nearest one inside.
inline Rows find_rows(const AttentionParams &p, const Span &span, int64_t position) {
  const int64_t *table = p.tables + span.block * p.table_width;
  const int64_t from = std::max(position, span.low);
  const int64_t to = std::min(position + kLanes - 1, span.high);
  int64_t place = from / p.block_size, offset = from % p.block_size;
  Rows rows;
  for (int64_t at = from; at <= to;) {
    const int64_t run = table[place++] * p.num_kv_heads + span.head;
    const int64_t base = (run * p.block_size + offset - at) * p.head_dim;
    const int64_t stop = std::min(at + p.block_size - offset, to + 1);
    for (; at < stop; at++) rows.offset[at - position] = base + at * p.head_dim;
    offset = 0;
  }
  for (int64_t i = 0; i < from - position; i++) rows.offset[i] = rows.offset[from - position];
  for (int64_t i = to - position + 1; i < kLanes; i++) rows.offset[i] = rows.offset[to - position];
  return rows;
}

// Into the second-level cache: measured half again as fast as into the first, which holds fewer
// requests in flight. Always inlined: GCC takes a function that only prefetches for one without effects and drops it.
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(const void *pool, const Rows &rows,
                                                 int64_t head_dim) {
  const int64_t bytes = head_dim * sizeof(T);
  for (int i = 0; i < kLanes; i++) {
    const char *row = static_cast<const char *>(pool) + rows.offset[i] * sizeof(T);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

// tile[u] = unit u of kLanes keys, for units that fill a vector or (Whole false) the rest of a key.
template <class T, bool Whole>
inline void transpose_part(const char *keys, const Rows &rows, int64_t bytes, Units *tile) {
  Units part[kLanes];
  for (int i = 0; i < kLanes; i++) {
    const char *from = keys + rows.offset[i] * sizeof(T);
    part[i] = Whole ? read<Units>(from) : read_part<Units>(from, bytes);
  }
  transpose(part);
  for (int i = 0; i < kLanes; i++) tile[i] = part[i];
}

template <class T>
inline void transpose_keys(const AttentionParams &p, const Rows &rows, Units *tile) {
  const char *keys = static_cast<const char *>(p.keys);
  int64_t left = p.head_dim * sizeof(T);
  constexpr int64_t size = sizeof(Units);
  for (; left >= size; left -= size, keys += size, tile += kLanes)
    transpose_part<T, true>(keys, rows, size, tile);
  if (left > 0) transpose_part<T, false>(keys, rows, left, tile);
}

// List the queries of a span's rows, once per chunk: divisions would cost as much as the products.
template <class T>
inline void list_queries(const AttentionParams &p, const Span &span, Query *queries) {
  const int64_t group = p.num_heads / p.num_kv_heads, first = p.starts[span.block];
  for (int64_t row = 0; row < p.counts[span.block]; row++) {
    const T *heads = static_cast<const T *>(p.query) + (first + row) * p.query_stride;
    const int64_t position = p.contexts[span.block] + row;
    const int64_t oldest = p.window > 0 ? position - p.window + 1 : 0;
    const int64_t newest = p.causal ? position : p.ends[span.block] - 1;
    for (int64_t head = span.head * group; head < (span.head + 1) * group; head++)
      *queries++ = {heads + head * p.head_dim, oldest, newest};
  }
}

// Scores of N queries with the keys of one tile; two sums each, to hide the latency of adding.
template <class T, int N>
inline void score_group(const T *const queries[N], const Units *tile, int64_t num_units,
                        Floats scores[N]) {
  Floats even[N] = {}, odd[N] = {};
  int64_t u = 0;
  for (; u + 1 < num_units; u += 2)
    for (int n = 0; n < N; n++) {
      const T *query = queries[n] + u * kPerUnit<T>;
      even[n] = dot_units<T>(even[n], tile[u], splat_unit(read<uint32_t>(query)));
      odd[n] = dot_units<T>(odd[n], tile[u + 1],
                            splat_unit(read<uint32_t>(query + kPerUnit<T>)));
    }
  for (int n = 0; n < N; n++) {
    if (u < num_units)
      even[n] = dot_units<T>(even[n], tile[u],
                             splat_unit(read<uint32_t>(queries[n] + u * kPerUnit<T>)));
    scores[n] = even[n] + odd[n];
  }
}

// Scale the scores of kLanes positions and hide those that the query's row must not see.
inline Floats mask_scores(const Query &query, int64_t position, float scale, Floats scores) {
  const Floats scaled = scores * scale;
  if (query.oldest <= position && position + kLanes - 1 <= query.newest) return scaled;
  Ints offset;
  for (int i = 0; i < kLanes; i++) offset[i] = i;
  const int64_t last = std::min<int64_t>(query.newest - position, kLanes);
  const int64_t start = std::max<int64_t>(query.oldest - position, -1);
  const Ints seen = (offset <= Ints{} + static_cast<int32_t>(last)) &
                    (offset >= Ints{} + static_cast<int32_t>(start));
  return seen ? scaled : splat(-__builtin_inff());
}

template <class T, int N>
inline void score_queries(const AttentionParams &p, const Query *queries, const Units *tile,
                          int64_t position, float *to) {
  const T *numbers[N];
  for (int n = 0; n < N; n++) numbers[n] = static_cast<const T *>(queries[n].numbers);
  Floats scores[N];
  score_group<T, N>(numbers, tile, p.head_dim / kPerUnit<T>, scores);
  const float scale = static_cast<float>(p.scale);
  for (int n = 0; n < N; n++)
    write(to + n * p.chunk_size, mask_scores(queries[n], position, scale, scores[n]));
}

// Pack the values of one tile: unit k of `packed` holds, per dimension, the kPerUnit<T> values that
// share one multiplication.
template <class T>
inline void pack_values(const AttentionParams &p, const Rows &rows, uint32_t *packed);

template <>
inline void pack_values<float>(const AttentionParams &p, const Rows &rows, uint32_t *packed) {
  const float *values = static_cast<const float *>(p.values);
  for (int k = 0; k < kLanes; k++, packed += padded(p.head_dim))
    std::memcpy(packed, values + rows.offset[k], p.head_dim * sizeof(float));
}

template <>
inline void pack_values<bf16>(const AttentionParams &p, const Rows &rows, uint32_t *packed) {
  const bf16 *values = static_cast<const bf16 *>(p.values);
  for (int k = 0; k < kLanes; k += 2, packed += padded(p.head_dim))
    for (int64_t d = 0; d < p.head_dim; d += 2 * kLanes) {
      const int64_t bytes = (p.head_dim - d) * 2;
      interleave(read_part<WideHalves>(values + rows.offset[k] + d, bytes),
                 read_part<WideHalves>(values + rows.offset[k + 1] + d, bytes), packed + d);
    }
}

// `following` is what this thread will probably compute next.
template <class T>
inline void score_chunk(const AttentionParams &p, const Span &span, const Span &following,
                        const Scratch &scratch) {
  Rows rows = find_rows(p, span, span.begin);
  for (int64_t position = span.begin; position < span.end; position += kLanes) {
    // The next tile travels from memory while this one is computed.
    const Rows next = position + kLanes < span.end ? find_rows(p, span, position + kLanes)
                                                   : find_rows(p, following, following.begin);
    prefetch_rows<T>(p.keys, next, p.head_dim);
    prefetch_rows<T>(p.values, next, p.head_dim);
    transpose_keys<T>(p, rows, scratch.tile);
    for_groups(span.num_queries, [&](auto size, int64_t m) {
      score_queries<T, size()>(p, scratch.queries + m, scratch.tile, position,
                               scratch.scores + m * p.chunk_size + position - span.begin);
    });
    const int64_t unit = (position - span.begin) / kPerUnit<T>;
    pack_values<T>(p, rows, scratch.packed + unit * padded(p.head_dim));
    rows = next;
  }
}

// Turn one query's scores into weights e^(s - max), rounded to T; returns (max, sum of weights).
template <class T>
inline std::pair<float, float> weigh_scores(const float *scores, T *probs, int64_t length) {
  Floats largest = splat(-__builtin_inff());
  for (int64_t k = 0; k < length; k += kLanes) largest = maximum(largest, load(scores + k));
  const float top = max_lanes(largest);
  // A row that sees nothing here has weights e^(-inf - 0) = 0.
  const float base = top == -__builtin_inff() ? 0.0f : top;
  Floats sum{};
  for (int64_t k = 0; k < length; k += kLanes) {
    store(probs + k, exp(load(scores + k) - base));
    sum += load(probs + k);
  }
  return {top, sum_lanes(sum)};
}

// result[n] = sum over the chunk of weight * value, for N queries and D vectors of dimensions.
template <class T, int N, int D>
inline void sum_values(const T *probs, const uint32_t *packed, int64_t num_units,
                       int64_t prob_stride, int64_t width, float *result) {
  Floats acc[N][D] = {};
  for (int64_t u = 0; u < num_units; u++) {
    Units value[D];
    for (int d = 0; d < D; d++) value[d] = read<Units>(packed + u * width + d * kLanes);
    for (int n = 0; n < N; n++) {
      const Units weight =
          splat_unit(read<uint32_t>(probs + n * prob_stride + u * kPerUnit<T>));
      for (int d = 0; d < D; d++) acc[n][d] = dot_units<T>(acc[n][d], value[d], weight);
    }
  }
  for (int n = 0; n < N; n++)
    for (int d = 0; d < D; d++) write(result + n * width + d * kLanes, acc[n][d]);
}

template <class T, int N>
inline void sum_queries(const AttentionParams &p, const Span &span, const Scratch &scratch,
                        int64_t m, float *result) {
  const int64_t width = padded(p.head_dim);
  const int64_t num_units = (span.end - span.begin) / kPerUnit<T>;
  const T *probs = static_cast<const T *>(scratch.probs) + m * p.chunk_size;
  int64_t d = 0;
  for (; d + kDimGroup * kLanes <= width; d += kDimGroup * kLanes)
    sum_values<T, N, kDimGroup>(probs, scratch.packed + d, num_units, p.chunk_size, width,
                                result + d);
  for (; d < width; d += kLanes)
    sum_values<T, N, 1>(probs, scratch.packed + d, num_units, p.chunk_size, width, result + d);
}

// Compute one chunk: `sums` [queries, padded head_dim] and `stats` [queries, 2] (max, sum).
template <class T>
inline void attend_chunk(const AttentionParams &p, const Span &span, const Span &following,
                         const Scratch &scratch, float *sums, float *stats) {
  const int64_t width = padded(p.head_dim);
  list_queries<T>(p, span, scratch.queries);
  score_chunk<T>(p, span, following, scratch);
  for (int64_t m = 0; m < span.num_queries; m++) {
    T *probs = static_cast<T *>(scratch.probs) + m * p.chunk_size;
    const auto [top, sum] =
        weigh_scores(scratch.scores + m * p.chunk_size, probs, span.end - span.begin);
    stats[2 * m] = top;
    stats[2 * m + 1] = sum;
  }
  for_groups(span.num_queries, [&](auto size, int64_t m) {
    sum_queries<T, size()>(p, span, scratch, m, sums + m * width);
  });
}

}  // namespace forerun
