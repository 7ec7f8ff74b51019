// K/V rows in the paged pool: where they lie, and how they are fetched and written.
// S is the type the pool stores: the model's type T, or int8_t with a scale per position and head.
#pragma once

#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "int8.h"
#include "vec.h"

namespace forerun {

template <class S>
constexpr bool kIsInt8 = std::is_same_v<S, int8_t>;

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

// Neighbouring rows of a pool: `count` from row `place` on.
struct Run {
  int64_t place, count;
};

// Walks along the rows of a span's positions, tile by tile.
class Cursor {
 public:
  Cursor(const AttentionParams &p, const Span &span)
      : span_(span), heads_(p.num_kv_heads), block_size_(p.block_size), position_(span.begin) {
    const int64_t block = span.low / block_size_;
    block_ = p.tables + span.block * p.table_width + block;
    offset_ = span.low - block * block_size_;
  }

  // Go to the next tile; returns how many of its positions are read, or 0 after the last one.
  int64_t enter_tile() {
    const int64_t from = std::max(position_, span_.low);
    position_ += kLanes;
    return std::max<int64_t>(std::min(position_, span_.high + 1) - from, 0);
  }

  // Take the next `most` rows, or fewer that are neighbours.
  Run take(int64_t most) {
    const Run run{(*block_ * heads_ + span_.head) * block_size_ + offset_,
                  std::min(block_size_ - offset_, most)};
    offset_ += run.count;
    if (offset_ == block_size_) {
      offset_ = 0;
      block_++;
    }
    return run;
  }

