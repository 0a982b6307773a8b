// Element types, conversions and reductions, and packs: the 16 bytes that a thread loads or stores at once.
//
// Macros from codegen.py: N ranks, the ELEMENT type, the OPERATION. C++17 without system headers, so that NVRTC
// compiles it for whatever GPU is found.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- element types: T lies in memory, A accumulates

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct f8e4m3 { u8 bits; };  // has no infinities: values too large become NaN, as in ml_dtypes
struct f8e5m2 { u8 bits; };
template <class R> struct cplx { R re, im; };
struct raw { u8 byte; };  // for collectives that only move bytes

template <class X> struct acc_of { typedef X type; };
template <> struct acc_of<f16> { typedef float type; };
template <> struct acc_of<bf16> { typedef float type; };
template <> struct acc_of<f8e4m3> { typedef float type; };
template <> struct acc_of<f8e5m2> { typedef float type; };

__device__ __forceinline__ float widen(f16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
}
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f8e5m2 x) { return widen(f16{(u16)(x.bits << 8)}); }
__device__ __forceinline__ float widen(f8e4m3 x) {
  const u32 sign = (u32)(x.bits & 0x80) << 24, rest = x.bits & 0x7f;
  if (rest == 0x7f) return __uint_as_float(sign | 0x7fc00000);
  if (rest < 8) return __uint_as_float(__float_as_uint((float)rest * 0.001953125f) | sign);  // rest / 512
  return __uint_as_float(sign | ((rest << 20) + (120u << 23)));
}
template <class X> __device__ __forceinline__ X widen(X x) { return x; }

// Rounds once, to nearest even, to eight bits with MANTISSA bits behind the exponent. LARGEST is the bit pattern of the
// largest finite value, OVERFLOW what replaces larger ones, QUIET_NAN a NaN.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 OVERFLOW, u32 QUIET_NAN>
__device__ __forceinline__ u8 to_eight(float f) {
  const u32 u = __float_as_uint(f), sign = u >> 24 & 0x80, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return (u8)(sign | QUIET_NAN);
  u32 bits;
  if (rest < (u32)(128 - BIAS) << 23) {
    bits = (u32)__float2int_rn(__uint_as_float(rest) * (float)(1 << (BIAS - 1 + MANTISSA)));
  } else {
    bits = (rest + (1u << (22 - MANTISSA)) - 1 + (rest >> (23 - MANTISSA) & 1)) >> (23 - MANTISSA);
    bits -= (u32)(127 - BIAS) << MANTISSA;
  }
  return (u8)(sign | (bits > LARGEST ? OVERFLOW : bits));
}
__device__ __forceinline__ void narrow(f8e4m3& x, float f) { x.bits = to_eight<3, 7, 0x7e, 0x7f, 0x7f>(f); }
__device__ __forceinline__ void narrow(f8e5m2& x, float f) { x.bits = to_eight<2, 15, 0x7b, 0x7c, 0x7e>(f); }

__device__ __forceinline__ void narrow(f16& x, float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(f)); }
__device__ __forceinline__ void narrow(bf16& x, float f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(f));
#else
  const u32 u = __float_as_uint(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // rounds once, to nearest even
  x.bits = (u16)((u & 0x7fffffff) > 0x7f800000 ? ((u >> 16 & 0x8000) | 0x7fc0) : rounded);
#endif
}
template <class X> __device__ __forceinline__ void narrow(X& x, X f) { x = f; }

// ---- reduction operations, as docs/numerics.md defines them

enum { NONE, SUM, AVG, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR, BXOR };  // AVG: of integers

template <class X> __device__ __forceinline__ X combine(X a, X b) {  // integers wrap around
  switch (OPERATION) {
    case SUM:
    case AVG: return (X)((u64)a + (u64)b);
    case PROD: return (X)((u64)a * (u64)b);
    case MIN: return a < b ? a : b;
    case MAX: return a > b ? a : b;
    case LAND: return (X)(a && b);
    case LOR: return (X)(a || b);
    case LXOR: return (X)(!a != !b);
    case BAND: return (X)(a & b);
    case BOR: return (X)(a | b);
    default: return (X)(a ^ b);
  }
}
template <class X> __device__ __forceinline__ X combine_float(X a, X b) {  // min and max propagate NaN
  switch (OPERATION) {
    case SUM: return a + b;
    case PROD: return a * b;
    case MIN: return (a < b || a != a) ? a : b;
    default: return (a > b || a != a) ? a : b;
  }
}
__device__ __forceinline__ float combine(float a, float b) { return combine_float(a, b); }
__device__ __forceinline__ double combine(double a, double b) { return combine_float(a, b); }
__device__ __forceinline__ raw combine(raw a, raw) { return a; }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }  // no fused multiply-add
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
template <class R> __device__ __forceinline__ cplx<R> combine(cplx<R> a, cplx<R> b) {
  if (OPERATION == SUM) return {a.re + b.re, a.im + b.im};
  return {times(a.re, b.re) - times(a.im, b.im), times(a.re, b.im) + times(a.im, b.re)};
}

