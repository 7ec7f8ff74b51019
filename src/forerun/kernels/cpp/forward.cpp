// Segments and attention: one segment as a call of its own, or all layers in one parallel region.
#include "attention.h"
#include "segment.h"

namespace forerun {
namespace {

template <class T>
void run_segment(const SegmentParams &p) {
#pragma omp parallel num_threads(p.num_threads)
  Segment<T>(p).run();
}

// Every thread has its own copy of what changes from layer to layer.
template <class T>
void run_layers(const ForwardParams &p) {
#pragma omp parallel num_threads(p.segment->num_threads)
  {
    SegmentParams segment = *p.segment;
    for (int64_t layer = 0; layer < p.num_layers; layer++) {
      segment.weights = p.weights[layer];
      segment.cosines = p.cosines[layer];
      segment.sines = p.sines[layer];
      Segment<T>(segment).run();
#pragma omp barrier
      AttentionParams attention = *p.attention[layer];
      attention.keys = p.keys[layer];
      attention.values = p.values[layer];
      attention.key_scales = p.key_scales == nullptr ? nullptr : p.key_scales[layer];
      attention.value_scales = p.value_scales == nullptr ? nullptr : p.value_scales[layer];
      attention.output = p.attended;
      attend<T>(attention);
      segment.attended = p.attended;
    }
    segment.weights = p.weights[p.num_layers];
    Segment<T>(segment).run();
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_segment(const forerun::SegmentParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::run_segment<forerun::bf16>(*params)
                                      : forerun::run_segment<float>(*params);
}

void forerun_forward(const forerun::ForwardParams *params) {
  params->segment->dtype == forerun::kBFloat16 ? forerun::run_layers<forerun::bf16>(*params)
                                               : forerun::run_layers<float>(*params);
}
}
