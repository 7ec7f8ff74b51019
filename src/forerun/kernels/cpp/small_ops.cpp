// The row-wise operations of rows.h, one call each, for callers that fuse nothing.
#include "abi.h"
#include "rows.h"

namespace forerun {
namespace {

// Below this many numbers per thread, waking a thread costs more than it saves.
constexpr int64_t kNumbersPerThread = 16384;

int choose_threads(int64_t numbers, int64_t num_threads) {
  const int64_t useful = numbers / kNumbersPerThread;
  return static_cast<int>(useful < 1 ? 1 : useful < num_threads ? useful : num_threads);
}

}  // namespace

// Buffers of [num_rows, num_heads, size]; rows are row strides apart, heads are dense. The weight
// of head h starts at h * weight_stride: 0 shares one weight.
// `update`, if not null, is added to x in place first.
struct NormParams {
  void *x;
  const void *update;
  const float *weight;
  void *out;
  int64_t x_stride, update_stride, out_stride, weight_stride;
  int64_t num_rows, num_heads, size;
  int64_t dtype, num_threads;
  double eps;
};

struct RotaryParams {
  void *x;  // [num_rows, num_heads, size] in place
  const void *cosines, *sines;  // [num_rows, size / 2], rows angle strides apart
  int64_t x_stride, cos_stride, sin_stride;
  int64_t num_rows, num_heads, size;
  int64_t dtype, num_threads;
};

struct GateParams {
  const void *x;  // [num_rows, 2 * size]: gate, up
  void *out;      // [num_rows, size]
  int64_t num_rows, size;
  int64_t activation;  // 0 silu, 1 gelu_tanh
  int64_t dtype, num_threads;
};

namespace {

template <class T>
void norm(const NormParams &p) {
  const int64_t total = p.num_rows * p.num_heads;
  const int threads = choose_threads(total * p.size, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < total; i++) {
    const int64_t row = i / p.num_heads, head = i % p.num_heads;
    const T *update = static_cast<const T *>(p.update);
    if (update != nullptr) update += row * p.update_stride + head * p.size;
    norm_row(static_cast<T *>(p.x) + row * p.x_stride + head * p.size, update,
             p.weight + head * p.weight_stride,
             static_cast<T *>(p.out) + row * p.out_stride + head * p.size, p.size,
             static_cast<float>(p.eps));
  }
}

template <class T>
void rotate(const RotaryParams &p) {
  const int64_t total = p.num_rows * p.num_heads;
  const int threads = choose_threads(total * p.size, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < total; i++) {
    const int64_t row = i / p.num_heads, head = i % p.num_heads;
    rotate_head(static_cast<T *>(p.x) + row * p.x_stride + head * p.size,
                static_cast<const T *>(p.cosines) + row * p.cos_stride,
                static_cast<const T *>(p.sines) + row * p.sin_stride, p.size / 2);
  }
}

template <class T>
void gate(const GateParams &p) {
  const int threads = choose_threads(p.num_rows * p.size, p.num_threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < p.num_rows; row++) {
    const T *x = static_cast<const T *>(p.x) + row * 2 * p.size;
    T *out = static_cast<T *>(p.out) + row * p.size;
    if (p.activation == 0)
      gate_row(x, out, p.size, silu);
    else
      gate_row(x, out, p.size, gelu_tanh);
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

void forerun_norm(const forerun::NormParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::norm<forerun::bf16>(*params)
                                      : forerun::norm<float>(*params);
}

void forerun_rotate(const forerun::RotaryParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::rotate<forerun::bf16>(*params)
                                      : forerun::rotate<float>(*params);
}

void forerun_gate(const forerun::GateParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::gate<forerun::bf16>(*params)
                                      : forerun::gate<float>(*params);
}
}
