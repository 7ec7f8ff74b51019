// Rows of logits as distributions p = exp(l / T - peak) * peak_prob: their peak, its probability and
// the probability of every tile of the row; and draws by inverse distribution function, from p or
// from what p has over another distribution. Nothing of the size of the row is written. Sums depend
// on the row alone: tiles have a fixed size, whatever the threads.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "abi.h"
#include "vocab.h"

namespace forerun {
namespace {

// Small enough for the first-level cache, where a tile is read twice.
constexpr int64_t kTile = 2048;
// Less residual mass than float32 can tell from p = q; such rejections have no measurable chance.
constexpr double kNoResidual = 1e-8;

int64_t count_tiles(int64_t vocab_size) { return (vocab_size + kTile - 1) / kTile; }

// What the exponents of a tile count from. -inf - -inf is no number: a tile without tokens counts
// from the lowest one.
float find_origin(float peak, float temperature) { return std::max(peak / temperature, -FLT_MAX); }

// The maximum of one tile, and its sum of exp((l - maximum) / T), NaN if any number is.
void measure_tile(const float *logits, int64_t size, float temperature, float *peak, float *sum) {
  Lanes top(-kInfinity), total(0.0f);
  for (int64_t v = 0; v < size; v += kStep)
    for (int i = 0; i < kVectors; i++) {
      const int64_t d = v + i * kLanes;
      top.part[i] = maximum(load_logits(logits + d, size - d), top.part[i]);
    }
  *peak = top.max();
  const float origin = find_origin(*peak, temperature);
  for (int64_t v = 0; v < size; v += kStep)
    for (int i = 0; i < kVectors; i++) {
      const int64_t d = v + i * kLanes;
      total.part[i] += exp(load_logits(logits + d, size - d) / temperature - origin);
    }
  *sum = total.sum();
}

// From the tiles of row `row` to its results.
void combine_tiles(const MeasureParams &p, int64_t row) {
  const int64_t num_tiles = count_tiles(p.vocab_size);
  const float *tops = p.tile_peaks + row * num_tiles, temperature = p.temperature[row];
  float *probs = p.tile_probs + row * num_tiles;
  const float peak = *std::max_element(tops, tops + num_tiles) / temperature;
  double sum = 0.0;
  for (int64_t i = 0; i < num_tiles; i++) {
    const double origin = find_origin(tops[i], temperature);
    probs[i] = static_cast<float>(probs[i] * std::exp(origin - peak));
    sum += probs[i];
  }
  for (int64_t i = 0; i < num_tiles; i++) probs[i] = static_cast<float>(probs[i] / sum);
  p.peaks[row] = peak;
  p.peak_probs[row] = static_cast<float>(1.0 / sum);
}

// What one draw draws from: p without the excluded token and what `covered` has of it.
struct Weights {
  const float *logits, *covered;
  int64_t vocab_size, excluded;
  float temperature, peak, peak_prob;

  // The weights of one tile, zeros after the row's end.
  void compute(int64_t begin, float *weights) const {
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const int64_t v = begin + i, left = std::max<int64_t>(vocab_size - v, 0);
      Floats probs = exp(load_logits(logits + v, left) / temperature - peak) * peak_prob;
      if (covered != nullptr) probs = maximum(Floats{}, probs - load(covered + v, left));
      write(weights + i, probs);
    }
    if (excluded >= begin && excluded < begin + kTile) weights[excluded - begin] = 0.0f;
  }

  float add_tile(int64_t begin) const {
    float weights[kTile];
    compute(begin, weights);
    Lanes sum(0.0f);
    for (int64_t i = 0; i < kTile; i += kStep)
      for (int j = 0; j < kVectors; j++) sum.part[j] += read<Floats>(weights + i + j * kLanes);
    return sum.sum();
  }
};

Weights find_weights(const DrawParams &p, int64_t i) {
  const int64_t row = p.rows[i], other = p.left_out_rows == nullptr ? -1 : p.left_out_rows[i];
  return {p.logits + row * p.row_stride,
          other < 0 ? nullptr : p.left_out + other * p.left_out_stride,
          p.vocab_size,
          p.left_out_ids == nullptr ? -1 : p.left_out_ids[i],
          p.temperature[row],
          p.peaks[row],
          p.peak_probs[row]};
}

template <class Value>
double add_up(int64_t count, Value value) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; i++) sum += value(i);
  return sum;
}

