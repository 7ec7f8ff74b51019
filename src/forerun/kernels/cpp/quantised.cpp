// Packing stored quantised blocks into panels, and reading rows back.
#include "quantised.h"

#include <omp.h>

namespace forerun {
namespace {

inline uint32_t read_unit(const uint8_t *from) { return read<uint32_t>(from); }

// One output's place in a block of a panel.
struct Lane {
  char *block;
  int64_t lane;

  void put_unit(int64_t at, int64_t vector, uint32_t unit) const {
    write(block + at + vector * kVectorBytes + lane * 4, unit);
  }
  void put_half(int64_t at, const uint8_t *bits) const {
    std::memcpy(block + at + lane * 2, bits, 2);
  }
};

// 32 codes of a group as the formats store them, one byte each.
struct Codes {
  uint8_t code[kGroupSize];

  uint32_t gather(int64_t first, int shift, uint32_t mask) const {
    uint32_t unit = 0;
    for (int byte = 0; byte < 4; byte++)
      unit |= ((code[first + byte] >> shift) & mask) << (8 * byte);
    return unit;
  }
  void put_nibbles(const Lane &lane, int64_t at) const {
    for (int u = 0; u < 4; u++)
      lane.put_unit(at, u, gather(4 * u, 0, 15) | gather(16 + 4 * u, 0, 15) << 4);
  }
  void put_fifth_bits(const Lane &lane, int64_t at) const {
    uint32_t bits = 0;
    for (int u = 0; u < kUnitsPerGroup; u++) bits |= gather(4 * u, 4, 1) << u;
    lane.put_unit(at, 0, bits);
  }
  void put_sixth_bits(const Lane &lane, int64_t at) const {
    for (int vector = 0; vector < 2; vector++) {
      uint32_t bits = 0;
      for (int u = 0; u < 4; u++) bits |= gather(16 * vector + 4 * u, 4, 3) << (2 * u);
      lane.put_unit(at, vector, bits);
    }
  }
};

// Stored: scale, [minimum], [fifth bits], codes; nibble i of byte b is input 16 i + b.
template <int Bits, bool HasMinimum>
void put_block(SimpleFormat<Bits, HasMinimum>, const uint8_t *from, const Lane &lane) {
  using Format = SimpleFormat<Bits, HasMinimum>;
  lane.put_half(Format::kScaleAt, from);
  if constexpr (HasMinimum) lane.put_half(Format::kScaleAt + kHalvesBytes, from + 2);
  from += HasMinimum ? 4 : 2;
  if constexpr (Bits == 8) {
    for (int u = 0; u < kUnitsPerGroup; u++)
      lane.put_unit(0, u, read_unit(from + 4 * u) ^ 0x80808080u);
    return;
  }
  const uint32_t fifth = Bits == 5 ? read_unit(from) : 0;
  if constexpr (Bits == 5) from += 4;
  Codes codes;
  for (int i = 0; i < kGroupSize; i++)
    codes.code[i] = ((from[i % 16] >> (i / 16 * 4)) & 15) | ((fifth >> i) & 1) << 4;
  codes.put_nibbles(lane, 0);
  if constexpr (Bits == 5) codes.put_fifth_bits(lane, Format::kFifthAt);
}

// Stored: two factors, twelve bytes of scales, [fifth bits], codes; two groups share 32 bytes.
template <int Bits>
void put_block(ScaledFormat<Bits>, const uint8_t *from, const Lane &lane) {
  using Format = ScaledFormat<Bits>;
  lane.put_half(Format::kFactorsAt, from);
  lane.put_half(Format::kFactorsAt + kHalvesBytes, from + 2);
  for (int i = 0; i < 3; i++) lane.put_unit(Format::kScalesAt, i, read_unit(from + 4 + 4 * i));
  const uint8_t *fifth = from + 16, *nibbles = fifth + (Bits == 5 ? 32 : 0);
  for (int g = 0; g < Format::kGroups; g++) {
    Codes codes;
    for (int i = 0; i < kGroupSize; i++) {
      codes.code[i] = (nibbles[g / 2 * 32 + i] >> (g % 2 * 4)) & 15;
      if (Bits == 5) codes.code[i] |= ((fifth[i] >> g) & 1) << 4;
    }
    codes.put_nibbles(lane, g * Format::kGroupBytes);
    if constexpr (Bits == 5)
      codes.put_fifth_bits(lane, g * Format::kGroupBytes + 4 * kVectorBytes);
  }
}

// Stored: nibbles, upper bits, scales, factor. Of each 128 inputs, groups 0 and 1 are low nibbles,
// 2 and 3 the high ones of the same 64 bytes; pair g of bits of 32 bytes belongs to group g.
void put_block(Q6K, const uint8_t *from, const Lane &lane) {
  const uint8_t *nibbles = from, *upper = from + 128, *scales = from + 192;
  lane.put_half(Q6K::kFactorAt, from + 208);
  for (int g = 0; g < Q6K::kGroups; g++) {
    const int64_t at = g * Q6K::kGroupBytes;
    const int half = g / 4, place = g % 4;
    Codes codes;
    for (int i = 0; i < kGroupSize; i++)
      codes.code[i] = ((nibbles[64 * half + place % 2 * 32 + i] >> (place / 2 * 4)) & 15) |
                      ((upper[32 * half + i] >> (2 * place)) & 3) << 4;
    codes.put_nibbles(lane, at);
    codes.put_sixth_bits(lane, at + 4 * kVectorBytes);
    lane.block[at + Q6K::kScalesAt + lane.lane] = static_cast<char>(scales[2 * g]);
    lane.block[at + Q6K::kScalesAt + kLanes + lane.lane] = static_cast<char>(scales[2 * g + 1]);
  }
}

// Outputs that do not exist are all zeros.
template <class Format>
void pack_part(Format format, const PackBlocksParams &p) {
  constexpr int64_t kStoredBytes = Format::kBlockBytes / kLanes;
  const int64_t num_blocks = p.in_features / (kGroupSize * Format::kGroups);
  const int64_t panels = (p.out_features + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) num_threads(p.num_threads)
  for (int64_t panel = 0; panel < panels; panel++) {
    char *to = static_cast<char *>(p.panels) + panel * num_blocks * Format::kBlockBytes;
    std::memset(to, 0, num_blocks * Format::kBlockBytes);
    const int64_t lanes = std::min<int64_t>(p.out_features - panel * kLanes, kLanes);
    for (int64_t lane = 0; lane < lanes; lane++) {
      const auto *from = static_cast<const uint8_t *>(p.blocks) +
                         (panel * kLanes + lane) * num_blocks * kStoredBytes;
      for (int64_t b = 0; b < num_blocks; b++)
        put_block(format, from + b * kStoredBytes, Lane{to + b * Format::kBlockBytes, lane});
    }
  }
}

// One output of a group as numbers.
template <class Format>
void read_lane(const Group &group, int64_t lane, float *to) {
  for (int64_t i = 0; i < kGroupSize; i++) {
    const uint32_t code = (group.codes[i / 4][lane] >> (8 * (i % 4))) & 255;
    int32_t whole = static_cast<int32_t>(code) - (Format::kOffsetBits ? 1 << Format::kOffsetBits : 0);
    if constexpr (Format::kHasHalves) whole *= i < 16 ? group.low[lane] : group.high[lane];
    to[i] = group.scale[lane] * static_cast<float>(whole);
    if constexpr (Format::kHasMinimum) to[i] += group.minimum[lane];
  }
}

template <class T>
void store_numbers(T *to, const float *from) {
  for (int64_t i = 0; i < kGroupSize; i += kLanes) store(to + i, load(from + i));
}

}  // namespace

template <class T>
void read_quantised_row(const PackedWeight &weight, int64_t row, T *to) {
  const Panel panel = find_panel(weight, row / kLanes);
  choose_format(panel.format, [&](auto format) {
    using Format = decltype(format);
    for (int64_t g = 0; g < weight.in_features / kGroupSize; g++) {
      Group group;
      float numbers[kGroupSize];
      Format::read(panel.data + g / Format::kGroups * Format::kBlockBytes, g % Format::kGroups, group);
      read_lane<Format>(group, row % kLanes, numbers);
      store_numbers(to + g * kGroupSize, numbers);
    }
  });
}

template void read_quantised_row(const PackedWeight &, int64_t, float *);
template void read_quantised_row(const PackedWeight &, int64_t, bf16 *);

}  // namespace forerun

extern "C" {

int64_t forerun_block_bytes(const forerun::PackBlocksParams *p) {
  using namespace forerun;
  return (p->out_features + kLanes - 1) / kLanes * count_panel_bytes(p->format, p->in_features);
}

void forerun_pack_blocks(const forerun::PackBlocksParams *p) {
  forerun::choose_format(p->format, [&](auto format) { forerun::pack_part(format, *p); });
}
}
