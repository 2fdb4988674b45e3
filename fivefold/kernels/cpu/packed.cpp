// y = x weight^T (+ bias), for weights that were repacked once: inference's linear layers.
//
// A token alone is bound by reading the weights, so they lie in the very order in which they are
// read: panels of WIDE outputs, inputs outermost within one: [O / WIDE][I][WIDE], in the format they
// are stored in. Every output is summed in the order of gemm.h, so that a packed bf16 or fp32 layer
// gives the bits of the unpacked one, for one row or many.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "gemm.h"

namespace {
using namespace fivefold;

// bf16 lies in pairs where those are multiplied.
typedef std::conditional_t<PAIRED, pair, woven> StoredBf16;

// Of weights, which come from memory: the CPU's own prefetching starts anew with every page.
constexpr long AHEAD = 4096;

constexpr long BLOCK_ROWS = 16 * ROWS;  // rows that pass a panel before the next one is read

template <class X, class W> struct Linear {
  typedef typename Step<W>::Left Left;
  static constexpr long CHAIN_STEPS = CHAIN / Step<W>::DEPTH;
  static constexpr bool IN_PLACE = std::is_same_v<X, Left>;

  long m, n, k;
  const X* x;
  long x_stride;
  const W* packed;
  const float *scale, *bias;
  X* y;
  long y_stride;
  int threads;

  long steps() const { return steps_of<W>(k); }
  long panels() const { return (n + WIDE - 1) / WIDE; }
  const W* panel(long p) const { return packed + p * steps() * WIDE; }

  int run() const {
    Floats copies = allocate_floats(IN_PLACE ? 0 : m * steps());
    if (!copies) return NO_MEMORY;
    Left* rows = (Left*)copies.get();
    if constexpr (!IN_PLACE) {
#pragma omp parallel for num_threads(threads) if (m > ROWS) schedule(static)
      for (long row = 0; row < m; ++row) copy_row(x + row * x_stride, k, rows + row * steps());
    }
    const Left* left = IN_PLACE ? (const Left*)x : rows;
    const long stride = IN_PLACE ? x_stride : steps();
#pragma omp parallel num_threads(threads)
    {
      const int me = omp_get_thread_num(), all = omp_get_num_threads();
      const long first = panels() * me / all, last = panels() * (me + 1) / all;
      if (m > ROWS) many(left, stride, first, last);
      else few(left, stride, first, last);
    }
    return 0;
  }

  // Reading the weight is all the work: it is used as it lies, by P panels side by side, so that
  // few rows keep the multipliers busy.
  template <int R, int P> long sweep(const Left* left, long stride, long p, long last) const {
    float sums[R * P * WIDE];
    for (; p + P <= last; p += P) {
      multiply<R, P, W, AHEAD>(left, 1, stride, panel(p), steps() * WIDE, k, sums, P * WIDE, false);
      finish(0, R, p * WIDE, P * WIDE, sums);
    }
    return p;
  }
  void few(const Left* left, long stride, long p, long last) const {
    if (m == 1) p = sweep<1, 4>(left, stride, p, last);
    if (m == 2) p = sweep<2, 2>(left, stride, p, last);
    if (m == 3) p = sweep<3, 2>(left, stride, p, last);
    float sums[ROWS * WIDE];
    for (; p < last; ++p) {
      multiply_rows<W, AHEAD>(int(m), left, 1, stride, panel(p), k, sums, WIDE, false);
      finish(0, m, p * WIDE, WIDE, sums);
    }
  }

  // A chain of a panel is widened once for all rows of a block, while its first rows are multiplied.
  void many(const Left* left, long stride, long first, long last) const {
    float sums[BLOCK_ROWS * WIDE];
    Left chain[CHAIN_STEPS * WIDE];
    for (long m0 = 0; m0 < m; m0 += BLOCK_ROWS) {
      const long m1 = std::min(m, m0 + BLOCK_ROWS);
      for (long p = first; p < last; ++p) {
        long step = 0;
        do {
          const long here = std::min(CHAIN_STEPS, steps() - step);
          const W* from = panel(p) + step * WIDE;
          const long depth = here * Step<W>::DEPTH;
          for (long row = m0; row < m1; row += ROWS) {
            const int rows = int(std::min<long>(ROWS, m1 - row));
            const Left* a = left + row * stride + step;
            float* to = sums + (row - m0) * WIDE;
            if constexpr (std::is_same_v<W, Left>) multiply_rows(rows, a, 1, stride, from, depth, to, WIDE, step > 0);
            else if (row == m0) multiply_rows<W, AHEAD, true>(rows, a, 1, stride, from, depth, to, WIDE, step > 0, chain);
            else multiply_rows(rows, a, 1, stride, chain, depth, to, WIDE, step > 0);
          }
          step += here;
        } while (step < steps());
        finish(m0, m1, p * WIDE, WIDE, sums);
      }
    }
  }

  // Scales, adds the bias and rounds once: rows [m0, m1) of so many columns from `column` on.
  void finish(long m0, long m1, long column, int columns, const float* sums) const {
    for (long row = m0; row < m1; ++row, sums += columns)
      for (int i = 0; i < columns && column + i < n; i += LANES) {
        const int here = int(std::min<long>(LANES, n - column - i));
        vf value = load(sums + i);
        if (scale) value *= load_some(scale + column + i, here);
        if (bias) value += load_some(bias + column + i, here);
        X* to = y + row * y_stride + column + i;
        if (here == LANES) store(to, value);
        else store_some(to, value, here);
      }
  }
};

template <class X, class W>
int run(long m, long n, long k, const X* x, long x_stride, const W* packed, const float* scale,
        const float* bias, X* y, long y_stride, int threads) {
  return Linear<X, W>{m, n, k, x, x_stride, packed, scale, bias, y, y_stride, std::max(threads, 1)}.run();
}

// Elements of panels that are not known as pairs are moved whatever they mean.
template <class T>
void pack(long n, long k, const T* weight, long row_stride, bool weave, T* packed) {
  for (long p = 0; p * WIDE < n; ++p)
    for (long i = 0; i < k; ++i)
      for (int j = 0; j < WIDE; ++j) {
        const long row = p * WIDE + j;
        const int at = weave ? j % LANES * 2 + j / LANES : j;
        packed[(p * k + i) * WIDE + at] = row < n ? weight[row * row_stride + i] : T{};
      }
}
}  // namespace

