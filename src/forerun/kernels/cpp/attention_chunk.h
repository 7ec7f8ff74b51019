// Attention of one request's query vectors over one chunk of its positions, for one KV head.
//
// Queries m = row * group + head share every key they read. Keys pass tile by tile (kLanes
// positions) through a transposed copy, so that one vector holds the scores of kLanes positions;
// values are packed so that one unit holds what one multiplication needs. Neither the tiles nor the
// order of sums depends on how many rows there are: positions a row must not see weigh exactly 0.
#pragma once

#include <algorithm>

#include "abi.h"
#include "vec.h"

namespace forerun {

// Query vectors and vectors of head_dim that are accumulated in registers at once.
constexpr int kQueryGroup = kLanes == 16 ? 4 : 2;
constexpr int kDimGroup = 4;

// Buffers of one thread.
struct Scratch {
  Units *tile;      // [units of a key, kLanes]
  uint32_t *packed; // [units of a chunk, padded head_dim]
  float *scores;    // [queries, chunk_size]
  void *probs;      // [queries, chunk_size], of the model's type

  static int64_t queries(const AttentionParams &p) {
    return p.max_count * (p.num_heads / p.num_kv_heads);
  }
  // One unit per number is enough for either type.
  static int64_t floats(const AttentionParams &p) {
    const int64_t dim = round_up(p.head_dim, kLanes);
    return dim * kLanes + p.chunk_size * dim + 2 * queries(p) * p.chunk_size;
  }
  Scratch(const AttentionParams &p, float *memory) {
    const int64_t dim = round_up(p.head_dim, kLanes);
    tile = reinterpret_cast<Units *>(memory);
    packed = reinterpret_cast<uint32_t *>(memory + dim * kLanes);
    scores = memory + dim * kLanes + p.chunk_size * dim;
    probs = scores + queries(p) * p.chunk_size;
  }
};

// The part of a chunk that any row of the request sees; begin and end are multiples of kLanes.
struct Span {
  int64_t request, head;
  int64_t low, high;  // first and last position read
  int64_t begin, end;
  int64_t num_queries;

  Span(const AttentionParams &p, int64_t chunk, int64_t head) : head(head) {
    request = p.chunk_request[chunk];
    const int64_t context = p.contexts[request], count = p.counts[request];
    const int64_t start =
        p.first[request] + (chunk - p.chunk_begin[request]) * p.chunk_size;
    const int64_t unseen = p.window > 0 ? std::max<int64_t>(context - p.window + 1, 0) : 0;
    low = std::max(start, unseen);
    high = std::min(start + p.chunk_size, context + count) - 1;
    begin = low / kLanes * kLanes;
    end = round_up(high + 1, kLanes);
    num_queries = count * (p.num_heads / p.num_kv_heads);
  }
};

// Fill in where the K or V rows of kLanes positions from `position` on lie. Positions outside
// low .. high may hold anything: they get the row of the nearest one inside.
template <class T>
inline void find_rows(const AttentionParams &p, const Span &span, const void *pool,
                      int64_t position, const T *rows[kLanes]) {
  const int64_t *table = p.tables + span.request * p.table_width;
  const int64_t from = std::max(position, span.low);
  const int64_t to = std::min(position + kLanes - 1, span.high);
  int64_t place = from / p.block_size, offset = from % p.block_size;
  for (int64_t at = from; at <= to; at++) {
    const int64_t run = table[place] * p.num_kv_heads + span.head;
    rows[at - position] =
        static_cast<const T *>(pool) + (run * p.block_size + offset) * p.head_dim;
    if (++offset == p.block_size) offset = 0, place++;
  }
  for (int64_t i = 0; i < from - position; i++) rows[i] = rows[from - position];
  for (int64_t i = to - position + 1; i < kLanes; i++) rows[i] = rows[to - position];
}

template <class T>
inline void prefetch_rows(const T *const rows[kLanes], int64_t head_dim) {
  const int64_t bytes = head_dim * sizeof(T);
  for (int i = 0; i < kLanes; i++)
    for (int64_t byte = 0; byte < bytes; byte += 64)
      __builtin_prefetch(reinterpret_cast<const char *>(rows[i]) + byte);
}

// tile[u] = unit u of kLanes keys.
template <class T>
inline void transpose_keys(const T *const rows[kLanes], int64_t head_dim, Units *tile) {
  const int64_t bytes = head_dim * sizeof(T);
  for (int64_t byte = 0; byte < bytes; byte += sizeof(Units)) {
    Units *part = tile + byte / 4;
    for (int i = 0; i < kLanes; i++)
      part[i] = read_part<Units>(reinterpret_cast<const char *>(rows[i]) + byte, bytes - byte);
    transpose(part);
  }
}

template <class T>
inline const T *find_query(const AttentionParams &p, const Span &span, int64_t m) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t row = p.starts[span.request] + m / group;
  const int64_t head = span.head * group + m % group;
  return static_cast<const T *>(p.query) + row * p.query_stride + head * p.head_dim;
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

// Scale scores and hide what the query's row must not see.
inline Floats mask_scores(const AttentionParams &p, const Span &span, int64_t m,
                          int64_t position, Floats scores) {
  const int64_t row = p.contexts[span.request] + m / (p.num_heads / p.num_kv_heads);
  const int64_t oldest = p.window > 0 ? row - p.window + 1 : 0;
  Ints offset;
  for (int i = 0; i < kLanes; i++) offset[i] = i;
  const Ints last = Ints{} + static_cast<int32_t>(std::min<int64_t>(row - position, kLanes));
  const Ints start = Ints{} + static_cast<int32_t>(std::max<int64_t>(oldest - position, -1));
  const Floats hidden = splat(-__builtin_inff());
  const Floats scaled = scores * static_cast<float>(p.scale);
  return (offset <= last) & (offset >= start) ? scaled : hidden;
}

template <class T, int N>
inline void score_queries(const AttentionParams &p, const Span &span, int64_t m,
                          int64_t position, const Scratch &scratch) {
  const T *queries[N];
  for (int n = 0; n < N; n++) queries[n] = find_query<T>(p, span, m + n);
  Floats scores[N];
  score_group<T, N>(queries, scratch.tile, p.head_dim / kPerUnit<T>, scores);
  for (int n = 0; n < N; n++)
    write(scratch.scores + (m + n) * p.chunk_size + position - span.begin,
          mask_scores(p, span, m + n, position, scores[n]));
}

// Compute scores of all queries, and pack the values: unit k of `packed` holds, per dimension, the
// kPerUnit<T> values that share one multiplication.
template <class T>
inline void pack_values(const T *const rows[kLanes], int64_t head_dim, uint32_t *packed) {
  const int64_t width = round_up(head_dim, kLanes);
  for (int k = 0; k < kLanes; k += kPerUnit<T>)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Units units;
      if constexpr (kPerUnit<T> == 1) {
        units = read_part<Units>(rows[k] + d, (head_dim - d) * 4);
      } else {
        const auto low = read_part<Halves>(rows[k] + d, (head_dim - d) * 2);
        const auto high = read_part<Halves>(rows[k + 1] + d, (head_dim - d) * 2);
        units = __builtin_convertvector(low, Units) | __builtin_convertvector(high, Units) << 16;
      }
      write(packed + k / kPerUnit<T> * width + d, units);
    }
}

