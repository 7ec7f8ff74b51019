// Coupled samples: argmax(p / E) with the exponential noise E of sampling/noise.py, which is
// argmax(l / T - log E). Nothing of the size of the row is written.
//
// E = -log1p(-w) >= w, so l / T - log w bounds the score from above, and the exponent and mantissa
// bits of w read as one integer bound log2 w from below by at most 0.087. Only tokens whose bound
// exceeds the best score so far, a few dozen per row, are scored: in double precision from the
// float32 l / T and w of the definition. So the result depends neither on the instruction set nor on
// how the row is cut into slices; it differs from the float32 definition only where that one ties.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "abi.h"
#include "vocab.h"

namespace forerun {
namespace {

constexpr float kLog2E = 1.44269504f;

// E of a hash; small E decides, and small w has full precision.
double compute_exponential(uint32_t hash) {
  const float w = (static_cast<float>(hash) + 0.5f) * 0x1p-32f;
  return -std::log1p(-static_cast<double>(std::min(w, 1.0f - 0x1p-24f)));
}

// The best token so far of a part of a row.
struct Best {
  double score;
  int64_t token_id;
};

// What a bound, in powers of two, must exceed to be worth a score. The margin covers the rounding
// of a bound that lies within the range of the noise of the best score.
float choose_threshold(double best) {
  const double scaled = best * kLog2E;
  return static_cast<float>(scaled - (std::abs(scaled) + 256.0) * 0x1p-20);
}

Best find_best(const float *logits, int64_t begin, int64_t end, float temperature, uint64_t key) {
  // log2 of a float is at least its bits * 2^-23 - 127; w is 2^-32 times a number from 0.5 on.
  constexpr float offset = 32.0f + 127.0f, least_bits = 126.0f;
  const float scale = static_cast<float>(std::min<double>(kLog2E / temperature, FLT_MAX));
  Best best{-std::numeric_limits<double>::infinity(), begin};
  float threshold = -kInfinity;
  for (int64_t v = begin; v < end; v += kLanes) {
    const Floats base = load_logits(logits + v, end - v) * scale + offset;
    if (greater_lanes(base, splat(threshold + least_bits)) == 0) continue;
    const Floats w = __builtin_convertvector(hash_tokens(key, v), Floats) + 0.5f;
    const Floats bits = __builtin_convertvector(reinterpret_cast<Ints>(w), Floats);
    const Floats bounds = base - bits * 0x1p-23f;
    for (uint32_t lanes = greater_lanes(bounds, splat(threshold)); lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (!(bounds[lane] > threshold)) continue;
      const double noise = -std::log(compute_exponential(hash_token(key, v + lane)));
      const double score = static_cast<double>(logits[v + lane] / temperature) + noise;
      if (!(score > best.score)) continue;
      best = {score, v + lane};
      threshold = choose_threshold(score);
    }
  }
  return best;
}

// Candidates come with their probabilities, the likeliest first and zeros last.
int64_t sample_listed(const float *probs, const int64_t *token_ids, int64_t width, uint64_t key) {
  Best best{0.0, token_ids[0]};
  for (int64_t i = 0; i < width && probs[i] > 0.0f; i++) {
    const uint32_t hash = hash_token(key, token_ids[i]);
    // E >= w, which float32 may have rounded down a little.
    if (!(probs[i] > best.score * ((hash + 0.5) * (0.999 * 0x1p-32)))) continue;
    const double score = probs[i] / compute_exponential(hash);
    if (score > best.score) best = {score, token_ids[i]};
  }
  return best.token_id;
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_sample(const forerun::SampleParams *params) {
  using namespace forerun;
  const SampleParams &p = *params;
  const int threads = choose_row_threads(p.num_rows * p.vocab_size, p.num_threads);
  const int64_t length = round_up((p.vocab_size + p.num_slices - 1) / p.num_slices, kLanes);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < p.num_rows * p.num_slices; i++) {
    const int64_t row = i / p.num_slices, begin = i % p.num_slices * length;
    const Best best =
        find_best(p.logits + row * p.row_stride, std::min(begin, p.vocab_size - 1),
                  std::min(begin + length, p.vocab_size), p.temperature[row], p.keys[row]);
    p.scores[i] = best.score;
    p.slice_ids[i] = best.token_id;
  }
  for (int64_t row = 0; row < p.num_rows; row++) {
    const double *scores = p.scores + row * p.num_slices;
    const int64_t winner = std::max_element(scores, scores + p.num_slices) - scores;
    p.token_ids[row] = p.slice_ids[row * p.num_slices + winner];
  }
}

void forerun_sample_listed(const forerun::SampleListedParams *params) {
  using namespace forerun;
  const SampleListedParams &p = *params;
  const int threads = choose_row_threads(p.num_rows * p.width, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < p.num_rows; row++)
    p.token_ids[row] = sample_listed(p.probs + row * p.probs_stride,
                                     p.listed_ids + row * p.ids_stride, p.width, p.keys[row]);
}
}
