// A Program's stages as groups of CTAs (blinkmpi/program.py says what a stage is; Blink section 4, CodeGen).
//
// A row of the table is one CTA: it walks every `stride`-th chunk of its stage. A channel lies in the reader's arena:
// slots and head flags, which the writer fills; the tail flags lie at the writer. In a CTA, one warp waits for the next
// chunk's flags while the workers move this one, and another raises flags while they go on.
//
// Macros from the host, besides common.cuh's: SHAPES, one case per kind of stage that this rank has.

enum {  // words of a row
  SHAPE, COUNT, CHUNK, FIRST, STRIDE, OWN, STORE, DEPTH, LANE, LINKS, IN_BYTES, OUT_BYTES, WORDS_BEFORE_CHANNELS = 16
};
// Addresses here; peer is below 0 if it is on another node; pace in ns per MiB, 0: as fast as it goes.
struct Channel { i64 slots, head, tail, peer, clock, pace; };
constexpr int READY = 1, DONE = 2;  // barriers, each between the workers and one warp
constexpr int THREADS = WORKERS + 64, MET = WORKERS + 32;

struct Stages {
  Common c;
  const i64* table;
  i64 row_words;
};
struct Shared {
  i64 stop;  // the first round that is not done
  u64 due[4];  // when a round's bytes have passed the emulated links
};

__device__ __forceinline__ void meet(int barrier) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(MET) : "memory"); }

// Emulated links: reserve the time that `bytes` take, behind what was reserved before. Returns when they are through.
__device__ __forceinline__ u64 reserve(u64* clock, u64 start, u64 ns) {
  u64 seen = get(clock);
  while (true) {
    const u64 until = (seen > start ? seen : start) + ns;
    const u64 was = atomicCAS(clock, seen, until);
    if (was == seen) return until;
    seen = was;
  }
}

