// Products with keys and values where they lie in a cache, for the few rows of a decoding token.
//
// Packing pays when many strips of rows pass a block. One strip reads each key once, and packing it
// would be most of the work. The sums are those of gemm.h, in the same order, so the bits are too.
#pragma once
#include "attention.h"

namespace fivefold {

// As `multiply` in gemm.h, resuming; right operands come from wherever `at(step, panel)` says.
template <int R, int P, int A_ROW, class At>
inline void multiply_at(const float* a, int a_step, const At& at, long k, float* c, long c_stride,
                        bool resume) {
  for (long start = 0; start < k; start += CHAIN) {
    vf total[R][2 * P] = {};
    const long end = k - start < CHAIN ? k : start + CHAIN;
    for (long i = start; i < end; ++i) {
      vf right[2 * P];
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        const auto* b = at(i, p);
        right[2 * p] = load(b);
        right[2 * p + 1] = load(b + LANES);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf left = splat(a[i * a_step + r * A_ROW]);
#pragma GCC unroll 16
        for (int p = 0; p < 2 * P; ++p) total[r][p] = fused(left, right[p], total[r][p]);
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
  }
}

// All `panels`, several side by side where rows are few. `at(step, panel)` counts panels from 0.
template <int R, int A_ROW, class At>
inline void sweep_panels(const float* a, int a_step, const At& at, int panels, long k, float* c,
                         long c_stride, bool resume) {
  constexpr int P = R == 1 ? 4 : R <= 3 ? 2 : 1;
  int j = 0;
  for (; j + P <= panels; j += P)
    multiply_at<R, P, A_ROW>(a, a_step, [&](long i, int p) { return at(i, j + p); }, k, c + j * WIDE, c_stride, resume);
  for (; j < panels; ++j)
    multiply_at<R, 1, A_ROW>(a, a_step, [&](long i, int) { return at(i, j); }, k, c + j * WIDE, c_stride, resume);
}

template <int A_ROW, class At>
inline void multiply_direct(int rows, const float* a, int a_step, const At& at, int panels, long k,
                            float* c, long c_stride, bool resume) {
  switch (rows) {
#define FIVEFOLD_CASE(R) \
  case R:                \
    return sweep_panels<R, A_ROW>(a, a_step, at, panels, k, c, c_stride, resume);
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

}  // namespace fivefold
