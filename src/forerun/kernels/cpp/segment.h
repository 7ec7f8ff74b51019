// From the attention of one layer to the attention of the next, in a parallel region.
// Threads take shares of rows in norms, of outputs in linear layers, of heads in the rotation, and
// meet at barriers; within a phase they write disjoint ranges.
#pragma once

#include "linear.h"
#include "rows.h"

namespace forerun {

template <class T>
class Segment {
 public:
  Segment(const SegmentParams &p, const Team &team) : p_(p), w_(*p.weights), team_(team) {}

  void run() const {
    if (p_.attended != nullptr) run_mlp();
    norm_rows(p_.attended == nullptr ? nullptr : w_.post_mlp_norm, w_.input_norm);
    if (is_present(w_.qkv)) run_qkv();
  }

 private:
  void run_mlp() const {
    multiply_into<T>(team_, w_.o, read_rows(p_.attended, w_.o), &w_.gate_up, as(p_.update));
    team_.wait();
    norm_rows(w_.post_attention_norm, w_.mlp_norm);
    w_.activation == 0 ? run_gate(silu) : run_gate(gelu_tanh);
    multiply_into<T>(team_, w_.down, read_rows(p_.gated, w_.down), &w_.qkv, as(p_.update));
    team_.wait();
  }

  // Gate and up outputs of one number meet in the two vectors of a panel.
  template <class Activation>
  void run_gate(Activation activation) const {
    const int64_t width = w_.down.in_features;
    multiply<T>(team_, w_.gate_up, read_rows(p_.normed, w_.gate_up), &w_.down,
                [&](const PanelColumns &at, int64_t row, Floats gate, Floats up) {
                  store(as(p_.gated) + row * width + at.first,
                        gate_numbers<T>(round_to<T>(gate), round_to<T>(up), activation),
                        at.first_count);
                });
  }

  // The update (normed first, if `update_norm`) joins the residual stream, whose norm is written.
  void norm_rows(const float *update_norm, const float *weight) const {
    const int64_t size = w_.hidden_size;
    const Share share = team_.share(p_.num_rows);
    for (int64_t row = share.from; row < share.to; row++) {
      T *update = p_.attended == nullptr ? nullptr : as(p_.update) + row * size;
      if (update_norm != nullptr)
        norm_row<T>(update, nullptr, update_norm, update, size, static_cast<float>(w_.eps));
      norm_row<T>(as(p_.residual) + row * size, update, weight, as(p_.normed) + row * size, size,
                  static_cast<float>(w_.eps));
    }
  }

  void run_qkv() const {
    multiply_into<T>(team_, w_.qkv, read_rows(p_.normed, w_.qkv), nullptr, as(p_.heads));
    team_.wait();
    const int64_t size = w_.head_dim;
    const Share share = team_.share(p_.num_rows * w_.num_rotated_heads);
    for (int64_t i = share.from; i < share.to; i++) {
      const int64_t row = i / w_.num_rotated_heads, head = i % w_.num_rotated_heads;
      T *x = as(p_.heads) + row * w_.qkv.out_features + head * size;
      if (w_.head_norm != nullptr)
        norm_row<T>(x, nullptr, w_.head_norm + head * size, x, size, static_cast<float>(w_.eps));
      const int64_t angle = p_.positions == nullptr ? row : p_.positions[row];
      rotate_head(x, static_cast<const T *>(p_.cosines) + angle * p_.cos_stride,
                  static_cast<const T *>(p_.sines) + angle * p_.sin_stride, size / 2);
    }
  }

  Input<T> read_rows(const void *rows, const PackedWeight &weight) const {
    return {static_cast<const T *>(rows), weight.in_features, p_.num_rows, p_.scratch};
  }

  static T *as(void *numbers) { return static_cast<T *>(numbers); }

  const SegmentParams &p_;
  const SegmentWeights &w_;
  const Team &team_;
};

}  // namespace forerun
