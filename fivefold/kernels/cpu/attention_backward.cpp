// Attention backward: scores again from queries and keys, weights from the log-sum-exp.
//
// One thread owns a sequence and key head and with it the gradients of its keys and values, which
// are summed over the rows in order: no atomics, and bits that do not depend on the batch.
#include <omp.h>

#include <new>
#include <vector>

#include "attention_call.h"
#include "attention_pack.h"
#include "attention_scores.h"

namespace {
using namespace fivefold;

constexpr long TILE = 16 * ROWS;       // rows whose weights are held at a time
constexpr long CHUNK_ROWS = 4 * TILE;  // rows that share a packed block

struct Item {
  long sequence, kv_head, work;
};

// Scores and products of the gradient with values, both [rows][BLOCK], to weights and gradients of
// scores in place; zeros in every panel that the strip does not see.
APART void differentiate(const Sight& sight, long row0, long row1, long block_start, const Span& span,
                         float softcap, const float* lse, const float* mean, float* scores, float* slopes) {
  const int from = span.first_panel() * 2, to = span.end_panel() * 2;
  for (long row = row0; row < row1; ++row, ++lse, ++mean, scores += BLOCK, slopes += BLOCK) {
    const int first = int(std::clamp<long>(sight.first(row) - block_start, 0, BLOCK));
    const int end = int(std::clamp<long>(sight.end(row) - block_start, 0, BLOCK));
    const vf base = splat(*lse == NEVER ? -NEVER : *lse);  // such a row saw nothing
    for (int v = 0; v < BLOCK / LANES; ++v) {
      vf weight = {}, slope = {};
      if (v >= from && v < to) {
        vf score = load(scores + v * LANES), steepness = splat(1.0f);
        if (softcap != 0.0f) {
          score = capped(score, softcap);
          const vf bend = score * splat(1.0f / softcap);
          steepness -= bend * bend;
        }
        if (!span.whole) score = masked(score, v * LANES, first, end);
        weight = exp(score - base);
        slope = weight * (load(slopes + v * LANES) - splat(*mean)) * steepness;
      }
      store(scores + v * LANES, weight);
      store(slopes + v * LANES, slope);
    }
  }
}

template <class T> struct Backward {
  Rows grad, query, key, value, out;
  const float* lse;  // [heads, query_rows]
  const int *query_starts, *key_starts;
  Shape shape;
  Score score;
  T *d_query, *d_key, *d_value;  // [query_rows, heads, head_dim], [key_rows, kv_heads, ...]
  int threads;

  long key_width() const { return round_up(shape.head_dim, WIDE); }
  long value_width() const { return round_up(shape.value_dim, WIDE); }

  Sight sight(long s) const {
    return {query_starts[s + 1] - query_starts[s], key_starts[s + 1] - key_starts[s], shape.groups(),
            score.window, score.causal};
  }
  long token(const Item& item, long row) const { return query_starts[item.sequence] + row / shape.groups(); }
  long head(const Item& item, long row) const {
    return item.kv_head * shape.groups() + row % shape.groups();
  }

  // Floats of one thread. Rows are packed twice: in strips as left operands, in panels as right ones.
  struct Scratch {
    float *query_strips, *grad_strips, *query_panels, *grad_panels, *lse, *mean, *d_query;
    float *keys_across, *values_across, *keys_along, *weights, *slopes, *zeros, *d_key, *d_value;
    long floats = 0;

    Scratch(float* at, const Shape& shape, long key_width, long value_width, long most_keys) {
      const auto take = [&](float*& to, long count) {
        to = at + floats;
        floats += round_up(count, 16);
      };
      take(query_strips, CHUNK_ROWS * shape.head_dim);
      take(grad_strips, CHUNK_ROWS * shape.value_dim);
      take(query_panels, CHUNK_ROWS * key_width);
      take(grad_panels, CHUNK_ROWS * value_width);
      take(lse, CHUNK_ROWS);
      take(mean, CHUNK_ROWS);
      take(d_query, CHUNK_ROWS * key_width);
      take(keys_across, BLOCK * shape.head_dim);
      take(values_across, BLOCK * shape.value_dim);
      take(keys_along, BLOCK * key_width);
      take(weights, TILE * BLOCK);
      take(slopes, TILE * BLOCK);
      take(zeros, std::max(shape.head_dim, shape.value_dim));
      take(d_key, most_keys * key_width);
      take(d_value, most_keys * value_width);
    }
  };

  // Rows [row0, row1) of a chunk that starts at `chunk`, at most a tile.
  void pack_tile_rows(const Item& item, long chunk, long row0, long row1, const Scratch& s) const {
    const T *queries[TILE], *grads[TILE];
    const int count = int(row1 - row0);
    for (int r = 0; r < count; ++r) {
      const long row = row0 + r, t = token(item, row), h = head(item, row), at = row - chunk;
      queries[r] = query.at<T>(t, h);
      grads[r] = grad.at<T>(t, h);
      s.lse[at] = lse[h * shape.query_rows + t];
      const T* result = out.at<T>(t, h);
      vf sums = {};
      for (long i = 0; i < shape.value_dim; i += LANES)
        sums += load_within(grads[r], i, shape.value_dim) * load_within(result, i, shape.value_dim);
      s.mean[at] = sum(sums);
    }
    for (int r = 0; r < count; r += ROWS) {
      const int rows = std::min(ROWS, count - r);
      const long at = row0 + r - chunk;
      pack_strip(queries + r, rows, shape.head_dim, score.scale, s.query_strips + at * shape.head_dim);
      pack_strip(grads + r, rows, shape.value_dim, 1.0f, s.grad_strips + at * shape.value_dim);
    }
    pack_along(queries, count, shape.head_dim, score.scale, s.query_panels + (row0 - chunk) * key_width());
    pack_along(grads, count, shape.value_dim, 1.0f, s.grad_panels + (row0 - chunk) * value_width());
  }

  void pack_block(const Item& item, const Sight& sees, long start, const Scratch& s) const {
    const T* rows[BLOCK];
    const long first = key_starts[item.sequence];
    Slots<T>{key.at<T>(first, item.kv_head), key.stride}.block(start, 0, sees.keys, s.zeros, rows);
    for (int n = 0; n < BLOCK; n += WIDE) pack_across(rows + n, shape.head_dim, s.keys_across + n * shape.head_dim);
    pack_along(rows, BLOCK, shape.head_dim, 1.0f, s.keys_along);
    Slots<T>{value.at<T>(first, item.kv_head), value.stride}.block(start, 0, sees.keys, s.zeros, rows);
    for (int n = 0; n < BLOCK; n += WIDE) pack_across(rows + n, shape.value_dim, s.values_across + n * shape.value_dim);
  }

  // Weights and gradients of scores of a tile, and what they add to the queries' gradients.
  void queries_of(const Sight& sees, long chunk, long row0, long row1, long start, const Scratch& s) const {
    for (long row = row0; row < row1; row += ROWS) {
      const int count = int(std::min<long>(ROWS, row1 - row));
      const Span span = span_of(sees, row, row + count, start);
      if (span.first >= span.end) continue;
      const long at = row - chunk, here = (row - row0) * BLOCK, panel = span.first_panel();
      const int panels = span.end_panel() - int(panel);
      const auto product = [&](const float* strips, const float* across, long depth, float* to) {
        multiply_panels<1>(count, strips + at * depth, ROWS, across + panel * WIDE * depth, WIDE * depth,
                           panels, depth, to + here + panel * WIDE, BLOCK, false);
      };
      product(s.query_strips, s.keys_across, shape.head_dim, s.weights);
      product(s.grad_strips, s.values_across, shape.value_dim, s.slopes);
      differentiate(sees, row, row + count, start, span, score.softcap, s.lse + at, s.mean + at,
                    s.weights + here, s.slopes + here);
      multiply_panels<BLOCK>(count, s.slopes + here + span.first, 1, s.keys_along + span.first * WIDE,
                             BLOCK * WIDE, int(key_width() / WIDE), span.end - span.first,
                             s.d_query + at * key_width(), key_width(), true);
    }
  }

  // What a tile adds to the gradients of a block's keys and values, ROWS keys at a time.
  void keys_of(const Sight& sees, long chunk, long row0, long row1, long start, const Scratch& s) const {
    const int keys = int(std::min<long>(BLOCK, sees.keys - start));
    for (int n = 0; n < keys; n += ROWS) {
      const int count = std::min(ROWS, keys - n);
      const long first = std::max(row0, sees.first_row(start + n));
      const long end = std::min(row1, sees.end_row(start + n + count));
      if (first >= end) continue;
      const auto product = [&](const float* left, const float* panels, long width, float* to) {
        multiply_panels<1>(count, left + (first - row0) * BLOCK + n, BLOCK,
                           panels + (row0 - chunk) * width + (first - row0) * WIDE, (row1 - row0) * WIDE,
                           int(width / WIDE), end - first, to + (start + n) * width, width, true);
      };
      product(s.weights, s.grad_panels, value_width(), s.d_value);
      product(s.slopes, s.query_panels, key_width(), s.d_key);
    }
  }

  void chunk(const Item& item, const Sight& sees, long chunk0, long chunk1, const Scratch& s) const {
    std::fill(s.d_query, s.d_query + (chunk1 - chunk0) * key_width(), 0.0f);
    for (long row = chunk0; row < chunk1; row += TILE)
      pack_tile_rows(item, chunk0, row, std::min(chunk1, row + TILE), s);
    const long end = sees.end(chunk1 - 1);
    for (long start = sees.first(chunk0) / BLOCK * BLOCK; start < end; start += BLOCK) {
      pack_block(item, sees, start, s);
      for (long row = chunk0; row < chunk1; row += TILE) {
        const long row1 = std::min(chunk1, row + TILE);
        queries_of(sees, chunk0, row, row1, start, s);
        keys_of(sees, chunk0, row, row1, start, s);
      }
    }
    for (long row = chunk0; row < chunk1; ++row)
      write(s.d_query + (row - chunk0) * key_width(), shape.head_dim, score.scale,
            d_query + (token(item, row) * shape.heads + head(item, row)) * shape.head_dim);
  }

  void whole(const Item& item, const Scratch& s) const {
    const Sight sees = sight(item.sequence);
    std::fill(s.d_key, s.d_key + sees.keys * key_width(), 0.0f);
    std::fill(s.d_value, s.d_value + sees.keys * value_width(), 0.0f);
    for (long row = 0; row < sees.rows(); row += CHUNK_ROWS)
      chunk(item, sees, row, std::min(sees.rows(), row + CHUNK_ROWS), s);
    for (long i = 0; i < sees.keys; ++i) {
      const long at = (key_starts[item.sequence] + i) * shape.kv_heads + item.kv_head;
      write(s.d_key + i * key_width(), shape.head_dim, 1.0f, d_key + at * shape.head_dim);
      write(s.d_value + i * value_width(), shape.value_dim, 1.0f, d_value + at * shape.value_dim);
    }
  }

  static void write(const float* from, long length, float scale, T* to) {
    for (long i = 0; i < length; i += LANES) {
      const vf x = load(from + i) * splat(scale);
      if (length - i >= LANES) store(to + i, x);
      else store_some(to + i, x, int(length - i));
    }
  }

  // Rows that belong to no sequence have no gradient.
  static void blank(T* gradient, long each, const int* starts, long sequences, long rows) {
    std::fill((char*)gradient, (char*)(gradient + starts[0] * each), 0);
    std::fill((char*)(gradient + starts[sequences] * each), (char*)(gradient + rows * each), 0);
  }

  int run() const {
    blank(d_query, shape.heads * shape.head_dim, query_starts, shape.sequences, shape.query_rows);
    blank(d_key, shape.kv_heads * shape.head_dim, key_starts, shape.sequences, shape.key_rows);
    blank(d_value, shape.kv_heads * shape.value_dim, key_starts, shape.sequences, shape.key_rows);
    std::vector<Item> items;
    long most_keys = 0;
    for (long s = 0; s < shape.sequences; ++s) {
      const Sight sees = sight(s);
      most_keys = std::max(most_keys, sees.keys);
      for (long kv = 0; kv < shape.kv_heads; ++kv) items.push_back({s, kv, sees.rows() * sees.keys});
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.work > b.work; });
    const auto carve = [&](float* at) { return Scratch(at, shape, key_width(), value_width(), most_keys); };
    const long each = carve(nullptr).floats;
    const int team = int(std::clamp<long>(items.size(), 1, threads));
    Floats memory = allocate_floats(team * each);
    if (!memory) return NO_MEMORY;
#pragma omp parallel num_threads(team)
    {
      const Scratch mine = carve(memory.get() + omp_get_thread_num() * each);
      std::fill(mine.zeros, mine.zeros + std::max(shape.head_dim, shape.value_dim), 0.0f);
#pragma omp for schedule(dynamic)
      for (long i = 0; i < long(items.size()); ++i) whole(items[i], mine);
    }
    return 0;
  }
};

