// What a step's rows are, computed from a few numbers per request: positions and slots, and how
// attention is cut into blocks of rows and chunks of positions.
#include <algorithm>
#include <cstring>

#include "abi.h"

namespace forerun {
namespace {

// Returns how many rows have no block.
int64_t lay_out(const StepLayoutParams &p) {
  int64_t row = 0, num_lost = 0;
  for (int64_t i = 0; i < p.num_requests; i++) {
    const int64_t *blocks = p.blocks + p.table_begin[i];
    const int64_t length = p.table_begin[i + 1] - p.table_begin[i];
    int64_t *table = p.tables + i * p.table_width;
    std::copy_n(blocks, length, table);
    std::fill(table + length, table + p.table_width, 0);
    p.query_start[i] = row;
    for (int64_t n = 0; n < p.counts[i]; n++, row++) {
      const int64_t position = p.contexts[i] + n, place = position / p.block_size;
      const int64_t block = place < length ? blocks[place] : 0;
      num_lost += block == 0;
      p.positions[row] = position;
      p.slots[row] = block * p.block_size + position % p.block_size;
    }
  }
  p.query_start[p.num_requests] = row;
  return num_lost;
}

// Cuts the rows of a step. Requests of few rows come first: their chunks may go to any thread.
class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionPlanParams &p) : p_(p), to_(*p.attention) {}

  // Returns how many numbers the lists need; they are complete if that is within the capacity.
  int64_t make() {
    count_blocks();
    const int64_t blocks = to_.num_blocks;
    const int64_t needed = blocks * (6 + to_.table_width) + 2 + 2 * num_chunks_;
    if (needed > p_.capacity) return needed;
    starts_ = take(blocks), counts_ = take(blocks), contexts_ = take(blocks), ends_ = take(blocks);
    first_ = take(blocks), chunk_begin_ = take(blocks + 1), tables_ = take(blocks * to_.table_width);
    chunk_owner_ = take(num_chunks_), partial_begin_ = take(num_chunks_ + 1);
    fill();
    to_.starts = starts_, to_.counts = counts_, to_.contexts = contexts_, to_.ends = ends_;
    to_.first = first_, to_.chunk_begin = chunk_begin_, to_.tables = tables_;
    to_.chunk_owner = chunk_owner_, to_.partial_begin = partial_begin_;
    return needed;
  }

 private:
  struct Block {
    int64_t request, start, count, context, first, end;

    int64_t num_chunks(int64_t size) const { return (end - first + size - 1) / size; }
  };

  int64_t count_rows(int64_t request) const {
    return p_.query_start[request + 1] - p_.query_start[request];
  }

  // Call f(block) for the blocks of a request, none if it has no rows.
  template <class F>
  void for_blocks_of(int64_t request, F f) const {
    const int64_t rows = count_rows(request), context = p_.contexts[request];
    for (int64_t offset = 0; offset < rows; offset += p_.block_rows) {
      Block block;
      block.request = request;
      block.start = p_.query_start[request] + offset;
      block.count = std::min(rows - offset, p_.block_rows);
      block.context = context + offset;
      const int64_t unseen = to_.window > 0 ? block.context - to_.window + 1 : 0;
      block.first = std::max<int64_t>(unseen, 0) / to_.chunk_size * to_.chunk_size;
      block.end = to_.causal ? block.context + block.count : context + rows;
      f(block);
    }
  }

  // Call f(block) for all blocks, those of requests of one block first.
  template <class F>
  void for_blocks(F f) const {
    for (int64_t i = 0; i < p_.num_requests; i++)
      if (count_rows(i) <= p_.block_rows) for_blocks_of(i, f);
    for (int64_t i = 0; i < p_.num_requests; i++)
      if (count_rows(i) > p_.block_rows) for_blocks_of(i, f);
  }

  void count_blocks() {
    to_.num_blocks = to_.num_shared = to_.max_count = to_.max_private_chunks = num_chunks_ = 0;
    for_blocks([&](const Block &block) {
      const bool is_shared = count_rows(block.request) <= p_.block_rows;
      const int64_t chunks = block.num_chunks(to_.chunk_size);
      to_.num_blocks++;
      to_.num_shared += is_shared;
      to_.max_count = std::max(to_.max_count, block.count);
      if (!is_shared) to_.max_private_chunks = std::max(to_.max_private_chunks, chunks);
      num_chunks_ += chunks;
    });
  }

  void fill() {
    int64_t i = 0, chunk = 0, partial = 0;
    for_blocks([&](const Block &block) {
      starts_[i] = block.start, counts_[i] = block.count, contexts_[i] = block.context;
      ends_[i] = block.end, first_[i] = block.first, chunk_begin_[i] = chunk;
      std::copy_n(p_.tables + block.request * to_.table_width, to_.table_width,
                  tables_ + i * to_.table_width);
      for (int64_t n = block.num_chunks(to_.chunk_size); n > 0; n--, chunk++) {
        chunk_owner_[chunk] = i;
        partial_begin_[chunk] = partial;
        partial += block.count;
      }
      i++;
    });
    chunk_begin_[i] = chunk;
    partial_begin_[chunk] = partial;
  }

  int64_t *take(int64_t count) {
    int64_t *list = p_.memory + used_;
    used_ += count;
    return list;
  }

  const AttentionPlanParams &p_;
  AttentionParams &to_;
  int64_t num_chunks_ = 0, used_ = 0;
  int64_t *starts_, *counts_, *contexts_, *ends_, *first_, *chunk_begin_, *tables_, *chunk_owner_;
  int64_t *partial_begin_;
};

}  // namespace
}  // namespace forerun

extern "C" {

int64_t forerun_lay_out(const forerun::StepLayoutParams *params) {
  return forerun::lay_out(*params);
}

int64_t forerun_plan_attention(const forerun::AttentionPlanParams *params) {
  return forerun::AttentionPlan(*params).make();
}
}
