// What the shared object promises to loader.py: plain functions over raw pointers, no PyTorch.
// Raise kAbiVersion, here and in loader.py, whenever a signature or a struct below changes.
// All sizes and strides count elements. Pointers to numbers of the model's type are void *.
#pragma once

#include <cstdint>

namespace forerun {

constexpr int64_t kAbiVersion = 6;

// Values of the `dtype` arguments.
constexpr int64_t kFloat32 = 0;
constexpr int64_t kBFloat16 = 1;

// One layer of one step. Block of rows i (a request's, or a part of them) owns counts[i] rows from
// starts[i] on. Its visible positions are cut into chunks at multiples of chunk_size, which are
// computed one by one and combined; chunks chunk_begin[i] .. chunk_begin[i + 1] - 1 are its, the
// first one starting at position first[i]. Partial results of chunk c start at row
// partial_begin[c]. Chunks of the first num_shared blocks may go to different threads; any other
// block is one thread's, because it has work enough and its partial results stay in the cache.
struct AttentionParams {
  void *keys;    // [num_blocks, num_kv_heads, block_size, head_dim], of the model's type or int8
  void *values;  // same
  float *key_scales;    // [num_blocks, num_kv_heads, block_size] what int8 keys are multiples of;
  float *value_scales;  // same for values; null: both are of the model's type
  const void *query;  // [rows, num_heads, head_dim], rows query_stride apart
  const void *key;    // [rows, num_kv_heads, head_dim], rows key_stride apart
  const void *value;  // same, rows value_stride apart
  void *output;       // [rows, num_heads, head_dim], contiguous
  float *workspace;   // as many floats as forerun_attention_workspace says
  const int64_t *starts;         // [num_blocks]
  const int64_t *counts;         // [num_blocks]
  const int64_t *contexts;       // [num_blocks] position of the first row
  const int64_t *ends;           // [num_blocks] positions the block sees; its rows' own if causal
  const int64_t *tables;         // [num_blocks, table_width] KV block ids
  const int64_t *slots;          // [rows] KV block id * block_size + offset
  const int64_t *first;          // [num_blocks]
  const int64_t *chunk_begin;    // [num_blocks + 1]
  const int64_t *chunk_owner;    // [chunks] block of rows
  const int64_t *partial_begin;  // [chunks + 1]
  int64_t query_stride, key_stride, value_stride;
  int64_t num_rows, num_blocks, num_shared, max_private_chunks, table_width, max_count;
  int64_t num_heads, num_kv_heads, head_dim, block_size, chunk_size;
  int64_t window;  // 0: everything before a row is visible
  int64_t causal;  // 0: what comes after a row is visible too
  int64_t dtype, num_threads;
  double scale;
};

// Formats of weights: numbers of the model's type (plain.h), or quantised ones (blocks.h).
constexpr int64_t kPlain = 0, kQ8_0 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 4, kQ5_1 = 5, kQ4K = 6,
                  kQ5K = 7, kQ6K = 8;

// Outputs of a weight from number `begin` on, in panels.
struct WeightPart {
  const void *panels;
  int64_t format, begin;
};

// A weight [out_features, in_features]. A quantised one may have parts of several formats, one after
// the other in memory; begins are multiples of 16.
constexpr int64_t kMaxParts = 3;
struct PackedWeight {
  WeightPart parts[kMaxParts];
  int64_t num_parts;  // 0: this weight is absent
  const float *bias;  // [out_features] or null
  int64_t out_features, in_features;
};

struct PackParams {
  const void *weight;  // [out_features, in_features], rows contiguous
  void *panels;        // as many bytes as forerun_packed_bytes says, on a 64-byte boundary
  int64_t out_features, in_features, dtype, num_threads;
};

// Packing of rows of stored blocks [out_features, in_features] into a part.
struct PackBlocksParams {
  const void *blocks;
  void *panels;  // as many bytes as forerun_block_bytes says
  int64_t format, out_features, in_features, num_threads;
};

// Rows row_ids[i] of a packed weight, as they were before packing.
struct UnpackParams {
  PackedWeight weight;
  const int64_t *row_ids;  // [num_rows]
  void *out;               // [num_rows, in_features]
  int64_t num_rows, dtype, num_threads;
};

struct LinearParams {
  PackedWeight weight;
  const void *x;   // [num_rows, in_features], rows x_stride apart
  void *out;       // [num_rows, out_features], of the model's type or float32
  void *scratch;   // [num_rows, in_features] numbers of the model's type
  int64_t x_stride, num_rows, out_dtype, dtype, num_threads;
};

// What lies between the attention of one layer and that of the next, in this order:
//   o, [norm], add to the residual stream, norm, gate and up, activation, down, [norm]  if attended
//   add to the residual stream, norm
//   qkv, [norm of q and k heads], rotation of q and k heads                             if qkv
// A null pointer leaves out the step in brackets.
struct SegmentWeights {
  PackedWeight o, gate_up, down, qkv;
  const float *post_attention_norm, *mlp_norm, *post_mlp_norm, *input_norm;  // [hidden_size]
  const float *head_norm;  // [num_rotated_heads, head_dim]
  int64_t hidden_size, num_rotated_heads, head_dim;
  int64_t activation;  // 0 silu, 1 gelu_tanh
  double eps;
};

struct SegmentParams {
  const SegmentWeights *weights;
  const void *attended;  // [num_rows, o.in_features] or null: nothing was attended yet
  void *residual;        // [num_rows, hidden_size], updated in place
  void *update;          // [num_rows, hidden_size] scratch
  void *normed;          // [num_rows, hidden_size] scratch; the result of a segment without qkv
  void *gated;           // [num_rows, down.in_features] scratch
  void *heads;           // [num_rows, qkv.out_features] result
  void *scratch;         // [num_rows, widest input] numbers of the model's type
  const void *cosines, *sines;  // [.., head_dim / 2], rows angle strides apart
  const int64_t *positions;     // [num_rows] rows of the angles; null: 0, 1, 2, ...
  int64_t cos_stride, sin_stride;
  int64_t num_rows, dtype, num_threads;
};

// All layers of one step: embedding, segment, attention, segment, ..., segment, head. Pointers of
// `segment` and of the attention calls that differ between layers come from the lists.
struct ForwardParams {
  const SegmentParams *segment;
  const PackedWeight *embedding;  // null: the residual stream holds the rows
  const int64_t *token_ids;  // [num_rows]
  const SegmentWeights *const *weights;     // [num_layers + 1]
  const AttentionParams *const *attention;  // [num_layers]
  void *const *keys, *const *values;        // [num_layers]
  float *const *key_scales, *const *value_scales;  // [num_layers] or null, as in the calls
  const void *const *cosines, *const *sines;  // [num_layers]
  void *attended;  // [num_rows, o.in_features] scratch
  void *taps;      // [num_rows, num_taps, hidden_size] copies of the residual stream after the
                   // layers tap_ids; -1 is before all layers, the last layer cannot be tapped
  const int64_t *tap_ids;    // [num_taps]
  const PackedWeight *head;  // null: no logits are wanted
  float *logits;             // [num_logits_rows, head->out_features], those of the rows from
  int64_t first_logits_row, num_logits_rows;  // first_logits_row on
  int64_t num_layers, num_positions, num_taps;  // num_positions: rows of cosines and sines
  double embed_scale;
};

// What forward, draft and ingest answer: done, or nothing was done because of a token id or of a
// position.
constexpr int64_t kDone = 0, kUnknownToken = 1, kUnknownPosition = 2;

// What a block drafter proposes, position by position: the first largest of base + W2 e, where e is
// the row of W1 of the token before (the anchor at first), and how likely that is to be accepted,
// sigmoid(w . [hidden ; e] + b). W1 and W2 are of the type `dtype`.
struct DraftParams {
  PackedWeight bias_table;  // W2 [draft_vocab_size, rank], plain
  const void *embedding;    // W1 [vocab_size, rank]
  const float *base;        // [num_rows, num_positions, draft_vocab_size], strides given
  const int64_t *anchor_ids;  // [num_rows]
  const int64_t *target_ids;  // [draft_vocab_size] within the vocabulary; null: ids are the same
  const void *hidden;         // [num_rows, num_positions, hidden_size]
  const float *confidence_weight;  // [hidden_size], with the embedding [hidden_size + rank]
  int64_t *token_ids;  // [num_rows, num_positions] result, of the target's vocabulary
  float *confidence;   // same, probabilities; null: not wanted
  void *scratch;       // as many bytes as forerun_draft_bytes says
  int64_t row_stride, position_stride, num_rows, num_positions;
  int64_t vocab_size, hidden_size, reads_embedding;
  int64_t dtype, hidden_dtype, num_threads;
  double confidence_bias;
};

// What a block drafter keeps of rows: norm(fc x) of their taps x, from it keys, normed by head and
// rotated, and values of all its layers, written to the pool.
struct IngestParams {
  PackedWeight fc;         // [hidden_size, num_taps * hidden_size]
  PackedWeight key_value;  // [2 * num_layers * num_kv_heads * head_dim, hidden_size]: keys first
  const float *hidden_norm;       // [hidden_size]
  const float *key_norm;          // [num_layers * num_kv_heads, head_dim]
  const void *features;           // [num_rows, fc.in_features], rows contiguous
  void *fused, *heads, *scratch;  // [num_rows, fc.out_features, key_value.out_features, widest input]
  const int64_t *positions, *slots;              // [num_rows]
  const void *cosines, *sines;                   // [num_positions, head_dim / 2], strides given
  void *const *keys, *const *values;             // [num_layers] as in AttentionParams
  float *const *key_scales, *const *value_scales;  // [num_layers] or null
  int64_t cos_stride, sin_stride, num_positions;
  int64_t num_rows, num_layers, num_kv_heads, head_dim, block_size;
  int64_t dtype, num_threads;
  double eps;
};

// Rows of a step from what each request has: its new rows, the positions before them, its KV blocks.
struct StepLayoutParams {
  const int64_t *counts, *contexts;  // [num_requests]
  const int64_t *table_begin;        // [num_requests + 1] where a request's blocks begin in `blocks`
  const int64_t *blocks;
  int64_t *query_start;         // [num_requests + 1] results
  int64_t *positions, *slots;   // [rows]
  int64_t *tables;              // [num_requests, table_width], block 0 beyond a request's own
  int64_t num_requests, table_width, block_size;
};

// Fills in the lists of an AttentionParams and everything that is counted there.
struct AttentionPlanParams {
  AttentionParams *attention;  // num_heads, num_kv_heads, block_size, window and causal are given
  const int64_t *query_start, *contexts;  // [num_requests + 1], [num_requests]
  const int64_t *tables;                  // [num_requests, table_width]
  int64_t *memory;
  int64_t capacity;  // numbers that fit into `memory`
  int64_t num_requests, block_rows;
};

// Below: rows of float32 logits [num_rows, vocab_size], row_stride apart.

// Coupled samples: argmax of p / E(key, token), the first among equals.
struct SampleParams {
  const float *logits, *temperature;  // [num_rows, vocab_size], [num_rows]
  const int64_t *keys;                // [num_rows]
  double *scores;                     // [num_rows, num_slices] scratch
  int64_t *slice_ids;                 // same
  int64_t *token_ids;                 // [num_rows] result
  int64_t row_stride, num_rows, vocab_size, num_slices, num_threads;
};

// The same from candidates by descending probability.
struct SampleListedParams {
  const float *probs;         // [num_rows, width], rows probs_stride apart
  const int64_t *listed_ids;  // same, rows ids_stride apart
  const int64_t *keys;        // [num_rows]
  int64_t *token_ids;         // [num_rows] result
  int64_t probs_stride, ids_stride, num_rows, width, num_threads;
};

// The maximum of l / T and its probability, and the probability of each tile of 2048 tokens.
// A row without a distribution has a maximum or a probability that is not finite.
struct MeasureParams {
  const float *logits, *temperature;
  float *tile_peaks;          // [num_rows, vocab_size / 2048 rounded up] scratch
  float *tile_probs;          // same, result
  float *peaks, *peak_probs;  // [num_rows] results
  int64_t row_stride, num_rows, vocab_size, num_threads;
};

// Draw i is from row rows[i], measured before, of which it leaves out the token left_out_ids[i] and
// all that row left_out_rows[i] of another distribution covers. -1 is none, and so is a null pointer.
struct DrawParams {
  const float *logits, *temperature, *peaks, *peak_probs, *tile_probs;
  const float *left_out;  // [.., vocab_size], rows left_out_stride apart
  const int64_t *rows, *left_out_ids, *left_out_rows;  // [num_draws]
  const double *uniforms;                              // [num_draws] in [0, 1)
  float *tile_sums;    // [num_draws, vocab_size / 2048 rounded up] scratch
  int64_t *token_ids;  // [num_draws] result
  int64_t row_stride, left_out_stride, num_draws, vocab_size, num_threads;
};

// The same from rows of candidates, zeros after the last one.
struct DrawListedParams {
  const float *probs;         // [.., width], rows probs_stride apart
  const int64_t *listed_ids;  // same, rows ids_stride apart
  const float *left_out;
  const int64_t *rows, *left_out_ids, *left_out_rows;  // [num_draws]
  const double *uniforms;                              // [num_draws] in [0, 1)
  int64_t *token_ids;                                  // [num_draws] result
  int64_t probs_stride, ids_stride, left_out_stride, num_draws, width, num_threads;
};

// Top-k, top-p and min-p of the rows rows[i], measured before. The num_kept[i] tokens that survive
// are written if they are at most `capacity`: by descending logit, with probabilities, zeros up to
// the longest list. The last of them is written in any case.
struct CutParams {
  const float *logits, *temperature, *peaks, *peak_probs;
  const int64_t *rows, *top_k;  // [num_rows]; top_k 2^31 is off
  const double *top_p, *min_p;  // [num_rows]
  int64_t *token_ids;           // [num_rows, capacity] results
  float *probs;
  int64_t *num_kept, *last_ids;  // [num_rows] results
  float *last_logits;
  uint64_t *scratch;  // [num_threads, capacity + 3 * (vocab_size + 16)]
  int64_t row_stride, num_rows, vocab_size, capacity, num_threads;
};

// Copies of the rows rows[i] with -inf for all tokens after the last one by (logit descending, id).
struct MaskParams {
  const float *logits;
  const int64_t *rows, *last_ids;  // [num_rows]
  const float *last_logits;
  float *out;  // [num_rows, vocab_size]
  int64_t row_stride, num_rows, vocab_size, num_threads;
};

}  // namespace forerun
