/* What the C executor does with values: copies, 16-bit floats, folds.
 *
 * Floating-point folds go operand by operand, in the order given; -ffp-contract=off keeps the bits of NumPy.
 */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR, BXOR };
enum { I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64 };

/* ---- copies: an own loop, because glibc's memcpy is slow at some distances between the pages of source and target */

typedef uint64_t v8 __attribute__((vector_size(64), aligned(1), may_alias));

__attribute__((optimize("no-tree-loop-distribute-patterns"))) static void copy(char *restrict d, const char *restrict s,
                                                                               size_t n, int nontemporal) {
  size_t i = 0;
#if defined(__AVX512F__)
  if (nontemporal && n >= 256) {
    for (; ((uintptr_t)(d + i) & 63) != 0; i++) d[i] = s[i];
    for (; i + 64 <= n; i += 64) _mm512_stream_si512((__m512i *)(d + i), _mm512_loadu_si512(s + i));
  }
#elif defined(__AVX__)
  if (nontemporal && n >= 256) {
    for (; ((uintptr_t)(d + i) & 31) != 0; i++) d[i] = s[i];
    for (; i + 32 <= n; i += 32) _mm256_stream_si256((__m256i *)(d + i), _mm256_loadu_si256((const __m256i *)(s + i)));
  }
#endif
  for (; i + 256 <= n; i += 256) {
    v8 a = *(const v8 *)(s + i), b = *(const v8 *)(s + i + 64), c = *(const v8 *)(s + i + 128), e = *(const v8 *)(s + i + 192);
    *(v8 *)(d + i) = a, *(v8 *)(d + i + 64) = b, *(v8 *)(d + i + 128) = c, *(v8 *)(d + i + 192) = e;
  }
  for (; i < n; i++) d[i] = s[i];
}

static void fence_nontemporal(void) { /* what was written past the caches comes before what is written now */
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/* ---- 16-bit floats: widen to float32, round to nearest even once */

static inline float bf16_to_f32(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline uint16_t f32_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t nan = (u >> 16 & 0x8000) | 0x7fc0;
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static void widen(int dtype, float *restrict d, const uint16_t *restrict s, int64_t n) {
  int64_t i = 0;
  if (dtype == BF16) {
    for (; i < n; i++) d[i] = bf16_to_f32(s[i]);
    return;
  }
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
#endif
  for (; i < n; i++) {
    _Float16 h;
    memcpy(&h, s + i, 2);
    d[i] = (float)h;
  }
}

static void narrow(int dtype, uint16_t *restrict d, const float *restrict s, int64_t n) {
  int64_t i = 0;
  if (dtype == BF16) {
    for (; i < n; i++) d[i] = f32_to_bf16(s[i]);
    return;
  }
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), 0));
#endif
  for (; i < n; i++) {
    _Float16 h = (_Float16)s[i];
    memcpy(d + i, &h, 2);
  }
}

/* ---- folds: acc[i] = a[i] op b[i]; acc may be a */

#define LOOP(T, EXPR)                                                        \
  {                                                                          \
    T *d = (T *)acc;                                                         \
    const T *x = (const T *)a, *y = (const T *)b;                            \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) d[i] = (T)(EXPR);   \
    return;                                                                  \
  }
#define INTEGER(T)                                   \
  switch (op) {                                      \
    case SUM: LOOP(T, (uint64_t)x[i] + (uint64_t)y[i]) \
    case PROD: LOOP(T, (uint64_t)x[i] * (uint64_t)y[i]) \
    case MIN: LOOP(T, x[i] < y[i] ? x[i] : y[i])     \
    case MAX: LOOP(T, x[i] > y[i] ? x[i] : y[i])     \
    case LAND: LOOP(T, x[i] && y[i])                 \
    case LOR: LOOP(T, x[i] || y[i])                  \
    case LXOR: LOOP(T, !x[i] != !y[i])               \
    case BAND: LOOP(T, x[i] & y[i])                  \
    case BOR: LOOP(T, x[i] | y[i])                   \
    default: LOOP(T, x[i] ^ y[i])                    \
  }
#define FLOATING(T)                                              \
  switch (op) {                                                  \
    case SUM: LOOP(T, x[i] + y[i])                               \
    case PROD: LOOP(T, x[i] * y[i])                              \
    case MIN: LOOP(T, (x[i] < y[i] || x[i] != x[i]) ? x[i] : y[i]) \
    default: LOOP(T, (x[i] > y[i] || x[i] != x[i]) ? x[i] : y[i])  \
  }

/* ---- averages: a complete sum divided by the number of ranks; integers towards zero, as NCCL has it */

#define QUOTIENTS(T, W)                                                                              \
  {                                                                                                  \
    for (int64_t i = 0; i < m; i++) ((T *)out)[i] = (T)((W)((const T *)sum)[i] / (W)n);              \
    return;                                                                                          \
  }

static void divide(int dtype, void *out, const void *sum, int64_t n, int64_t m) {
  switch (dtype) {
    case I8: QUOTIENTS(int8_t, int32_t)
    case I16: QUOTIENTS(int16_t, int32_t)
    case I32: QUOTIENTS(int32_t, int64_t)
    case I64: QUOTIENTS(int64_t, int64_t)
    case U8: QUOTIENTS(uint8_t, uint32_t)
    case U16: QUOTIENTS(uint16_t, uint32_t)
    case U32: QUOTIENTS(uint32_t, uint64_t)
    case U64: QUOTIENTS(uint64_t, uint64_t)
    case F64: QUOTIENTS(double, double)
    default: QUOTIENTS(float, float)
  }
}

static void combine(int dtype, int op, void *acc, const void *a, const void *b, int64_t n) {
  switch (dtype) {
    case I8: INTEGER(int8_t)
    case I16: INTEGER(int16_t)
    case I32: INTEGER(int32_t)
    case I64: INTEGER(int64_t)
    case U8: INTEGER(uint8_t)
    case U16: INTEGER(uint16_t)
    case U32: INTEGER(uint32_t)
    case U64: INTEGER(uint64_t)
    case F64: FLOATING(double)
    default: FLOATING(float)
  }
}
