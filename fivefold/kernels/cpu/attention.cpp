// Attention forward: over packed documents, and over a cache of blocks. One code, hence equal bits.
//
// A work item is a run of rows of one sequence and key head. It packs each block of keys and values
// once and takes its rows past them, strips of ROWS at a time, while the block is in the cache.
#include <omp.h>

#include <new>
#include <vector>

#include "attention_call.h"
#include "attention_direct.h"
#include "attention_pack.h"
#include "attention_softmax.h"
#include "kernels.h"

namespace {
using namespace fivefold;

constexpr long TILE = 8 * ROWS;       // rows whose weights are held before values are summed by them
constexpr long ITEM_ROWS = 8 * TILE;  // rows that share a packed block
constexpr long ITEMS_A_THREAD = 4;    // fewer: parts of the keys are work items of their own,
constexpr long MOST_PARTIAL = 16 << 20;  // unless their results take more floats than this

struct Item {
  long sequence, kv_head, row0, row1;
};
struct Piece {
  long item, part, at;  // where its Running lies
};

struct Table {
  const int* blocks = nullptr;  // null: keys of documents lie one behind the other
  long most_blocks = 0, block_size = 1, key_block = 0, value_block = 0;
  long key_dim = 1;  // between the dims of a key; if not 1, the keys of a block are neighbours
  bool crosswise() const { return key_dim != 1; }
};

template <class T> struct Forward {
  Rows query, key, value;
  const int *query_starts, *key_starts, *lengths;  // keys by starts, or by lengths in a table
  Table table;
  Shape shape;
  Score score;
  T* out;      // [query_rows, heads, value_dim]
  float* lse;  // [heads, query_rows] or null
  int threads;

  long longest() const { return std::max(shape.head_dim, shape.value_dim); }
  long width() const { return round_up(shape.value_dim, WIDE); }

  Sight sight(long s) const {
    const long keys = lengths ? lengths[s] : key_starts[s + 1] - key_starts[s];
    return {query_starts[s + 1] - query_starts[s], keys, shape.groups(), score.window, score.causal};
  }
  Slots<T> slots(const Rows& x, long block_stride, long s, long kv_head) const {
    if (!table.blocks) return {x.at<T>(key_starts[s], kv_head), x.stride};
    return {x.at<T>(0, kv_head), x.stride, table.blocks + s * table.most_blocks, table.block_size, block_stride};
  }

  // ---- one item ----

  struct Scratch {
    float *queries, *keys, *values, *weights, *zeros, *running, *other;
  };
  // For items of so many rows at most, in whole strips: a decoding token's are few, and memory for
  // many would come anew from the operating system in every call.
  long scratch_floats(long rows) const {
    return (rows + BLOCK) * shape.head_dim + BLOCK * width() + std::min(rows, TILE) * BLOCK + longest() +
           2 * Running::floats(rows, width());
  }
  Scratch carve(float* at, long rows) const {
    Scratch s;
    s.queries = at;
    s.keys = s.queries + rows * shape.head_dim;
    s.values = s.keys + BLOCK * shape.head_dim;
    s.weights = s.values + BLOCK * width();
    s.zeros = s.weights + std::min(rows, TILE) * BLOCK;
    std::fill(s.zeros, s.zeros + longest(), 0.0f);
    s.running = s.zeros + longest();
    s.other = s.running + Running::floats(rows, width());
    return s;
  }

  const T* query_at(const Item& item, long row) const {
    const long groups = shape.groups();
    return query.at<T>(query_starts[item.sequence] + row / groups, item.kv_head * groups + row % groups);
  }
  void pack_queries(const Item& item, float* strips) const {
    for (long row = item.row0; row < item.row1; row += ROWS, strips += ROWS * shape.head_dim) {
      const T* rows[ROWS];
      const int count = int(std::min<long>(ROWS, item.row1 - row));
      for (int r = 0; r < count; ++r) rows[r] = query_at(item, row + r);
      pack_strip(rows, count, shape.head_dim, score.scale, strips);
    }
  }

  void pack_keys(const Item& item, long start, long first, long end, const Scratch& s) const {
    const Slots<T> keys = slots(key, table.key_block, item.sequence, item.kv_head);
    if (table.crosswise()) {
      for (long n = 0; n < BLOCK; n += WIDE) {  // keys that are not held are masked, NaN or not
        if (start + n >= end || start + n + WIDE <= first) continue;
        const T* from = keys.at(start + n);
        float* panel = s.keys + n * shape.head_dim;
        for (long e = 0; e < shape.head_dim; ++e, from += table.key_dim)
          for (int half = 0; half < 2; ++half)
            store(panel + e * WIDE + half * LANES, load(from + half * LANES));
      }
      return;
    }
    const T* rows[BLOCK];
    keys.block(start, first, end, s.zeros, rows);
    for (int n = 0; n < BLOCK; n += WIDE) pack_across(rows + n, shape.head_dim, s.keys + n * shape.head_dim);
  }

  // One strip of rows past a block, values (and keys that lie crosswise) read in place.
  void strip(const Item& item, const Sight& sees, long start, const Scratch& s, const Running& so_far) const {
    const int count = int(item.row1 - item.row0);
    const Span span = span_of(sees, item.row0, item.row1, start);
    if (span.first >= span.end) return;
    const int panel = span.first_panel(), panels = span.end_panel() - panel;
    float* scores = s.weights + panel * WIDE;
    if (table.crosswise()) {
      const Slots<T> keys = slots(key, table.key_block, item.sequence, item.kv_head);
      const T* from[BLOCK / WIDE];
      for (int j = 0; j < panels; ++j) from[j] = keys.at(start + (panel + j) * WIDE);
      const long step = table.key_dim;
      multiply_direct<1>(count, s.queries, ROWS, [&](long e, int j) { return from[j] + e * step; },
                         panels, shape.head_dim, scores, BLOCK, false);
    } else {
      pack_keys(item, start, sees.first(item.row0), sees.end(item.row1 - 1), s);
      multiply_panels<1>(count, s.queries, ROWS, s.keys + panel * WIDE * shape.head_dim,
                         WIDE * shape.head_dim, panels, shape.head_dim, scores, BLOCK, false);
    }
    weigh(sees, item.row0, item.row1, start, span, score.softcap, s.weights, so_far, 0);
    const T* rows[BLOCK];
    slots(value, table.value_block, item.sequence, item.kv_head)
        .block(start, start + span.first, start + span.end, s.zeros, rows);
    multiply_direct<BLOCK>(count, s.weights + span.first, 1,
                           [&](long i, int j) { return rows[span.first + i] + j * WIDE; },
                           int(width() / WIDE), span.end - span.first, so_far.out, width(), true);
  }

  void pack_block(const Item& item, const Sight& sees, long start, const Scratch& s) const {
    const long first = sees.first(item.row0), end = sees.end(item.row1 - 1);
    pack_keys(item, start, first, end, s);
    const T* rows[BLOCK];
    slots(value, table.value_block, item.sequence, item.kv_head).block(start, first, end, s.zeros, rows);
    pack_along(rows, BLOCK, shape.value_dim, 1.0f, s.values);
  }

  // The rows of a tile past a packed block: scores, weights, then sums of values.
  void tile(const Item& item, const Sight& sees, long tile0, long start, const Scratch& s, const Running& so_far) const {
    const long tile1 = std::min(item.row1, tile0 + TILE);
    for (long row = tile0; row < tile1; row += ROWS) {
      const int count = int(std::min<long>(ROWS, tile1 - row));
      const Span span = span_of(sees, row, row + count, start);
      if (span.first >= span.end) continue;
      const int panel = span.first_panel();
      float* scores = s.weights + (row - tile0) * BLOCK;
      multiply_panels<1>(count, s.queries + (row - item.row0) * shape.head_dim, ROWS,
                         s.keys + panel * WIDE * shape.head_dim, WIDE * shape.head_dim,
                         span.end_panel() - panel, shape.head_dim, scores + panel * WIDE, BLOCK, false);
      weigh(sees, row, row + count, start, span, score.softcap, scores, so_far, row - item.row0);
    }
    for (long row = tile0; row < tile1; row += ROWS) {
      const int count = int(std::min<long>(ROWS, tile1 - row));
      const Span span = span_of(sees, row, row + count, start);
      if (span.first >= span.end) continue;
      multiply_panels<BLOCK>(count, s.weights + (row - tile0) * BLOCK + span.first, 1,
                             s.values + span.first * WIDE, BLOCK * WIDE, int(width() / WIDE),
                             span.end - span.first, so_far.out + (row - item.row0) * width(), width(), true);
    }
  }

  void part(const Item& item, long part, const Scratch& s, const Running& so_far) const {
    const Sight sees = sight(item.sequence);
    const long first = std::max(sees.first(item.row0), part * PART);
    const long end = std::min(sees.end(item.row1 - 1), (part + 1) * PART);
    so_far.clear(item.row1 - item.row0);
    const bool few = item.row1 - item.row0 <= ROWS && shape.value_dim % WIDE == 0;
    for (long start = first / BLOCK * BLOCK; start < end; start += BLOCK) {
      if (few) {
        strip(item, sees, start, s, so_far);
        continue;
      }
      pack_block(item, sees, start, s);
      for (long row = item.row0; row < item.row1; row += TILE) tile(item, sees, row, start, s, so_far);
    }
  }

  long first_part(const Item& item) const { return sight(item.sequence).first(item.row0) / PART; }
  long end_part(const Item& item) const {
    return (std::max<long>(0, sight(item.sequence).end(item.row1 - 1)) + PART - 1) / PART;
  }

  void write(const Item& item, const Running& done) const {
    const long groups = shape.groups();
    for (long row = item.row0; row < item.row1; ++row) {
      const long token = query_starts[item.sequence] + row / groups, head = item.kv_head * groups + row % groups;
      T* to = out + (token * shape.heads + head) * shape.value_dim;
      const float log_sum = finish(done, row - item.row0, shape.value_dim, to);
      if (lse) lse[head * shape.query_rows + token] = log_sum;
    }
  }

  // Parts one after the other: the same merges in the same order as apart.
  void whole(const Item& item, const Scratch& s) const {
    const long rows = item.row1 - item.row0;
    const Running total(s.running, rows, width()), one(s.other, rows, width());
    pack_queries(item, s.queries);
    total.clear(rows);
    const long first = first_part(item), end = end_part(item);
    for (long p = first; p < end; ++p) {
      part(item, p, s, end - first == 1 ? total : one);
      if (end - first > 1) merge(total, one, rows);
    }
    write(item, total);
  }

  // ---- all items ----

  std::vector<Item> items() const {
    std::vector<Item> all;
    for (long s = 0; s < shape.sequences; ++s)
      for (long kv = 0; kv < shape.kv_heads; ++kv)
        for (long end = sight(s).rows(); end > 0;) {  // the last rows see most: they go first
          const long start = (end - 1) / ITEM_ROWS * ITEM_ROWS;
          all.push_back({s, kv, start, end});
          end = start;
        }
    return all;
  }

  void blank(long token0, long token1) const {
    const long each = shape.heads * shape.value_dim;
    std::fill((char*)(out + token0 * each), (char*)(out + token1 * each), 0);
    if (lse)
      for (long head = 0; head < shape.heads; ++head)
        std::fill(lse + head * shape.query_rows + token0, lse + head * shape.query_rows + token1, NEVER);
  }

  int run() const {
    blank(0, query_starts[0]);  // rows that belong to no sequence
    blank(query_starts[shape.sequences], shape.query_rows);
    const std::vector<Item> all = items();
    std::vector<Piece> pieces;
    long floats = 0, rows = 0;
    for (const Item& item : all) rows = std::max(rows, round_up(item.row1 - item.row0, ROWS));
    for (long i = 0; i < long(all.size()); ++i)
      for (long p = first_part(all[i]); p < end_part(all[i]); ++p) {
        pieces.push_back({i, p, floats});
        floats += Running::floats(all[i].row1 - all[i].row0, width());
      }
    const bool apart = long(all.size()) < ITEMS_A_THREAD * threads && pieces.size() > all.size() && floats <= MOST_PARTIAL;
    Floats scratch = allocate_floats(threads * scratch_floats(rows));
    Floats partial = allocate_floats(apart ? floats : 0);
    if (!scratch || !partial) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
    {
      const Scratch mine = carve(scratch.get() + omp_get_thread_num() * scratch_floats(rows), rows);
      if (apart) {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < long(pieces.size()); ++i) {
          const Item& item = all[pieces[i].item];
          pack_queries(item, mine.queries);
          part(item, pieces[i].part, mine, Running(partial.get() + pieces[i].at, item.row1 - item.row0, width()));
        }
      }
#pragma omp for schedule(dynamic)
      for (long i = 0; i < long(all.size()); ++i) {
        if (apart) combine(i, all[i], pieces, partial.get(), mine);
        else whole(all[i], mine);
      }
    }
    return 0;
  }

