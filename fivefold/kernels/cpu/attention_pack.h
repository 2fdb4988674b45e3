// Rows of a tensor (keys, values, queries) into panels and tiles of fp32 for the micro-kernel.
//
// Rows are given by their addresses, as those of a cache lie anywhere.
#pragma once
#include "attention.h"
#include "transpose.h"

namespace fivefold {

// LANES values of a row of `length`, zeros behind its end.
template <class T> inline vf load_within(const T* row, long at, long length) {
  const long left = length - at;
  return left >= LANES ? load(row + at) : load_some(row + at, int(left));
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