// Find the smallest index whose cumulative value exceeds uniform * total; leaves the uniform's
// place inside that value. A target that rounding moved past the end takes the last value.
template <class Value>
int64_t invert(int64_t count, double *uniform, Value value) {
  const double target = *uniform * add_up(count, value);
  double before = 0.0, next = 0.0;
  int64_t chosen = 0;
  for (int64_t i = 0; i < count && !(next > target); i++) {
    if (!(value(i) > 0.0f)) continue;
    chosen = i;
    before = next;
    next += value(i);
  }
  *uniform = std::min((target - before) / value(chosen), 1.0 - 0x1p-53);
  return chosen;
}

// Only tiles that differ from p's are added up.
void fill_sums(const Weights &row, const float *tile_probs, int64_t num_tiles, float *sums) {
  std::copy(tile_probs, tile_probs + num_tiles, sums);
  for (int64_t i = 0; i < num_tiles; i++)
    if (row.covered != nullptr || (row.excluded >= 0 && row.excluded / kTile == i))
      sums[i] = row.add_tile(i * kTile);
}

int64_t draw(const DrawParams &p, int64_t i) {
  const int64_t num_tiles = count_tiles(p.vocab_size);
  const float *tile_probs = p.tile_probs + p.rows[i] * num_tiles;
  float *sums = p.tile_sums + i * num_tiles, weights[kTile];
  const auto sum_of = [sums](int64_t tile) { return sums[tile]; };
  Weights row = find_weights(p, i);
  fill_sums(row, tile_probs, num_tiles, sums);
  if (!(add_up(num_tiles, sum_of) > kNoResidual)) {
    row.covered = nullptr;
    row.excluded = -1;
    std::copy(tile_probs, tile_probs + num_tiles, sums);
  }
  double uniform = p.uniforms[i];
  const int64_t begin = invert(num_tiles, &uniform, sum_of) * kTile;
  row.compute(begin, weights);
  return begin + invert(std::min(kTile, row.vocab_size - begin), &uniform,
                        [&weights](int64_t place) { return weights[place]; });
}

int64_t draw_listed(const DrawListedParams &p, int64_t i) {
  const float *probs = p.probs + p.rows[i] * p.probs_stride;
  const int64_t *ids = p.listed_ids + p.rows[i] * p.ids_stride;
  const int64_t other = p.left_out_rows == nullptr ? -1 : p.left_out_rows[i];
  const int64_t excluded = p.left_out_ids == nullptr ? -1 : p.left_out_ids[i];
  const float *covered = other < 0 ? nullptr : p.left_out + other * p.left_out_stride;
  const auto prob_of = [=](int64_t place) { return probs[place]; };
  const auto residual_of = [=](int64_t place) {
    if (ids[place] == excluded) return 0.0f;
    return covered == nullptr ? probs[place] : std::max(probs[place] - covered[ids[place]], 0.0f);
  };
  double uniform = p.uniforms[i];
  if (add_up(p.width, residual_of) > kNoResidual)
    return ids[invert(p.width, &uniform, residual_of)];
  return ids[invert(p.width, &uniform, prob_of)];
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_measure(const forerun::MeasureParams *params) {
  using namespace forerun;
  const MeasureParams &p = *params;
  const int threads = choose_row_threads(p.num_rows * p.vocab_size, p.num_threads);
  const int64_t num_tiles = count_tiles(p.vocab_size);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < p.num_rows * num_tiles; i++) {
    const int64_t row = i / num_tiles, begin = i % num_tiles * kTile;
    measure_tile(p.logits + row * p.row_stride + begin, std::min(kTile, p.vocab_size - begin),
                 p.temperature[row], p.tile_peaks + i, p.tile_probs + i);
  }
  for (int64_t row = 0; row < p.num_rows; row++) combine_tiles(p, row);
}

void forerun_draw(const forerun::DrawParams *params) {
  using namespace forerun;
  const DrawParams &p = *params;
  const int threads = choose_row_threads(p.num_draws * kTile, p.num_threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t i = 0; i < p.num_draws; i++) p.token_ids[i] = draw(p, i);
}
void forerun_draw_listed(const forerun::DrawListedParams *params) {
  using namespace forerun;
  const DrawListedParams &p = *params;
  const int threads = choose_row_threads(p.num_draws * p.width, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < p.num_draws; i++) p.token_ids[i] = draw_listed(p, i);
}
}
