// Keys and values of new tokens into a cache of blocks.
#include "kernels.h"
#include "rows.h"

namespace fivefold {
namespace {

struct Place {
  long block, token, head, dim;  // strides in elements
};

template <class T>
void write(long tokens, const long* slots, const T* from, long from_token, T* cache, const Place& at,
           long block_size, long heads, long dims, int threads) {
#pragma omp parallel for num_threads(threads_for(tokens * heads * dims, threads)) schedule(static)
  for (long t = 0; t < tokens; ++t) {
    T* to = cache + slots[t] / block_size * at.block + slots[t] % block_size * at.token;
    for (long h = 0; h < heads; ++h) {
      const T* row = from + t * from_token + h * dims;
      T* head = to + h * at.head;
      if (at.dim == 1) std::copy(row, row + dims, head);
      else
        for (long d = 0; d < dims; ++d) head[d * at.dim] = row[d];
    }
  }
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// key [tokens][kv_heads][head_dim], rows key_token apart, and value likewise, to slots (block *
// block_size + offset) of caches as attention.cpp has them. Returns 0, 2 for an unknown format, 4
// for a slot that the cache does not have (nothing is done then).
FIVEFOLD_EXPORT int fivefold_write_cache(
    int format, long tokens, const long* slots, const void* key, long key_token, const void* value,
    long value_token, void* key_cache, long key_block, long key_stride, long key_head, long key_dim,
    void* value_cache, long value_block, long value_stride, long value_head, long blocks,
    long block_size, long kv_heads, long head_dim, long value_dim, int threads) {
  for (long t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= blocks * block_size) return BAD_TABLE;
  return with_format(format, [&](auto kind) {
    using T = decltype(kind);
    write(tokens, slots, (const T*)key, key_token, (T*)key_cache,
          {key_block, key_stride, key_head, key_dim}, block_size, kv_heads, head_dim, threads);
    write(tokens, slots, (const T*)value, value_token, (T*)value_cache,
          {value_block, value_stride, value_head, 1}, block_size, kv_heads, value_dim, threads);
    return DONE;
  });
}
