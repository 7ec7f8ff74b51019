// Rows of numbers stored as int8 with one scale each: value = scale * q, |q| <= 127; and integer
// arithmetic over them. int16 holds every q, and 15 bits of what is multiplied with it; sums in
// int32 are exact, so that their order does not matter, if no more than 516 products are added.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "vec.h"

namespace forerun {

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t WideBytes __attribute__((vector_size(kLanes * 4)));
typedef int16_t Words __attribute__((vector_size(kLanes * 2)));
typedef int16_t WideWords __attribute__((vector_size(kLanes * 4)));

// Rows whose largest number is not above this are stored as zeros: limit / amax must be finite.
constexpr float kTiniest = 1e-30f;
constexpr float kByteLimit = 127.0f, kWordLimit = 32767.0f;

// Intrinsics, because GCC 12 converts bytes one by one. round_to_ints rounds to nearest even, as
// the processor does by default (the product of a scaling must not be fused into the rounding);
// what is no number becomes -2^31. Narrowing brings what does not fit to the nearest that does.
#if defined(__AVX512F__)
inline Ints to_ints(Bytes x) {
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(x)));
}
inline Ints round_to_ints(Floats x) {
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x)));
}
inline Bytes to_bytes(Ints x) {
  return reinterpret_cast<Bytes>(_mm512_cvtsepi32_epi8(reinterpret_cast<__m512i>(x)));
}
inline Words to_words(Ints x) {
  return reinterpret_cast<Words>(_mm512_cvtsepi32_epi16(reinterpret_cast<__m512i>(x)));
}
#else
inline Ints to_ints(Bytes x) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(&x));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(bytes));
}
inline Ints round_to_ints(Floats x) {
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
}
inline Words to_words(Ints x) {
  const __m256i whole = reinterpret_cast<__m256i>(x);
  return reinterpret_cast<Words>(
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}
inline Bytes to_bytes(Ints x) {
  const __m128i words = reinterpret_cast<__m128i>(to_words(x));
  Bytes bytes;
  _mm_storel_epi64(reinterpret_cast<__m128i *>(&bytes), _mm_packs_epi16(words, words));
  return bytes;
}
#endif

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// kLanes numbers of a row that has `count` more; zeros after its end.
inline Floats load(const int8_t *from, int64_t count = kLanes) {
  return to_floats(to_ints(read_part<Bytes>(from, count)));
}

// acc + both products of a lane. Where that is two instructions, they stay together: GCC would add
// up all products at the end, and there are more of them than registers.
inline Ints dot_words(Ints acc, Units a, Units b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(acc),
                                                    reinterpret_cast<__m512i>(a),
                                                    reinterpret_cast<__m512i>(b)));
#else
#if defined(__AVX512F__)
  acc += reinterpret_cast<Ints>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
  acc += reinterpret_cast<Ints>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
  asm("" : "+v"(acc));
  return acc;
#endif
}

// Without their sign the bits of numbers are ordered as they are, NaN above all: one among numbers
// becomes their maximum.
inline Ints magnitude_bits(Floats x) { return reinterpret_cast<Ints>(x) & 0x7fffffff; }
inline Ints maximum(Ints a, Ints b) { return a > b ? a : b; }
inline float max_magnitude(Ints bits) {
  // As whole numbers: comparisons of floats would lose a NaN.
  return reduce_lanes(reinterpret_cast<Floats>(bits), [](Floats a, Floats b) {
    return reinterpret_cast<Floats>(maximum(reinterpret_cast<Ints>(a), reinterpret_cast<Ints>(b)));
  });
}

template <class T>
inline float find_largest(const T *x, int64_t size) {
  Ints bits{};
  for (int64_t d = 0; d < size; d += kLanes)
    bits = maximum(bits, magnitude_bits(load(x + d, size - d)));
  return max_magnitude(bits);
}

inline float invert_scale(float largest, float limit) {
  return largest > kTiniest ? limit / largest : 0.0f;
}

// scale = amax / 127, q = round(x * (127 / amax)); returns the scale. A row with a NaN or an
// infinity gets a scale like it: whoever multiplies by it sees it.
template <class T>
inline float quantise_row(const T *x, int64_t size, int8_t *to) {
  const float largest = find_largest(x, size), inverse = invert_scale(largest, kByteLimit);
  for (int64_t d = 0; d < size; d += kLanes) {
    const Bytes bytes = to_bytes(round_to_ints(load(x + d, size - d) * inverse));
    std::memcpy(to + d, &bytes, std::min<int64_t>(size - d, kLanes));
  }
  return largest / kByteLimit;
}

// The same to 15 bits, for a row that is multiplied with int8: the second and third number of every
// four change places, as in split_even and split_odd, and zeros fill the last vector.
template <class T>
inline float quantise_query(const T *x, int64_t size, int16_t *to) {
  Ints swapped;
  for (int i = 0; i < kLanes; i++) swapped[i] = i % 4 == 1 || i % 4 == 2 ? i ^ 3 : i;
  const float largest = find_largest(x, size), inverse = invert_scale(largest, kWordLimit);
  for (int64_t d = 0; d < size; d += kLanes) {
    const Ints rounded = round_to_ints(load(x + d, size - d) * inverse);
    write(to + d, to_words(__builtin_shuffle(rounded, swapped)));
  }
  return largest / kWordLimit;
}

// Units of four int8 become units of two int16: numbers 0 and 2, then 1 and 3.
inline Units split_even(Units four) {
  return reinterpret_cast<Units>(
      reinterpret_cast<WideWords>(reinterpret_cast<WideHalves>(four) << 8) >> 8);
}
inline Units split_odd(Units four) {
  return reinterpret_cast<Units>(reinterpret_cast<WideWords>(four) >> 8);
}

// Number `Place` of the four in each unit, of every lane.
template <int Place>
inline Units split_float(Units four) {
  return reinterpret_cast<Units>(
      to_floats(reinterpret_cast<Ints>(four << (24 - 8 * Place)) >> 24));
}

// The numbers of a and b in turn, of the first or the second half of every 16 bytes: what single
// instructions do.
template <bool Second, class V>
inline V interleave(V a, V b) {
  constexpr int total = sizeof(V) / sizeof(a[0]), run = 16 / sizeof(a[0]);
  V order;
  for (int i = 0; i < total; i++)
    order[i] = i / run * run + Second * run / 2 + i % run / 2 + i % 2 * total;
  return __builtin_shuffle(a, b, order);
}

}  // namespace forerun
