// Rows into columns, in registers: how panels are packed from rows.
#pragma once
#include <utility>

#include "vec.h"

namespace fivefold {

constexpr int WIDE = 2 * LANES;  // columns of a panel

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

}  // namespace fivefold
