// Paged attention of requests with few rows: write K/V to their slots, attend chunk by chunk,
// combine. Three passes in one parallel region; threads write disjoint ranges in each.
#include "attention_chunk.h"

#include <omp.h>

namespace forerun {
namespace {

// Where partial results and thread buffers lie in the workspace.
struct Workspace {
  int64_t width, num_partials;
  float *sums;   // [num_partials, width]
  float *stats;  // [num_partials, 2]
  float *threads;

  explicit Workspace(const AttentionParams &p)
      : width(padded(p.head_dim)),
        num_partials(round_up(p.partial_begin[p.num_chunks] * p.num_heads, kLanes)),
        sums(p.workspace),
        stats(sums + num_partials * width),
        threads(stats + num_partials * 2) {}

  int64_t floats(const AttentionParams &p) const {
    return num_partials * (width + 2) + p.num_threads * Scratch::floats(p);
  }
  // Partial results of a chunk are ordered by KV head, then row, then head within the group.
  int64_t find(const AttentionParams &p, int64_t chunk, int64_t head) const {
    const int64_t rows = p.partial_begin[chunk + 1] - p.partial_begin[chunk];
    return (p.partial_begin[chunk] * p.num_kv_heads + head * rows) *
           (p.num_heads / p.num_kv_heads);
  }
};

template <class T>
void write_row(const AttentionParams &p, void *pool, const T *row, int64_t slot, int64_t head) {
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  T *run = static_cast<T *>(pool) + (block * p.num_kv_heads + head) * p.block_size * p.head_dim;
  // What an earlier owner left must be finite: other backends read whole blocks under a mask.
  if (offset == 0) std::memset(run, 0, p.block_size * p.head_dim * sizeof(T));
  std::memcpy(run + offset * p.head_dim, row, p.head_dim * sizeof(T));
}

template <class T>
void write_request(const AttentionParams &p, int64_t request, int64_t head) {
  const T *key = static_cast<const T *>(p.key) + head * p.head_dim;
  const T *value = static_cast<const T *>(p.value) + head * p.head_dim;
  const int64_t start = p.starts[request];
  for (int64_t row = start; row < start + p.counts[request]; row++) {
    write_row(p, p.keys, key + row * p.key_stride, p.slots[row], head);
    write_row(p, p.values, value + row * p.value_stride, p.slots[row], head);
  }
}

// output = sum of chunk sums, each times e^(its max - overall max), over the same sum of weights.
template <class T>
void combine_query(const AttentionParams &p, const Workspace &space, int64_t request,
                   int64_t head, int64_t m) {
  const int64_t begin = p.chunk_begin[request], end = p.chunk_begin[request + 1];
  float top = -__builtin_inff();
  for (int64_t c = begin; c < end; c++)
    top = std::max(top, space.stats[2 * (space.find(p, c, head) + m)]);
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t row = (p.starts[request] + m / group) * p.num_heads + head * group + m % group;
  T *output = static_cast<T *>(p.output) + row * p.head_dim;
  for (int64_t d = 0; d < p.head_dim; d += kDimGroup * kLanes) {
    const int64_t vectors = std::min<int64_t>(kDimGroup, (space.width - d) / kLanes);
    Floats sum[kDimGroup] = {}, total{};
    for (int64_t c = begin; c < end; c++) {
      const int64_t partial = space.find(p, c, head) + m;
      const Floats scale = exp(splat(space.stats[2 * partial] - top));
      total += scale * space.stats[2 * partial + 1];
      for (int64_t v = 0; v < vectors; v++)
        sum[v] += scale * load(space.sums + partial * space.width + d + v * kLanes);
    }
    for (int64_t v = 0; v < vectors && d + v * kLanes < p.head_dim; v++)
      store(output + d + v * kLanes, sum[v] / total, p.head_dim - d - v * kLanes);
  }
}

template <class T>
void attend(const AttentionParams &p) {
  const Workspace space(p);
  const int64_t heads = p.num_kv_heads;
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t num_items = p.num_chunks * heads;
#pragma omp parallel num_threads(p.num_threads)
  {
    const Scratch scratch(p, space.threads + omp_get_thread_num() * Scratch::floats(p));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.num_reqs * heads; i++) write_request<T>(p, i / heads, i % heads);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; i++) {
      const int64_t ahead = std::min(i + p.num_threads, num_items - 1);
      const Span span(p, i / heads, i % heads), following(p, ahead / heads, ahead % heads);
      const int64_t at = space.find(p, i / heads, i % heads);
      attend_chunk<T>(p, span, following, scratch, space.sums + at * space.width,
                      space.stats + 2 * at);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.num_reqs * heads; i++)
      for (int64_t m = 0; m < p.counts[i / heads] * group; m++)
        combine_query<T>(p, space, i / heads, i % heads, m);
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

int64_t forerun_abi_version() { return forerun::kAbiVersion; }

int64_t forerun_attention_workspace(const forerun::AttentionParams *params) {
  return forerun::Workspace(*params).floats(*params);
}

void forerun_attention(const forerun::AttentionParams *params) {
  if (params->dtype == forerun::kBFloat16)
    forerun::attend<forerun::bf16>(*params);
  else
    forerun::attend<float>(*params);
}
}
