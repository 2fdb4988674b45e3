// RMSNorm, with and without a residual added before it, and its backward pass.
#include "kernels.h"
#include "rows.h"

#include <cmath>

namespace fivefold {
namespace {

template <class T> struct Rows {
  T* data;
  long stride;  // elements from row to row
  T* operator[](long row) const { return data + row * stride; }
  explicit operator bool() const { return data != nullptr; }
};

// Sum over the columns of term(column): four running sums a lane, then one order for all of them.
constexpr int CHAINS = 4;

template <class F> inline float sum_over(long size, F term) {
  vf total[CHAINS] = {};
  long i = 0;
  for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
    for (int c = 0; c < CHAINS; ++c) total[c] += term(i + c * LANES);
  for (; i < size; i += LANES) total[0] += term(i);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// y = x / rms(x) * (weight + offset), and 1 / rms(x). With a residual, x is first x + residual,
// rounded into `total`: what is normalised is what the next layer will add to.
template <class T>
void forward(long rows, long size, Rows<const T> x, Rows<const T> residual, const float* weight,
             float eps, float offset, T* y, T* total, float* inverse, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * size, threads)) schedule(static)
  for (long r = 0; r < rows; ++r) {
    const T* row = x[r];
    if (residual) {
      T* kept = total + r * size;
      for (long i = 0; i < size; i += LANES)
        write(kept, i, size, read(x[r], i, size) + read(residual[r], i, size));
      row = kept;
    }
    const float squares = sum_over(size, [&](long i) {
      const vf value = read(row, i, size);
      return value * value;
    });
    const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
    inverse[r] = scale;
    for (long i = 0; i < size; i += LANES)
      write(y + r * size, i, size,
            (read(row, i, size) * splat(scale)) * (read(weight, i, size) + splat(offset)));
  }
}

// With n = x / rms(x) and s = grad * (weight + offset): the gradient of x is (s - n mean(s n)) / rms(x)
// plus `extra` (the residual stream's own), and the weight's the sum over rows of grad * n.
// That sum is taken over blocks of `block_rows` rows, [blocks][size] in `partial`, then over
// blocks: an order that no number of threads changes.
template <class T>
void backward(long rows, long size, Rows<const T> grad, Rows<const T> extra, Rows<const T> x,
              const float* weight, float offset, const float* inverse, T* grad_x, long block_rows,
              float* partial, float* grad_weight, int threads) {
  const long blocks = (rows + block_rows - 1) / block_rows;
  const int team = threads_for(rows * size, threads);
#pragma omp parallel for num_threads(team) schedule(static)
  for (long b = 0; b < blocks; ++b) {
    float* mine = partial + b * size;
    std::fill(mine, mine + size, 0.0f);
    for (long r = b * block_rows; r < std::min(rows, (b + 1) * block_rows); ++r) {
      const T *g = grad[r], *from = x[r];
      const vf scale = splat(inverse[r]);
      const float products = sum_over(size, [&](long i) {
        const vf scaled = read(g, i, size) * (read(weight, i, size) + splat(offset));
        return scaled * (read(from, i, size) * scale);
      });
      const vf mean = splat(products / float(size));
      for (long i = 0; i < size; i += LANES) {
        const vf slope = read(g, i, size);
        const vf normal = read(from, i, size) * scale;
        const vf scaled = slope * (read(weight, i, size) + splat(offset));
        vf result = (scaled - normal * mean) * scale;
        if (extra) result += read(extra[r], i, size);
        write(grad_x + r * size, i, size, result);
        write(mine, i, size, read(mine, i, size) + slope * normal);
      }
    }
  }
#pragma omp parallel for num_threads(threads_for(blocks * size, threads)) schedule(static)
  for (long i = 0; i < size; i += LANES) {
    vf total = {};
    for (long b = 0; b < blocks; ++b) total += read(partial + b * size, i, size);
    write(grad_weight, i, size, total);
  }
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// x, residual (or null) and extra (or null) have rows so many elements apart; all else is dense.
// `total` is written where there is a residual. Returns 0, or 2 for an unknown format.
FIVEFOLD_EXPORT int fivefold_rms_norm(
    int format, long rows, long size, const void* x, long x_stride, const void* residual,
    long residual_stride, const float* weight, float eps, float offset, void* y, void* total,
    float* inverse, int threads) {
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    forward<T>(rows, size, {(const T*)x, x_stride}, {(const T*)residual, residual_stride}, weight,
               eps, offset, (T*)y, (T*)total, inverse, threads);
    return DONE;
  });
}

FIVEFOLD_EXPORT int fivefold_rms_norm_backward(
    int format, long rows, long size, const void* grad, long grad_stride, const void* extra,
    long extra_stride, const void* x, long x_stride, const float* weight, float offset,
    const float* inverse, void* grad_x, long block_rows, float* partial, float* grad_weight,
    int threads) {
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    backward<T>(rows, size, {(const T*)grad, grad_stride}, {(const T*)extra, extra_stride},
                {(const T*)x, x_stride}, weight, offset, inverse, (T*)grad_x, block_rows, partial,
                grad_weight, threads);
    return DONE;
  });
}
