// Top-k, top-p and min-p of rows of logits, as sampling/filters.py defines them: what survives is a
// prefix of the tokens by (logit descending, id ascending).
//
// Tokens above a floor are listed, lower floors until the list must hold the whole prefix; then
// each filter shortens the list. Where a filter cuts is found by histograms of the list, ever finer
// around the cut, so that nothing long is sorted.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "abi.h"
#include "vocab.h"

namespace forerun {
namespace {

constexpr int kBins = 256;
constexpr int kChunk = 256;
constexpr int64_t kSortable = 64;
// How far below the peak to look for candidates, in logits / T. Beyond the last e^-x is 0.
constexpr float kDistances[] = {6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 88};
constexpr int64_t kMaxLanes = 16;
constexpr int64_t kTopKOff = int64_t{1} << 31;

// Tokens by ascending id, with their logits and probabilities; arrays have kMaxLanes to spare.
struct List {
  float *logits, *probs;
  uint32_t *ids;
  int64_t size;

  List(uint32_t *memory, int64_t capacity)
      : logits(reinterpret_cast<float *>(memory)),
        probs(logits + capacity),
        ids(memory + 2 * capacity),
        size(0) {}

  // Append token i of another list, or of a longer view of this one, if it is to stay.
  void append_if(bool stays, const List &from, int64_t i) {
    logits[size] = from.logits[i];
    probs[size] = from.probs[i];
    ids[size] = from.ids[i];
    size += stays;
  }
  double add_up() const {
    double parts[8] = {}, sum = 0.0;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
      for (int j = 0; j < 8; j++) parts[j] += probs[i + j];
    for (; i < size; i++) sum += probs[i];
    for (const double part : parts) sum += part;
    return sum;
  }
};

// The last token that stays.
struct Cut {
  float logit;
  uint32_t id;

  bool keeps(float other, uint32_t other_id) const {
    return (other > logit) | ((other == logit) & (other_id <= id));
  }
};

struct Row {
  const float *logits;
  int64_t vocab_size, top_k;
  double top_p, min_p;
  float temperature, peak, peak_prob;

  // List the tokens above a floor.
  void collect(float floor, List &list) const {
    Units places;
    for (int i = 0; i < kLanes; i++) places[i] = i;
    list.size = 0;
    for (int64_t v = 0; v < vocab_size; v += kLanes) {
      const Floats x = load_logits(logits + v, vocab_size - v);
      const uint32_t lanes = greater_lanes(x, splat(floor));
      if (lanes == 0) continue;
      write_lanes(list.logits + list.size, reinterpret_cast<Units>(x), lanes);
      write_lanes(list.ids + list.size, places + static_cast<uint32_t>(v), lanes);
      list.size += __builtin_popcount(lanes);
    }
    for (int64_t i = 0; i < list.size; i += kLanes) {
      const Floats scaled = load(list.logits + i, list.size - i) / temperature;
      store(list.probs + i, exp(scaled - peak) * peak_prob, list.size - i);
    }
  }

  // Whether everything that survives, and what top-p is relative to, lies within this distance.
  bool is_complete(const List &list, float distance) const {
    if (top_k < kTopKOff) return list.size >= top_k;
    if (top_p < 1.0 && list.add_up() >= top_p) return true;
    return min_p > 2.0 * std::exp(-distance);
  }

  void list_candidates(List &list) const {
    const float top = peak * temperature;
    // However large the logits are, the floor is below the largest one.
    const float highest_floor = top - std::abs(top) * 0x1p-20f;
    for (const float distance : kDistances) {
      collect(std::min((peak - distance) * temperature, highest_floor), list);
      if (is_complete(list, distance)) return;
    }
  }
};

struct Range {
  float low, high;

  explicit Range(const List &list) {
    Floats lows = splat(list.logits[0]), highs = lows;
    int64_t i = 0;
    for (; i + kLanes <= list.size; i += kLanes) {
      lows = minimum(lows, read<Floats>(list.logits + i));
      highs = maximum(highs, read<Floats>(list.logits + i));
    }
    low = -max_lanes(-lows);
    high = max_lanes(highs);
    for (; i < list.size; i++) {
      low = std::min(low, list.logits[i]);
      high = std::max(high, list.logits[i]);
    }
  }
};

// Where tokens fall between the largest and the smallest logit of a list; scale 0 if all are equal.
struct Bins {
  double high, scale;

