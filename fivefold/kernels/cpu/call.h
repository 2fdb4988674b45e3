// What every C function here has in common: how it is seen from outside, what it returns, and how it
// takes memory. Nothing throws across the boundary.
#pragma once
#include "scratch.h"

// The build hides all other symbols.
#define FIVEFOLD_EXPORT extern "C" __attribute__((visibility("default")))

namespace fivefold {

// What the functions return beside 0; the bindings say it in words.
enum Failure : int { NO_MEMORY = 1, NO_FORMAT = 2, BAD_STARTS = 3, BAD_TABLE = 4 };

}  // namespace fivefold
