// Linear layers on their own: packing a weight, reading rows back, multiplying.
#include "linear.h"

#include <omp.h>

namespace forerun {
namespace {

// Where row `row` of a weight lies: its unit u is at data[u * 2 * kLanes].
template <class Word>
Word *find_row(Word *panels, const PackedShape &shape, int64_t row) {
  const bool second = row >= shape.half;
  const int64_t place = second ? row - shape.half : row;
  return panels + place / kLanes * shape.panel_size() * kLanes + second * kLanes + place % kLanes;
}

template <class T>
void pack(const PackParams &p) {
  const PackedShape shape = PackedShape::of<T>(p.out_features, p.in_features);
#pragma omp parallel for schedule(static) num_threads(p.num_threads)
  for (int64_t row = 0; row < 2 * shape.half; row++) {
    uint32_t *to = find_row(static_cast<uint32_t *>(p.panels), shape, row);
    const T *from = static_cast<const T *>(p.weight) + row * p.in_features;
    for (int64_t u = 0; u < shape.units; u++)
      to[u * 2 * kLanes] =
          row < p.out_features ? read<uint32_t>(from + u * kPerUnit<T>) : 0;
  }
}

template <class T>
void read_plain_row(const PackedWeight &weight, int64_t row, T *to) {
  const PackedShape shape = find_shape<T>(weight);
  const auto *from = find_row(static_cast<const uint32_t *>(weight.parts[0].panels), shape, row);
  for (int64_t u = 0; u < shape.units; u++) write(to + u * kPerUnit<T>, from[u * 2 * kLanes]);
}

// Returns how many row ids lie outside the weight; their rows are left alone.
template <class T>
int64_t unpack(const UnpackParams &p) {
  int64_t num_outside = 0;
#pragma omp parallel for schedule(static) num_threads(p.num_threads) if (p.num_rows > 8) \
    reduction(+ : num_outside)
  for (int64_t i = 0; i < p.num_rows; i++) {
    if (p.row_ids[i] < 0 || p.row_ids[i] >= p.weight.out_features) {
      num_outside++;
      continue;
    }
    read_weight_row(p.weight, p.row_ids[i], static_cast<T *>(p.out) + i * p.weight.in_features);
  }
  return num_outside;
}

template <class T, class Out>
void linear(const LinearParams &p) {
  const Input<T> input{static_cast<const T *>(p.x), p.x_stride, p.num_rows, p.scratch};
  Meeting meeting;
#pragma omp parallel num_threads(p.num_threads)
  multiply_into<T>(Team{meeting}, p.weight, input, nullptr, static_cast<Out *>(p.out));
}

}  // namespace

template <class T>
void read_weight_row(const PackedWeight &weight, int64_t row, T *to) {
  is_plain(weight) ? read_plain_row(weight, row, to) : read_quantised_row(weight, row, to);
}

template void read_weight_row(const PackedWeight &, int64_t, float *);
template void read_weight_row(const PackedWeight &, int64_t, bf16 *);

}  // namespace forerun

extern "C" {

int64_t forerun_packed_bytes(const forerun::PackParams *p) {
  using namespace forerun;
  const PackedShape shape = p->dtype == kBFloat16
                                ? PackedShape::of<bf16>(p->out_features, p->in_features)
                                : PackedShape::of<float>(p->out_features, p->in_features);
  return shape.num_panels() * shape.panel_size() * static_cast<int64_t>(sizeof(Units));
}

void forerun_pack(const forerun::PackParams *p) {
  p->dtype == forerun::kBFloat16 ? forerun::pack<forerun::bf16>(*p) : forerun::pack<float>(*p);
}

int64_t forerun_unpack(const forerun::UnpackParams *p) {
  return p->dtype == forerun::kBFloat16 ? forerun::unpack<forerun::bf16>(*p)
                                        : forerun::unpack<float>(*p);
}

void forerun_linear(const forerun::LinearParams *p) {
  using namespace forerun;
  if (p->dtype != kBFloat16)
    linear<float, float>(*p);
  else if (p->out_dtype == kBFloat16)
    linear<bf16, bf16>(*p);
  else
    linear<bf16, float>(*p);
}
}