// By a power of two a product has the same bits as the quotient, and is far shorter.
template <class R> __device__ __forceinline__ R quotient(R a, int n) {
  return n & (n - 1) ? a / (R)n : times(a, (R)1 / (R)n);
}
// Integers are divided towards zero, as NCCL does. Those of up to 16 bits by a product, which takes fewer registers: half
// a unit beyond the sum it is at least 1 / 2n from every whole number, far more than two roundings of float32 come to.
template <class X> __device__ __forceinline__ X divided(X a, int n) {
  if (OPERATION != AVG) return a;  // nor have sums the code for it
  if (sizeof(X) < 4) return (X)(int)times((float)(int)a + ((int)a < 0 ? -0.5f : 0.5f), 1.0f / (float)n);
  if ((X)-1 < (X)0) return sizeof(X) < 8 ? (X)((int)a / n) : (X)((i64)a / n);
  return sizeof(X) < 8 ? (X)((u32)a / (u32)n) : (X)((u64)a / (u64)n);
}
__device__ __forceinline__ raw divided(raw a, int) { return a; }
__device__ __forceinline__ float divided(float a, int n) { return quotient(a, n); }
__device__ __forceinline__ double divided(double a, int n) { return quotient(a, n); }
template <class R> __device__ __forceinline__ cplx<R> divided(cplx<R> a, int n) {
  return {quotient(a.re, n), quotient(a.im, n)};
}

// Sums of 16-bit floats, two elements in a word. With two operands they have the bits that `widen`, `+` and `narrow`
// would give: rounding a sum to float32 before it is rounded to at most 11 digits changes nothing, since 24 are twice
// as many and two more (Figueroa, "When is double rounding innocuous?", 1995).
// tests/gpu/calls/test_sums.py tries all pairs.
template <class X> struct Pairs { static constexpr bool ADD = false; };
template <> struct Pairs<f16> { static constexpr bool ADD = true; };
template <class X> __device__ __forceinline__ u32 pair_sum(u32 a, u32) { return a; }
template <> __device__ __forceinline__ u32 pair_sum<f16>(u32 a, u32 b) {
  u32 c;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> struct Pairs<bf16> { static constexpr bool ADD = true; };
template <> __device__ __forceinline__ u32 pair_sum<bf16>(u32 a, u32 b) {
  u32 c;  // a * 1 + b, rounded once; generations before 9.0 have no addition
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80), "r"(b));
  return c;
}
#endif

// ---- packs: 16 bytes, E elements of T; as partial results (of A) they may take 32 or 64 bytes

typedef ELEMENT T;
typedef acc_of<T>::type A;
constexpr int E = 16 / sizeof(T);
constexpr bool WIDE = sizeof(A) != sizeof(T);
constexpr bool ADDS_PAIRS = Pairs<T>::ADD && OPERATION == SUM;

template <int BYTES> struct alignas(16) Bits { u32 w[BYTES / 4]; };
typedef Bits<16> Pack;
typedef Bits<(int)(E * sizeof(A))> Partial;

