// What one step of a decoder takes, as it crosses the C boundary: plain numbers and addresses.
//
// N tokens of the step, D hidden, H query heads, K key/value heads, E head_dim, F feed-forward.
// cpu/decoder_step.py declares the same structures to Python, field by field.
#pragma once

namespace fivefold {

// A packed weight (packed.cpp) with the scales of int8, or none, and a bias, or none.
struct Packed {
  const void* data;
  const float *scale, *bias;
};

// Norms are fp32 [D] ([E] of heads); those that a family lacks are null.
struct DecoderLayer {
  const float *attention_norm, *feed_forward_norm, *query_norm, *key_norm, *attention_post_norm,
      *feed_forward_post_norm;
  Packed heads;    // [(H + 2 K) E, D]: query, key and value, one below the other
  Packed output;   // [D, H E]
  Packed gate_up;  // [2 F, D]: gate, then up
  Packed down;     // [D, F]
  long window;     // 0: none
  long rope;       // which of the step's tables
};

struct DecoderShape {
  long layers, hidden, heads, kv_heads, head_dim, inner;
  int format, activation;
  float eps, norm_offset, scale, softcap;
};

// Caches of all layers, `layer` apart: keys and values as attention.cpp has them.
struct DecoderCache {
  void *keys, *values;
  long key_layer, key_block, key_stride, key_head, key_dim;
  long value_layer, value_block, value_stride, value_head;
  long blocks, block_size;
};

struct DecoderBatch {
  long tokens, sequences, most_blocks;
  const long* slots;  // [N]
  const int *block_table, *query_starts, *lengths;
  const float* const* cosines;  // of each rope: [N][E / 2]
  const float* const* sines;
};

}  // namespace fivefold
