// Vectors of kLanes floats, in the compiler's own vector types so that one source serves every
// instruction set; intrinsics only where an instruction has no such spelling. A "unit" is four
// bytes: one float, or two neighbouring bfloat16.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

namespace forerun {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Units __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Pairs __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint16_t WideHalves __attribute__((vector_size(kLanes * 4)));

struct bf16 {
  uint16_t bits;
};

// How many numbers of type T one unit holds.
template <class T>
constexpr int kPerUnit = 4 / sizeof(T);

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// x - 0, unlike x + 0, is x for every x, so that it costs nothing.
inline Floats splat(float x) { return x - Floats{}; }
inline Units splat_unit(uint32_t x) { return Units{} + x; }

template <class V>
inline V read(const void *from) {
  V result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

template <class V>
inline void write(void *to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// Read `bytes` bytes, zeros after them: rows may end where their allocation ends.
template <class V>
inline V read_part(const void *from, int64_t bytes) {
  if (bytes >= static_cast<int64_t>(sizeof(V))) return read<V>(from);
  V result{};
  std::memcpy(&result, from, bytes);
  return result;
}

inline Floats widen(Halves bits) {
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Units) << 16);
}

// Round to nearest even; a NaN stays one.
inline Halves narrow(Floats x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(x));
#else
  const Units bits = reinterpret_cast<Units>(x);
  const Units rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : splat_unit(0x7fc0), Halves);
#endif
}

inline Floats load(const float *from, int64_t count = kLanes) {
  return read_part<Floats>(from, count * 4);
}
inline Floats load(const bf16 *from, int64_t count = kLanes) {
  return widen(read_part<Halves>(from, count * 2));
}
inline void store(float *to, Floats x, int64_t count = kLanes) {
  if (count >= kLanes) return write(to, x);
  std::memcpy(to, &x, count * 4);
}
inline void store(bf16 *to, Floats x, int64_t count = kLanes) {
  const Halves bits = narrow(x);
  if (count >= kLanes) return write(to, bits);
  std::memcpy(to, &bits, count * 2);
}

// acc + a * b per lane; with bfloat16 units, both products of a lane.
template <class T>
inline Floats dot_units(Floats acc, Units a, Units b);

template <>
inline Floats dot_units<float>(Floats acc, Units a, Units b) {
  return acc + reinterpret_cast<Floats>(a) * reinterpret_cast<Floats>(b);
}

template <>
inline Floats dot_units<bf16>(Floats acc, Units a, Units b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  constexpr uint32_t high = 0xffff0000u;
  acc = dot_units<float>(acc, a << 16, b << 16);
  return dot_units<float>(acc, a & high, b & high);
#endif
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

// Add up, or take the largest of, all lanes, always in the same order.
template <class F>
inline float reduce_lanes(Floats x, F f) {
  Ints lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  if constexpr (kLanes == 16) x = f(x, __builtin_shuffle(x, (lane + 8) & (kLanes - 1)));
  x = f(x, __builtin_shuffle(x, (lane + 4) & (kLanes - 1)));
  x = f(x, __builtin_shuffle(x, (lane + 2) & (kLanes - 1)));
  return f(x, __builtin_shuffle(x, (lane + 1) & (kLanes - 1)))[0];
}
inline float sum_lanes(Floats x) {
  return reduce_lanes(x, [](Floats a, Floats b) { return a + b; });
}
inline float max_lanes(Floats x) { return reduce_lanes(x, maximum); }

// e^x to about one unit in the last place for x in [-87, 88]; exactly 0 below, e^88 above.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by polynomial, 2^n by the exponent bits.
inline Floats exp(Floats x) {
  const Floats low = splat(-87.0f), shift = splat(12582912.0f);  // 1.5 * 2^23: rounds to integer
  const Floats clamped = minimum(splat(88.0f), x);
  const Floats safe = clamped < low ? low : clamped;
  const Floats shifted = safe * 1.44269504f + shift;
  const Floats n = shifted - shift;
  const Floats r = (safe - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats series = splat(1.9875691500e-4f);
  series = series * r + 1.3981999507e-3f;
  series = series * r + 8.3334519073e-3f;
  series = series * r + 4.1665795894e-2f;
  series = series * r + 1.6666665459e-1f;
  series = series * r + 5.0000001201e-1f;
  series = series * (r * r) + r + 1.0f;
  const Ints exponent = reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(shift) + 127;
  const Floats result = series * reinterpret_cast<Floats>(exponent << 23);
  return x < low ? Floats{} : result;
}

// One round of a transposition: rows `Distance` apart exchange parts, seen as vectors V.
template <int Distance, class V>
inline void exchange(Units rows[kLanes], V low, V high) {
  for (int first = 0; first < kLanes; first += 2 * Distance)
    for (int i = first; i < first + Distance; i++) {
      const V a = reinterpret_cast<V>(rows[i]), b = reinterpret_cast<V>(rows[i + Distance]);
      rows[i] = reinterpret_cast<Units>(__builtin_shuffle(a, b, low));
      rows[i + Distance] = reinterpret_cast<Units>(__builtin_shuffle(a, b, high));
    }
}

// Transpose kLanes x kLanes units in place: units, then pairs within four, then fours.
// These are the patterns of single-instruction shuffles, twice as fast as freely chosen ones.
inline void transpose(Units rows[kLanes]) {
  Units single, four;
  for (int i = 0; i < kLanes; i++) {
    const int place = i % 4, base = i - place, half = i / (kLanes / 2);
    single[i] = base + place / 2 + place % 2 * kLanes;
    four[i] = 2 * (base - half * (kLanes / 2)) + place + half * kLanes;
  }
  Pairs pair;
  for (int i = 0; i < kLanes / 2; i++) pair[i] = i - i % 2 + i % 2 * (kLanes / 2);
  exchange<1>(rows, single, single + 2);
  exchange<2>(rows, pair, pair + 1);
  exchange<4>(rows, four, four + 4);
  if constexpr (kLanes == 16) exchange<8>(rows, four, four + 4);
  // The first two rounds leave the middle two of four rows in each other's place.
  for (int i = 0; i < kLanes; i += 4) std::swap(rows[i + 1], rows[i + 2]);
}

}  // namespace forerun
