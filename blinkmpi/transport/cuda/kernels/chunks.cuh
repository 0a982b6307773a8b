// How a CTA moves chunks: its workers move one while a warp waits until the next may be moved, and another warp tells
// the peers of the last one. The two warps and the workers meet at named barriers.
//
// Macros from codegen.py, besides those of layout.cuh: WORKERS threads that move data.

#include "sync.cuh"

constexpr int READY = 1, MOVED = 2;  // named barriers, each between the workers and one of the other warps
constexpr int THREADS = WORKERS + 64, BARRIER_THREADS = WORKERS + 32;

__device__ __forceinline__ void sync_named(int barrier) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(BARRIER_THREADS) : "memory");
}

// What a kind of stage has in common for its three roles. INS channels are reduced in their order, with the own operand
// (if OWN_AT >= 0) at position OWN_AT. Those in the mask IN_WIDE bring partial results, the others elements of T.
template <int INS_, int OWN_AT_, int OUTS_, bool STORES_, bool FINAL_, u64 IN_WIDE_, bool OUT_WIDE_> struct Kind {
  static constexpr int INS = INS_, OWN_AT = OWN_AT_, OUTS = OUTS_, OPERANDS = INS + (OWN_AT >= 0);
  static constexpr int UNROLL = OPERANDS <= 1 ? 8 : OPERANDS <= 2 ? 4 : OPERANDS <= 4 ? 2 : 1;
  static constexpr int REST = UNROLL > 2 ? 2 : 1;  // of packs that are unaligned, or too few for that
  static constexpr bool STORES = STORES_, FINAL = FINAL_;
  static constexpr bool OUT_WIDE = WIDE && OUT_WIDE_;
  static constexpr u64 IN_WIDE = WIDE ? IN_WIDE_ : 0;
  static constexpr bool LATE_LOADS = IN_WIDE && INS * E > 32;  // all operands at once would not fit the registers
  static constexpr bool THIN = !FINAL && !IN_WIDE && !OUT_WIDE;  // nothing is in the type of partial results
  static constexpr bool COPIES = OPERANDS == 1 && THIN, ADDS = OPERANDS == 2 && THIN && ADDS_PAIRS;
  static __device__ constexpr bool wide(int i) { return IN_WIDE >> i & 1; }
};

// The operands and targets of one chunk.
template <class K> struct Chunk {
  i64 elements;
  const char* own;
  char* store;
  const char* in[K::INS ? K::INS : 1];
  char* out[K::OUTS ? K::OUTS : 1];
};

enum How {
  ALIGNED,  // the user's buffers are aligned to 16 bytes
  BLOCKS,   // they need not be; packs (or their blocks) behind `whole` are left out
  EDGE      // a pack that may not be whole
};
// Move U packs of a chunk, `step` apart: all operands are loaded before the first is used, unless LATE_LOADS.
template <class K, int U, How HOW>
__device__ __forceinline__ void move_packs(const CommonArguments& c, const Chunk<K>& x, i64 p, i64 step, i64 whole) {
  Piece mine[U];
  Pack thin[U][K::INS ? K::INS : 1];
  Partial wide[U][K::IN_WIDE && !K::LATE_LOADS ? K::INS : 1];
  const int bytes = HOW == EDGE ? (int)((x.elements - p * E < E ? x.elements - p * E : E) * (i64)sizeof(T)) : 16;
#pragma unroll
  for (int u = 0; u < U; u++) {
    const i64 q = p + u * step;
    if (HOW == BLOCKS && q > whole) continue;
    if (K::OWN_AT >= 0) {
      if (HOW == ALIGNED) mine[u].x = load_pack(x.own + q * 16);
      else if (HOW == BLOCKS) mine[u] = load_piece(x.own + q * 16);
      else mine[u].x = load_user(x.own + q * 16, bytes);
    }
#pragma unroll
    for (int i = 0; i < K::INS; i++) {
      if (K::LATE_LOADS) continue;
      if (K::wide(i)) wide[u][K::IN_WIDE ? i : 0] = load_partial(x.in[i] + q * (i64)sizeof(Partial));
      else thin[u][i] = load_pack(x.in[i] + q * 16);
    }
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    const i64 q = p + u * step;
    if (HOW == BLOCKS && q > whole) continue;
    Partial sum;
    Pack y, own;
    if (K::OWN_AT >= 0) own = HOW == BLOCKS ? realigned(x.own + q * 16, mine[u]) : mine[u].x;
    if (K::COPIES) {
      y = K::OWN_AT >= 0 ? own : thin[u][0];
    } else if (K::ADDS) {  // two operands, whose sum has the same bits in either order
      y = pair_sums(thin[u][0], K::OWN_AT >= 0 ? own : thin[u][K::INS - 1]);
    } else {
#pragma unroll
      for (int o = 0; o < K::OPERANDS; o++) {
        const int i = K::OWN_AT >= 0 && o > K::OWN_AT ? o - 1 : o;
        Partial operand;
        if (o == K::OWN_AT) operand = widened(own);
        else if (K::LATE_LOADS && K::wide(i)) operand = load_partial(x.in[i] + q * (i64)sizeof(Partial));
        else if (K::LATE_LOADS) operand = widened(load_pack(x.in[i] + q * 16));
        else if (K::wide(i)) operand = wide[u][K::IN_WIDE ? i : 0];
        else operand = widened(thin[u][i]);
        if (o) accumulate(sum, operand);
        else sum = operand;
      }
      if (K::FINAL && c.divisor) divide(sum, (int)c.divisor);
      if (!K::OUT_WIDE || K::STORES) y = narrowed(sum);
    }
#pragma unroll
    for (int i = 0; i < K::OUTS; i++) {
      if (K::OUT_WIDE) store_partial(x.out[i] + q * (i64)sizeof(Partial), sum);
      else store_pack(x.out[i] + q * 16, y);
    }
    if (K::STORES) {
      if (HOW == ALIGNED) store_pack(x.store + q * 16, y);
      else if (HOW == BLOCKS) store_block(x.store + q * 16, y);
      else store_user(x.store + q * 16, y, bytes);
    }
  }
}

// Move a whole chunk, by all workers.
template <class K> __device__ __forceinline__ void move_all(const CommonArguments& c, const Chunk<K>& x) {
  const i64 packs = (x.elements + E - 1) / E;
  const bool plain = (K::OWN_AT < 0 || aligned(x.own)) && (!K::STORES || aligned(x.store));
  // The last place where a pack is whole. Among unaligned ones the whole block must be, for its warp moves it.
  const i64 whole = x.elements / E - (plain ? 1 : 32 - lane_of_warp());
  i64 p = threadIdx.x;
  for (; plain && p + (K::UNROLL - 1) * WORKERS <= whole; p += K::UNROLL * WORKERS)
    move_packs<K, K::UNROLL, ALIGNED>(c, x, p, WORKERS, whole);
  for (; p <= whole; p += K::REST * WORKERS) move_packs<K, K::REST, BLOCKS>(c, x, p, WORKERS, whole);
  while (p >= WORKERS && p - WORKERS > whole) p -= WORKERS;
  if (p < packs) move_packs<K, 1, EDGE>(c, x, p, 0, whole);
}
