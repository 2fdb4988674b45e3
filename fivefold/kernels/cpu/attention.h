// What forward and backward attention share: sizes of blocks, what a query sees, where keys lie.
//
// The query heads of a key head are rows of one matrix: row r = i * groups + g is query i of the
// sequence in the g-th head of the group. Everything here is about one sequence and one key head.
#pragma once
#include <algorithm>

#include "call.h"
#include "gemm.h"

namespace fivefold {

// Keys are taken BLOCK at a time, blocks aligned to position 0 of their sequence: the softmax of a
// row runs over the same blocks however its queries were batched or chunked.
constexpr int BLOCK = 64;
static_assert(BLOCK % WIDE == 0, "a block of keys is whole panels");

// A softmax runs over PART keys at most; parts are computed apart, by several threads where queries
// are few, and merged in order. An absolute length, so that a row's bits depend on nothing else.
constexpr long PART = 1024;

// Compiled once, not once for every format and caller: both kernels run the very same instructions.
#define APART __attribute__((noinline))

constexpr long NO_WINDOW = long(1) << 40;

// Which keys the rows of a sequence see. The last query sits at the last key.
struct Sight {
  long queries, keys, groups, window;
  bool causal;

  long rows() const { return queries * groups; }
  long position(long row) const { return row / groups + keys - queries; }
  // Row sees keys [first, end), none where end <= first. Both grow with the row.
  long first(long row) const { return causal ? std::max<long>(0, position(row) - window + 1) : 0; }
  long end(long row) const { return causal ? position(row) + 1 : keys; }

  // Rows [first_row, end_row) are the ones that see any of keys [k0, k1).
  long first_row(long k0) const {
    return causal ? std::max<long>(0, k0 - (keys - queries)) * groups : 0;
  }
  long end_row(long k1) const {
    if (!causal) return rows();
    return std::clamp<long>(k1 - 1 + window - (keys - queries), 0, queries) * groups;
  }
};

// Keys (or values) of one sequence and head: contiguous rows, or slots of a block table.
template <class T> struct Slots {
  const T* base;
  long stride;                // between neighbouring keys
  const int* table = nullptr;  // null: one block holds all
  long block_size = 1, block_stride = 0;

  const T* at(long position) const {
    if (!table) return base + position * stride;
    return base + table[position / block_size] * block_stride + position % block_size * stride;
  }
  // Where the keys of a block lie. Outside [first, end), which may hold anything, a row of zeros
  // takes their place. Slots of one cache block are found together: a division a key would take
  // longer than its products.
  void block(long block_start, long first, long end, const float* zeros, const T** rows) const {
    const long from = std::max(first, block_start), to = std::min(end, block_start + BLOCK);
    long position = block_start;
    for (; position < std::min(from, block_start + BLOCK); ++position) rows[position - block_start] = (const T*)zeros;
    while (position < to) {
      const long run = table ? std::min(to - position, block_size - position % block_size) : to - position;
      const T* slot = at(position);
      for (long i = 0; i < run; ++i, ++position, slot += stride) rows[position - block_start] = slot;
    }
    for (; position < block_start + BLOCK; ++position) rows[position - block_start] = (const T*)zeros;
  }
};

}  // namespace fivefold