  explicit Bins(const List &list) {
    const Range range(list);
    high = range.high;
    scale = range.low < range.high ? kBins / (high - range.low) : 0.0;
  }
  // Write the bins of up to kChunk tokens.
  void find(const float *logits, int64_t count, int32_t *bins) const {
    for (int64_t i = 0; i < count; i++)
      bins[i] = std::min(static_cast<int32_t>((high - logits[i]) * scale), kBins - 1);
  }
};

// Call visit(token, bin) for all tokens of a list.
template <class Visit>
void visit_bins(const List &list, const Bins &bins, Visit visit) {
  int32_t found[kChunk];
  for (int64_t begin = 0; begin < list.size; begin += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, list.size - begin);
    bins.find(list.logits + begin, count, found);
    for (int64_t i = 0; i < count; i++) visit(begin + i, found[i]);
  }
}

// Narrow `from` to the bin the limit lies in, written to `to`, and add up what is before it.
// Tokens weigh their probability, or 1. The last bin is never empty.
void narrow_to_bin(const List &from, List &to, const Bins &bins, bool is_count, double limit,
                   double *before) {
  double sums[kBins] = {};
  visit_bins(from, bins, [&](int64_t i, int bin) { sums[bin] += is_count ? 1.0 : from.probs[i]; });
  int chosen = 0;
  for (; chosen < kBins - 1 && *before + sums[chosen] < limit; chosen++) *before += sums[chosen];
  List narrowed = to;  // may be `from` itself, whose size is still needed
  narrowed.size = 0;
  visit_bins(from, bins, [&](int64_t i, int bin) { narrowed.append_if(bin == chosen, from, i); });
  to.size = narrowed.size;
}

// The last token with less than `limit` before it, the first one at least.
Cut find_cut(const List &list, List &scratch, bool is_count, double limit) {
  const List *open = &list;
  double before = 0.0;
  Bins bins(list);
  while (open->size > kSortable && bins.scale > 0.0) {
    narrow_to_bin(*open, scratch, bins, is_count, limit, &before);
    open = &scratch;
    bins = Bins(scratch);
  }
  int32_t order[kSortable];
  const bool is_flat = bins.scale == 0.0;  // then the list is in order already
  if (!is_flat) {
    std::iota(order, order + open->size, 0);
    std::stable_sort(order, order + open->size, [open](int32_t a, int32_t b) {
      return open->logits[a] > open->logits[b];
    });
  }
  int64_t last = 0;
  for (int64_t i = 0; i < open->size && (i == 0 || before < limit); i++) {
    last = is_flat ? i : order[i];
    before += is_count ? 1.0 : open->probs[last];
  }
  return {open->logits[last], open->ids[last]};
}

// Which lanes of the tokens from `begin` on a cut keeps.
uint32_t find_kept(const List &list, int64_t begin, Cut cut) {
  const Floats x = read<Floats>(list.logits + begin);
  uint32_t kept = greater_lanes(x, splat(cut.logit));
  const uint32_t ties = ~greater_lanes(splat(cut.logit), x) & ~kept & ((1u << kLanes) - 1);
  for (uint32_t left = ties; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    if (list.ids[begin + lane] <= cut.id) kept |= 1u << lane;
  }
  return kept & ((1u << std::min<int64_t>(kLanes, list.size - begin)) - 1);
}

void keep_head(List &list, Cut cut) {
  int64_t size = 0;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const uint32_t kept = find_kept(list, i, cut);
    const Units logits = read<Units>(list.logits + i), probs = read<Units>(list.probs + i);
    const Units ids = read<Units>(list.ids + i);
    write_lanes(list.logits + size, logits, kept);
    write_lanes(list.probs + size, probs, kept);
    write_lanes(list.ids + size, ids, kept);
    size += __builtin_popcount(kept);
  }
  list.size = size;
}

void keep_probable(List &list, double least) {
  List kept = list;
  kept.size = 0;
  for (int64_t i = 0; i < list.size; i++) kept.append_if(list.probs[i] >= least, list, i);
  list.size = kept.size;
}

