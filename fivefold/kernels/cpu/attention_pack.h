// Rows of a tensor (keys, values, queries) into panels and tiles of fp32 for the micro-kernel.
//
// Rows are given by their addresses, as those of a cache lie anywhere.
#pragma once
#include <utility>

#include "attention.h"

namespace fivefold {

// LANES values of a row of `length`, zeros behind its end.
template <class T> inline vf load_within(const T* row, long at, long length) {
  const long left = length - at;
  return left >= LANES ? load(row + at) : load_some(row + at, int(left));
}

// One step of a transposition: lanes l with bit S of l set change places between rows i and i + S.
template <int S, int... L>
inline void exchange(vf& low, vf& high, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  const vf a = __builtin_shufflevector(low, high, (L & S ? LANES + L - S : L)...);
  high = __builtin_shufflevector(low, high, (L & S ? LANES + L : L + S)...);
#else
  const vf a = __builtin_shuffle(low, high, vi{(L & S ? LANES + L - S : L)...});
  high = __builtin_shuffle(low, high, vi{(L & S ? LANES + L : L + S)...});
#endif
  low = a;
}

template <int S> inline void exchange_all(vf (&x)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(x[i], x[i + S], std::make_integer_sequence<int, LANES>{});
  if constexpr (S > 1) exchange_all<S / 2>(x);
}

// x[i][j] becomes x[j][i], in registers.
inline void transpose(vf (&x)[LANES]) { exchange_all<LANES / 2>(x); }

// LANES rows of `length`, crosswise, into every WIDE-th place: [length][WIDE].
template <class T> void pack_half_across(const T* const* rows, long length, float* to) {
  long at = 0;
  for (; at + LANES <= length; at += LANES, to += LANES * WIDE) {
    vf square[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) square[i] = load(rows[i] + at);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) store(to + i * WIDE, square[i]);
  }
  for (; at < length; ++at, to += WIDE)
    for (int i = 0; i < LANES; ++i) to[i] = to_float(rows[i][at]);
}

// WIDE rows of `length`, crosswise: panel [length][WIDE].
template <class T> void pack_across(const T* const* rows, long length, float* panel) {
  pack_half_across(rows, length, panel);
  pack_half_across(rows + LANES, length, panel + LANES);
}

// `count` rows of `length`, lengthwise, times `scale`: panels [count][WIDE], one behind the other,
// with zeros behind the last column.
template <class T>
void pack_along(const T* const* rows, int count, long length, float scale, float* panels) {
  for (long column = 0; column < length; column += WIDE)
    for (int i = 0; i < count; ++i, panels += WIDE)
      for (int half = 0; half < 2; ++half) {
        const long at = column + half * LANES;
        store(panels + half * LANES, at < length ? load_within(rows[i], at, length) * splat(scale) : vf{});
      }
}

// Up to ROWS rows of `length` times `scale`: a tile [length][ROWS].
template <class T>
void pack_strip(const T* const* rows, int count, long length, float scale, float* tile) {
  for (int r = 0; r < count; ++r)
    for (long at = 0; at < length; at += LANES) {
      float values[LANES];
      store(values, load_within(rows[r], at, length) * splat(scale));
      const long here = std::min<long>(LANES, length - at);
      for (long i = 0; i < here; ++i) tile[(at + i) * ROWS + r] = values[i];
    }
}

}  // namespace fivefold
