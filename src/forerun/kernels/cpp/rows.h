// Row-wise operations between the linear layers: RMS norm, rotary embedding, gated activation.
// Numbers are read and written in the model's type and computed in float32.
#pragma once

#include <cmath>

#include "vec.h"

namespace forerun {

// What the composition of two operations would do between them: round to the model's type.
template <class T>
inline Floats round_to(Floats x) {
  if constexpr (kPerUnit<T> == 1) return x;
  return widen(narrow(x));
}

// Load numbers d onwards of a row, after adding the update to it in place if there is one.
template <class T>
inline Floats add_and_load(T *x, const T *update, int64_t d, int64_t size) {
  Floats sum = load(x + d, size - d);
  if (update == nullptr) return sum;
  sum = round_to<T>(sum + load(update + d, size - d));
  store(x + d, sum, size - d);
  return sum;
}

template <class T>
void norm_row(T *x, const T *update, const float *weight, T *out, int64_t size, float eps) {
  Floats even{}, odd{};
  for (int64_t d = 0; d < size; d += 2 * kLanes) {
    const Floats a = add_and_load(x, update, d, size);
    even += a * a;
    if (d + kLanes >= size) break;
    const Floats b = add_and_load(x, update, d + kLanes, size);
    odd += b * b;
  }
  const float mean = sum_lanes(even + odd) / static_cast<float>(size);
  const float scale = 1.0f / std::sqrt(mean + eps);
  for (int64_t d = 0; d < size; d += kLanes) {
    const Floats scaled = load(x + d, size - d) * scale * load(weight + d, size - d);
    store(out + d, scaled, size - d);
  }
}

template <class T>
void rotate_head(T *x, const T *cosines, const T *sines, int64_t half) {
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t left = half - d;
    const Floats a = load(x + d, left), b = load(x + half + d, left);
    const Floats c = load(cosines + d, left), s = load(sines + d, left);
    store(x + d, a * c - b * s, left);
    store(x + half + d, b * c + a * s, left);
  }
}

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Floats gelu_tanh(Floats x) {
  const Floats u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp(-2.0f * u));
}

// activation(gate) * up; the activation alone is rounded first.
template <class T, class Activation>
inline Floats gate_numbers(Floats gate, Floats up, Activation activation) {
  return round_to<T>(activation(gate)) * up;
}

template <class T, class Activation>
void gate_row(const T *gate, T *out, int64_t size, Activation activation) {
  for (int64_t d = 0; d < size; d += kLanes) {
    const Floats a = load(gate + d, size - d), b = load(gate + size + d, size - d);
    store(out + d, gate_numbers<T>(a, b, activation), size - d);
  }
}

}  // namespace forerun
