// The queries of a block of rows for one KV head, and the buffers a thread works with.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "units.h"

namespace forerun {

// Query vectors and vectors of head_dim that are accumulated in registers at once.
constexpr int kQueryGroup = kLanes == 16 ? 4 : 2;
constexpr int kDimGroup = 4;

// One query vector and the positions its row sees. Scores are products with keys times `scale`.
struct Query {
  const void *numbers;
  int64_t oldest, newest;
  float scale;
};

// Buffers of one thread.
struct Scratch {
  Units *tile;              // [units of a key, kLanes]
  uint32_t *packed;         // [units of a chunk, kDimGroup * kLanes]
  float *scores;            // [queries, chunk_size]
  void *probs;              // [queries, chunk_size], of the type that is multiplied
  float *steps;             // [queries] what whole weights are multiples of
  float *value_scales;      // [chunk_size]
  float *keys, *values;     // [kLanes, head_dim] and [chunk_size, head_dim] copies of rows
  float *copied_scales;     // [2, kLanes]
  const void **value_rows;  // [tiles of a chunk] where values lie
  Query *queries;           // [queries]

  static int64_t max_queries(const AttentionParams &p) {
    return p.max_count * (p.num_heads / p.num_kv_heads);
  }
  // One float per number is enough for any type.
  static int64_t floats(const AttentionParams &p) {
    const int64_t dim = padded(p.head_dim), described = sizeof(Query) / sizeof(float);
    const int64_t per_query = 2 * p.chunk_size + 1 + described;
    return (2 * dim + 2) * kLanes + (kDimGroup * kLanes + 2 + dim) * p.chunk_size +
           round_up(max_queries(p), kLanes) * per_query;
  }
  Scratch(const AttentionParams &p, float *memory) {
    const int64_t dim = padded(p.head_dim), num_queries = round_up(max_queries(p), kLanes);
    const auto take = [&](int64_t floats) { return std::exchange(memory, memory + floats); };
    tile = reinterpret_cast<Units *>(take(dim * kLanes));
    packed = reinterpret_cast<uint32_t *>(take(kDimGroup * kLanes * p.chunk_size));
    scores = take(num_queries * p.chunk_size);
    probs = take(num_queries * p.chunk_size);
    steps = take(num_queries);
    value_scales = take(p.chunk_size);
    keys = take(kLanes * dim);
    values = take(p.chunk_size * dim);
    copied_scales = take(2 * kLanes);
    value_rows = reinterpret_cast<const void **>(take(p.chunk_size));
    queries = reinterpret_cast<Query *>(memory);
  }

  // Keys are needed for one tile, values until the end of the chunk.
  template <class S>
  TileCopy find_copy(const AttentionParams &p, int64_t at) const {
    return {keys, reinterpret_cast<S *>(values) + at * p.head_dim, copied_scales,
            copied_scales + kLanes};
  }
};

// Queries of all rows in 15 bits, for int8 rows of a bfloat16 model; otherwise as they came.
struct RoundedQueries {
  int16_t *numbers;  // [rows, num_heads, padded head_dim]
  float *steps;      // [rows, num_heads]

  static int64_t floats(const AttentionParams &p) {
    return round_up(p.num_rows * p.num_heads, kLanes) * (padded(p.head_dim) / 2 + 1);
  }
  RoundedQueries(const AttentionParams &p, float *memory)
      : numbers(reinterpret_cast<int16_t *>(memory)),
        steps(memory + round_up(p.num_rows * p.num_heads, kLanes) * (padded(p.head_dim) / 2)) {}
};

// Those of a block of rows and one KV head.
template <class T, class S>
inline void round_queries(const AttentionParams &p, const RoundedQueries &rounded, int64_t block,
                          int64_t kv_head) {
  if constexpr (!std::is_same_v<Computed<T, S>, T>) {
    const int64_t group = p.num_heads / p.num_kv_heads, start = p.starts[block];
    for (int64_t row = start; row < start + p.counts[block]; row++)
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const T *query = static_cast<const T *>(p.query) + row * p.query_stride;
        const int64_t at = row * p.num_heads + head;
        rounded.steps[at] = quantise_query(query + head * p.head_dim, p.head_dim,
                                           rounded.numbers + at * padded(p.head_dim));
      }
  }
}

// List the queries of a block's rows for one KV head, in the type that is multiplied: divisions in
// every tile would cost as much as the products.
template <class T, class S>
inline void list_queries(const AttentionParams &p, const RoundedQueries &rounded, int64_t block,
                         int64_t kv_head, const Scratch &scratch) {
  const int64_t group = p.num_heads / p.num_kv_heads, first = p.starts[block];
  Query *query = scratch.queries;
  for (int64_t row = 0; row < p.counts[block]; row++) {
    const T *heads = static_cast<const T *>(p.query) + (first + row) * p.query_stride;
    const int64_t position = p.contexts[block] + row;
    const int64_t oldest = p.window > 0 ? position - p.window + 1 : 0;
    const int64_t newest = p.causal ? position : p.ends[block] - 1;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      *query = {heads + head * p.head_dim, oldest, newest, static_cast<float>(p.scale)};
      if constexpr (!std::is_same_v<Computed<T, S>, T>) {
        const int64_t at = (first + row) * p.num_heads + head;
        query->numbers = rounded.numbers + at * padded(p.head_dim);
        query->scale *= rounded.steps[at];
      }
      query++;
    }
  }
}

}  // namespace forerun
