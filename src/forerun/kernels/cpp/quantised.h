// y = x W^T over quantised weights: rows become 8-bit integers per group of 32 inputs, products and
// sums within a group are exact integers, and a row's groups are added in ascending order.
//
// Every row passes through one loop body, whatever the number of rows, the tile or the thread: a
// row's result does not depend on the rows computed with it.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "shape.h"
#include "team.h"

namespace forerun {

// One group of a row: x = scale * code.
struct RowGroup {
  uint32_t codes[kUnitsPerGroup];
  float scale;
  float weighted_sum;  // scale * sum of all codes
  int32_t minus_sum;   // -(sum of all codes)
  int32_t minus_low;   // -(sum of the first 16)
};
static_assert(sizeof(RowGroup) <= kGroupSize * sizeof(bf16), "scratch holds rows of the model's type");

// Rows whose sums and groups stay in the caches while a weight streams by. (Measured: 32 to 128 are
// equal.)
constexpr int64_t kRowTile = 64;

// How far ahead of its use a weight is fetched into the second-level cache.
constexpr int64_t kQuantisedAheadBytes = 8192;

// The sum of 16 signed bytes.
inline int32_t sum_bytes(const int8_t *bytes) {
  const __m128i wide = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes));
  // Moved to unsigned, because that is what can be added up at once.
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(wide, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// 32 numbers of a row. A group that is not finite has a scale that is not.
template <class T>
inline void quantise_group(const T *x, RowGroup &to) {
  auto *codes = reinterpret_cast<int8_t *>(to.codes);
  to.scale = quantise_row(x, kGroupSize, codes);
  const int32_t low = sum_bytes(codes), sum = low + sum_bytes(codes + 16);
  to.weighted_sum = to.scale * static_cast<float>(sum);
  to.minus_sum = -sum;
  to.minus_low = -low;
}

// Groups of rows in tiles: group g of row r of a tile of R rows that begins at row b is number
// b * groups + g * R + r.
template <class T>
inline void quantise_rows(const T *x, int64_t stride, int64_t num_rows, int64_t num_groups,
                          Share share, RowGroup *to) {
  for (int64_t begin = 0; begin < num_rows; begin += kRowTile) {
    const int64_t rows = std::min(kRowTile, num_rows - begin);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t g = share.from; g < share.to; g++)
        quantise_group(x + (begin + r) * stride + g * kGroupSize,
                       to[begin * num_groups + g * rows + r]);
  }
}

#if !defined(__AVX512VNNI__)
// Sums of two neighbouring products of unsigned with signed bytes, which must fit 16 bits.
inline Units add_pairs(Units codes, Units row) {
#if defined(__AVX512F__)
  return reinterpret_cast<Units>(
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(row)));
#else
  return reinterpret_cast<Units>(
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(row)));
#endif
}
#endif

// acc + sum of four products of unsigned with signed bytes, per lane.
template <int Bits>
inline Ints dot_bytes(Ints acc, Units codes, Units row) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc),
                                                    reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(row)));
#else
  if constexpr (Bits <= 6) return dot_words(acc, add_pairs(codes, row), splat_unit(0x00010001));
  const Units odd = reinterpret_cast<Units>(reinterpret_cast<WideHalves>(codes) >> 8);
  return dot_words(dot_words(acc, codes & 0x00ff00ff, split_even(row)), odd, split_odd(row));
#endif
}

// The exact sum of code products of one group of one row; two chains, to hide their latency.
template <class Format>
inline Ints multiply_codes(const Group &group, const RowGroup &row) {
  Ints low{}, high{};
  if constexpr (Format::kHasHalves) {
    low = (low + row.minus_low) << Format::kOffsetBits;
    high = (high + (row.minus_sum - row.minus_low)) << Format::kOffsetBits;
  } else if constexpr (Format::kOffsetBits > 0) {
    low = (low + row.minus_sum) << Format::kOffsetBits;
  }
  for (int u = 0; u < kUnitsPerGroup / 2; u++) {
    low = dot_bytes<Format::kBits>(low, group.codes[u], splat_unit(row.codes[u]));
    high = dot_bytes<Format::kBits>(high, group.codes[u + 4], splat_unit(row.codes[u + 4]));
  }
  if constexpr (Format::kHasHalves) return low * group.low + high * group.high;
  return low + high;
}

// Where a thread's weights come from, and what it reads after their end.
struct Stream {
  const char *end, *after;

  const char *find_ahead(const char *at) const {
    const char *ahead = at + kQuantisedAheadBytes;
    return ahead < end || after == nullptr ? ahead : after + (ahead - end);
  }
};

// sums[r] = products of one panel with the rows of a tile.
template <class Format>
void multiply_panel(const RowGroup *rows, int64_t num_rows, const char *panel, int64_t num_groups,
                    const Stream &stream, Floats *sums) {
  for (int64_t r = 0; r < num_rows; r++) sums[r] = Floats{};
  for (int64_t begin = 0; begin < num_groups; begin += Format::kGroups) {
    const char *ahead = stream.find_ahead(panel);
    for (int64_t g = 0; g < Format::kGroups; g++, rows += num_rows) {
      for (int64_t byte = g * Format::kBlockBytes / Format::kGroups;
           byte < (g + 1) * Format::kBlockBytes / Format::kGroups; byte += 64)
        __builtin_prefetch(ahead + byte, 0, 2);
      Group group;
      Format::read(panel, g, group);
#pragma GCC unroll 4
      for (int64_t r = 0; r < num_rows; r++) {
        const Floats products = __builtin_convertvector(multiply_codes<Format>(group, rows[r]), Floats);
        Floats sum = sums[r] + products * (group.scale * rows[r].scale);
        if constexpr (Format::kHasMinimum) sum += group.minimum * rows[r].weighted_sum;
        sums[r] = sum;
      }
    }
    panel += Format::kBlockBytes;
  }
}

// One output vector of a quantised weight: its format and where it lies.
struct Panel {
  int64_t format;
  const char *data;
};

inline int64_t count_panel_bytes(int64_t format, int64_t in_features) {
  return choose_format(format, [&](auto kind) {
    return in_features / (kGroupSize * kind.kGroups) * kind.kBlockBytes;
  });
}

// Parts begin at whole vectors.
inline Panel find_panel(const PackedWeight &weight, int64_t vector) {
  int64_t part = 0;
  while (part + 1 < weight.num_parts && weight.parts[part + 1].begin <= vector * kLanes) part++;
  const WeightPart &from = weight.parts[part];
  const int64_t bytes = count_panel_bytes(from.format, weight.in_features);
  return {from.format, static_cast<const char *>(from.panels) + (vector - from.begin / kLanes) * bytes};
}

// Write row `row` of a weight as numbers (quantised.cpp).
template <class T>
void read_quantised_row(const PackedWeight &weight, int64_t row, T *to);

}  // namespace forerun
