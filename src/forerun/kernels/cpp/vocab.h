// Walks over whole rows of logits, in steps of kStep numbers on every instruction set, so that sums
// are added in the same order everywhere; and the counter-based hash behind all token noise.
#pragma once

#include <immintrin.h>

#include <limits>

#include "vec.h"

namespace forerun {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kStep = 32;
constexpr int kVectors = kStep / kLanes;  // vectors per step

// Below this many numbers per thread, waking a thread costs more than it saves.
inline int choose_row_threads(int64_t numbers, int64_t num_threads) {
  const int64_t useful = numbers / 16384;
  return static_cast<int>(useful < 1 ? 1 : useful < num_threads ? useful : num_threads);
}

// One bit per lane in which a > b.
inline uint32_t greater_lanes(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
#endif
}

// Write the chosen lanes side by side; what follows them, up to kLanes in all, is undefined.
inline void write_lanes(void *to, Units x, uint32_t lanes) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(lanes, reinterpret_cast<__m512i>(x)));
#else
  uint32_t packed[kLanes], count = 0;
  for (; lanes != 0; lanes &= lanes - 1) packed[count++] = x[__builtin_ctz(lanes)];
  std::memcpy(to, packed, sizeof packed);
#endif
}

// Load `count` numbers, -inf after them: no token there.
inline Floats load_logits(const float *from, int64_t count) {
  if (count >= kLanes) return read<Floats>(from);
  float part[kLanes];
  for (int i = 0; i < kLanes; i++) part[i] = i < count ? from[i] : -kInfinity;
  return read<Floats>(part);
}

// One accumulator per place of a step.
struct Lanes {
  Floats part[kVectors];

  explicit Lanes(float fill) {
    for (Floats &lanes : part) lanes = splat(fill);
  }
  float sum() const {
    float all[kStep];
    std::memcpy(all, part, sizeof all);
    for (int width = kStep / 2; width > 0; width /= 2)
      for (int i = 0; i < width; i++) all[i] += all[i + width];
    return all[0];
  }
  float max() const {
    Floats all = part[0];
    for (int i = 1; i < kVectors; i++) all = maximum(all, part[i]);
    return max_lanes(all);
  }
};

// splitmix64 of key + id * golden without its last step, which leaves the top bits as they are.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;

template <class V>
inline V mix(V z) {
  z = (z ^ (z >> 30)) * kMix1;
  return (z ^ (z >> 27)) * kMix2;
}

inline uint32_t hash_token(uint64_t key, uint64_t id) { return mix(key + id * kGolden) >> 32; }

// The hashes of ids first, first + 1 and so on.
inline Units hash_tokens(uint64_t key, uint64_t first) {
  Pairs steps;
  Units high;
  for (int i = 0; i < kLanes / 2; i++) steps[i] = i * kGolden;
  for (int i = 0; i < kLanes; i++) high[i] = 2 * i + 1;
  const Pairs low_half = mix(steps + (key + first * kGolden));
  const Pairs high_half = mix(steps + (key + (first + kLanes / 2) * kGolden));
  return __builtin_shuffle(reinterpret_cast<Units>(low_half), reinterpret_cast<Units>(high_half),
                           high);
}

}  // namespace forerun
