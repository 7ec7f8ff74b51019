// Segments and attention: one segment as a call of its own, or a whole step in one parallel region.
#include "attention.h"
#include "segment.h"

namespace forerun {
namespace {

template <class T>
void run_segment(const SegmentParams &p) {
  Meeting meeting;
#pragma omp parallel num_threads(p.num_threads)
  Segment<T>(p, Team{meeting}).run();
}

// Rows of the embedding begin the residual stream; a product with the scale is rounded once.
template <class T>
void embed(const ForwardParams &p, const Team &team) {
  const int64_t size = p.embedding->in_features;
  const Share share = team.share(p.segment->num_rows);
  for (int64_t row = share.from; row < share.to; row++) {
    T *to = static_cast<T *>(p.segment->residual) + row * size;
    read_weight_row(*p.embedding, p.token_ids[row], to);
    if (p.embed_scale == 1.0) continue;
    for (int64_t d = 0; d < size; d += kLanes)
      store(to + d, load(to + d, size - d) * static_cast<float>(p.embed_scale), size - d);
  }
}

// Copy rows of the residual stream, to which all up to layer `layer` was added. A thread's rows are
// those whose norms it computes: it wrote them itself, and nobody else will.
template <class T>
void copy_taps(const ForwardParams &p, int64_t layer, const Team &team) {
  const int64_t size = p.weights[0]->hidden_size;
  const Share share = team.share(p.segment->num_rows);
  for (int64_t tap = 0; tap < p.num_taps; tap++) {
    if (p.tap_ids[tap] != layer) continue;
    for (int64_t row = share.from; row < share.to; row++)
      std::memcpy(static_cast<T *>(p.taps) + (row * p.num_taps + tap) * size,
                  static_cast<const T *>(p.segment->residual) + row * size, size * sizeof(T));
  }
}

template <class T>
void compute_logits(const ForwardParams &p, const Team &team) {
  const int64_t size = p.head->in_features;
  const T *rows = static_cast<const T *>(p.segment->normed) + p.first_logits_row * size;
  const Input<T> input{rows, size, p.num_logits_rows, p.segment->scratch};
  multiply_into<T>(team, *p.head, input, nullptr, p.logits);
}

int64_t check_inputs(const ForwardParams &p) {
  const int64_t vocab_size = p.embedding == nullptr ? INT64_MAX : p.embedding->out_features;
  for (int64_t row = 0; row < p.segment->num_rows; row++) {
    if (p.token_ids[row] < 0 || p.token_ids[row] >= vocab_size) return kUnknownToken;
    const int64_t position = p.segment->positions[row];
    if (position < 0 || position >= p.num_positions) return kUnknownPosition;
  }
  return kDone;
}

// Every thread has its own copy of what changes from layer to layer.
template <class T>
void run_layers(const ForwardParams &p) {
  Meeting meeting;
#pragma omp parallel num_threads(p.segment->num_threads)
  {
    const Team team{meeting};
    SegmentParams segment = *p.segment;
    if (p.embedding != nullptr) embed<T>(p, team);
    team.wait();
    for (int64_t layer = 0; layer < p.num_layers; layer++) {
      segment.weights = p.weights[layer];
      segment.cosines = p.cosines[layer];
      segment.sines = p.sines[layer];
      Segment<T>(segment, team).run();
      copy_taps<T>(p, layer - 1, team);
      team.wait();
      AttentionParams attention = *p.attention[layer];
      attention.keys = p.keys[layer];
      attention.values = p.values[layer];
      attention.key_scales = p.key_scales == nullptr ? nullptr : p.key_scales[layer];
      attention.value_scales = p.value_scales == nullptr ? nullptr : p.value_scales[layer];
      attention.output = p.attended;
      attend<T>(attention, team);
      segment.attended = p.attended;
    }
    segment.weights = p.weights[p.num_layers];
    Segment<T>(segment, team).run();
    if (p.head != nullptr) compute_logits<T>(p, team);
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_segment(const forerun::SegmentParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::run_segment<forerun::bf16>(*params)
                                      : forerun::run_segment<float>(*params);
}

int64_t forerun_forward(const forerun::ForwardParams *params) {
  const int64_t fault = forerun::check_inputs(*params);
  if (fault != forerun::kDone) return fault;
  params->segment->dtype == forerun::kBFloat16 ? forerun::run_layers<forerun::bf16>(*params)
                                               : forerun::run_layers<float>(*params);
  return forerun::kDone;
}
}
