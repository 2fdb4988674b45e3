// Products of strips of rows with panels of keys, and which of the scores count.
#pragma once
#include "attention.h"

namespace fivefold {

constexpr float NEVER = -__builtin_inff();  // the score of a key that is not seen

inline vi lane_numbers() {
  vi lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  return lanes;
}

// P panels' products side by side where rows are few: one accumulator alone waits on itself.
template <int A_ROW>
APART void multiply_panels(int rows, const float* a, int a_step, const float* b, long panel_stride,
                            int panels, long k, float* c, long c_stride, bool resume) {
  int j = 0;
#define FIVEFOLD_SWEEP(R, P)                                                               \
  if (rows == R)                                                                           \
    for (; j + P <= panels; j += P)                                                        \
      multiply<R, P, float>(a, a_step, A_ROW, b + j * panel_stride, panel_stride, k,       \
                            c + j * WIDE, c_stride, resume);
  FIVEFOLD_SWEEP(1, 4)
  FIVEFOLD_SWEEP(2, 2)
  FIVEFOLD_SWEEP(3, 2)
#undef FIVEFOLD_SWEEP
  for (; j < panels; ++j)
    multiply_rows<float>(rows, a, a_step, A_ROW, b + j * panel_stride, k, c + j * WIDE, c_stride, resume);
}

// Which keys of a block, counted from its start, a strip sees.
struct Span {
  int first, end;  // any of its rows
  bool whole;      // every row sees all keys of the panels that are touched
  int first_panel() const { return first / WIDE; }
  int end_panel() const { return (end + WIDE - 1) / WIDE; }
};

inline Span span_of(const Sight& sight, long row0, long row1, long block_start) {
  const auto inside = [&](long key) { return int(std::clamp<long>(key - block_start, 0, BLOCK)); };
  Span s{inside(sight.first(row0)), inside(sight.end(row1 - 1)), false};
  s.whole = inside(sight.first(row1 - 1)) <= s.first_panel() * WIDE &&
            inside(sight.end(row0)) >= s.end_panel() * WIDE;
  return s;
}

// Scores [LANES] of keys at `key` and on, -inf outside [first, end).
inline vf masked(vf scores, int key, int first, int end) {
  const vi keys = lane_numbers() + key;
  const vi seen = (keys >= first) & (keys < end);
  return seen ? scores : splat(NEVER);
}

inline vf capped(vf scores, float softcap) {
  return splat(softcap) * tanh(scores * splat(1.0f / softcap));
}

}  // namespace fivefold
