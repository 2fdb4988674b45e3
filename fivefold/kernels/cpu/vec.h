// Vectors of floats as wide as the CPU's registers, in GCC's vector extensions.
//
// One source serves every width: 16 lanes with AVX-512, 8 with AVX, 4 elsewhere (SSE, NEON). The
// compiler splits a vector that is wider than the machine's, so -DFIVEFOLD_LANES=16 runs the
// 16-lane code on an 8-lane CPU (slowly): that is how it is tested where AVX-512 is missing.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef FIVEFOLD_LANES
#if defined(__AVX512F__)
#define FIVEFOLD_LANES 16
#elif defined(__AVX__)
#define FIVEFOLD_LANES 8
#else
#define FIVEFOLD_LANES 4
#endif
#endif

namespace fivefold {

constexpr int LANES = FIVEFOLD_LANES;

typedef float vf __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), may_alias));
typedef int8_t vb __attribute__((vector_size(LANES), may_alias));

// Storage formats. Arithmetic is always in fp32.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The codes by which Python names formats at the C boundary (cpu/library.py).
enum Format : int { FP32 = 0, BF16 = 1, FP16 = 2 };

inline vf splat(float x) { return x - vf{}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float to_float(fp16 x) {
#if defined(__FLT16_MAX__)
  _Float16 half;
  std::memcpy(&half, &x.bits, 2);
  return float(half);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // bias 15 to bias 127
  if (magnitude >= 0x7c00) bits += 112u << 23;       // infinities and NaN
  float value;
  if (magnitude < 0x0400) value = float(magnitude) * 0x1p-24f;  // subnormals
  else std::memcpy(&value, &bits, 4);
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

template <class T> inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{uint16_t((bits >> 16) | 0x40)};  // a quiet NaN
  return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};  // to nearest, ties to even
}
template <> inline fp16 from_float<fp16>(float x) {
#if defined(__FLT16_MAX__)
  const _Float16 half = _Float16(x);
  fp16 result;
  std::memcpy(&result.bits, &half, 2);
  return result;
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return fp16{uint16_t(sign | 0x7e00)};
  if (bits >= 0x477ff000) return fp16{uint16_t(sign | 0x7c00)};
  if (bits < 0x38800000) {  // subnormal: let the FPU round at the right bit
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return fp16{uint16_t(sign | (bits - 0x3f000000))};
  }
  bits += 0xfff + ((bits >> 13) & 1) - (112u << 23);
  return fp16{uint16_t(sign | (bits >> 13))};
#endif
}

// ---- loads and stores: LANES values, from anywhere (no alignment asked) ----

inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline vf load(const bf16* p) {  // GCC 12 takes five instructions to widen by itself
#if defined(__AVX2__) && FIVEFOLD_LANES == 8
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  vh x;
  std::memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}
inline vf load(const fp16* p) {
#if defined(__F16C__) && FIVEFOLD_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  vf x;
  for (int i = 0; i < LANES; ++i) x[i] = to_float(p[i]);
  return x;
#endif
}
inline vf load(const int8_t* p) {
#if defined(__AVX2__) && FIVEFOLD_LANES == 8  // GCC 12 widens bytes one by one
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  vb x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
#endif
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu quiet = (bits >> 16) | 0x40;
  const vu chosen = (vu)(x == x ? rounded : quiet);
#if defined(__AVX2__) && FIVEFOLD_LANES == 8
  const __m256i wide = (__m256i)chosen;
  const __m128i low = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128((__m128i*)p, low);
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)chosen));
#else
  const vh low = __builtin_convertvector(chosen, vh);
  std::memcpy(p, &low, sizeof low);
#endif
}
inline void store(fp16* p, vf x) {
#if defined(__F16C__) && FIVEFOLD_LANES == 8
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < LANES; ++i) p[i] = from_float<fp16>(x[i]);
#endif
}

// The first `count` < LANES values, zeros (or `fill`) behind them: never touches memory beyond.
template <class T> inline vf load_some(const T* p, int count, float fill = 0.0f) {
  float buffer[LANES];
  for (int i = 0; i < LANES; ++i) buffer[i] = i < count ? to_float(p[i]) : fill;
  return load(buffer);
}
template <class T> inline void store_some(T* p, vf x, int count) {
  T buffer[LANES];
  store(buffer, x);
  std::memcpy(p, buffer, count * sizeof(T));
}

// ---- arithmetic ----

// a b + c, rounded once where the CPU can. Never left to the compiler (-ffp-contract=off), which
// fuses in one kernel and not in another, as it thinks best: the bits of a sum would depend on it.
inline vf fused(vf a, vf b, vf c) {
#if defined(__FMA__) && FIVEFOLD_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__aarch64__) && FIVEFOLD_LANES == 4
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vf square_root(vf x) {
#if defined(__AVX__) && FIVEFOLD_LANES == 8
  return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__AVX512F__) && FIVEFOLD_LANES == 16
  return (vf)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < LANES; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }
inline vf minimum(vf a, vf b) { return a < b ? a : b; }

// Sums and maxima of the lanes by halving, one fixed order whatever the row.
inline float sum(vf x) {
  float lanes[LANES];
  store(lanes, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float maximum(vf x) {
  float lanes[LANES];
  store(lanes, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// e^x within 2 units in the last place; exactly 0 below -87.3 (so e^-inf = 0), NaN for NaN.
// x = n ln2 + r with |r| <= ln2 / 2; e^r by the polynomial of Cephes' expf (Moshier 1989).
inline vf exp(vf x) {
  const vf inside = minimum(maximum(x, splat(-87.3f)), splat(88.3f));
  const vf magic = splat(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer
  const vf shifted = fused(inside, splat(1.44269504088896341f), magic);
  const vf n = shifted - magic;
  const vf r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), inside));
  vf p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + splat(1.0f);
  const vi exponent = __builtin_convertvector(n, vi) << 23;
  const vf value = (vf)((vi)p + exponent);
  const vf bounded = x < splat(-87.3f) ? splat(0.0f) : value;
  return x == x ? bounded : x;
}

inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// tanh(x) = 1 - 2 / (e^2x + 1); near 0, where that cancels, the Taylor series.
inline vf tanh(vf x) {
  const vf big = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
  const vf s = x * x;
  const vf small =
      x + x * s * (splat(-1.0f / 3) + s * (splat(2.0f / 15) + s * (splat(-17.0f / 315) + s * splat(62.0f / 2835))));
  return (s < splat(0.04f)) ? small : big;
}

}  // namespace fivefold
