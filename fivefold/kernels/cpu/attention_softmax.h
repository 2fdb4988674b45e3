// The online softmax of a strip of rows over one block of keys after the other (Milakov and
// Gimelshein 2018; Dao et al. 2022), and how two of them over different keys become one.
//
// A key that a row does not see has weight exactly 0 and changes no bit of the row; nor does a
// maximum that stays (its factor is e^0 = 1). So blocks and panels that nothing sees may be skipped.
#pragma once
#include <cmath>

#include "attention_scores.h"

namespace fivefold {

// Sums and maxima so far, a row each: largest score, sum of weights (by lanes), weighted values.
struct Running {
  float *maximum, *sum, *out;
  long width;  // of a row of out: value_dim in whole panels

  static long floats(long rows, long width) { return rows * (1 + LANES + width); }
  Running(float* memory, long rows, long width)
      : maximum(memory + rows * (LANES + width)), sum(memory + rows * width), out(memory), width(width) {}

  void clear(long rows) const {
    std::fill(maximum, maximum + rows, NEVER);
    std::fill(out, out + rows * (width + LANES), 0.0f);
  }
};

// Scores of rows [row0, row1), `scores` [rows][BLOCK], to weights in place. Sums so far are brought
// to the new maximum; adding the weighted values to `out` is left to the caller.
APART inline void weigh(const Sight& sight, long row0, long row1, long block_start, const Span& span,
                  float softcap, float* scores, const Running& so_far, long state_row) {
  const int from = span.first_panel() * 2, to = span.end_panel() * 2;
  for (long row = row0; row < row1; ++row, scores += BLOCK, ++state_row) {
    if (softcap != 0.0f)
      for (int v = from; v < to; ++v) store(scores + v * LANES, capped(load(scores + v * LANES), softcap));
    if (!span.whole) {
      const int first = int(std::clamp<long>(sight.first(row) - block_start, 0, BLOCK));
      const int end = int(std::clamp<long>(sight.end(row) - block_start, 0, BLOCK));
      for (int v = from; v < to; ++v)
        store(scores + v * LANES, masked(load(scores + v * LANES), v * LANES, first, end));
    }
    vf top = splat(NEVER);
    for (int v = from; v < to; ++v) top = maximum(load(scores + v * LANES), top);
    const float before = so_far.maximum[state_row];
    const float now = std::max(before, maximum(top));
    const vf base = splat(now == NEVER ? 0.0f : now);
    vf total = {};
    for (int v = from; v < to; ++v) {
      const vf weight = exp(load(scores + v * LANES) - base);
      store(scores + v * LANES, weight);
      total += weight;
    }
    float* sum = so_far.sum + state_row * LANES;
    if (now != before) {
      const vf factor = exp(splat(before) - base);
      store(sum, load(sum) * factor);
      float* out = so_far.out + state_row * so_far.width;
      for (long i = 0; i < so_far.width; i += LANES) store(out + i, load(out + i) * factor);
      so_far.maximum[state_row] = now;
    }
    store(sum, load(sum) + total);
  }
}

// Adds the softmax over other, later keys. Rows that saw nothing, on either side, change no bit.
APART inline void merge(const Running& total, const Running& part, long rows) {
  for (long row = 0; row < rows; ++row) {
    const float before = total.maximum[row], other = part.maximum[row];
    if (other == NEVER) continue;
    const bool copy = before == NEVER;
    const float now = std::max(before, other);
    const vf keep = exp(splat(before) - splat(now)), add = exp(splat(other) - splat(now));
    const auto combine = [&](float* to, const float* from, long count) {
      for (long i = 0; i < count; i += LANES)
        store(to + i, copy ? load(from + i) : fused(load(to + i), keep, load(from + i) * add));
    };
    combine(total.sum + row * LANES, part.sum + row * LANES, LANES);
    combine(total.out + row * total.width, part.out + row * part.width, total.width);
    total.maximum[row] = now;
  }
}

// Divides by the sum of weights and rounds once. Returns the log of the sum of e^score; a row that
// saw nothing gives zeros and -inf.
template <class T>
inline float finish(const Running& so_far, long row, long length, T* to) {
  const float total = sum(load(so_far.sum + row * LANES));
  const bool blind = so_far.maximum[row] == NEVER && total == 0.0f;
  const float inverse = blind ? 0.0f : 1.0f / total;
  const float* from = so_far.out + row * so_far.width;
  for (long i = 0; i < length; i += LANES) {
    const vf x = load(from + i) * splat(inverse);
    if (length - i >= LANES) store(to + i, x);
    else store_some(to + i, x, int(length - i));
  }
  return blind ? NEVER : so_far.maximum[row] + std::log(total);
}

}  // namespace fivefold