// INS channels are folded in order, with the own operand (if OWN_AT >= 0) at place OWN_AT.
template <int INS, int OWN_AT, int OUTS, bool STORES, bool FINAL, bool IN_PARTIAL, bool OUT_PARTIAL>
__device__ __forceinline__ void run(const Stages& a, const i64* row, u64 seq, Shared& s) {
  constexpr int OPERANDS = INS + (OWN_AT >= 0);
  constexpr int UNROLL = OPERANDS <= 1 ? 8 : OPERANDS <= 2 ? 4 : OPERANDS <= 4 ? 2 : 1;
  constexpr bool IN_WIDE = WIDE && IN_PARTIAL, OUT_WIDE = WIDE && OUT_PARTIAL;
  constexpr bool LATE_LOADS = IN_WIDE && INS * E > 32;  // too much for the registers all at once
  const Common& c = a.c;
  const Channel* ins = (const Channel*)(row + WORDS_BEFORE_CHANNELS);
  const Channel* outs = ins + INS;
  const i64 chunks = (row[COUNT] + row[CHUNK] - 1) / row[CHUNK], depth = row[DEPTH];
  const u64 base = seq << 24;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == WORKERS / 32) {  // the waiter
    bool ok = true;
    for (int i = lane; i < INS + OUTS; i += 32)
      if (ins[i].peer >= 0) ok &= await_entry(c, (int)ins[i].peer, seq);
    i64 j = 0;
    for (i64 k = row[FIRST]; k < chunks; k += row[STRIDE], j++) {
      for (int i = lane; i < INS + OUTS && ok; i += 32) {
        if (i < INS) ok = await(c, (u64*)ins[i].head, base + j + 1, seq, (int)ins[i].peer, row[LANE], k);
        else if (j >= depth) ok = await(c, (u64*)ins[i].tail, base + j + 1 - depth, seq, (int)ins[i].peer, row[LANE], k);
      }
      ok = __all_sync(~0u, ok);
      u64 due = 0;
      if (ok && row[LINKS]) {
        const i64 n = row[COUNT] - k * row[CHUNK] < row[CHUNK] ? row[COUNT] - k * row[CHUNK] : row[CHUNK];
        for (int i = lane; i < OUTS; i += 32)
          if (outs[i].pace) {
            const u64 until = reserve((u64*)outs[i].clock, now_ns(), (u64)(n * (i64)(OUT_WIDE ? sizeof(A) : sizeof(T)) * outs[i].pace) >> 20);
            due = until > due ? until : due;
          }
        for (int d = 16; d; d /= 2) { const u64 other = __shfl_xor_sync(~0u, due, d); due = other > due ? other : due; }
      }
      if (lane == 0) {
        s.due[j & 3] = due;  // the other warp may be two rounds behind
        if (!ok) s.stop = j;
      }
      meet(READY);
      if (!ok) break;
    }
    return;
  }
  if (warp == WORKERS / 32 + 1) {  // the one who raises flags
    i64 j = 0;
    for (i64 k = row[FIRST]; k < chunks; k += row[STRIDE], j++) {
      meet(DONE);
      if (j >= *(volatile i64*)&s.stop) return;
      const u64 due = *(volatile u64*)&s.due[j & 3];
      if (due) while (now_ns() < due) __nanosleep(100);
      fence();
      for (int i = lane; i < INS + OUTS; i += 32) set((u64*)(i < INS ? ins[i].tail : ins[i].head), base + j + 1);
    }
    return;
  }
  i64 j = 0;
  for (i64 k = row[FIRST]; k < chunks; k += row[STRIDE], j++) {
    meet(READY);
    if (j >= *(volatile i64*)&s.stop) { meet(DONE); return; }
    const i64 first = k * row[CHUNK], n = row[COUNT] - first < row[CHUNK] ? row[COUNT] - first : row[CHUNK];
    const i64 slot = j % depth, packs = (n + E - 1) / E;
    const char* own = c.send + row[OWN] + first * (i64)sizeof(T);
    char* store = c.recv + row[STORE] + first * (i64)sizeof(T);
    const bool plain = (OWN_AT < 0 || aligned(own)) && (!STORES || aligned(store));
    const char* in[INS ? INS : 1];
    char* out[OUTS ? OUTS : 1];
#pragma unroll
    for (int i = 0; i < INS; i++) in[i] = (const char*)ins[i].slots + slot * row[IN_BYTES];
#pragma unroll
    for (int i = 0; i < OUTS; i++) out[i] = (char*)outs[i].slots + slot * row[OUT_BYTES];

    auto move = [&](auto unroll, i64 p, i64 step, bool fast) {
      constexpr int U = decltype(unroll)::value;
      Pack mine[U];
      Pack thin[U][!IN_WIDE && INS ? INS : 1];
      Partial wide[U][IN_WIDE && INS ? INS : 1];
#pragma unroll
      for (int u = 0; u < U; u++) {
        const i64 q = p + u * step;
        const int bytes = (int)((n - q * E < E ? n - q * E : E) * (i64)sizeof(T));
        if (OWN_AT >= 0) mine[u] = fast ? load16(own + q * 16) : load_own(own + q * 16, bytes);
#pragma unroll
        for (int i = 0; i < INS; i++) {
          if (LATE_LOADS) continue;
          if (IN_WIDE) wide[u][i] = load_partial(in[i] + q * (i64)sizeof(Partial));
          else thin[u][i] = load16(in[i] + q * 16);
        }
      }
#pragma unroll
      for (int u = 0; u < U; u++) {
        const i64 q = p + u * step;
        const int bytes = (int)((n - q * E < E ? n - q * E : E) * (i64)sizeof(T));
        Partial sum;
        Pack y;
        if (OPERANDS == 1 && !WIDE && !FINAL) {
          y = OWN_AT >= 0 ? mine[u] : thin[u][0];
        } else {
#pragma unroll
          for (int o = 0; o < OPERANDS; o++) {
            const int i = OWN_AT >= 0 && o > OWN_AT ? o - 1 : o;
            Partial x;
            if (o == OWN_AT) x = widened(mine[u]);
            else if (LATE_LOADS) x = load_partial(in[i] + q * (i64)sizeof(Partial));
            else if (IN_WIDE) x = wide[u][i];
            else x = widened(thin[u][i]);
            if (o) fold(sum, x);
            else sum = x;
          }
          if (FINAL && c.divide) divide(sum, (int)c.divide);
          if (!OUT_WIDE || STORES) y = narrowed(sum);
        }
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
          if (OUT_WIDE) store_partial(out[i] + q * (i64)sizeof(Partial), sum);
          else store16(out[i] + q * 16, y);
        }
        if (STORES) {
          if (fast) store16(store + q * 16, y);
          else store_own(store + q * 16, y, bytes);
        }
      }
    };
    const i64 whole = plain ? n / E : 0;
    i64 p = threadIdx.x;
    for (; p + (UNROLL - 1) * WORKERS < whole; p += UNROLL * WORKERS) move(Int<UNROLL>(), p, WORKERS, true);
    for (; p < whole; p += WORKERS) move(Int<1>(), p, 0, true);
    for (; p < packs; p += WORKERS) move(Int<1>(), p, 0, false);
    meet(DONE);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) stages(const __grid_constant__ Stages a) {
  __shared__ i64 row[ROW_WORDS];
  __shared__ Shared s;
  for (int i = threadIdx.x; i < ROW_WORDS; i += THREADS) row[i] = a.table[(i64)blockIdx.x * ROW_WORDS + i];
  if (threadIdx.x == 0) s.stop = 1ll << 62;
  const u64 seq = enter(a.c);  // and a barrier behind the copy of the row
  switch (row[SHAPE]) { SHAPES }
  if (a.c.home && all_through(a.c, seq)) go_home(a.c);
}