// Elements that a packed weight [n][k] takes: an odd k is padded for pairs.
FIVEFOLD_EXPORT long fivefold_packed_size(long n, long k) {
  return (n + WIDE - 1) / WIDE * WIDE * ((k + 1) / 2 * 2);
}

// A weight of `bytes` an element: 1 for int8, 2 for bf16 (`format` says so) and fp16, 4 for fp32.
FIVEFOLD_EXPORT int fivefold_pack(long n, long k, int bytes, int format, const void* weight,
                                  long row_stride, void* packed) {
  if (bytes == 2 && format == BF16 && PAIRED) {
    for (long p = 0; p * WIDE < n; ++p)
      pack_panel((const bf16*)weight + p * WIDE * row_stride, 1, row_stride, k,
                 int(std::min<long>(WIDE, n - p * WIDE)), (pair*)packed + p * steps_of<pair>(k) * WIDE);
    return 0;
  }
  switch (bytes) {
    case 1: pack(n, k, (const uint8_t*)weight, row_stride, false, (uint8_t*)packed); return 0;
    case 2: pack(n, k, (const uint16_t*)weight, row_stride, format == BF16, (uint16_t*)packed); return 0;
    case 4: pack(n, k, (const uint32_t*)weight, row_stride, false, (uint32_t*)packed); return 0;
  }
  return NO_FORMAT;
}

// x [m][k] and y [m][n] of format `format`; the weight of the same, or int8 with a `scale` [n].
FIVEFOLD_EXPORT int fivefold_packed_linear(long m, long n, long k, int format, const void* x,
                                           long x_stride, const void* packed, const float* scale,
                                           const float* bias, void* y, long y_stride, int threads) {
#define FIVEFOLD_RUN(X, W, CODE)                                                                   \
  if (format == CODE)                                                                              \
    return scale ? run(m, n, k, (const X*)x, x_stride, (const int8_t*)packed, scale, bias, (X*)y,  \
                       y_stride, threads)                                                          \
                 : run(m, n, k, (const X*)x, x_stride, (const W*)packed, scale, bias, (X*)y,       \
                       y_stride, threads);
  FIVEFOLD_RUN(float, float, FP32)
  FIVEFOLD_RUN(bf16, StoredBf16, BF16)
  FIVEFOLD_RUN(fp16, fp16, FP16)
#undef FIVEFOLD_RUN
  return NO_FORMAT;
}
