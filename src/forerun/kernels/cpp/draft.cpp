// The sequential head of a block drafter: position by position, logits plus a bias that the token
// before chooses, and the largest of them. Biased logits exist only in registers.
//
// Every thread owns the same panels of the bias table for the whole call, so that they stay in its
// cache, and finds the best of them for all requests. After a position the threads meet, and each
// takes the best of all threads itself: one barrier per position. A result depends neither on the
// number of threads nor on the requests drafted with it.
#include <cmath>

#include "abi.h"
#include "linear.h"
#include "team.h"
#include "vocab.h"

namespace forerun {
namespace {

// The best logit so far: the first among equals. Nothing below or equal to -inf was found yet.
struct Best {
  float logit = -kInfinity;
  int64_t draft_id = 0;

  void take(const Best &other) {
    if (other.logit > logit || (other.logit == logit && other.draft_id < draft_id)) *this = other;
  }
};

// The best of every lane of the two vectors of all panels a thread has seen, and in which panel.
struct LaneBest {
  Floats logits[2] = {splat(-kInfinity), splat(-kInfinity)};
  Ints panels[2] = {};

  void take(int half, Floats candidates, int64_t panel) {
    const Ints is_better = candidates > logits[half];
    logits[half] = is_better ? candidates : logits[half];
    panels[half] = is_better ? Ints{} + static_cast<int32_t>(panel) : panels[half];
  }
  Best find(int64_t half_size) const {
    Best best;
    for (int half = 0; half < 2; half++)
      for (int lane = 0; lane < kLanes; lane++)
        if (logits[half][lane] > -kInfinity)
          best.take({logits[half][lane], half * half_size + panels[half][lane] * kLanes + lane});
    return best;
  }
};

template <class H>
float dot(const H *x, const float *weight, int64_t size) {
  Floats even{}, odd{};
  for (int64_t d = 0; d < size; d += 2 * kLanes) {
    even += load(x + d, size - d) * load(weight + d, size - d);
    if (d + kLanes >= size) break;
    odd += load(x + d + kLanes, size - d - kLanes) * load(weight + d + kLanes, size - d - kLanes);
  }
  return sum_lanes(even + odd);
}

// One thread. T is the type of both tables of the head.
template <class T>
class Drafting {
 public:
  Drafting(const DraftParams &p, const Team &team)
      : p_(p),
        team_(team),
        shape_(find_shape<T>(p.bias_table)),
        tiles_(p.num_rows),
        tile_(reinterpret_cast<uint32_t *>(static_cast<Best *>(p.scratch) +
                                           2 * team.num_threads * p.num_rows) +
              team.thread * kTileRows * shape_.units) {}

  void run() const {
    const Share rows = team_.share(p_.num_rows);
    for (int64_t k = 0; k < p_.num_positions; k++) {
      for (int64_t t = 0; t < tiles_.count; t++) find_best(k, tiles_.begin(t), tiles_.begin(t + 1));
      if (p_.confidence != nullptr)
        for (int64_t row = rows.from; row < rows.to; row++) rate(k, row);
      team_.wait();
      for (int64_t row = rows.from; row < rows.to; row++)
        p_.token_ids[row * p_.num_positions + k] = find_previous(k + 1, row);
    }
  }

 private:
  // Two sets in turn: a thread may begin position k + 1 while others still read those of k.
  Best *list_bests(int64_t k, int64_t thread) const {
    return static_cast<Best *>(p_.scratch) + (k % 2 * team_.num_threads + thread) * p_.num_rows;
  }

  // The token before position k, of the target's vocabulary.
  int64_t find_previous(int64_t k, int64_t row) const {
    if (k == 0) return p_.anchor_ids[row];
    Best best;
    for (int64_t thread = 0; thread < team_.num_threads; thread++)
      best.take(list_bests(k - 1, thread)[row]);
    return p_.target_ids == nullptr ? best.draft_id : p_.target_ids[best.draft_id];
  }

