// Paged attention: write K/V to their slots, attend chunk by chunk, combine. Passes of a parallel
// region; threads write disjoint ranges in each.
#pragma once

#include "attention_chunk.h"
#include "team.h"

namespace forerun {

// Partial results of some chunks of one block of rows and one KV head, chunks `stride` apart.
// Queries of a chunk are ordered by row, then by head within the group.
struct Partials {
  float *sums;   // [chunks, queries, width]
  float *stats;  // [chunks, queries, 2]
  int64_t width, stride;

  float *find_sums(int64_t chunk, int64_t m) const { return sums + (chunk * stride + m) * width; }
  float *find_stats(int64_t chunk, int64_t m) const { return stats + (chunk * stride + m) * 2; }
};

// Where partial results and thread buffers lie in the workspace.
struct Workspace {
  int64_t width, num_shared, num_private, scratch_floats;
  float *shared, *threads;

  explicit Workspace(const AttentionParams &p)
      : width(padded(p.head_dim)),
        num_shared(
            round_up(p.partial_begin[p.chunk_begin[p.num_shared]] * p.num_heads, kLanes)),
        num_private(p.max_private_chunks * round_up(Scratch::max_queries(p), kLanes)),
        scratch_floats(Scratch::floats(p)),
        shared(p.workspace),
        threads(shared + num_shared * (width + 2)) {}

  int64_t floats_per_thread() const { return scratch_floats + num_private * (width + 2); }
  int64_t floats(const AttentionParams &p) const {
    return num_shared * (width + 2) + p.num_threads * floats_per_thread();
  }
  float *find_thread(int64_t thread) const { return threads + thread * floats_per_thread(); }

  // Those of a block whose chunks any thread may compute; chunks count from the block's first.
  Partials find_shared(const AttentionParams &p, int64_t block, int64_t head) const {
    const int64_t queries = p.counts[block] * (p.num_heads / p.num_kv_heads);
    const int64_t chunk = p.chunk_begin[block];
    const int64_t at = p.partial_begin[chunk] * p.num_heads + head * queries;
    return {shared + at * width, shared + num_shared * width + at * 2, width,
            queries * p.num_kv_heads};
  }
  Partials find_private(const AttentionParams &p, int64_t thread) const {
    float *memory = find_thread(thread) + scratch_floats;
    return {memory, memory + num_private * width, width, round_up(Scratch::max_queries(p), kLanes)};
  }
};

template <class T>
inline T *find_slot(const AttentionParams &p, void *pool, int64_t slot, int64_t head) {
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const int64_t run = (block * p.num_kv_heads + head) * p.block_size + offset;
  return static_cast<T *>(pool) + run * p.head_dim;
}

// What an earlier owner left must be finite: other backends read whole blocks under a mask. Before
// any row is written: rows of one KV block may be different threads'.
template <class T>
inline void clear_new_blocks(const AttentionParams &p, int64_t block, int64_t head) {
  const int64_t bytes = p.block_size * p.head_dim * sizeof(T), start = p.starts[block];
  for (int64_t row = start; row < start + p.counts[block]; row++) {
    if (p.slots[row] % p.block_size != 0) continue;
    std::memset(find_slot<T>(p, p.keys, p.slots[row], head), 0, bytes);
    std::memset(find_slot<T>(p, p.values, p.slots[row], head), 0, bytes);
  }
}

template <class T>
inline void write_rows(const AttentionParams &p, int64_t block, int64_t head) {
  const T *key = static_cast<const T *>(p.key) + head * p.head_dim;
  const T *value = static_cast<const T *>(p.value) + head * p.head_dim;
  const int64_t start = p.starts[block];
  for (int64_t row = start; row < start + p.counts[block]; row++) {
    const int64_t bytes = p.head_dim * sizeof(T), slot = p.slots[row];
    std::memcpy(find_slot<T>(p, p.keys, slot, head), key + row * p.key_stride, bytes);
    std::memcpy(find_slot<T>(p, p.values, slot, head), value + row * p.value_stride, bytes);
  }
}

// output = sum of chunk sums, each times e^(its max - overall max), over the same sum of weights.
template <class T>
inline void combine_query(const Partials &partials, int64_t num_chunks, int64_t m, int64_t head_dim,
                   T *output) {
  float top = -__builtin_inff();
  for (int64_t c = 0; c < num_chunks; c++) top = std::max(top, *partials.find_stats(c, m));
  for (int64_t d = 0; d < head_dim; d += kDimGroup * kLanes) {
    const int64_t vectors = std::min<int64_t>(kDimGroup, (partials.width - d) / kLanes);
    Floats sum[kDimGroup] = {}, total{};
    for (int64_t c = 0; c < num_chunks; c++) {
      const float *stats = partials.find_stats(c, m);
      const Floats scale = exp(splat(stats[0] - top));
      total += scale * stats[1];
      for (int64_t v = 0; v < vectors; v++)
        sum[v] += scale * load(partials.find_sums(c, m) + d + v * kLanes);
    }
    for (int64_t v = 0; v < vectors && d + v * kLanes < head_dim; v++)
      store(output + d + v * kLanes, sum[v] / total, head_dim - d - v * kLanes);
  }
}

template <class T>
inline void combine(const AttentionParams &p, const Partials &partials, int64_t block, int64_t head) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t num_chunks = p.chunk_begin[block + 1] - p.chunk_begin[block];
  for (int64_t row = 0; row < p.counts[block]; row++)
    for (int64_t i = 0; i < group; i++) {
      const int64_t at = (p.starts[block] + row) * p.num_heads + head * group + i;
      combine_query<T>(partials, num_chunks, row * group + i, p.head_dim,
                       static_cast<T *>(p.output) + at * p.head_dim);
    }
}