template <class T>
inline void score_chunk(const AttentionParams &p, const Span &span, const Scratch &scratch) {
  const T *keys[kLanes], *values[kLanes], *next[kLanes];
  const int64_t width = round_up(p.head_dim, kLanes);
  for (int64_t position = span.begin; position < span.end; position += kLanes) {
    find_rows(p, span, p.keys, position, keys);
    find_rows(p, span, p.values, position, values);
    prefetch_rows(values, p.head_dim);
    if (position + kLanes < span.end) {
      find_rows(p, span, p.keys, position + kLanes, next);
      prefetch_rows(next, p.head_dim);
    }
    transpose_keys(keys, p.head_dim, scratch.tile);
    int64_t m = 0;
    for (; m + kQueryGroup <= span.num_queries; m += kQueryGroup)
      score_queries<T, kQueryGroup>(p, span, m, position, scratch);
    for (; m < span.num_queries; m++) score_queries<T, 1>(p, span, m, position, scratch);
    const int64_t unit = (position - span.begin) / kPerUnit<T>;
    pack_values(values, p.head_dim, scratch.packed + unit * width);
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
  const int64_t width = round_up(p.head_dim, kLanes);
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
inline void attend_chunk(const AttentionParams &p, const Span &span, const Scratch &scratch,
                         float *sums, float *stats) {
  const int64_t width = round_up(p.head_dim, kLanes);
  score_chunk<T>(p, span, scratch);
  for (int64_t m = 0; m < span.num_queries; m++) {
    T *probs = static_cast<T *>(scratch.probs) + m * p.chunk_size;
    const auto [top, sum] =
        weigh_scores(scratch.scores + m * p.chunk_size, probs, span.end - span.begin);
    stats[2 * m] = top;
    stats[2 * m + 1] = sum;
  }
  int64_t m = 0;
  for (; m + kQueryGroup <= span.num_queries; m += kQueryGroup)
    sum_queries<T, kQueryGroup>(p, span, scratch, m, sums + m * width);
  for (; m < span.num_queries; m++) sum_queries<T, 1>(p, span, scratch, m, sums + m * width);
}

}  // namespace forerun
