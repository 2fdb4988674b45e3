// The blocks of a decoder over the tokens of one step, in one call: the kernels of this folder, one
// after the other, with the operands and in the order of `model/`. So the bits are those of the
// modules; what is saved is Python and torch between the kernels, most of the time of a few tokens.
#include "decoder_step.h"

#include "kernels.h"
#include "vec.h"

namespace {
using namespace fivefold;

long bytes_of(int format) { return format == FP32 ? 4 : 2; }

// Memory between kernels, one piece of it: rows of all tokens.
struct Scratch {
  char *normed, *heads, *normed_heads, *query, *key, *attended, *projected, *gate_up, *gated;
  float* inverse;
};

struct Step {
  const DecoderShape& s;
  const DecoderLayer* layers;
  const DecoderCache& cache;
  const DecoderBatch& batch;
  char* hidden;  // [N][D], in and out
  int threads;
  Scratch at{};

  long width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

  // Lays the scratch out from `memory` on, or only counts its bytes.
  long carve(char* memory) {
    const long n = batch.tokens, bytes = bytes_of(s.format);
    long used = 0;
    const auto take = [&](long elements) {
      char* piece = memory + used;
      used += round_up(elements * bytes, 64);
      return piece;
    };
    at.normed = take(n * s.hidden);
    at.heads = take(n * width());
    at.normed_heads = take(layers->query_norm ? n * (s.heads + s.kv_heads) * s.head_dim : 0);
    at.query = take(n * s.heads * s.head_dim);
    at.key = take(n * s.kv_heads * s.head_dim);
    at.attended = take(n * s.heads * s.head_dim);
    at.projected = take(n * s.hidden);
    at.gate_up = take(n * 2 * s.inner);
    at.gated = take(n * s.inner);
    at.inverse = (float*)take(n * (4 / bytes));
    return used;
  }

  char* shifted(char* x, long elements) const { return x + elements * bytes_of(s.format); }

  int multiply(const Packed& w, long outputs, long inputs, const char* x, char* y) const {
    return fivefold_packed_linear(batch.tokens, outputs, inputs, s.format, x, inputs, w.data, w.scale,
                                  w.bias, y, outputs, threads);
  }
  int norm(const float* weight, const char* x, char* y) const {
    return fivefold_rms_norm(s.format, batch.tokens, s.hidden, x, s.hidden, nullptr, 0, weight, s.eps,
                             s.norm_offset, y, nullptr, at.inverse, threads);
  }
  // hidden += x, through the norm that some families have after a block; then y = norm(hidden).
  int add_and_norm(const float* post, const float* next, char* x, char* y) const {
    if (post)
      if (const int failed = norm(post, x, x)) return failed;
    return fivefold_rms_norm(s.format, batch.tokens, s.hidden, x, s.hidden, hidden, s.hidden, next,
                             s.eps, s.norm_offset, y, hidden, at.inverse, threads);
  }

  // Turns `count` heads, the first at place `first` of a token's heads, normed before if there is a
  // weight. Normed heads lie one head after the other, each of all tokens.
  int turn(const DecoderLayer& layer, const float* weight, long first, long count, char* to) const {
    const long n = batch.tokens, e = s.head_dim;
    const char* from = shifted(at.heads, first * e);
    long token = width(), head = e;
    if (weight) {
      for (long h = 0; h < count; ++h)
        if (const int failed = fivefold_rms_norm(
                s.format, n, e, shifted(at.heads, (first + h) * e), width(), nullptr, 0, weight, s.eps,
                s.norm_offset, shifted(at.normed_heads, (first + h) * n * e), nullptr, at.inverse,
                threads))
          return failed;
      from = shifted(at.normed_heads, first * n * e);
      token = e;
      head = n * e;
    }
    return fivefold_rotate(s.format, 1, n, count, e / 2, from, 0, token, head,
                           batch.cosines[layer.rope], batch.sines[layer.rope], 0, 1.0f, to, threads);
  }

