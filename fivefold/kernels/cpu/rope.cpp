// Rotation of the halves of each head by the angles of its position; linear, so that backward is
// the same by the opposite angles.
#include "kernels.h"
#include "rows.h"

namespace fivefold {
namespace {

// x is [batch][length][heads][2 * half], every dim but the last of any stride; y is dense. Tables
// are [batch][length][half], dense but for the batch, whose stride may be 0.
struct Shape {
  long batch, length, heads, half;
  long x_batch, x_token, x_head, table_batch;
};

template <class T>
void rotate(const Shape& s, const T* x, const float* cosines, const float* sines, float sign, T* y,
            int threads) {
  const long tokens = s.batch * s.length, wide = 2 * s.half;
#pragma omp parallel for num_threads(threads_for(tokens * s.heads * wide, threads)) schedule(static)
  for (long token = 0; token < tokens; ++token) {
    const long b = token / s.length, place = token % s.length;
    const float* cosine = cosines + b * s.table_batch + place * s.half;
    const float* sine = sines + b * s.table_batch + place * s.half;
    for (long h = 0; h < s.heads; ++h) {
      const T* from = x + b * s.x_batch + place * s.x_token + h * s.x_head;
      T* to = y + (token * s.heads + h) * wide;
      for (long i = 0; i < s.half; i += LANES) {
        const vf first = read(from, i, s.half), second = read(from + s.half, i, s.half);
        const vf c = read(cosine, i, s.half), turn = splat(sign) * read(sine, i, s.half);
        write(to, i, s.half, first * c - second * turn);
        write(to + s.half, i, s.half, second * c + first * turn);
      }
    }
  }
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// `sign` is 1, or -1 to turn back. Returns 0, or 2 for an unknown format.
FIVEFOLD_EXPORT int fivefold_rotate(
    int format, long batch, long length, long heads, long half, const void* x, long x_batch,
    long x_token, long x_head, const float* cosines, const float* sines, long table_batch, float sign,
    void* y, int threads) {
  const Shape shape{batch, length, heads, half, x_batch, x_token, x_head, table_batch};
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    rotate<T>(shape, (const T*)x, cosines, sines, sign, (T*)y, threads);
    return DONE;
  });
}
