// What a chunk of logits is turned into: losses and their slopes, or log-probabilities and
// entropies. A row (of a vocabulary) is read twice while it is in the cache: once for its largest
// logit and the sum of exponentials, once for what is made of them.
//
// A row's numbers depend on that row alone: its sums run in lanes and blocks counted from column 0.
#include "call.h"
#include "rows.h"

#include <cfloat>
#include <cmath>

namespace fivefold {
namespace {

constexpr long IGNORE = -100;
constexpr int BAD_LABEL = 3;
constexpr int BLOCK = 8;  // vectors between two corrections of the largest logit

// Softmax of a row is e^(logit - largest) / sum.
struct Softmax {
  float largest, sum;
  double log_sum() const { return std::log(double(sum)); }             // from `largest` on
  double normaliser() const { return double(largest) + log_sum(); }  // log of the sum of e^logit
};

// c tanh(x / c), in place of x. A cap of 0 is none.
inline void cap_row(float* row, long size, float cap) {
  for (long i = 0; i < size; i += LANES)
    write(row, i, size, splat(cap) * tanh(read(row, i, size) / splat(cap)));
}

// The running maximum starts at the least finite number: -inf would give -inf - -inf = NaN.
Softmax softmax_of(const float* row, long size) {
  vf largest = splat(-FLT_MAX), sums = {};
  long i = 0;
  for (; i + BLOCK * LANES <= size; i += BLOCK * LANES) {
    vf block[BLOCK];
    vf next = largest;
    for (int b = 0; b < BLOCK; ++b) next = maximum(next, block[b] = load(row + i + b * LANES));
    sums *= exp(largest - next);
    for (int b = 0; b < BLOCK; ++b) sums += exp(block[b] - next);
    largest = next;
  }
  for (; i < size; i += LANES) {
    const vf x = size - i >= LANES ? load(row + i) : load_some(row + i, int(size - i), -INFINITY);
    const vf next = maximum(largest, x);
    sums = sums * exp(largest - next) + exp(x - next);
    largest = next;
  }
  const float most = maximum(largest);
  return {most, sum(sums * exp(largest - splat(most)))};
}

inline vf probabilities(vf logits, const Softmax& s) {
  return exp(logits - splat(s.largest)) * splat(1.0f / s.sum);
}

inline double total_of(const float* row, long size) {
  vf total[2] = {};
  for (long i = 0; i < size; i += LANES) total[(i / LANES) % 2] += read(row, i, size);
  return double(sum(total[0])) + double(sum(total[1]));
}

// Overwrites logits by slope(logits), then that of the label, if there is one, by one that knows it.
// Slopes of a format T lie at the start of their row's memory: writing never overtakes reading.
template <class T, class F> void slopes_in_place(float* row, long size, long label, F slope) {
  const vf of_label = label == IGNORE ? vf{} : slope(splat(row[label]), 1.0f);
  T* to = (T*)row;
  for (long i = 0; i < size; i += LANES) write(to, i, size, slope(read(row, i, size), 0.0f));
  if (label != IGNORE) to[label] = from_float<T>(of_label[0]);
}

// How much of a slope by the capped logit arrives at the raw one: 1 - tanh^2.
inline vf bend(vf capped, float cap) {
  if (cap == 0.0f) return splat(1.0f);
  const vf t = capped / splat(cap);
  return splat(1.0f) - t * t;
}

struct Chunk {
  long rows, size;
  float* logits;
  const int64_t* labels;
  float cap;
  int threads;

  bool labels_fit() const {
    return std::all_of(labels, labels + rows,
                       [&](int64_t x) { return x == IGNORE || (x >= 0 && x < size); });
  }

  // f(row number, its logits, its label or IGNORE)
  template <class F> int every(F f) const {
    if (!labels_fit()) return BAD_LABEL;
#pragma omp parallel for num_threads(threads_for(rows * size, threads)) schedule(static)
    for (long r = 0; r < rows; ++r) f(r, logits + r * size, long(labels[r]));
    return DONE;
  }