__device__ __forceinline__ Pack load_pack(const void* p) {
  Pack x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_pack(void* p, const Pack& x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(p), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}
__device__ __forceinline__ u32 load_byte(const void* p) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_byte(void* p, u32 x) {
  asm volatile("st.global.u8 [%0], %1;" :: "l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// User buffers are aligned to their element type only, and the last pack of one has just `bytes` bytes.
template <class W> __device__ __forceinline__ void copy_words(void* to, const void* from, int bytes) {
#pragma unroll
  for (int i = 0; i < (int)(16 / sizeof(W)); i++)
    if (i * (int)sizeof(W) < bytes) ((W*)to)[i] = ((const W*)from)[i];
}
__device__ __forceinline__ Pack load_user(const char* p, int bytes) {
  if (aligned(p) && bytes >= 16) return load_pack(p);
  Pack x = {{0, 0, 0, 0}};
  if ((((u64)p | (u64)bytes) & 3) == 0) copy_words<u32>(&x, p, bytes);
  else if ((((u64)p | (u64)bytes) & 1) == 0) copy_words<u16>(&x, p, bytes);
  else copy_words<u8>(&x, p, bytes);
  return x;
}
__device__ __forceinline__ void store_user(char* p, const Pack& x, int bytes) {
  if (aligned(p) && bytes >= 16) return store_pack(p, x);
  if ((((u64)p | (u64)bytes) & 3) == 0) copy_words<u32>(p, &x, bytes);
  else if ((((u64)p | (u64)bytes) & 1) == 0) copy_words<u16>(p, &x, bytes);
  else copy_words<u8>(p, &x, bytes);
}
// ---- blocks: the 32 packs side by side that a warp moves together, also where they are not aligned to 16 bytes
//
// Say that they begin `skew` bytes behind a multiple of 16. Every lane but the first takes the aligned pack in which
// its own begins, so that its neighbour gets the last bytes of that. The first lane's aligned pack is wrapped: it ends
// with the first bytes of the block and begins with the last ones, and lanes 0 to 15 take a byte of it each. So a block
// costs two instructions instead of one, and not a byte beside it is touched.

constexpr int BLOCK = 32 * 16;
__device__ __forceinline__ int skew_of(const void* p) { return (int)((u64)p & 15); }
__device__ __forceinline__ int lane_of_warp() { return (int)(threadIdx.x & 31); }

// Where this lane's byte of the wrapped pack lies, if its own pack begins at p.
__device__ __forceinline__ char* wrapped_byte(const char* p, int lane, int skew) {
  return (char*)p - skew - 15 * lane + (lane < skew ? BLOCK : 0);
}
// 16 of the 32 bytes of two packs, without the first `skew` of them.
__device__ __forceinline__ Pack joined(const Pack& x, const Pack& y, int skew) {
  u32 w[8] = {x.w[0], x.w[1], x.w[2], x.w[3], y.w[0], y.w[1], y.w[2], y.w[3]};
#pragma unroll
  for (int i = 0; i < 6; i++) w[i] = skew & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; i++) w[i] = skew & 4 ? w[i + 1] : w[i];
  Pack z;
#pragma unroll
  for (int i = 0; i < 4; i++) z.w[i] = __funnelshift_r(w[i], w[i + 1], (skew & 3) * 8);
  return z;
}
// What a lane has of a block until `realigned` makes its pack of it: the loads of other blocks may go between.
struct Piece {
  Pack x;
  u32 wrapped;
};
__device__ __forceinline__ Piece load_piece(const char* p) {
  const int skew = skew_of(p), lane = lane_of_warp();
  Piece piece = {{{0, 0, 0, 0}}, 0};
  if (lane || !skew) piece.x = load_pack(p - skew);
  if (skew && lane < 16) piece.wrapped = load_byte(wrapped_byte(p, lane, skew));
  return piece;
}
__device__ __forceinline__ Pack realigned(const char* p, const Piece& piece) {
  const int skew = skew_of(p), lane = lane_of_warp();
  Pack x = piece.x, next;
  if (!skew) return x;
  u32 word = piece.wrapped << (lane & 3) * 8;
  word |= __shfl_xor_sync(~0u, word, 1);
  word |= __shfl_xor_sync(~0u, word, 2);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 w = __shfl_sync(~0u, word, 4 * i);
    x.w[i] = lane ? x.w[i] : w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) next.w[i] = __shfl_sync(~0u, x.w[i], lane + 1);
  return joined(x, next, skew);
}
__device__ __forceinline__ void store_block(char* p, const Pack& y) {
  const int skew = skew_of(p), lane = lane_of_warp();
  if (!skew) return store_pack(p, y);
  Pack last;
#pragma unroll
  for (int i = 0; i < 4; i++) last.w[i] = __shfl_sync(~0u, y.w[i], lane + 31);
  const Pack x = joined(last, y, 16 - skew);
  if (lane) store_pack(p - skew, x);
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 w = __shfl_sync(~0u, x.w[i], 0);
    word = lane / 4 == i ? w : word;
  }
  if (lane < 16) store_byte(wrapped_byte(p, lane, skew), word >> (lane & 3) * 8);
}

__device__ __forceinline__ Partial load_partial(const char* p) {
  Partial x;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Partial) / 16; i++) ((Pack*)&x)[i] = load_pack(p + 16 * i);
  return x;
}
__device__ __forceinline__ void store_partial(char* p, const Partial& x) {
#pragma unroll
  for (int i = 0; i < (int)sizeof(Partial) / 16; i++) store_pack(p + 16 * i, ((const Pack*)&x)[i]);
}
__device__ __forceinline__ Partial widened(const Pack& x) {
  Partial y;
#pragma unroll
  for (int i = 0; i < E; i++) ((A*)&y)[i] = widen(((const T*)&x)[i]);
  return y;
}
__device__ __forceinline__ Pack narrowed(const Partial& x) {
  Pack y;
#pragma unroll
  for (int i = 0; i < E; i++) narrow(((T*)&y)[i], ((const A*)&x)[i]);
  return y;
}
// The sum of two operands, where ADDS_PAIRS.
__device__ __forceinline__ Pack pair_sums(const Pack& x, const Pack& y) {
  Pack z;
#pragma unroll
  for (int i = 0; i < 4; i++) z.w[i] = pair_sum<T>(x.w[i], y.w[i]);
  return z;
}
__device__ __forceinline__ void accumulate(Partial& a, const Partial& b) {
#pragma unroll
  for (int i = 0; i < E; i++) ((A*)&a)[i] = combine(((const A*)&a)[i], ((const A*)&b)[i]);
}
__device__ __forceinline__ void divide(Partial& a, int n) {
#pragma unroll
  for (int i = 0; i < E; i++) ((A*)&a)[i] = divided(((const A*)&a)[i], n);
}
