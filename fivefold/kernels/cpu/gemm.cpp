// c = a b (+ bias), for operands of any format and strides: what training's matrix products are.
//
// With b(k, n) = weight[n][k] it is a linear layer, with b(k, n) = weight[k][n] its input's
// gradient, with a(m, k) = gradient[k][m] its weight's.
#include <omp.h>

#include <algorithm>

#include "call.h"
#include "gemm.h"

namespace fivefold {
namespace {

// A packed block of b: as much as fits in the last-level cache beside what streams through it.
constexpr long BLOCK_K = 4 * CHAIN;
constexpr long BLOCK_N = 1024;
// A packed block of a: half of a small L2 cache (512 KiB).
constexpr long BLOCK_A_BYTES = 256 << 10;
constexpr long MOST_TILES = 16;

struct Matrix {
  const void* data;
  long row_stride, column_stride;
};

template <class S, class C>
struct Product {
  typedef typename Packed<S>::Type T;  // of packed operands, of the size of a float

  long m, n, k;
  Matrix a, b;
  C* c;
  long c_stride;
  const float* bias;  // [n] or null
  bool accumulate;
  int threads;

  // Blocks of n and of k lie outermost. Where k has several blocks and c cannot hold fp32 partial
  // sums, they are kept in a buffer [m][BLOCK_N].
  int run() const {
    if (m == 0 || n == 0) return 0;
    const long deepest = std::clamp<long>(k, 1, BLOCK_K);
    const long tiles = std::clamp<long>(BLOCK_A_BYTES / (4 * ROWS * deepest), 1, MOST_TILES);
    const long block_m = tiles * ROWS;
    const long blocks_m = (m + block_m - 1) / block_m;
    const bool kept = k > BLOCK_K;
    const long columns = row_of_partial();
    Floats panels = allocate_floats(deepest * columns);
    Floats partial = allocate_floats(kept ? m * columns : 0);
    const long each = MOST_TILES * ROWS * WIDE + block_m * deepest;  // a thread's sums and tiles
    Floats scratch = allocate_floats(threads * each);
    if (!panels || !partial || !scratch) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
    for (long n0 = 0; n0 < n; n0 += BLOCK_N) {
      const long n1 = std::min(n, n0 + BLOCK_N);
      const long count = (n1 - n0 + WIDE - 1) / WIDE;
      // Few rows: the panels of a block are shared out too, so that every thread has work.
      const long splits = std::clamp<long>(4 * threads / std::max<long>(blocks_m, 1), 1, count);
      for (long k0 = 0; k0 < k || k0 == 0; k0 += BLOCK_K) {
        const long depth = std::min(k - k0, BLOCK_K);
#pragma omp for schedule(static)
        for (long p = 0; p < count; ++p) 
          pack_right(k0, depth, n0 + p * WIDE, (T*)panels.get() + p * steps_of<T>(depth) * WIDE);
#pragma omp for schedule(dynamic) collapse(2)
        for (long i = 0; i < blocks_m; ++i)
          for (long s = 0; s < splits; ++s) {
            float* mine = scratch.get() + omp_get_thread_num() * each;
            block(i * block_m, std::min(m, (i + 1) * block_m), n0, count * s / splits,
                  count * (s + 1) / splits, k0, depth, (const T*)panels.get(), partial.get(), kept,
                  mine);
          }
      }
    }
    return 0;
  }

  long row_of_partial() const { return std::min((n + WIDE - 1) / WIDE * WIDE, BLOCK_N); }

  void pack_right(long k0, long depth, long column, T* panel) const {
    const S* from = (const S*)b.data + k0 * b.row_stride + column * b.column_stride;
    pack_panel(from, b.row_stride, b.column_stride, depth, int(std::min<long>(WIDE, n - column)), panel);
  }

