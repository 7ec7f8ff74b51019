// Paged attention: write K/V to their slots, attend chunk by chunk, combine. Passes of a parallel
// region; threads write disjoint ranges in each.
#pragma once

#include "attention_chunk.h"
#include "team.h"

namespace forerun {

// Items per thread from which their number no longer matters for an even share.
constexpr int64_t kManyItems = 24;

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
  RoundedQueries rounded;

  explicit Workspace(const AttentionParams &p)
      : width(padded(p.head_dim)),
        num_shared(
            round_up(p.partial_begin[p.chunk_begin[p.num_shared]] * p.num_heads, kLanes)),
        num_private(p.max_private_chunks * round_up(Scratch::max_queries(p), kLanes)),
        scratch_floats(Scratch::floats(p)),
        shared(p.workspace),
        threads(shared + num_shared * (width + 2)),
        rounded(p, threads + p.num_threads * floats_per_thread()) {}

  int64_t floats_per_thread() const { return scratch_floats + num_private * (width + 2); }
  int64_t floats(const AttentionParams &p) const {
    return num_shared * (width + 2) + p.num_threads * floats_per_thread() +
           RoundedQueries::floats(p);
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

// output = sum of chunk sums, each times e^(its max - overall max), over the same sum of weights.
template <class T>
inline void combine_query(const Partials &partials, int64_t num_chunks, int64_t m,
                          int64_t head_dim, T *output) {
  float top = -__builtin_inff();
  for (int64_t c = 0; c < num_chunks; c++) top = std::max(top, *partials.find_stats(c, m));
  for (int64_t d = 0; d < head_dim; d += kDimGroup * kLanes) {
    const int64_t left = head_dim - d;
    const int64_t vectors = std::min<int64_t>(kDimGroup, round_up(left, kLanes) / kLanes);
    Floats sum[kDimGroup] = {}, total{};
    for (int64_t c = 0; c < num_chunks; c++) {
      const float *stats = partials.find_stats(c, m);
      const Floats scale = exp(splat(stats[0] - top));
      total += scale * stats[1];
      for (int64_t v = 0; v < vectors; v++)
        sum[v] += scale * load(partials.find_sums(c, m) + d + v * kLanes);
    }
    for (int64_t v = 0; v < vectors; v++)
      store(output + d + v * kLanes, sum[v] / total, left - v * kLanes);
  }
}

template <class T>
inline void combine(const AttentionParams &p, const Partials &partials, int64_t block,
                    int64_t head) {
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
template <class T, class S>
inline void attend_shared(const AttentionParams &p, const Workspace &space, const Scratch &scratch,
                          int64_t item, int64_t ahead) {
  const int64_t heads = p.num_kv_heads, chunk = item / heads, head = item % heads;
  const Span span(p, chunk, head), following(p, ahead / heads, ahead % heads);
  const Partials partials = space.find_shared(p, span.block, head);
  const int64_t place = chunk - p.chunk_begin[span.block];
  list_queries<T, S>(p, space.rounded, span.block, head, scratch);
  attend_chunk<T, S>(p, span, following, scratch, partials.find_sums(place, 0),
                     partials.find_stats(place, 0));
}

// A whole block of rows for one KV head.
template <class T, class S>
inline void attend_private(const AttentionParams &p, const Workspace &space, int64_t thread,
                           const Scratch &scratch, int64_t block, int64_t head) {
  const Partials partials = space.find_private(p, thread);
  const int64_t begin = p.chunk_begin[block], end = p.chunk_begin[block + 1];
  list_queries<T, S>(p, space.rounded, block, head, scratch);
  for (int64_t c = begin; c < end; c++) {
    const Span span(p, c, head), following(p, std::min(c + 1, end - 1), head);
    attend_chunk<T, S>(p, span, following, scratch, partials.find_sums(c - begin, 0),
                       partials.find_stats(c - begin, 0));
  }
  combine<T>(p, partials, block, head);
}

// The chunks of shared blocks, in runs of `group` items (chunk, then head) that one thread takes.
struct SharedItems {
  int64_t num_items, group;

  SharedItems(const AttentionParams &p, int64_t num_threads)
      : num_items(p.chunk_begin[p.num_shared] * p.num_kv_heads),
        // Rows of a chunk's heads are neighbours: one thread takes all, if there are chunks enough.
        group(num_items >= kManyItems * num_threads ? p.num_kv_heads : 1) {}

  int64_t num_runs() const { return num_items / group; }
  int64_t find_ahead(int64_t item, int64_t num_threads) const {
    const bool is_last = (item + 1) % group == 0;
    return std::min(item + 1 + (is_last ? (num_threads - 1) * group : 0), num_items - 1);
  }
};

template <class T, class S>
inline void attend_pool(const AttentionParams &p, const Team &team) {
  const Workspace space(p);
  const int64_t heads = p.num_kv_heads, num_shared = p.num_shared * heads;
  const int64_t num_private = p.num_blocks * heads - num_shared;
  const SharedItems items(p, team.num_threads);
  const Scratch scratch(p, space.find_thread(team.thread));
  const Share blocks = team.share(p.num_blocks * heads), shared = team.share(num_shared);
  for (int64_t i = blocks.from; i < blocks.to; i++) clear_new_blocks<S>(p, i / heads, i % heads);
  if (num_private > 0) team.wait();  // or every KV block of this step is one thread's alone
  for (int64_t i = blocks.from; i < blocks.to; i++) {
    write_rows<T, S>(p, i / heads, i % heads);
    round_queries<T, S>(p, space.rounded, i / heads, i % heads);
  }
  team.wait();
  for (int64_t n; (n = team.meeting.take_item()) < num_private + items.num_runs();) {
    const int64_t block = num_shared + n, first = (n - num_private) * items.group;
    if (n < num_private)
      attend_private<T, S>(p, space, team.thread, scratch, block / heads, block % heads);
    else
      for (int64_t i = first; i < first + items.group; i++)
        attend_shared<T, S>(p, space, scratch, i, items.find_ahead(i, team.num_threads));
  }
  team.wait();
  for (int64_t i = shared.from; i < shared.to; i++)
    combine<T>(p, space.find_shared(p, i / heads, i % heads), i / heads, i % heads);
}

// All threads of a team together; results are complete when they meet again.
template <class T>
inline void attend(const AttentionParams &p, const Team &team) {
  p.key_scales == nullptr ? attend_pool<T, T>(p, team) : attend_pool<T, int8_t>(p, team);
}

}  // namespace forerun