void apply_filters(const Row &row, List &list, List &scratch) {
  if (row.top_k < list.size)
    keep_head(list, find_cut(list, scratch, true, static_cast<double>(row.top_k)));
  if (row.top_p < 1.0) {
    const double norm = row.top_k < kTopKOff ? list.add_up() : 1.0;
    keep_head(list, find_cut(list, scratch, false, row.top_p * norm));
  }
  const double least = row.min_p * row.peak_prob;
  if (least > 0.0) keep_probable(list, least);
}

Cut find_last(const List &list) {
  const float low = Range(list).low;
  int64_t last = list.size - 1;
  while (list.logits[last] != low) last--;
  return {low, list.ids[last]};
}

// Larger logits get smaller keys; equal ones, -0 and 0 among them, are told apart by place.
uint64_t make_key(float logit, int64_t place) {
  const float x = logit + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rank = static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u;
  return static_cast<uint64_t>(~rank) << 32 | static_cast<uint64_t>(place);
}

void write_sorted(const List &list, uint64_t *keys, int64_t *token_ids, float *probs) {
  for (int64_t i = 0; i < list.size; i++) keys[i] = make_key(list.logits[i], i);
  std::sort(keys, keys + list.size);
  const double sum = list.add_up();
  for (int64_t i = 0; i < list.size; i++) {
    const uint32_t place = static_cast<uint32_t>(keys[i]);
    token_ids[i] = list.ids[place];
    probs[i] = static_cast<float>(list.probs[place] / sum);
  }
}

// A row that is no distribution; its caller knows from the peak.
bool is_broken(const Row &row) { return !std::isfinite(row.peak) || !std::isfinite(row.peak_prob); }

void write_only_token(const CutParams &p, int64_t i) {
  p.num_kept[i] = 1;
  p.token_ids[i * p.capacity] = 0;
  p.probs[i * p.capacity] = 1.0f;
}

void cut_row(const CutParams &p, int64_t i, uint64_t *keys) {
  const int64_t number = p.rows[i], size = p.vocab_size;
  const Row row{p.logits + number * p.row_stride, size,        p.top_k[i], p.top_p[i], p.min_p[i],
                p.temperature[number],            p.peaks[number], p.peak_probs[number]};
  if (is_broken(row)) return write_only_token(p, i);
  uint32_t *memory = reinterpret_cast<uint32_t *>(keys + p.capacity);
  List list(memory, size + kMaxLanes), scratch(memory + 3 * (size + kMaxLanes), size + kMaxLanes);
  row.list_candidates(list);
  apply_filters(row, list, scratch);
  const Cut last = find_last(list);
  p.num_kept[i] = list.size;
  p.last_logits[i] = last.logit;
  p.last_ids[i] = last.id;
  if (list.size <= p.capacity)
    write_sorted(list, keys, p.token_ids + i * p.capacity, p.probs + i * p.capacity);
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_cut(const forerun::CutParams *params) {
  using namespace forerun;
  const CutParams &p = *params;
  const int threads = choose_row_threads(p.num_rows * p.vocab_size, p.num_threads);
  const int64_t scratch_size = p.capacity + 3 * (p.vocab_size + kMaxLanes);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t i = 0; i < p.num_rows; i++)
    cut_row(p, i, p.scratch + omp_get_thread_num() * scratch_size);
  int64_t width = 0;
  for (int64_t i = 0; i < p.num_rows; i++)
    if (p.num_kept[i] <= p.capacity) width = std::max(width, p.num_kept[i]);
  for (int64_t i = 0; i < p.num_rows; i++)
    for (int64_t j = std::min(p.num_kept[i], width); j < width; j++) {
      p.token_ids[i * p.capacity + j] = 0;
      p.probs[i * p.capacity + j] = 0.0f;
    }
}

void forerun_mask_tail(const forerun::MaskParams *params) {
  using namespace forerun;
  const MaskParams &p = *params;
  const int threads = choose_row_threads(p.num_rows * p.vocab_size, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < p.num_rows; i++) {
    const float *logits = p.logits + p.rows[i] * p.row_stride;
    const Cut last{p.last_logits[i], static_cast<uint32_t>(p.last_ids[i])};
    for (int64_t v = 0; v < p.vocab_size; v++)
      p.out[i * p.vocab_size + v] =
          last.keeps(logits[v], static_cast<uint32_t>(v)) ? logits[v] : -kInfinity;
  }
}
}