// One chunk of a shared block; `ahead` is the one this thread will probably get next.
template <class T>
inline void attend_shared(const AttentionParams &p, const Workspace &space, const Scratch &scratch,
                   int64_t item, int64_t ahead) {
  const int64_t heads = p.num_kv_heads, chunk = item / heads, head = item % heads;
  const Span span(p, chunk, head), following(p, ahead / heads, ahead % heads);
  const Partials partials = space.find_shared(p, span.block, head);
  const int64_t place = chunk - p.chunk_begin[span.block];
  attend_chunk<T>(p, span, following, scratch, partials.find_sums(place, 0),
                  partials.find_stats(place, 0));
}

// A whole block of rows for one KV head.
template <class T>
inline void attend_private(const AttentionParams &p, const Partials &partials, const Scratch &scratch,
                    int64_t block, int64_t head) {
  const int64_t begin = p.chunk_begin[block], end = p.chunk_begin[block + 1];
  for (int64_t c = begin; c < end; c++) {
    const Span span(p, c, head), following(p, std::min(c + 1, end - 1), head);
    attend_chunk<T>(p, span, following, scratch, partials.find_sums(c - begin, 0),
                    partials.find_stats(c - begin, 0));
  }
  combine<T>(p, partials, block, head);
}

// All threads of a team together; results are complete when they meet again.
template <class T>
inline void attend(const AttentionParams &p, const Team &team) {
  const Workspace space(p);
  const int64_t heads = p.num_kv_heads, num_shared = p.num_shared * heads;
  const int64_t num_private = p.num_blocks * heads - num_shared;
  const int64_t num_items = num_private + p.chunk_begin[p.num_shared] * heads;
  const Scratch scratch(p, space.find_thread(team.thread));
  const Share blocks = team.share(p.num_blocks * heads), shared = team.share(num_shared);
  for (int64_t i = blocks.from; i < blocks.to; i++) clear_new_blocks<T>(p, i / heads, i % heads);
  if (num_private > 0) team.wait();  // or every KV block of this step is one thread's alone
  for (int64_t i = blocks.from; i < blocks.to; i++) write_rows<T>(p, i / heads, i % heads);
  team.wait();
  for (int64_t item; (item = team.meeting.take_item()) < num_items;) {
    const int64_t block = num_shared + item, chunk = item - num_private;
    if (item < num_private)
      attend_private<T>(p, space.find_private(p, team.thread), scratch, block / heads, block % heads);
    else
      attend_shared<T>(p, space, scratch, chunk,
                       std::min(chunk + team.num_threads, num_items - num_private - 1));
  }
  team.wait();
  for (int64_t i = shared.from; i < shared.to; i++)
    combine<T>(p, space.find_shared(p, i / heads, i % heads), i / heads, i % heads);
}

}  // namespace forerun
