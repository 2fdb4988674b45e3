// SwiGLU and GeGLU: activation(gate) * up by rows, and both gradients from one reading.
#include "kernels.h"
#include "rows.h"

namespace fivefold {
namespace {

// The codes by which Python names activations (cpu/gated.py).
enum Activation : int { SILU = 0, GELU_TANH = 1 };

// 1 / (1 + e^-x) and 1 - that, each without cancellation, and 0 where e^-|x| is.
struct Logistic {
  vf on, off;
};
inline Logistic logistic(vf x) {
  const vf small = exp(x < splat(0.0f) ? x : -x);
  const vf large = splat(1.0f) / (splat(1.0f) + small);
  const vf rest = small * large;
  return {x < splat(0.0f) ? rest : large, x < splat(0.0f) ? large : rest};
}

// Value and slope of silu(x) = x s(x).
struct Silu {
  static vf value(vf x) { return x * logistic(x).on; }
  static void both(vf x, vf& value, vf& slope) {
    const Logistic s = logistic(x);
    value = x * s.on;
    slope = s.on * (splat(1.0f) + x * s.off);
  }
};

// 0.5 x (1 + tanh(u)) is x s(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float SCALE = 2.0f * 0.7978845608028654f, CUBIC = 0.044715f;
  static vf inner(vf x) { return splat(SCALE) * x * (splat(1.0f) + splat(CUBIC) * x * x); }
  static vf value(vf x) { return x * logistic(inner(x)).on; }
  static void both(vf x, vf& value, vf& slope) {
    // Beyond this the activation is flat to the last bit, and x^3 would overflow.
    const vf near = minimum(maximum(x, splat(-50.0f)), splat(50.0f));
    const Logistic s = logistic(inner(near));
    value = x * s.on;
    slope = s.on + near * s.on * s.off * splat(SCALE) * (splat(1.0f) + splat(3 * CUBIC) * near * near);
    slope = x == x ? slope : x;
  }
};

template <class A, class T>
void forward(long rows, long size, const T* gate, long gate_stride, const T* up, long up_stride, T* y,
             int threads) {
#pragma omp parallel for num_threads(threads_for(rows * size, threads)) schedule(static)
  for (long r = 0; r < rows; ++r)
    for (long i = 0; i < size; i += LANES)
      write(y + r * size, i, size,
            A::value(read(gate + r * gate_stride, i, size)) * read(up + r * up_stride, i, size));
}

template <class A, class T>
void backward(long rows, long size, const T* grad, long grad_stride, const T* gate, long gate_stride,
              const T* up, long up_stride, T* grad_gate, T* grad_up, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * size, threads)) schedule(static)
  for (long r = 0; r < rows; ++r)
    for (long i = 0; i < size; i += LANES) {
      const vf g = read(grad + r * grad_stride, i, size);
      vf value, slope;
      A::both(read(gate + r * gate_stride, i, size), value, slope);
      write(grad_gate + r * size, i, size, g * read(up + r * up_stride, i, size) * slope);
      write(grad_up + r * size, i, size, g * value);
    }
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// Inputs are rows so many elements apart, results dense. Returns 0, or 2 for an unknown format.
FIVEFOLD_EXPORT int fivefold_gated(
    int format, int activation, long rows, long size, const void* gate, long gate_stride,
    const void* up, long up_stride, void* y, int threads) {
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    const auto run = activation == SILU ? forward<Silu, T> : forward<GeluTanh, T>;
    run(rows, size, (const T*)gate, gate_stride, (const T*)up, up_stride, (T*)y, threads);
    return DONE;
  });
}

FIVEFOLD_EXPORT int fivefold_gated_backward(
    int format, int activation, long rows, long size, const void* grad, long grad_stride,
    const void* gate, long gate_stride, const void* up, long up_stride, void* grad_gate,
    void* grad_up, int threads) {
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    const auto run = activation == SILU ? backward<Silu, T> : backward<GeluTanh, T>;
    run(rows, size, (const T*)grad, grad_stride, (const T*)gate, gate_stride, (const T*)up, up_stride,
        (T*)grad_gate, (T*)grad_up, threads);
    return DONE;
  });
}