  // f(row number, its logits, capped, its label) for rows with a label; g(...) for the others.
  template <class F, class G> int each(F f, G g) const {
    return every([&](long r, float* row, long label) {
      if (label == IGNORE) return g(r, row);
      if (cap != 0.0f) cap_row(row, size, cap);
      f(r, row, label);
    });
  }
};

// loss = (1 - smoothing) (n - l[label]) + smoothing (n - mean l) + z n^2, n the normaliser.
template <class T>
int losses_and_slopes(const Chunk& chunk, float z_loss, float smoothing, bool wants_slopes,
                      float* losses) {
  const float cap = chunk.cap, share = smoothing / float(chunk.size);
  return chunk.each(
      [&](long r, float* row, long label) {
        const Softmax s = softmax_of(row, chunk.size);
        const double n = s.normaliser();
        // From the largest logit on: the difference of two large numbers would round.
        double loss = s.log_sum() - (double(row[label]) - s.largest);
        if (smoothing != 0.0f) {
          const double others = s.log_sum() - (total_of(row, chunk.size) / double(chunk.size) - s.largest);
          loss += double(smoothing) * (others - loss);
        }
        losses[r] = float(loss + double(z_loss) * n * n);
        if (!wants_slopes) return;
        const float rise = float(1.0 + 2.0 * double(z_loss) * n);
        slopes_in_place<T>(row, chunk.size, label, [&](vf logits, float is_label) {
          const vf p = probabilities(logits, s);
          return (p * splat(rise) - splat(share + (1.0f - smoothing) * is_label)) * bend(logits, cap);
        });
      },
      [&](long r, float* row) {
        losses[r] = 0.0f;
        if (wants_slopes) std::fill((T*)row, (T*)row + chunk.size, T{});
      });
}

// The entropy -sum p log p = log_sum - sum p (l - largest), where p = 0 adds nothing.
double entropy_of(const float* row, long size, const Softmax& s) {
  vf total[2] = {};
  for (long i = 0; i < size; i += LANES) {
    const vf x = size - i >= LANES ? load(row + i) : load_some(row + i, int(size - i), -INFINITY);
    const vf below = x - splat(s.largest), weight = exp(below);
    total[(i / LANES) % 2] += weight == splat(0.0f) ? splat(0.0f) : weight * below;
  }
  return s.log_sum() - double(sum(total[0] + total[1])) / s.sum;
}

int log_probs(const Chunk& chunk, float* log_probs, float* entropies) {
  return chunk.each(
      [&](long r, float* row, long label) {
        const Softmax s = softmax_of(row, chunk.size);
        log_probs[r] = float((double(row[label]) - s.largest) - s.log_sum());
        entropies[r] = float(entropy_of(row, chunk.size, s));
      },
      [&](long r, float*) { log_probs[r] = entropies[r] = 0.0f; });
}

// By a logit, the log-probability of the label has the slope (is label) - p, and the entropy
// -p (log p + entropy).
template <class T>
int log_probs_slopes(const Chunk& chunk, const float* of_log_probs, const float* of_entropies) {
  const float cap = chunk.cap;
  return chunk.each(
      [&](long r, float* row, long label) {
        const Softmax s = softmax_of(row, chunk.size);
        const vf a = splat(of_log_probs[r]), b = splat(of_entropies[r]);
        // log p + entropy = (l - largest) + this
        const vf above = splat(float(entropy_of(row, chunk.size, s) - s.log_sum()));
        slopes_in_place<T>(row, chunk.size, label, [&](vf logits, float is_label) {
          const vf p = probabilities(logits, s);
          const vf of_p = a + b * (logits - splat(s.largest) + above);
          const vf pull = p == splat(0.0f) ? splat(0.0f) : p * of_p;
          return (a * splat(is_label) - pull) * bend(logits, cap);
        });
      },
      [&](long, float* row) { std::fill((T*)row, (T*)row + chunk.size, T{}); });
}

// Of words that are a part of the vocabulary: what the parts are put together from.
int part_sums(const Chunk& chunk, float* largest, float* sums, float* chosen) {
  return chunk.every([&](long r, float* row, long label) {
    if (chunk.cap != 0.0f) cap_row(row, chunk.size, chunk.cap);
    const Softmax s = softmax_of(row, chunk.size);
    largest[r] = s.largest;
    sums[r] = s.sum;
    chosen[r] = label == IGNORE ? 0.0f : row[label];
  });
}

// Of the same logits, capped: rise * softmax - (is label), the softmax being of all parts.
template <class T>
int part_slopes(const Chunk& chunk, const float* largest, const float* sums, const float* rise) {
  const float cap = chunk.cap;
  return chunk.every([&](long r, float* row, long label) {
    if (rise[r] == 0.0f) return std::fill((T*)row, (T*)row + chunk.size, T{});
    const Softmax whole{largest[r], sums[r]};
    slopes_in_place<T>(row, chunk.size, label, [&](vf logits, float is_label) {
      return (probabilities(logits, whole) * splat(rise[r]) - splat(is_label)) * bend(logits, cap);
    });
  });
}

}  // namespace
}  // namespace fivefold

using namespace fivefold;

// logits [rows][size] dense fp32; labels -100 where there is none; a cap of 0 is none. Where
// slopes are wanted, row r holds them from its start on, in `format`. Returns 0, 2 for an unknown
// format, 3 for a label beyond the row (nothing is done then).
FIVEFOLD_EXPORT int fivefold_cross_entropy(
    long rows, long size, float* logits, const int64_t* labels, float cap, float z_loss,
    float smoothing, int format, int wants_slopes, float* losses, int threads) {
  const Chunk chunk{rows, size, logits, labels, cap, threads};
  return with_format(format, [&](auto kind) {
    return losses_and_slopes<decltype(kind)>(chunk, z_loss, smoothing, wants_slopes != 0, losses);
  });
}

FIVEFOLD_EXPORT int fivefold_log_probs(
    long rows, long size, float* logits, const int64_t* labels, float cap, float* log_probs,
    float* entropies, int threads) {
  return fivefold::log_probs(Chunk{rows, size, logits, labels, cap, threads}, log_probs, entropies);
}

FIVEFOLD_EXPORT int fivefold_log_probs_slopes(
    long rows, long size, float* logits, const int64_t* labels, float cap, const float* of_log_probs,
    const float* of_entropies, int format, int threads) {
  const Chunk chunk{rows, size, logits, labels, cap, threads};
  return with_format(format, [&](auto kind) {
    return log_probs_slopes<decltype(kind)>(chunk, of_log_probs, of_entropies);
  });
}

// logits as above; a label of -100 is one that other words have, or none. They are left capped.
FIVEFOLD_EXPORT int fivefold_part_sums(long rows, long size, float* logits, const int64_t* labels,
                                       float cap, float* largest, float* sums, float* chosen,
                                       int threads) {
  return part_sums(Chunk{rows, size, logits, labels, cap, threads}, largest, sums, chosen);
}

// largest and sums [rows] are of all words; a rise of 0 makes slopes of 0, whatever is in the row.
FIVEFOLD_EXPORT int fivefold_part_slopes(long rows, long size, float* logits, const int64_t* labels,
                                         float cap, const float* largest, const float* sums,
                                         const float* rise, int format, int threads) {
  const Chunk chunk{rows, size, logits, labels, cap, threads};
  return with_format(format, [&](auto kind) {
    return part_slopes<decltype(kind)>(chunk, largest, sums, rise);
  });
}
