// The row-wise operations of rows.h, one call each, for callers that fuse nothing.
#include "abi.h"
#include "rows.h"

namespace forerun {
namespace {

// Load fewer numbers than a vector has; the other lanes get the lowest.
inline Floats load_filled(const float *from, int64_t count) {
  float part[kLanes];
  for (int i = 0; i < kLanes; i++) part[i] = i < count ? from[i] : -__builtin_inff();
  return read<Floats>(part);
}

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

struct ArgmaxParams {
  const float *x;    // [num_rows, size], rows row strides apart
  int64_t *indices;  // [num_rows] results
  float *values;     // [num_rows] the number at each index
  int64_t row_stride, num_rows, size, num_threads;
};

namespace {

// The first index of the largest number; of the first NaN if there is one.
int64_t find_largest(const float *x, int64_t size) {
  Floats largest = splat(-__builtin_inff());
  Ints unordered{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats numbers = size - i >= kLanes ? load(x + i) : load_filled(x + i, size - i);
    unordered |= numbers != numbers;
    largest = maximum(numbers, largest);
  }
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; lane++) has_nan |= unordered[lane] != 0;
  const float top = max_lanes(largest);
  for (int64_t i = 0; i < size; i++)
    if (has_nan ? x[i] != x[i] : x[i] == top) return i;
  return 0;
}

void argmax(const ArgmaxParams &p) {
#pragma omp parallel for num_threads(p.num_threads) if (p.num_rows > 1)
  for (int64_t row = 0; row < p.num_rows; row++) {
    const float *x = p.x + row * p.row_stride;
    p.indices[row] = find_largest(x, p.size);
    p.values[row] = x[p.indices[row]];
  }
}

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

void forerun_argmax(const forerun::ArgmaxParams *params) { forerun::argmax(*params); }

void forerun_rotate(const forerun::RotaryParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::rotate<forerun::bf16>(*params)
                                      : forerun::rotate<float>(*params);
}

void forerun_gate(const forerun::GateParams *params) {
  params->dtype == forerun::kBFloat16 ? forerun::gate<forerun::bf16>(*params)
                                      : forerun::gate<float>(*params);
}
}
