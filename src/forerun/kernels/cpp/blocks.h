// Quantised weights: how kLanes outputs of each format lie in memory, and how a group of 32 inputs
// is read. A panel holds kLanes outputs; its blocks follow each other along the input and hold
// exactly the bytes of the stored blocks: kLanes stored blocks, side by side number by number.
//
// Codes of a group are eight units of four unsigned bytes per output, inputs in ascending order.
// Formats that store signed numbers keep them with an offset of 2^kOffsetBits.
#pragma once

#include "abi.h"
#include "int8.h"

namespace forerun {

constexpr int64_t kGroupSize = 32;
constexpr int64_t kUnitsPerGroup = kGroupSize / 4;
constexpr int64_t kVectorBytes = sizeof(Units);
constexpr int64_t kHalvesBytes = kLanes * 2;  // one fp16 per output

// weight = scale * (code - offset) + minimum; with low and high, whole multiples of the codes of
// inputs 0 .. 15 and 16 .. 31, weight = scale * low * (code - offset).
struct Group {
  Units codes[kUnitsPerGroup];
  Floats scale, minimum;
  Ints low, high;
};

inline Floats read_float16(const char *from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(read<__m256i>(from)));
#else
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(read<__m128i>(from)));
#endif
}

inline Units read_vector(const char *from, int64_t index) {
  return read<Units>(from + index * kVectorBytes);
}

// Four vectors of nibbles: low ones are inputs 0 .. 15, high ones 16 .. 31.
inline void read_nibbles(const char *from, Group &group) {
  for (int i = 0; i < 4; i++) {
    const Units both = read_vector(from, i);
    group.codes[i] = both & 0x0f0f0f0f;
    group.codes[i + 4] = (both >> 4) & 0x0f0f0f0f;
  }
}

// A fifth bit per input: that of byte b of unit u is bit 8 b + u.
inline void add_fifth_bits(const char *from, Group &group) {
  const Units bits = read_vector(from, 0);
  for (int u = 0; u < kUnitsPerGroup; u++) {
    const Units moved = u <= 4 ? bits << (4 - u) : bits >> (u - 4);
    group.codes[u] |= moved & 0x10101010;
  }
}

// Fifth and sixth bits: those of byte b of unit u are bits 8 b + 2 (u % 4) of vector u / 4.
inline void add_sixth_bits(const char *from, Group &group) {
  for (int u = 0; u < kUnitsPerGroup; u++) {
    const Units bits = read_vector(from, u / 4);
    const int place = 2 * (u % 4);
    const Units moved = place <= 4 ? bits << (4 - place) : bits >> (place - 4);
    group.codes[u] |= moved & 0x30303030;
  }
}

// 32 codes with one scale: [codes][fifth bits][scale][minimum].
template <int Bits, bool HasMinimum>
struct SimpleFormat {
  static constexpr int kBits = Bits;
  static constexpr bool kHasMinimum = HasMinimum, kHasHalves = false;
  static constexpr int kOffsetBits = HasMinimum ? 0 : Bits - 1;
  static constexpr int kGroups = 1;
  static constexpr int64_t kFifthAt = (Bits == 8 ? 8 : 4) * kVectorBytes;
  static constexpr int64_t kScaleAt = kFifthAt + (Bits == 5 ? kVectorBytes : 0);
  static constexpr int64_t kBlockBytes = kScaleAt + (HasMinimum ? 2 : 1) * kHalvesBytes;

  static void read(const char *block, int64_t, Group &group) {
    if constexpr (Bits == 8)
      for (int u = 0; u < kUnitsPerGroup; u++) group.codes[u] = read_vector(block, u);
    else
      read_nibbles(block, group);
    if constexpr (Bits == 5) add_fifth_bits(block + kFifthAt, group);
    group.scale = read_float16(block + kScaleAt);
    if constexpr (HasMinimum) group.minimum = read_float16(block + kScaleAt + kHalvesBytes);
  }
};

