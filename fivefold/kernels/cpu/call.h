// What every C function here has in common: how it is seen from outside, what it returns, and how it
// takes memory. Nothing throws across the boundary.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>

// The build hides all other symbols.
#define FIVEFOLD_EXPORT extern "C" __attribute__((visibility("default")))

namespace fivefold {

// What the functions return beside 0; the bindings say it in words.
enum Failure : int { NO_MEMORY = 1, NO_FORMAT = 2, BAD_STARTS = 3, BAD_TABLE = 4 };

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

struct FreeFloats {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float, FreeFloats>;

// On a cache line of its own. Null where memory is missing.
inline Floats allocate_floats(long count) {
  return Floats((float*)std::aligned_alloc(64, round_up(std::max<long>(count, 1) * 4, 64)));
}

}  // namespace fivefold
