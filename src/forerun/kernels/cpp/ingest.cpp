// What a block drafter keeps of computed rows: taps of the target as K/V of its layers in the pool.
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "team.h"

namespace forerun {
namespace {

// One thread; its share of the rows is one block of rows to the pool. S is the type the pool stores.
template <class T, class S>
class Ingestion {
 public:
  Ingestion(const IngestParams &p, const Team &team)
      : p_(p), team_(team), rows_(team.share(p.num_rows)), count_(rows_.to - rows_.from) {
    pool_.slots = p.slots;
    pool_.starts = &rows_.from;
    pool_.counts = &count_;
    pool_.num_kv_heads = p.num_kv_heads;
    pool_.head_dim = p.head_dim;
    pool_.block_size = p.block_size;
    pool_.key_stride = pool_.value_stride = p.key_value.out_features;
  }

  void run() {
    for (int64_t layer = 0; layer < p_.num_layers; layer++) {
      enter_layer(layer);
      for (int64_t head = 0; head < p_.num_kv_heads; head++) clear_new_blocks<S>(pool_, 0, head);
    }
    // The multiplications make threads meet: before any row is written, all blocks are cleared.
    T *fused = static_cast<T *>(p_.fused), *heads = static_cast<T *>(p_.heads);
    multiply_into<T>(team_, p_.fc, read_rows(p_.features, p_.fc), &p_.key_value, fused);
    team_.wait();
    for (int64_t row = rows_.from; row < rows_.to; row++) norm_fused(fused + row * hidden_size());
    multiply_into<T>(team_, p_.key_value, read_rows(fused, p_.key_value), nullptr, heads);
    team_.wait();
    for (int64_t row = rows_.from; row < rows_.to; row++) rotate_keys(row);
    for (int64_t layer = 0; layer < p_.num_layers; layer++) {
      enter_layer(layer);
      for (int64_t head = 0; head < p_.num_kv_heads; head++) write_rows<T, S>(pool_, 0, head);
    }
  }

 private:
  int64_t hidden_size() const { return p_.fc.out_features; }

  // Point at a layer's part of the rows, where keys of all layers come first, and of the pool.
  void enter_layer(int64_t layer) {
    const int64_t width = p_.num_kv_heads * p_.head_dim;
    const T *keys = static_cast<const T *>(p_.heads) + layer * width;
    pool_.key = keys;
    pool_.value = keys + p_.num_layers * width;
    pool_.keys = p_.keys[layer];
    pool_.values = p_.values[layer];
    if constexpr (kIsInt8<S>) {
      pool_.key_scales = p_.key_scales[layer];
      pool_.value_scales = p_.value_scales[layer];
    }
  }

  void norm_fused(T *row) const {
    norm_row<T>(row, nullptr, p_.hidden_norm, row, hidden_size(), static_cast<float>(p_.eps));
  }

  void rotate_keys(int64_t row) const {
    const int64_t size = p_.head_dim, position = p_.positions[row];
    const T *cosines = static_cast<const T *>(p_.cosines) + position * p_.cos_stride;
    const T *sines = static_cast<const T *>(p_.sines) + position * p_.sin_stride;
    T *keys = static_cast<T *>(p_.heads) + row * p_.key_value.out_features;
    for (int64_t head = 0; head < p_.num_layers * p_.num_kv_heads; head++) {
      T *key = keys + head * size;
      norm_row<T>(key, nullptr, p_.key_norm + head * size, key, size, static_cast<float>(p_.eps));
      rotate_head(key, cosines, sines, size / 2);
    }
  }

  Input<T> read_rows(const void *rows, const PackedWeight &weight) const {
    return {static_cast<const T *>(rows), weight.in_features, p_.num_rows, p_.scratch};
  }

  const IngestParams &p_;
  const Team &team_;
  const Share rows_;
  const int64_t count_;
  AttentionParams pool_{};
};

template <class T>
void ingest(const IngestParams &p) {
  Meeting meeting;
#pragma omp parallel num_threads(p.num_threads)
  {
    const Team team{meeting};
    p.key_scales == nullptr ? Ingestion<T, T>(p, team).run() : Ingestion<T, int8_t>(p, team).run();
  }
}

}  // namespace
}  // namespace forerun

extern "C" {

int64_t forerun_ingest(const forerun::IngestParams *params) {
  using namespace forerun;
  for (int64_t row = 0; row < params->num_rows; row++)
    if (params->positions[row] < 0 || params->positions[row] >= params->num_positions)
      return kUnknownPosition;
  params->dtype == kBFloat16 ? ingest<bf16>(*params) : ingest<float>(*params);
  return kDone;
}
}