  const T *find_embedding(int64_t token_id) const {
    return static_cast<const T *>(p_.embedding) + token_id * shape_.in_features;
  }

  // Put what follows the token before each row side by side, as pack_rows does.
  void gather_rows(int64_t k, int64_t begin, int64_t end) const {
    const int64_t count = end - begin;
    for (int64_t r = 0; r < count; r++) {
      const T *from = find_embedding(find_previous(k, begin + r));
      for (int64_t u = 0; u < shape_.units; u++)
        tile_[u * count + r] = read<uint32_t>(from + u * kPerUnit<T>);
    }
  }

  // The best of this thread's panels for the rows of a tile.
  void find_best(int64_t k, int64_t begin, int64_t end) const {
    gather_rows(k, begin, end);
    LaneBest lanes[kTileRows];
    const auto *panels = static_cast<const Units *>(p_.bias_table.parts[0].panels);
    const Share share = team_.share(shape_.num_panels());
    for (int64_t i = share.from; i < share.to; i++) {
      const Units *panel = panels + i * shape_.panel_size();
      const Units *next = panels + (i + 1 < share.to ? i + 1 : share.from) * shape_.panel_size();
      const PanelColumns at(shape_, i);
      auto compare = [&](int64_t r, const Floats sums[2]) {
        const float *base = p_.base + (begin + r) * p_.row_stride + k * p_.position_stride;
        lanes[r].take(0, load_logits(base + at.first, at.first_count) + sums[0], i);
        if (at.second_count > 0)
          lanes[r].take(1, load_logits(base + at.second, at.second_count) + sums[1], i);
      };
      choose_tile<T>(end - begin, tile_, panel, shape_.units,
                     Ahead(panel, next, shape_.units, 0, 1), compare,
                     std::make_integer_sequence<int, kTileRows>{});
    }
    Best *bests = list_bests(k, team_.thread);
    for (int64_t row = begin; row < end; row++) bests[row] = lanes[row - begin].find(shape_.half);
  }

  // The probability that what this position proposes is accepted, whatever it is.
  void rate(int64_t k, int64_t row) const {
    const int64_t at = row * p_.num_positions + k, size = p_.hidden_size;
    const float *weight = p_.confidence_weight;
    float sum = p_.hidden_dtype == kBFloat16
                    ? dot(static_cast<const bf16 *>(p_.hidden) + at * size, weight, size)
                    : dot(static_cast<const float *>(p_.hidden) + at * size, weight, size);
    if (p_.reads_embedding)
      sum += dot(find_embedding(find_previous(k, row)), weight + size, shape_.in_features);
    p_.confidence[at] = 1.0f / (1.0f + std::exp(-(sum + static_cast<float>(p_.confidence_bias))));
  }

  const DraftParams &p_;
  const Team &team_;
  const PackedShape shape_;
  const Tiles tiles_;
  uint32_t *const tile_;
};

template <class T>
void draft(const DraftParams &p) {
  Meeting meeting;
#pragma omp parallel num_threads(p.num_threads)
  {
    const Team team{meeting};
    Drafting<T>(p, team).run();
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

int64_t forerun_draft_bytes(const forerun::DraftParams *params) {
  using namespace forerun;
  const int64_t tile_numbers = kTileRows * params->bias_table.in_features;
  const int64_t bests = 2 * params->num_rows * static_cast<int64_t>(sizeof(Best));
  return params->num_threads * (bests + tile_numbers * static_cast<int64_t>(sizeof(float)));
}

int64_t forerun_draft(const forerun::DraftParams *params) {
  using namespace forerun;
  for (int64_t row = 0; row < params->num_rows; row++)
    if (params->anchor_ids[row] < 0 || params->anchor_ids[row] >= params->vocab_size)
      return kUnknownToken;
  params->dtype == kBFloat16 ? draft<bf16>(*params) : draft<float>(*params);
  return kDone;
}
}
