// What is multiplied, made of rows as the pool stores them: units of numbers of C.
//
// C is the model's type T, or int16_t for int8 rows of a bfloat16 model, whose products are then
// integers. Every int8 is exact in C; scales multiply scores and weights, not rows. A unit is four
// bytes: one float, or two bfloat16 or int16.
#pragma once

#include <type_traits>

#include "int8.h"
#include "pool.h"

namespace forerun {

template <class T, class S>
using Computed = std::conditional_t<kIsInt8<S> && kPerUnit<T> == 2, int16_t, T>;

template <class C>
constexpr bool kIsWhole = std::is_same_v<C, int16_t>;

// How many rows of values are put together at once.
template <class C>
constexpr int kRowsPerStep = kIsWhole<C> ? 4 : kPerUnit<C>;

// Room for a row that is read by whole vectors, of bytes even.
inline int64_t padded(int64_t head_dim) { return round_up(head_dim, 4 * kLanes); }

// Call f(unit, numbers) for the units of C that unit `unit` of S becomes: of int8 four numbers.
template <class C, class S, class F>
inline void split_units(int64_t unit, Units numbers, F f) {
  if constexpr (!kIsInt8<S>) {
    f(unit, numbers);
  } else if constexpr (kPerUnit<C> == 2) {
    f(2 * unit, split_even(numbers));
    f(2 * unit + 1, split_odd(numbers));
  } else {
    f(4 * unit, split_float<0>(numbers));
    f(4 * unit + 1, split_float<1>(numbers));
    f(4 * unit + 2, split_float<2>(numbers));
    f(4 * unit + 3, split_float<3>(numbers));
  }
}

// Call f(unit, numbers) for every unit of kLanes keys in ascending order; a lane is a key.
template <class C, class S, class F>
inline void for_units(const S *rows, int64_t head_dim, F f) {
  const char *keys = reinterpret_cast<const char *>(rows);
  const int64_t stride = head_dim * sizeof(S);
  constexpr int64_t size = sizeof(Units);
  Units part[kLanes];
  int64_t done = 0;
  for (; done + size <= stride; done += size) {
    for (int i = 0; i < kLanes; i++) part[i] = read<Units>(keys + i * stride + done);
    transpose(part);
    // Without a loop, units stay in registers.
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) split_units<C, S>(done / 4 + i, part[i], f);
  }
  if (done == stride) return;
  for (int i = 0; i < kLanes; i++)
    part[i] = read_part<Units>(keys + i * stride + done, stride - done);
  transpose(part);
  for (int i = 0; done + 4 * i < stride; i++) split_units<C, S>(done / 4 + i, part[i], f);
}

// Units a key has in a tile, after its int8 were split by four.
template <class C>
inline int64_t count_units(int64_t head_dim) {
  return round_up(head_dim, kRowsPerStep<C>) / kPerUnit<C>;
}

// Four rows a, b, c, d of int8, interleaved to (a, c) and (b, d), become two vectors of units
// (a, b) and two of (c, d).
template <class F>
inline void split_fours(int vector, WideBytes ac, WideBytes bd, F f) {
  const WideWords first = reinterpret_cast<WideWords>(ac), second = reinterpret_cast<WideWords>(bd);
  const Units low = reinterpret_cast<Units>(interleave<false>(first, second));
  const Units high = reinterpret_cast<Units>(interleave<true>(first, second));
  f(vector, 0, split_even(low));
  f(vector, 1, split_odd(low));
  f(vector + 1, 0, split_even(high));
  f(vector + 1, 1, split_odd(high));
}

// Call f(vector, unit, numbers) for D vectors of kRowsPerStep<C> rows of values, of each number `at`
// and those after it. A lane of `numbers` holds one dimension of the kPerUnit<C> rows that
// share a multiplication; `unit` counts those groups. Dimensions change places: see unpack_sums.
template <class C, int D, class S, class F>
inline void for_values(const S *rows, int64_t size, int64_t at, F f) {
  static_assert(D == 4 || (D == 2 && !kIsWhole<C>));
  if constexpr (kIsWhole<C>) {
    const auto read_row = [=](int i) {
      return read_part<WideBytes>(rows + i * size + at, size - at);
    };
    const WideBytes a = read_row(0), b = read_row(1), c = read_row(2), d = read_row(3);
    split_fours(0, interleave<false>(a, c), interleave<false>(b, d), f);
    split_fours(2, interleave<true>(a, c), interleave<true>(b, d), f);
  } else if constexpr (kPerUnit<C> == 2) {
#pragma GCC unroll 2
    for (int vector = 0; vector < D; vector += 2) {
      const int64_t from = at + vector * kLanes, bytes = (size - from) * sizeof(S);
      if (bytes <= 0) return;
      const WideHalves a = read_part<WideHalves>(rows + from, bytes);
      const WideHalves b = read_part<WideHalves>(rows + size + from, bytes);
      f(vector, 0, reinterpret_cast<Units>(interleave<false>(a, b)));
      f(vector + 1, 0, reinterpret_cast<Units>(interleave<true>(a, b)));
    }
  } else {
#pragma GCC unroll 4
    for (int vector = 0; vector < D; vector++) {
      const int64_t from = at + vector * kLanes;
      if (from >= size) return;
      f(vector, 0, reinterpret_cast<Units>(load(rows + from, size - from)));
    }
  }
}

}  // namespace forerun
