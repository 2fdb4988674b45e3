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
#include <algorithm>
#include <type_traits>

#include "transpose.h"

namespace fivefold {

// 12 accumulators of the 16 registers of AVX2 (24 of 32 with AVX-512), the rest for operands.
constexpr int ROWS = LANES == 16 ? 12 : 6;
constexpr long CHAIN = 256;

// How one step along k is made, by the format T of a panel: which left operands it takes, and how
// many k it covers.
template <class T>
struct Step {
  typedef float Left;
  static constexpr long DEPTH = 1;
  static vf spread(float left) { return splat(left); }
  static void right(const T* b, vf& low, vf& high) { low = load(b), high = load(b + LANES); }
  static void add(vf& total, vf left, vf right) { total = fused(left, right, total); }
};

// bf16 panels whose halves are woven: columns 0, LANES, 1, LANES + 1, ... So one load gives both halves,
// by a shift and a mask, where widening each takes a load, a shuffle and a shift.
struct woven {
  bf16 value;
};

template <>
struct Step<woven> {
  typedef float Left;
  static constexpr long DEPTH = 1;
  static vf spread(float left) { return splat(left); }
  static void right(const woven* b, vf& low, vf& high) {
    const vu both = (vu)load((const float*)b);
    low = (vf)(both << 16), high = (vf)(both & 0xffff0000u);
  }
  static void add(vf& total, vf left, vf right) { total = fused(left, right, total); }
};

// Two neighbours along k, as AVX-512's dot product of bf16 takes them. Elsewhere that is emulated
// when asked for (-DFIVEFOLD_PAIRS), to test the layout.
struct pair {
  bf16 first, second;
};

#if defined(__AVX512BF16__) && FIVEFOLD_LANES == 16
#define FIVEFOLD_PAIRS 1
#endif
#if defined(FIVEFOLD_PAIRS)
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

template <>
struct Step<pair> {
  typedef pair Left;
  static constexpr long DEPTH = 2;
  static vf spread(pair left) {
    int32_t whole;
    std::memcpy(&whole, &left, 4);
    return (vf)(whole - vi{});
  }
  static void right(const pair* b, vf& low, vf& high) {
    low = load((const float*)b), high = load((const float*)(b + LANES));
  }
  static void add(vf& total, vf left, vf right) {
#if defined(__AVX512BF16__) && FIVEFOLD_LANES == 16
    total = (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)right);
#else
    const vu a = (vu)left, b = (vu)right;
    total = fused((vf)(a << 16), (vf)(b << 16), total);
    total = fused((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), total);
#endif
  }
};

// Steps that K takes in panels of T: an odd K ends in a pair with a zero.
template <class T>
constexpr long steps_of(long k) { return (k + Step<T>::DEPTH - 1) / Step<T>::DEPTH; }

