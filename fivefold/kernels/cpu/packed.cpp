// y = x weight^T (+ bias), for weights that were repacked once: inference's linear layers.
//
// A token alone is bound by reading the weights, so they lie in the very order in which they are
// read: panels of WIDE outputs, inputs outermost within one: [O / WIDE][I][WIDE], in the format they
// are stored in. Every output is summed in the order of gemm.h, so that a packed bf16 or fp32 layer
// gives the bits of the unpacked one, for one row or many.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "call.h"
#include "gemm.h"

namespace {
using namespace fivefold;

// bf16 lies in pairs where those are multiplied.
typedef std::conditional_t<PAIRED, pair, bf16> StoredBf16;

constexpr long TILES = 8;  // rows that a thread packs at a time, in tiles

// Panels of P neighbours: several rows of a tile keep the multipliers busy, one row needs several
// panels for that.
template <class W, int R, int P>
long sweep(const typename Step<W>::Left* tile, const W* packed, long k, long first, long last, float* out, long stride) {
  for (; first + P <= last; first += P)
    multiply<R, P, W>(tile, R, packed + first * steps_of<W>(k) * WIDE,
                      steps_of<W>(k) * WIDE, k, out + first * WIDE, stride, false);
  return first;
}

template <class W>
void tile_by_panels(int rows, const typename Step<W>::Left* tile, const W* packed, long k, long first, long last,
                    float* out, long stride) {
  if (rows == 1) first = sweep<W, 1, 4>(tile, packed, k, first, last, out, stride);
  if (rows == 2) first = sweep<W, 2, 2>(tile, packed, k, first, last, out, stride);
  if (rows == 3) first = sweep<W, 3, 2>(tile, packed, k, first, last, out, stride);
  for (; first < last; ++first)
    multiply_rows(rows, tile, rows, packed + first * steps_of<W>(k) * WIDE, k,
                  out + first * WIDE, stride, false);
}

template <class X, class W>
int run(long m, long n, long k, const X* x, long x_stride, const W* packed, const float* scale,
        const float* bias, X* y, long y_stride, int threads) {
  const long panels = (n + WIDE - 1) / WIDE, block = std::min<long>(m, TILES * ROWS);
  const long each = block * k + ROWS * panels * WIDE;
  Floats scratch = allocate_floats(threads * each);
  if (!scratch) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    typedef typename Step<W>::Left Left;
    Left* rows_packed = (Left*)(scratch.get() + me * each);
    float* out = scratch.get() + me * each + block * k;
    const long first = panels * me / all, last = panels * (me + 1) / all;
    for (long m0 = 0; m0 < m; m0 += block) {
      const long m1 = std::min(m, m0 + block);
      for (long row = m0; row < m1; row += ROWS)
        pack_tile(x + row * x_stride, x_stride, 1, int(std::min<long>(ROWS, m1 - row)), k,
                  rows_packed + (row - m0) * steps_of<W>(k));
      // A group of panels stays in cache while all rows of the block pass by.
      const long group = m1 - m0 > ROWS ? 1 : last - first;
      for (long p = first; p < last; p += group)
        for (long row = m0; row < m1; row += ROWS) {
          const int rows = int(std::min<long>(ROWS, m1 - row));
          const long end = std::min(last, p + group), stride = panels * WIDE;
          tile_by_panels(rows, rows_packed + (row - m0) * steps_of<W>(k), packed, k, p, end, out, stride);
          for (int r = 0; r < rows; ++r)
            for (long column = p * WIDE; column < std::min(n, end * WIDE); column += LANES) {
              const int here = int(std::min<long>(LANES, n - column));
              vf value = load(out + r * stride + column);
              if (scale) value *= load_some(scale + column, here);
              if (bias) value += load_some(bias + column, here);
              X* to = y + (row + r) * y_stride + column;
              if (here == LANES) store(to, value);
              else store_some(to, value, here);
            }
        }
    }
  }
  return 0;
}

// Elements of panels that are not known as pairs are moved whatever they mean.
template <class T>
void pack(long n, long k, const T* weight, long row_stride, T* packed) {
  for (long p = 0; p * WIDE < n; ++p)
    for (long i = 0; i < k; ++i)
      for (int j = 0; j < WIDE; ++j) {
        const long row = p * WIDE + j;
        packed[(p * k + i) * WIDE + j] = row < n ? weight[row * row_stride + i] : T{};
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
    case 1: pack(n, k, (const uint8_t*)weight, row_stride, (uint8_t*)packed); return 0;
    case 2: pack(n, k, (const uint16_t*)weight, row_stride, (uint16_t*)packed); return 0;
    case 4: pack(n, k, (const uint32_t*)weight, row_stride, (uint32_t*)packed); return 0;
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