  // Rows [m0, m1) of the left operand: tiles [K][rows], one behind the other.
  void pack_left(long m0, long m1, long k0, long depth, T* tiles) const {
    const S* from = (const S*)a.data + m0 * a.row_stride + k0 * a.column_stride;
    for (long row = 0; row < m1 - m0; row += ROWS)
      pack_tile(from + row * a.row_stride, a.row_stride, a.column_stride,
                int(std::min<long>(ROWS, m1 - m0 - row)), depth, tiles + row * steps_of<T>(depth));
  }

  // A panel's chain of k stays in the first-level cache while all rows of the block pass it.
  void block(long m0, long m1, long n0, long p0, long p1, long k0, long depth, const T* panels,
             float* partial, bool kept, float* scratch) const {
    T* left = (T*)(scratch + MOST_TILES * ROWS * WIDE);
    pack_left(m0, m1, k0, depth, left);
    const long steps = steps_of<T>(depth), stride = kept ? row_of_partial() : WIDE;
    for (long p = p0; p < p1; ++p) {
      float* sums = kept ? partial + m0 * stride + p * WIDE : scratch;
      for (long at = 0; at == 0 || at < depth; at += CHAIN) {
        const long step = at / Step<T>::DEPTH;
        for (long row = 0; row < m1 - m0; row += ROWS) {
          const int rows = int(std::min<long>(ROWS, m1 - m0 - row));
          multiply_rows(rows, left + row * steps + step * rows, rows, 1, panels + (p * steps + step) * WIDE,
                        std::min(CHAIN, depth - at), sums + row * stride, stride, k0 + at > 0);
        }
      }
      if (k0 + depth >= k) finish(m0, m1, n0 + p * WIDE, sums, stride);
    }
  }

  // Adds the bias, or what is there, and rounds once into c.
  void finish(long m0, long m1, long column, const float* from, long stride) const {
    const int columns = int(std::min<long>(WIDE, n - column));
    for (long row = m0; row < m1; ++row, from += stride)
      for (int half = 0; half < 2; ++half) {
        const int here = std::min(columns - half * LANES, LANES);
        if (here <= 0) break;
        C* to = c + row * c_stride + column + half * LANES;
        vf x = load(from + half * LANES);
        if (bias) x += load_some(bias + column + half * LANES, here);
        if (here == LANES) store(to, accumulate ? x + load(to) : x);
        else store_some(to, accumulate ? x + load_some(to, here) : x, here);
      }
  }
};

}  // namespace
}  // namespace fivefold

namespace {
using namespace fivefold;

template <class S, class C>
int run(long m, long n, long k, const void* a, long a_row, long a_column, const void* b, long b_row,
        long b_column, void* c, long c_stride, const float* bias, int accumulate, int threads) {
  return Product<S, C>{m, n, k, {a, a_row, a_column}, {b, b_row, b_column}, (C*)c, c_stride,
                          bias, accumulate != 0, threads}.run();
}
}  // namespace

// c [m][n] (rows c_stride apart) = or += a(m, k) b(k, n) + bias. a and b are of format `format`, c
// of `c_format`. Strides are in elements. Returns 0, 1 without memory, 2 for formats not built.
FIVEFOLD_EXPORT int fivefold_gemm(
    long m, long n, long k, int format, const void* a, long a_row, long a_column, const void* b,
    long b_row, long b_column, int c_format, void* c, long c_stride, const float* bias,
    int accumulate, int threads) {
#define FIVEFOLD_RUN(IN, OUT, CODE_IN, CODE_OUT)                                               \
  if (format == CODE_IN && c_format == CODE_OUT)                                               \
    return run<IN, OUT>(m, n, k, a, a_row, a_column, b, b_row, b_column, c, c_stride, bias, \
                            accumulate, threads);
  FIVEFOLD_RUN(float, float, FP32, FP32)
  FIVEFOLD_RUN(bf16, bf16, BF16, BF16)
  FIVEFOLD_RUN(bf16, float, BF16, FP32)
  FIVEFOLD_RUN(fp16, fp16, FP16, FP16)
  FIVEFOLD_RUN(fp16, float, FP16, FP32)
#undef FIVEFOLD_RUN
  return NO_FORMAT;
}
