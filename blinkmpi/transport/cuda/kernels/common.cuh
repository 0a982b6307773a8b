// What all kernels share: elements, packs, flags in peers' memory, waits with a deadline.
//
// Macros from the host: N ranks (of at most MAX_RANKS), ELEMENT type, OPERATION, WORKERS threads that move data.
// C++17, no headers: NVRTC compiles it for whatever GPU is found.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- elements: T lies in memory, A accumulates

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct f8e4m3 { u8 bits; };  // without infinities: what is too large becomes NaN, as in ml_dtypes
struct f8e5m2 { u8 bits; };
template <class R> struct cplx { R re, im; };
struct raw { u8 byte; };  // collectives that only move

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

// To eight bits with MANTISSA of them behind the exponent, to nearest even, once. LARGEST is the largest finite value's
// pattern, BEYOND what stands for more, NOT for NaN.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 BEYOND, u32 NOT> __device__ __forceinline__ u8 to_eight(float f) {
  const u32 u = __float_as_uint(f), sign = u >> 24 & 0x80, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return (u8)(sign | NOT);
  u32 bits;
  if (rest < (u32)(128 - BIAS) << 23) {
    bits = (u32)__float2int_rn(__uint_as_float(rest) * (float)(1 << (BIAS - 1 + MANTISSA)));
  } else {
    bits = (rest + (1u << (22 - MANTISSA)) - 1 + (rest >> (23 - MANTISSA) & 1)) >> (23 - MANTISSA);
    bits -= (u32)(127 - BIAS) << MANTISSA;
  }
  return (u8)(sign | (bits > LARGEST ? BEYOND : bits));
}
__device__ __forceinline__ void narrow(f8e4m3& x, float f) { x.bits = to_eight<3, 7, 0x7e, 0x7f, 0x7f>(f); }
__device__ __forceinline__ void narrow(f8e5m2& x, float f) { x.bits = to_eight<2, 15, 0x7b, 0x7c, 0x7e>(f); }

