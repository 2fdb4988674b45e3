// The micro-kernel that every matrix product here is made of.
//
//   c[m][n] += sum over k of a(m, k) b(k, n),   one k after the other, in fp32.
//
// The left operand is packed into tiles of up to ROWS rows, k outermost: [K][rows]. The right one
// is packed into panels of WIDE columns: [K][WIDE]. Both then stream through the caches, and an
// accumulator tile of rows x WIDE stays in registers for the whole of K.
//
// Each c[m][n] is the sum, in order, of chains of CHAIN fused multiply-adds over k = 0, 1, 2, ...,
// whatever the rows beside it, the tile it lies in, the blocking of K (in whole chains) and the
// thread that computes it. That is all there is to batch invariance of a linear layer. (One chain
// over all of K would do for that too, but rounds four times worse at K = 2048.)
#pragma once
#include "vec.h"

namespace fivefold {

// 12 accumulators of the 16 registers of AVX2 (24 of 32 with AVX-512), the rest for operands.
constexpr int ROWS = LANES == 16 ? 12 : 6;
constexpr int WIDE = 2 * LANES;
constexpr long CHAIN = 256;

// R rows times P neighbouring panels. Panels lie `panel_stride` elements apart, k steps WIDE.
// `c` is [R][P * WIDE] with rows `c_stride` apart, added to when `resume`. A k of 0 gives zeros.
// Rows of an unpacked left operand lie A_ROW apart, with an a_step of 1 (attention's weights).
template <int R, int P, class T, int A_ROW = 1>
inline void multiply(const float* a, int a_step, const T* b, long panel_stride, long k, float* c,
                     long c_stride, bool resume) {
  do {
    vf total[R][2 * P] = {};
    const long steps = k < CHAIN ? k : CHAIN;
    for (long i = 0; i < steps; ++i, a += a_step, b += WIDE) {
      vf right[2 * P];
#pragma GCC unroll 16
      for (int p = 0; p < 2 * P; ++p) right[p] = load(b + (p / 2) * panel_stride + (p % 2) * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf left = splat(a[r * A_ROW]);
#pragma GCC unroll 16
        for (int p = 0; p < 2 * P; ++p) total[r][p] += left * right[p];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int p = 0; p < 2 * P; ++p) {
        float* to = c + r * c_stride + p * LANES;
        store(to, resume ? load(to) + total[r][p] : total[r][p]);
      }
    resume = true;
    k -= steps;
  } while (k > 0);
}

// The same for a number of rows known only now, one panel: each count has a kernel of its own.
template <class T, int A_ROW = 1>
inline void multiply_rows(int rows, const float* a, int a_step, const T* b, long k, float* c,
                          long c_stride, bool resume) {
  switch (rows) {
#define FIVEFOLD_CASE(R) \
  case R:                \
    return multiply<R, 1, T, A_ROW>(a, a_step, b, 0, k, c, c_stride, resume);
    FIVEFOLD_CASE(1)
    FIVEFOLD_CASE(2)
    FIVEFOLD_CASE(3)
    FIVEFOLD_CASE(4)
    FIVEFOLD_CASE(5)
    FIVEFOLD_CASE(6)
#if FIVEFOLD_LANES == 16
    FIVEFOLD_CASE(7)
    FIVEFOLD_CASE(8)
    FIVEFOLD_CASE(9)
    FIVEFOLD_CASE(10)
    FIVEFOLD_CASE(11)
    FIVEFOLD_CASE(12)
#endif
#undef FIVEFOLD_CASE
  }
}

// Packs columns [0, columns) of b(k, n) = source[k * k_stride + n * n_stride] into one panel
// [K][WIDE], zeros behind the last column.
template <class S, class T>
inline void pack_panel(const S* source, long k_stride, long n_stride, long k, int columns,
                       T* panel) {
  if (n_stride == 1 && columns == WIDE) {
    for (long i = 0; i < k; ++i)
      for (int half = 0; half < 2; ++half)
        store(panel + i * WIDE + half * LANES, load(source + i * k_stride + half * LANES));
    return;
  }
  // k is the contiguous one: read LANES of it from each column, write them crosswise.
  constexpr int BLOCK = LANES;
  float square[WIDE][BLOCK];
  for (int n = columns; n < WIDE; ++n)
    for (int i = 0; i < BLOCK; ++i) square[n][i] = 0.0f;
  for (long start = 0; start < k; start += BLOCK) {
    const int count = k - start < BLOCK ? int(k - start) : BLOCK;
    for (int n = 0; n < columns; ++n) {
      const S* from = source + start * k_stride + n * n_stride;
      if (k_stride == 1 && count == BLOCK) store(square[n], load(from));
      else
        for (int i = 0; i < count; ++i) square[n][i] = to_float(from[i * k_stride]);
    }
    for (int i = 0; i < count; ++i) {
      float row[WIDE];
      for (int n = 0; n < WIDE; ++n) row[n] = square[n][i];
      for (int half = 0; half < 2; ++half)
        store(panel + (start + i) * WIDE + half * LANES, load(row + half * LANES));
    }
  }
}

// Packs rows [0, rows) of a(m, k) = source[m * m_stride + k * k_stride] into one tile [K][rows].
template <class S>
inline void pack_tile(const S* source, long m_stride, long k_stride, int rows, long k,
                      float* tile) {
  if (k_stride == 1) {
    for (int m = 0; m < rows; ++m) {
      const S* from = source + m * m_stride;
      long i = 0;
      for (; i + LANES <= k; i += LANES) {
        float values[LANES];
        store(values, load(from + i));
        for (int j = 0; j < LANES; ++j) tile[(i + j) * rows + m] = values[j];
      }
      for (; i < k; ++i) tile[i * rows + m] = to_float(from[i]);
    }
    return;
  }
  for (long i = 0; i < k; ++i)
    for (int m = 0; m < rows; ++m) tile[i * rows + m] = to_float(source[m * m_stride + i * k_stride]);
}

}  // namespace fivefold
