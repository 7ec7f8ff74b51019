// What the shared object promises to loader.py: plain functions over raw pointers, no PyTorch.
// Raise kAbiVersion, here and in loader.py, whenever a signature or a struct below changes.
// All sizes and strides count elements. Pointers to numbers of the model's type are void *.
#pragma once

#include <cstdint>

namespace forerun {

constexpr int64_t kAbiVersion = 2;

// Values of the `dtype` arguments.
constexpr int64_t kFloat32 = 0;
constexpr int64_t kBFloat16 = 1;

// One layer of one step, few-row requests only. Request i owns counts[i] rows from starts[i] on.
// Its visible positions are cut into chunks at multiples of chunk_size, which are computed
// independently; chunks chunk_begin[i] .. chunk_begin[i + 1] - 1 are its, the first one starting
// at position first[i]. Partial results of chunk c start at row partial_begin[c].
struct AttentionParams {
  void *keys;    // [num_blocks, num_kv_heads, block_size, head_dim]
  void *values;  // same shape
  const void *query;  // [rows, num_heads, head_dim], rows query_stride apart
  const void *key;    // [rows, num_kv_heads, head_dim], rows key_stride apart
  const void *value;  // same, rows value_stride apart
  void *output;       // [rows, num_heads, head_dim], contiguous
  float *workspace;   // as many floats as forerun_attention_workspace says
  const int64_t *starts;         // [num_reqs]
  const int64_t *counts;         // [num_reqs]
  const int64_t *contexts;       // [num_reqs] positions cached before this step
  const int64_t *tables;         // [num_reqs, table_width] block ids
  const int64_t *slots;          // [rows] block id * block_size + offset
  const int64_t *first;          // [num_reqs]
  const int64_t *chunk_begin;    // [num_reqs + 1]
  const int64_t *chunk_request;  // [num_chunks]
  const int64_t *partial_begin;  // [num_chunks + 1]
  int64_t query_stride, key_stride, value_stride;
  int64_t num_reqs, num_chunks, table_width, max_count;
  int64_t num_heads, num_kv_heads, head_dim, block_size, chunk_size;
  int64_t window;  // 0: everything before a row is visible
  int64_t dtype, num_threads;
  double scale;
};

}  // namespace forerun
