// The operands of attention as they cross the C boundary, and what is checked of their contents.
#pragma once
#include "attention.h"

namespace fivefold {

struct Rows {
  const void* data;
  long stride, head_stride;  // in elements; the last dimension is in one piece

  template <class T> const T* at(long row, long head) const {
    return (const T*)data + row * stride + head * head_stride;
  }
};

struct Shape {
  long query_rows, key_rows, sequences, heads, kv_heads, head_dim, value_dim;
  long groups() const { return heads / kv_heads; }
};

struct Score {
  bool causal;
  long window;
  float scale, softcap;
};

// Cumulative starts [sequences + 1] that never fall and stay within `rows`.
inline bool are_starts(const int* starts, long sequences, long rows) {
  for (long s = 0; s <= sequences; ++s)
    if (starts[s] < (s ? starts[s - 1] : 0) || starts[s] > rows) return false;
  return true;
}

}  // namespace fivefold