 private:
  const Span &span_;
  const int64_t heads_, block_size_;
  const int64_t *block_;
  int64_t position_, offset_;
};

// The K and V rows of kLanes positions, head_dim numbers each, one after the other.
template <class S>
struct Tile {
  const S *keys, *values;
  const float *key_scales, *value_scales;  // [kLanes], of int8 rows
};

// Where tiles are put together whose rows are not neighbours.
struct TileCopy {
  void *keys, *values;               // [kLanes, head_dim]
  float *key_scales, *value_scales;  // [kLanes]
};

template <class N>
inline void copy_rows(N *to, const N *pool, const Run &run, int64_t size) {
  std::memcpy(to, pool + run.place * size, run.count * size * sizeof(N));
}

// The row at `from` to the places before it, the one at `last` to those after it.
template <class N>
inline void repeat_ends(N *rows, int64_t size, int64_t from, int64_t last) {
  for (int64_t i = 0; i < from; i++)
    std::memcpy(rows + i * size, rows + from * size, size * sizeof(N));
  for (int64_t i = last + 1; i < kLanes; i++)
    std::memcpy(rows + i * size, rows + last * size, size * sizeof(N));
}

// Places outside from .. from + count - 1 stand for positions that are not read, where the pool may
// hold anything: they get the row of the nearest one.
template <class S>
[[gnu::noinline]] Tile<S> copy_tile(const AttentionParams &p, Run run, int64_t from, int64_t count,
                                    Cursor &cursor, const TileCopy &copy) {
  const int64_t size = p.head_dim, last = from + count - 1;
  S *keys = static_cast<S *>(copy.keys), *values = static_cast<S *>(copy.values);
  for (int64_t row = from;; run = cursor.take(last + 1 - row)) {
    copy_rows(keys + row * size, static_cast<const S *>(p.keys), run, size);
    copy_rows(values + row * size, static_cast<const S *>(p.values), run, size);
    if constexpr (kIsInt8<S>) {
      copy_rows(copy.key_scales + row, p.key_scales, run, 1);
      copy_rows(copy.value_scales + row, p.value_scales, run, 1);
    }
    row += run.count;
    if (row > last) break;
  }
  repeat_ends(keys, size, from, last);
  repeat_ends(values, size, from, last);
  if constexpr (kIsInt8<S>) {
    repeat_ends(copy.key_scales, 1, from, last);
    repeat_ends(copy.value_scales, 1, from, last);
  }
  return {keys, values, copy.key_scales, copy.value_scales};
}

// Rows are read where they lie if they are neighbours, as in blocks of whole tiles; else from a
// copy. `from` is the place of the first position that is read.
template <class S>
inline Tile<S> find_tile(const AttentionParams &p, int64_t from, Cursor &cursor,
                         const TileCopy &copy) {
  const int64_t count = cursor.enter_tile();
  const Run run = cursor.take(count);
  if (run.count < kLanes) return copy_tile<S>(p, run, from, count, cursor, copy);
  const int64_t at = run.place * p.head_dim, scales = kIsInt8<S> ? run.place : 0;
  return {static_cast<const S *>(p.keys) + at, static_cast<const S *>(p.values) + at,
          p.key_scales + scales, p.value_scales + scales};
}

// Into the second-level cache: measured half again as fast as into the first, which holds fewer
// requests in flight. Always inlined: GCC takes a function that only prefetches for one without
// effects and drops it, and one that is handed such a function too.
[[gnu::always_inline]] inline void prefetch_run(const void *pool, const Run &run,
                                                int64_t row_bytes) {
  const char *at = static_cast<const char *>(pool) + run.place * row_bytes;
  for (const char *end = at + run.count * row_bytes; at < end; at += 64)
    __builtin_prefetch(at, 0, 2);
}

// The rows of `num_tiles` tiles of one pool, and their scales.
template <class S>
[[gnu::always_inline]] inline void prefetch_tiles(const AttentionParams &p, Cursor &cursor,
                                                  int64_t num_tiles, const void *pool,
                                                  const float *scales) {
  for (int64_t i = 0; i < num_tiles; i++)
    for (int64_t left = cursor.enter_tile(); left > 0;) {
      const Run run = cursor.take(left);
      prefetch_run(pool, run, p.head_dim * sizeof(S));
      if constexpr (kIsInt8<S>) prefetch_run(scales, run, sizeof(float));
      left -= run.count;
    }
}

// Number of a slot's row among the rows of one KV head's blocks.
inline int64_t find_slot(const AttentionParams &p, int64_t slot, int64_t head) {
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  return (block * p.num_kv_heads + head) * p.block_size + offset;
}

// What an earlier owner left must be finite: other backends read whole blocks under a mask. Before
// any row is written: rows of one KV block may be different threads'.
template <class S>
inline void clear_new_blocks(const AttentionParams &p, int64_t block, int64_t head) {
  const int64_t count = p.block_size * p.head_dim, start = p.starts[block];
  for (int64_t row = start; row < start + p.counts[block]; row++) {
    if (p.slots[row] % p.block_size != 0) continue;
    const int64_t at = find_slot(p, p.slots[row], head);
    for (void *pool : {p.keys, p.values})
      std::memset(static_cast<S *>(pool) + at * p.head_dim, 0, count * sizeof(S));
    if constexpr (kIsInt8<S>)
      for (float *scales : {p.key_scales, p.value_scales})
        std::memset(scales + at, 0, p.block_size * sizeof(float));
  }
}

// Write one row of T to row `at` of a pool.
template <class T, class S>
inline void write_row(const T *from, void *pool, float *scales, int64_t at, int64_t size) {
  S *to = static_cast<S *>(pool) + at * size;
  if constexpr (kIsInt8<S>) scales[at] = quantise_row(from, size, to);
  else std::memcpy(to, from, size * sizeof(T));
}

template <class T, class S>
inline void write_rows(const AttentionParams &p, int64_t block, int64_t head) {
  const T *key = static_cast<const T *>(p.key) + head * p.head_dim;
  const T *value = static_cast<const T *>(p.value) + head * p.head_dim;
  const int64_t start = p.starts[block];
  for (int64_t row = start; row < start + p.counts[block]; row++) {
    const int64_t at = find_slot(p, p.slots[row], head);
    write_row<T, S>(key + row * p.key_stride, p.keys, p.key_scales, at, p.head_dim);
    write_row<T, S>(value + row * p.value_stride, p.values, p.value_scales, at, p.head_dim);
  }
}

}  // namespace forerun
