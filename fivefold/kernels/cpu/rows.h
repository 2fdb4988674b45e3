// What kernels that walk along rows share: formats, the columns behind the last whole vector, and
// when threads pay.
#pragma once
#include <algorithm>

#include "vec.h"

namespace fivefold {

// What the functions at the C boundary return.
constexpr int DONE = 0, UNKNOWN_FORMAT = 2;

// f(T{}) for the type T that Python's code for a format stands for.
template <class F> inline int with_format(int format, F f) {
  switch (format) {
    case FP32: return f(float{});
    case BF16: return f(bf16{});
    case FP16: return f(fp16{});
  }
  return UNKNOWN_FORMAT;
}

// Columns [i, i + LANES) of a row of n, zeros behind the last.
template <class T> inline vf read(const T* row, long i, long n) {
  return n - i >= LANES ? load(row + i) : load_some(row + i, int(n - i));
}
template <class T> inline void write(T* row, long i, long n, vf x) {
  if (n - i >= LANES) store(row + i, x);
  else store_some(row + i, x, int(n - i));
}

// Waking a thread takes as long as so many elements.
constexpr long ELEMENTS_A_THREAD = 1 << 14;

inline int threads_for(long elements, int threads) {
  return int(std::clamp<long>(elements / ELEMENTS_A_THREAD, 1, std::max(threads, 1)));
}

}  // namespace fivefold