// Eight groups with 6-bit scales and minima: per group [nibbles][fifth bits], then the twelve bytes
// of scales as three vectors, then the two common factors.
template <int Bits>
struct ScaledFormat {
  static constexpr int kBits = Bits;
  static constexpr bool kHasMinimum = true, kHasHalves = false;
  static constexpr int kOffsetBits = 0;
  static constexpr int kGroups = 8;
  static constexpr int64_t kGroupBytes = Bits * kVectorBytes;
  static constexpr int64_t kScalesAt = kGroups * kGroupBytes;
  static constexpr int64_t kFactorsAt = kScalesAt + 3 * kVectorBytes;
  static constexpr int64_t kBlockBytes = kFactorsAt + 2 * kHalvesBytes;

  static void read(const char *block, int64_t g, Group &group) {
    read_nibbles(block + g * kGroupBytes, group);
    if constexpr (Bits == 5) add_fifth_bits(block + g * kGroupBytes + 4 * kVectorBytes, group);
    const auto [scale, minimum] = find_scales(block + kScalesAt, static_cast<int>(g));
    group.scale = __builtin_convertvector(scale, Floats) * read_float16(block + kFactorsAt);
    group.minimum = -(__builtin_convertvector(minimum, Floats) *
                      read_float16(block + kFactorsAt + kHalvesBytes));
  }

 private:
  // The first four groups have bytes of their own; the last four are nibbles of the third vector
  // and the top bits of the first and second.
  static std::pair<Ints, Ints> find_scales(const char *from, int g) {
    const Units first = read_vector(from, 0), second = read_vector(from, 1);
    const int shift = 8 * (g % 4);
    if (g < 4) return {Ints((first >> shift) & 63), Ints((second >> shift) & 63)};
    const Units low = read_vector(from, 2) >> shift;
    const Units scale = (low & 15) | (((first >> shift) & 0xc0) >> 2);
    const Units minimum = ((low >> 4) & 15) | (((second >> shift) & 0xc0) >> 2);
    return {Ints(scale), Ints(minimum)};
  }
};

// Sixteen signed scales for 16 inputs each: per group [nibbles][two more bits][two scales], then
// the common factor.
struct Q6K {
  static constexpr int kBits = 6;
  static constexpr bool kHasMinimum = false, kHasHalves = true;
  static constexpr int kOffsetBits = 5;
  static constexpr int kGroups = 8;
  static constexpr int64_t kScalesAt = 6 * kVectorBytes;
  static constexpr int64_t kGroupBytes = kScalesAt + 2 * kLanes;
  static constexpr int64_t kFactorAt = kGroups * kGroupBytes;
  static constexpr int64_t kBlockBytes = kFactorAt + kHalvesBytes;

  static void read(const char *block, int64_t g, Group &group) {
    const char *from = block + g * kGroupBytes;
    read_nibbles(from, group);
    add_sixth_bits(from + 4 * kVectorBytes, group);
    group.low = to_ints(forerun::read<Bytes>(from + kScalesAt));
    group.high = to_ints(forerun::read<Bytes>(from + kScalesAt + kLanes));
    group.scale = read_float16(block + kFactorAt);
  }
};

using Q8_0 = SimpleFormat<8, false>;
using Q4_0 = SimpleFormat<4, false>;
using Q4_1 = SimpleFormat<4, true>;
using Q5_0 = SimpleFormat<5, false>;
using Q5_1 = SimpleFormat<5, true>;
using Q4K = ScaledFormat<4>;
using Q5K = ScaledFormat<5>;

// Call f(Format{}) for the format of a number in abi.h.
template <class F>
inline auto choose_format(int64_t format, F f) {
  switch (format) {
    case kQ8_0: return f(Q8_0{});
    case kQ4_0: return f(Q4_0{});
    case kQ4_1: return f(Q4_1{});
    case kQ5_0: return f(Q5_0{});
    case kQ5_1: return f(Q5_1{});
    case kQ4K: return f(Q4K{});
    case kQ5K: return f(Q5K{});
    default: return f(Q6K{});
  }
}

}  // namespace forerun