  void combine(long index, const Item& item, const std::vector<Piece>& pieces, float* partial, const Scratch& s) const {
    const long rows = item.row1 - item.row0;
    const Running total(s.running, rows, width());
    total.clear(rows);
    for (const Piece& piece : pieces)
      if (piece.item == index) merge(total, Running(partial + piece.at, rows, width()), rows);
    write(item, total);
  }
};

// Table entries of blocks that some row sees lie in the cache.
bool is_table(const Forward<float>& call, long blocks) {
  for (long s = 0; s < call.shape.sequences; ++s) {
    const Sight sees = call.sight(s);
    if (sees.keys < 0 || sees.keys > call.table.most_blocks * call.table.block_size) return false;
    if (!sees.queries) continue;
    const long end = (sees.keys + call.table.block_size - 1) / call.table.block_size;
    for (long b = sees.first(0) / call.table.block_size; b < end; ++b) {
      const int entry = call.table.blocks[s * call.table.most_blocks + b];
      if (entry < 0 || entry >= blocks) return false;
    }
  }
  return true;
}

template <class T> int run(const Forward<float>& call, void* out) {
  try {
    return Forward<T>{call.query, call.key, call.value, call.query_starts, call.key_starts, call.lengths,
                      call.table, call.shape, call.score, (T*)out, call.lse, std::max(call.threads, 1)}.run();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

int run_as(int format, const Forward<float>& call, void* out) {
  if (format == FP32) return run<float>(call, out);
  if (format == BF16) return run<bf16>(call, out);
  if (format == FP16) return run<fp16>(call, out);
  return NO_FORMAT;
}
}  // namespace

// Packed documents: query [query_rows, heads, head_dim], key and value [key_rows, kv_heads, ...] with
// strides in elements, starts [sequences + 1]. window 0: none.
FIVEFOLD_EXPORT int fivefold_flash_attention(
    int format, const void* query, long query_stride, long query_head, const void* key, long key_stride,
    long key_head, const void* value, long value_stride, long value_head, const int* query_starts,
    const int* key_starts, long query_rows, long key_rows, long sequences, long heads, long kv_heads,
    long head_dim, long value_dim, int causal, long window, float scale, float softcap, void* out,
    float* lse, int threads) {
  if (!are_starts(query_starts, sequences, query_rows) || !are_starts(key_starts, sequences, key_rows))
    return BAD_STARTS;
  const Forward<float> call{{query, query_stride, query_head}, {key, key_stride, key_head},
                            {value, value_stride, value_head}, query_starts, key_starts, nullptr, {},
                            {query_rows, key_rows, sequences, heads, kv_heads, head_dim, value_dim},
                            {causal != 0, window ? window : NO_WINDOW, scale, softcap}, nullptr, lse, threads};
  return run_as(format, call, out);
}

// A cache of blocks: key [blocks, block_size, kv_heads, head_dim] and value likewise, block_table
// [sequences, most_blocks], lengths [sequences] of keys held. Causal. With a key_dim of more than 1
// (between the dims of a key) key_stride is 1 and block_size a multiple of the widest panel.
FIVEFOLD_EXPORT int fivefold_paged_attention(
    int format, const void* query, long query_stride, long query_head, const void* key, long key_block,
    long key_stride, long key_head, long key_dim, const void* value, long value_block, long value_stride,
    long value_head, const int* block_table, const int* query_starts, const int* lengths,
    long query_rows, long blocks, long block_size, long most_blocks, long sequences, long heads,
    long kv_heads, long head_dim, long value_dim, long window, float scale, float softcap, void* out,
    int threads) {
  if (!are_starts(query_starts, sequences, query_rows)) return BAD_STARTS;
  const Forward<float> call{{query, query_stride, query_head}, {key, key_stride, key_head},
                            {value, value_stride, value_head}, query_starts, nullptr, lengths,
                            {block_table, most_blocks, block_size, key_block, value_block, key_dim},
                            {query_rows, 0, sequences, heads, kv_heads, head_dim, value_dim},
                            {true, window ? window : NO_WINDOW, scale, softcap}, nullptr, nullptr, threads};
  if (!is_table(call, blocks)) return BAD_TABLE;
  return run_as(format, call, out);
}
