// One step of AdamW over flat tensors: each number is read once and written once, where a chain of
// operators would pass over the memory a dozen times.
#include "call.h"
#include "rows.h"

namespace fivefold {
namespace {

// What the host computes once a step, in double precision: corrections of the moments' bias
// towards zero, and how much of a parameter decay leaves.
struct Step {
  float rate, root, keep, beta2, rest1, rest2, eps;
};

template <class G, class C>
void update(long count, float* parameter, const G* gradient, float* first, float* second, C* copy,
            const Step& s, int threads) {
#pragma omp parallel for num_threads(threads_for(count, threads)) schedule(static)
  for (long i = 0; i < count; i += LANES) {
    const vf slope = read(gradient, i, count), before = read(first, i, count);
    const vf mean = before + (slope - before) * splat(s.rest1);
    const vf square = read(second, i, count) * splat(s.beta2) + slope * slope * splat(s.rest2);
    const vf scale = square_root(square) / splat(s.root) + splat(s.eps);
    const vf moved = read(parameter, i, count) * splat(s.keep) - splat(s.rate) * (mean / scale);
    write(first, i, count, mean);
    write(second, i, count, square);
    write(parameter, i, count, moved);
    if (copy) write(copy, i, count, moved);
  }
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// parameter, first and second moment are fp32 [count], gradient and copy (or null) of any format;
// `rest` is 1 - beta. Returns 0, or 2 for an unknown format.
FIVEFOLD_EXPORT int fivefold_adamw(
    long count, float* parameter, int gradient_format, const void* gradient, float* first,
    float* second, int copy_format, void* copy, float rate, float root, float keep, float beta2,
    float rest1, float rest2, float eps, int threads) {
  const Step step{rate, root, keep, beta2, rest1, rest2, eps};
  return with_format(gradient_format, [&](auto gradient_kind) {
    return with_format(copy_format, [&](auto copy_kind) {
      using G = decltype(gradient_kind);
      using C = decltype(copy_kind);
      update<G, C>(count, parameter, (const G*)gradient, first, second, (C*)copy, step, threads);
      return DONE;
    });
  });
}