template <class T>
int run(Rows grad, Rows query, Rows key, Rows value, Rows out, const float* lse, const int* query_starts,
        const int* key_starts, const Shape& shape, const Score& score, void* d_query, void* d_key,
        void* d_value, int threads) {
  try {
    return Backward<T>{grad, query, key, value, out, lse, query_starts, key_starts, shape, score,
                       (T*)d_query, (T*)d_key, (T*)d_value, std::max(threads, 1)}.run();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}
}  // namespace

// As fivefold_flash_attention. lse [heads, query_rows] and the gradients lie in one piece.
FIVEFOLD_EXPORT int fivefold_flash_attention_backward(
    int format, const void* grad, long grad_stride, long grad_head, const void* query, long query_stride,
    long query_head, const void* key, long key_stride, long key_head, const void* value,
    long value_stride, long value_head, const void* out, long out_stride, long out_head,
    const int* query_starts, const int* key_starts, long query_rows, long key_rows, long sequences,
    long heads, long kv_heads, long head_dim, long value_dim, int causal, long window, float scale,
    float softcap, const float* lse, void* d_query, void* d_key, void* d_value, int threads) {
  if (!are_starts(query_starts, sequences, query_rows) || !are_starts(key_starts, sequences, key_rows))
    return BAD_STARTS;
  const Shape shape{query_rows, key_rows, sequences, heads, kv_heads, head_dim, value_dim};
  const Score score{causal != 0, window ? window : NO_WINDOW, scale, softcap};
  const auto call = format == FP32 ? run<float> : format == BF16 ? run<bf16> : format == FP16 ? run<fp16> : nullptr;
  if (!call) return NO_FORMAT;
  return call({grad, grad_stride, grad_head}, {query, query_stride, query_head}, {key, key_stride, key_head},
              {value, value_stride, value_head}, {out, out_stride, out_head}, lse, query_starts, key_starts,
              shape, score, d_query, d_key, d_value, threads);
}
