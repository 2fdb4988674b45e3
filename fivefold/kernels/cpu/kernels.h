// The C functions of this folder that others here call, as they are declared to Python.
#pragma once
#include "call.h"

FIVEFOLD_EXPORT int fivefold_packed_linear(long m, long n, long k, int format, const void* x,
                                           long x_stride, const void* packed, const float* scale,
                                           const float* bias, void* y, long y_stride, int threads);
FIVEFOLD_EXPORT int fivefold_rms_norm(
    int format, long rows, long size, const void* x, long x_stride, const void* residual,
    long residual_stride, const float* weight, float eps, float offset, void* y, void* total,
    float* inverse, int threads);
FIVEFOLD_EXPORT int fivefold_rotate(
    int format, long batch, long length, long heads, long half, const void* x, long x_batch,
    long x_token, long x_head, const float* cosines, const float* sines, long table_batch, float sign,
    void* y, int threads);
FIVEFOLD_EXPORT int fivefold_gated(
    int format, int activation, long rows, long size, const void* gate, long gate_stride,
    const void* up, long up_stride, void* y, int threads);
FIVEFOLD_EXPORT int fivefold_write_cache(
    int format, long tokens, const long* slots, const void* key, long key_token, const void* value,
    long value_token, void* key_cache, long key_block, long key_stride, long key_head, long key_dim,
    void* value_cache, long value_block, long value_stride, long value_head, long blocks,
    long block_size, long kv_heads, long head_dim, long value_dim, int threads);
FIVEFOLD_EXPORT int fivefold_paged_attention(
    int format, const void* query, long query_stride, long query_head, const void* key, long key_block,
    long key_stride, long key_head, long key_dim, const void* value, long value_block, long value_stride,
    long value_head, const int* block_table, const int* query_starts, const int* lengths,
    long query_rows, long blocks, long block_size, long most_blocks, long sequences, long heads,
    long kv_heads, long head_dim, long value_dim, long window, float scale, float softcap, void* out,
    int threads);