// R rows times P neighbouring panels. Panels lie `panel_stride` elements apart, k steps WIDE.
// `c` is [R][P * WIDE] with rows `c_stride` apart, added to when `resume`. A k of 0 gives zeros.
// Steps of the left operand lie a_step apart, its rows a_row: R and 1 in a packed tile, 1 and a row's
// length where rows are taken as they lie. Panels are prefetched AHEAD bytes, if any. With KEEP, one
// panel is left widened in `keep`, [K][WIDE], for other rows to use.
template <int R, int P, class T, long AHEAD = 0, bool KEEP = false>
inline void multiply(const typename Step<T>::Left* a, long a_step, long a_row, const T* b,
                     long panel_stride, long k, float* c, long c_stride, bool resume,
                     typename Step<T>::Left* keep = nullptr) {
  static_assert(!KEEP || P == 1, "one panel is kept");
  constexpr long CHAIN_STEPS = CHAIN / Step<T>::DEPTH;
  long left_steps = steps_of<T>(k);
  do {
    vf total[R][2 * P] = {};
    const long steps = left_steps < CHAIN_STEPS ? left_steps : CHAIN_STEPS;
#pragma GCC unroll 4
    for (long i = 0; i < steps; ++i, a += a_step, b += WIDE) {
      vf right[2 * P];
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        const T* from = b + p * panel_stride;
        if constexpr (AHEAD > 0) __builtin_prefetch((const char*)from + AHEAD);
        Step<T>::right(from, right[2 * p], right[2 * p + 1]);
      }
      if constexpr (KEEP) {
        store(keep, right[0]), store(keep + LANES, right[1]);
        keep += WIDE;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf left = Step<T>::spread(a[r * a_row]);
#pragma GCC unroll 16
        for (int p = 0; p < 2 * P; ++p) Step<T>::add(total[r][p], left, right[p]);
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
    left_steps -= steps;
  } while (left_steps > 0);
}

// The same for a number of rows known only now, one panel: each count has a kernel of its own.
template <class T, long AHEAD = 0, bool KEEP = false>
inline void multiply_rows(int rows, const typename Step<T>::Left* a, long a_step, long a_row,
                          const T* b, long k, float* c, long c_stride, bool resume,
                          typename Step<T>::Left* keep = nullptr) {
  switch (rows) {
#define FIVEFOLD_CASE(R) \
  case R:                \
    return multiply<R, 1, T, AHEAD, KEEP>(a, a_step, a_row, b, 0, k, c, c_stride, resume, keep);
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

// One step of one row or column of an operand as T, a zero for the k that an odd end lacks.
template <class T, class S> inline T one_step(const S* at, long k_stride, bool whole) {
  if constexpr (std::is_same_v<T, pair>) return pair{at[0], whole ? at[k_stride] : bf16{0}};
  else return to_float(at[0]);
}
// LANES steps of a row whose k lies in one piece.
template <class T, class S> inline vf steps_of_row(const S* at) {
  if constexpr (std::is_same_v<T, pair>) return load((const float*)at);
  else return load(at);
}
// One step of LANES rows or columns that lie side by side.
template <class T, class S> inline vf rows_of_step(const S* at, long k_stride) {
  if constexpr (std::is_same_v<T, pair>) return (vf)((vu)load(at) >> 16 | (vu)load(at + k_stride));
  else return load(at);
}

// Packs columns [0, columns) of b(k, n) = source[k * k_stride + n * n_stride] into one panel
// [K][WIDE]. What stands behind the last column has no meaning.
template <class S, class T>
inline void pack_panel(const S* source, long k_stride, long n_stride, long k, int columns,
                       T* panel) {
  constexpr long DEPTH = Step<T>::DEPTH;
  const long whole = k / DEPTH, steps = steps_of<T>(k);
  long i = 0;
  if (k_stride == 1) {
    typedef std::conditional_t<std::is_same_v<T, pair>, float, S> Element;
    const Element* rows[WIDE];
    for (int n = 0; n < WIDE; ++n)
      rows[n] = (const Element*)(source + std::min(n, columns - 1) * n_stride);
    pack_across(rows, whole, (float*)panel);
    i = whole;
  } else if (n_stride == 1 && columns == WIDE) {
    for (; i < whole; ++i)
      for (int n = 0; n < WIDE; n += LANES)
        store((float*)(panel + i * WIDE + n), rows_of_step<T>(source + i * DEPTH * k_stride + n, k_stride));
  }
  for (; i < steps; ++i)
    for (int n = 0; n < columns; ++n)
      panel[i * WIDE + n] = one_step<T>(source + i * DEPTH * k_stride + n * n_stride, k_stride, i < whole);
}

// Packs rows [0, rows) of a(m, k) = source[m * m_stride + k * k_stride] into one tile [K][rows].
//
// Whole vectors are stored: what one brings from beyond the tile's rows, the next step overwrites.
// The last steps, behind which there is nothing, go one by one.
template <class S, class T>
inline void pack_tile(const S* source, long m_stride, long k_stride, int rows, long k, T* tile) {
  constexpr long DEPTH = Step<T>::DEPTH;
  constexpr int GROUPS = (ROWS + LANES - 1) / LANES;
  const long whole = k / DEPTH, steps = steps_of<T>(k), wide = (rows + LANES - 1) / LANES * LANES;
  const long room = steps - (wide + rows - 1) / rows + 1;  // steps that may be stored as vectors
  long i = 0;
  if (k_stride == 1) {
    for (; i + LANES <= std::min(whole, room); i += LANES) {
      vf square[GROUPS][LANES];
#pragma GCC unroll 16
      for (int m = 0; m < GROUPS * LANES; ++m)
        square[m / LANES][m % LANES] = steps_of_row<T>(source + std::min(m, rows - 1) * m_stride + i * DEPTH);
      for (auto& each : square) transpose(each);
      for (int step = 0; step < LANES; ++step)
        for (int group = 0; group * LANES < rows; ++group)
          store((float*)(tile + (i + step) * rows + group * LANES), square[group][step]);
    }
  } else if (m_stride == 1 && k_stride >= wide - rows) {  // the last k is not read as a vector
    for (; i < std::min(whole - 1, room); ++i)
      for (int m = 0; m < rows; m += LANES)
        store((float*)(tile + i * rows + m), rows_of_step<T>(source + i * DEPTH * k_stride + m, k_stride));
  }
  for (; i < steps; ++i)
    for (int m = 0; m < rows; ++m)
      tile[i * rows + m] = one_step<T>(source + m * m_stride + i * DEPTH * k_stride, k_stride, i < whole);
}

// A row of k in one piece as the multiplier takes it: fp32, or pairs with a zero behind an odd end.
template <class S>
inline void copy_row(const S* from, long k, float* to) {
  long i = 0;
  for (; i + LANES <= k; i += LANES) store(to + i, load(from + i));
  if (i < k) store_some(to + i, load_some(from + i, int(k - i)), int(k - i));
}
inline void copy_row(const bf16* from, long k, pair* to) {
  std::memcpy((void*)to, from, k / 2 * sizeof(pair));
  if (k % 2) to[k / 2] = pair{from[k - 1], bf16{0}};
}

// What operands of a format are packed as.
template <class S>
struct Packed {
  typedef float Type;
};
#if defined(FIVEFOLD_PAIRS)
template <>
struct Packed<bf16> {
  typedef pair Type;
};
#endif
static_assert(sizeof(pair) == sizeof(float), "buffers are measured in floats");

}  // namespace fivefold