__device__ __forceinline__ void narrow(f16& x, float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(f)); }
__device__ __forceinline__ void narrow(bf16& x, float f) {
  const u32 u = __float_as_uint(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest even, once
  x.bits = (u16)((u & 0x7fffffff) > 0x7f800000 ? ((u >> 16 & 0x8000) | 0x7fc0) : rounded);
}
template <class X> __device__ __forceinline__ void narrow(X& x, X f) { x = f; }

// ---- operations, with the meaning of docs/numerics.md

enum { NONE, SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR, BXOR };

template <class X> __device__ __forceinline__ X combine(X a, X b) {  // integers: wrap
  switch (OPERATION) {
    case SUM: return (X)((u64)a + (u64)b);
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
template <class X> __device__ __forceinline__ X combine_float(X a, X b) {  // min, max: NaN wins
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
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }  // never fused with a sum
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
template <class R> __device__ __forceinline__ cplx<R> combine(cplx<R> a, cplx<R> b) {
  if (OPERATION == SUM) return {a.re + b.re, a.im + b.im};
  return {times(a.re, b.re) - times(a.im, b.im), times(a.re, b.im) + times(a.im, b.re)};
}

template <class X> __device__ __forceinline__ X divided(X a, int) { return a; }
__device__ __forceinline__ float divided(float a, int n) { return a / (float)n; }
__device__ __forceinline__ double divided(double a, int n) { return a / (double)n; }
template <class R> __device__ __forceinline__ cplx<R> divided(cplx<R> a, int n) { return {a.re / (R)n, a.im / (R)n}; }

// ---- packs: 16 bytes of T, E elements; as partial results of a 16-bit type they take 32 bytes

typedef ELEMENT T;
typedef acc_of<T>::type A;
constexpr int E = 16 / sizeof(T);
constexpr bool WIDE = sizeof(A) != sizeof(T);

template <int BYTES> struct alignas(16) Bits { u32 w[BYTES / 4]; };
typedef Bits<16> Pack;
typedef Bits<(int)(E * sizeof(A))> Partial;

__device__ __forceinline__ Pack load16(const void* p) {
  Pack x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store16(void* p, const Pack& x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(p), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}
__device__ __forceinline__ bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// The user's memory may begin anywhere that its element type allows; `bytes` of the pack exist.
template <class W> __device__ __forceinline__ void copy_words(void* to, const void* from, int bytes) {
#pragma unroll
  for (int i = 0; i < (int)(16 / sizeof(W)); i++)
    if (i * (int)sizeof(W) < bytes) ((W*)to)[i] = ((const W*)from)[i];
}
__device__ __forceinline__ Pack load_own(const char* p, int bytes) {
  if (aligned(p) && bytes >= 16) return load16(p);
  Pack x = {{0, 0, 0, 0}};
  if ((((u64)p | (u64)bytes) & 3) == 0) copy_words<u32>(&x, p, bytes);
  else if ((((u64)p | (u64)bytes) & 1) == 0) copy_words<u16>(&x, p, bytes);
  else copy_words<u8>(&x, p, bytes);
  return x;
}
__device__ __forceinline__ void store_own(char* p, const Pack& x, int bytes) {
  if (aligned(p) && bytes >= 16) return store16(p, x);
  if ((((u64)p | (u64)bytes) & 3) == 0) copy_words<u32>(p, &x, bytes);
  else if ((((u64)p | (u64)bytes) & 1) == 0) copy_words<u16>(p, &x, bytes);
  else copy_words<u8>(p, &x, bytes);
}
__device__ __forceinline__ Partial load_partial(const char* p) {
  Partial x;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Partial) / 16; i++) ((Pack*)&x)[i] = load16(p + 16 * i);
  return x;
}
__device__ __forceinline__ void store_partial(char* p, const Partial& x) {
#pragma unroll
  for (int i = 0; i < (int)sizeof(Partial) / 16; i++) store16(p + 16 * i, ((const Pack*)&x)[i]);
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
__device__ __forceinline__ void fold(Partial& a, const Partial& b) {
#pragma unroll
  for (int i = 0; i < E; i++) ((A*)&a)[i] = combine(((const A*)&a)[i], ((const A*)&b)[i]);
}
__device__ __forceinline__ void divide(Partial& a, int n) {
#pragma unroll
  for (int i = 0; i < E; i++) ((A*)&a)[i] = divided(((const A*)&a)[i], n);
}

template <int V> struct Int { static constexpr int value = V; };

// ---- flags: words that a peer writes and we poll

__device__ __forceinline__ u64 get(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 get_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void set(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ---- the head of every rank's arena, mapped by all ranks; lines of 128 bytes

struct Line { u64 word, send, recv; u64 pad[13]; };  // with a call's entry: where its registered buffers lie
struct Arena {
  u64 seq;       // calls that all CTAs have entered here
  u32 ticket;    // CTAs that have entered this call
  u32 left;      // CTAs that are through with it, where they have to meet
  u64 through;   // the last call that all of them were through with
  u32 pad[26];
  u64 abort;     // not 0: some rank gave up
  u64 told;      // not 0: a thread of ours has filled in the report
  u64 pad2[14];
  Line entered[MAX_RANKS];        // by peer: (its call's number << 32) | fingerprint
  u64 done[MAX_CTAS][MAX_RANKS];  // by CTA and peer: the last call in which it needs nobody's buffers any more
};

static_assert(sizeof(Line) == 128 && sizeof(Arena) <= HEAD_BYTES, "arena.py keeps room for it");

// In pinned host memory: who gave up, waiting for what. First writer wins.
struct Report { u64 abort, code, seq, peer, stage, chunk, want, seen; };
enum { ABORTED = 1, LATE = 2, DIFFERENT = 3 };
enum { FOR_ENTRY = -1, FOR_FINISH = -2, FOR_PACKET = -3 };  // in `stage`

struct Common {  // the first part of every kernel's arguments
  Arena* peer[N];  // peer[rank] is our own
  Report* report;
  u64 print;  // fingerprint of the call, 32 bits
  u64 timeout_ns;
  i64 rank, divide;
  const char* send;
  char* recv;
  u64 send_ref, recv_ref;  // the same as (region + 1) << 48 | offset, or 0: see Direct
  char* home;  // not 0: where `home_bytes` of recv go in the end
  i64 home_bytes;
};

__device__ __noinline__ bool give_up(const Common& c, u64 code, u64 seq, int peer, i64 stage, i64 chunk, u64 want, u64 seen) {
  Report* r = c.report;
  if (atomicCAS(&c.peer[c.rank]->told, 0ull, 1ull) == 0) {  // not in host memory, where atomics may be refused
    r->seq = seq, r->peer = peer, r->stage = stage, r->chunk = chunk, r->want = want, r->seen = seen;
    fence();
    set(&r->code, code);
    set(&r->abort, 1);
  }
  for (int p = 0; p < N; p++) set(&c.peer[p]->abort, 1 + c.rank);  // they leave as soon as they wait
  return false;
}

// Where a spin looks at clock and abort words.
struct Patience {
  u32 polls;
  u64 since;
};
__device__ __forceinline__ bool aborted(const Common& c) {
  return get(&c.peer[c.rank]->abort) != 0 || get(&c.report->abort) != 0;
}
__device__ __forceinline__ int impatient(Patience& w, const Common& c) {  // 0: go on, else why to give up
  if (++w.polls & 1023) return 0;
  const u64 now = now_ns();
  if (w.since == 0) w.since = now;
  if (aborted(c)) return ABORTED;
  return now - w.since > c.timeout_ns ? LATE : 0;
}

// Wait until *flag >= want, and make what was written before it readable. False: leave.
__device__ __forceinline__ bool await(const Common& c, const u64* flag, u64 want, u64 seq, int peer, i64 stage, i64 chunk) {
  Patience w = {0, 0};
  u64 seen;
  while ((i64)((seen = get(flag)) - want) < 0) {
    const int state = impatient(w, c);
    if (state) return give_up(c, state, seq, peer, stage, chunk, want, seen);
  }
  get_acquire(flag);
  return true;
}

// Wait until `peer` has entered call `seq`, and compare what it called.
__device__ __forceinline__ bool await_entry(const Common& c, int peer, u64 seq) {
  const u64* word = &c.peer[c.rank]->entered[peer].word;
  Patience w = {0, 0};
  u64 seen;
  while ((int)((u32)((seen = get_acquire(word)) >> 32) - (u32)seq) < 0) {
    const int state = impatient(w, c);
    if (state) return give_up(c, state, seq, peer, FOR_ENTRY, 0, seq, seen >> 32);
  }
  if ((u32)(seen >> 32) == (u32)seq && (u32)seen != (u32)c.print)
    return give_up(c, DIFFERENT, seq, peer, FOR_ENTRY, 0, c.print, (u32)seen);
  return true;
}

// Every CTA begins with this: the number of the call. CTA 0 tells the peers; the last CTA to come counts the call.
__device__ __forceinline__ u64 enter(const Common& c) {
  __shared__ u64 shared_seq;
  Arena* own = c.peer[c.rank];
  if (threadIdx.x == 0) shared_seq = get(&own->seq) + 1;
  __syncthreads();
  const u64 seq = shared_seq;
  if (blockIdx.x == 0 && threadIdx.x < N && threadIdx.x != c.rank) {
    Line* line = &c.peer[threadIdx.x]->entered[c.rank];
    if (c.send_ref | c.recv_ref) {
      set(&line->send, c.send_ref), set(&line->recv, c.recv_ref);
      fence();
    }
    set(&line->word, (seq << 32) | (u32)c.print);
  }
  if (threadIdx.x == blockDim.x - 1) {  // behind the barrier: this CTA has read seq
    __threadfence();
    if (atomicAdd(&own->ticket, 1u) == gridDim.x - 1) {
      own->ticket = 0;
      set(&own->seq, seq);
    }
  }
  return seq;
}

// Wait until all CTAs of this rank have come here: what they have read may be overwritten, what they wrote be read.
__device__ __forceinline__ bool all_through(const Common& c, u64 seq) {
  bool ok = true;
  __syncthreads();
  if (threadIdx.x == 0) {
    Arena* own = c.peer[c.rank];
    __threadfence();
    if (atomicAdd(&own->left, 1u) == gridDim.x - 1) {
      own->left = 0;
      fence();
      set(&own->through, seq);
    } else {
      u32 polls = 0;  // no deadline: the others wait for peers, each time within theirs, and say so when they give up
      while (ok && (i64)(get(&own->through) - seq) < 0) ok = (++polls & 1023) || !aborted(c);
      get_acquire(&own->through);
    }
  }
  return __syncthreads_and(ok);
}

// A reduce-scatter in place: the result stands in this rank's own block of its vector, which nobody else reads. When the
// front has been read, it goes there; the two do not overlap.
__device__ __forceinline__ void go_home(const Common& c) {
  constexpr int UNROLL = 8;
  const char* from = c.recv;
  const i64 step = (i64)gridDim.x * blockDim.x * 16, bytes = c.home_bytes;
  const i64 whole = aligned(from) && aligned(c.home) ? bytes & ~15ll : 0;
  i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
  for (; at < whole; at += UNROLL * step) {  // all loads are on their way before the first store, also at the end
    Pack x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * step < whole) x[u] = load16(from + at + u * step);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * step < whole) store16(c.home + at + u * step, x[u]);
  }
  while (at - step >= whole) at -= step;
  for (; at < bytes; at += step) {
    const int here = (int)(bytes - at < 16 ? bytes - at : 16);
    store_own(c.home + at, load_own(from + at, here), here);
  }
}