  int attend(const DecoderLayer& layer, long index) const {
    const long n = batch.tokens, e = s.head_dim;
    char* keys = shifted((char*)cache.keys, index * cache.key_layer);
    char* values = shifted((char*)cache.values, index * cache.value_layer);
    if (const int failed = fivefold_write_cache(
            s.format, n, batch.slots, at.key, s.kv_heads * e,
            shifted(at.heads, (s.heads + s.kv_heads) * e), width(), keys, cache.key_block,
            cache.key_stride, cache.key_head, cache.key_dim, values, cache.value_block,
            cache.value_stride, cache.value_head, cache.blocks, cache.block_size, s.kv_heads, e, e,
            threads))
      return failed;
    return fivefold_paged_attention(
        s.format, at.query, s.heads * e, e, keys, cache.key_block, cache.key_stride, cache.key_head,
        cache.key_dim, values, cache.value_block, cache.value_stride, cache.value_head,
        batch.block_table, batch.query_starts, batch.lengths, n, cache.blocks, cache.block_size,
        batch.most_blocks, batch.sequences, s.heads, s.kv_heads, e, e, layer.window, s.scale,
        s.softcap, at.attended, threads);
  }

  // From the normed hidden state to the block's two results added to `hidden`; then the norm of
  // what comes `next`.
  int block(const DecoderLayer& layer, long index, const float* next) const {
    const long attended = s.heads * s.head_dim;
    int failed = multiply(layer.heads, width(), s.hidden, at.normed, at.heads);
    if (!failed) failed = turn(layer, layer.query_norm, 0, s.heads, at.query);
    if (!failed) failed = turn(layer, layer.key_norm, s.heads, s.kv_heads, at.key);
    if (!failed) failed = attend(layer, index);
    if (!failed) failed = multiply(layer.output, s.hidden, attended, at.attended, at.projected);
    if (!failed) failed = add_and_norm(layer.attention_post_norm, layer.feed_forward_norm, at.projected, at.normed);
    if (!failed) failed = multiply(layer.gate_up, 2 * s.inner, s.hidden, at.normed, at.gate_up);
    if (!failed)
      failed = fivefold_gated(s.format, s.activation, batch.tokens, s.inner, at.gate_up, 2 * s.inner,
                              shifted(at.gate_up, s.inner), 2 * s.inner, at.gated, threads);
    if (!failed) failed = multiply(layer.down, s.hidden, s.inner, at.gated, at.projected);
    if (!failed) failed = add_and_norm(layer.feed_forward_post_norm, next, at.projected, at.normed);
    return failed;
  }

  int run(const float* final_norm) const {
    int failed = norm(layers[0].attention_norm, hidden, at.normed);
    for (long i = 0; i < s.layers && !failed; ++i)
      failed = block(layers[i], i, i + 1 < s.layers ? layers[i + 1].attention_norm : final_norm);
    return failed;
  }
};
}  // namespace

// Bytes of `scratch` for so many tokens.
FIVEFOLD_EXPORT long fivefold_decoder_scratch(const DecoderShape* shape, const DecoderLayer* layers,
                                              long tokens) {
  DecoderBatch batch{};
  batch.tokens = tokens;
  return Step{*shape, layers, DecoderCache{}, batch, nullptr, 1}.carve(nullptr);
}

// `hidden` [N][D] goes through all layers (at least one) in place; at the start of `scratch` then lie
// the states after the final norm, [N][D]. Keys and values of the tokens are written on the way.
// Returns 0, or what a kernel returned.
FIVEFOLD_EXPORT int fivefold_decoder_step(const DecoderShape* shape, const DecoderLayer* layers,
                                          const DecoderCache* cache, const DecoderBatch* batch,
                                          const float* final_norm, void* hidden, void* scratch,
                                          int threads) {
  Step step{*shape, layers, *cache, *batch, (char*)hidden, threads};
  step.carve((char*)scratch);
  return step.run(final_norm);
}
