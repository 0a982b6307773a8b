// The protocol `slots`: a Program's stages as groups of CTAs (blinkmpi/program/ir.py; Blink section 4, CodeGen).
//
// A row of the table moves every `STRIDE`-th chunk of its stage, and a CTA has one row, where there are enough CTAs. A
// channel is a ring of slots at the reader, which the writer fills, with a head flag at the reader (chunks written) and
// a tail flag at the writer (chunks read). In a CTA, one warp waits for the flags of the next chunk while the workers
// move this one, and another warp raises the flags of the last one.
//
// A CTA of several rows moves a chunk of the first one, then of the next ones, then the first row's next chunk. Rows
// follow those whose chunks they read, on whatever rank. So all CTAs of all ranks keep to one order, by round, then by
// stage, in which everything that a step waits for comes before it: the first step that has not run can always run.
//
// A table may serve calls of many counts. What depends on the count is then among the arguments, for each stage of this
// rank, and takes the place of words of the row. A stage may have no elements: its CTAs do no round.
//
// In place, a row may wait for another row of its rank besides, by whose head flag it knows what was read: AFTER.
//
// Macros from codegen.py, besides those of layout.cuh: WORKERS threads that move data, ROWS of a CTA and ROW_WORDS of a
// row, STAGE_KINDS, one case per kind of stage that this rank has, SPANS among the arguments, 0 if the table has all.

#include "chunks.cuh"
#include "in_place.cuh"

enum RowWord {
  KIND, COUNT, CHUNK, OWN, STORE, FIRST, STRIDE, DEPTH, STAGE, EMULATED, IN_BYTES, OUT_BYTES, SPAN,
  AFTER,
  WORDS_BEFORE_CHANNELS = 16
};
// Addresses as this rank has mapped them. `peer` is below 0 if it is on another node. An emulated link takes
// `link_ns_per_mib`, and `link_clock` holds the time until which it is reserved; 0: the channel is not slowed down.
struct Channel { i64 slots, head, tail, peer, link_clock, link_ns_per_mib; };
constexpr int SPAN_WORDS = STORE - COUNT + 1;
struct StageArguments {
  CommonArguments c;
  const i64* table;  // [CTA][ROWS][ROW_WORDS]
#if SPANS
  i64 spans[SPANS][SPAN_WORDS];  // COUNT to STORE of the rows whose SPAN is the index
#endif
};
struct Shared {
  i64 stop;    // the first turn that is not taken, because the call was aborted
  u64 due[4];  // by turn: when its bytes have passed the emulated links
};

// Reserve `ns` on an emulated link, behind what is already reserved. Returns when the reservation ends.
__device__ __forceinline__ u64 reserve(u64* clock, u64 start, u64 ns) {
  u64 seen = load_relaxed(clock);
  while (true) {
    const u64 until = (seen > start ? seen : start) + ns;
    const u64 was = atomicCAS(clock, seen, until);
    if (was == seen) return until;
    seen = was;
  }
}

// The chunks of a row. Round j moves chunk FIRST + j * STRIDE through slot j % depth.
struct Rounds {
  const i64* row;
  i64 chunks, depth;
  u64 base;  // flags hold base + chunks done: they grow from call to call, and are never reset
  const Channel *ins, *outs;
};
// A round, its chunk k, and how many turns the CTA has had before: its rounds of all rows.
struct Round { i64 j, k, turn; };

// The waiting warp, before the first round of a row. What this rank itself had in its memory is done.
template <class K>
__device__ __forceinline__ bool await_peers(const CommonArguments& c, const Rounds& r, u64 seq, int lane) {
  bool ok = true;
  for (int i = lane; i < K::INS + K::OUTS; i += 32) {  // outs follow ins
    const i64 peer = r.ins[i].peer;
    if (peer >= 0 && peer != (i64)c.rank) ok &= await_announcement(c, (int)peer, seq);
  }
  return ok;
}

// The waiting warp: lets the workers start a round when its inputs have come and its output slots are free. Returns
// whether they may; so do the other roles.
template <class K>
__device__ __forceinline__ bool await_round(const CommonArguments& c, const Rounds& r, const Round& x, u64 seq,
                                            int lane, bool ok, Shared& s) {
  const i64* row = r.row;
  const Channel *ins = r.ins, *outs = r.outs;
  for (int i = lane; i <= K::INS + K::OUTS && ok; i += 32) {
    if (i < K::INS)
      ok = await_flag(c, (u64*)ins[i].head, r.base + x.j + 1, seq, (int)ins[i].peer, row[STAGE], x.k);
    else if (i < K::INS + K::OUTS && x.j >= r.depth)
      ok = await_flag(c, (u64*)ins[i].tail, r.base + x.j + 1 - r.depth, seq, (int)ins[i].peer, row[STAGE], x.k);
    else if (K::INS && K::STORES && i == K::INS + K::OUTS && row[AFTER])  // the peer swaps its block with ours
      ok = await_flag(c, (u64*)row[AFTER], r.base + x.j + 1, seq, (int)ins[0].peer, row[STAGE], x.k);
  }
  ok = __all_sync(~0u, ok);
  u64 due = 0;
  if (ok && row[EMULATED]) {
    const i64 n = row[COUNT] - x.k * row[CHUNK] < row[CHUNK] ? row[COUNT] - x.k * row[CHUNK] : row[CHUNK];
    for (int i = lane; i < K::OUTS; i += 32)
      if (outs[i].link_ns_per_mib) {
        const u64 start = now_ns();
        const i64 bytes = n * (i64)(K::OUT_WIDE ? sizeof(A) : sizeof(T));
        const u64 until = reserve((u64*)outs[i].link_clock, start, (u64)(bytes * outs[i].link_ns_per_mib) >> 20);
        due = until > due ? until : due;
      }
    for (int d = 16; d; d /= 2) { const u64 other = __shfl_xor_sync(~0u, due, d); due = other > due ? other : due; }
  }
  if (lane == 0) {
    s.due[x.turn & 3] = due;  // the flag-raising warp may be two turns behind
    if (!ok) s.stop = x.turn;
  }
  sync_named(READY);
  return ok;
}

// The flag-raising warp: tells the peers of a round that the workers have moved its chunk.
template <class K>
__device__ __forceinline__ bool raise_flags(const Rounds& r, const Round& x, int lane, Shared& s) {
  sync_named(MOVED);
  if (x.turn >= *(volatile i64*)&s.stop) return false;
  const u64 due = *(volatile u64*)&s.due[x.turn & 3];
  if (due) while (now_ns() < due) __nanosleep(100);
  // Publishes the workers' stores to the output slots, and completes their loads of the input slots: the named
  // barrier orders both before this fence. Pairs with the acquire in await_flag, of the waiting warps at the reader
  // (head) and at the writer (tail), or with the host's poll of the flags of a network channel.
  fence_system();
  for (int i = lane; i < K::INS + K::OUTS; i += 32)
    store_relaxed((u64*)(i < K::INS ? r.ins[i].tail : r.ins[i].head), r.base + x.j + 1);
  return true;
}

// The workers: reduce the operands of a chunk, and store the result to all targets.
template <class K>
__device__ __forceinline__ bool move_chunk(const CommonArguments& c, const Rounds& r, const Round& x, Shared& s) {
  const i64* row = r.row;
  sync_named(READY);
  if (x.turn >= *(volatile i64*)&s.stop) { sync_named(MOVED); return false; }
  const i64 first = x.k * row[CHUNK], n = row[COUNT] - first < row[CHUNK] ? row[COUNT] - first : row[CHUNK];
  const i64 slot = x.j % r.depth;
  Chunk<K> y;
  y.elements = n;
  y.own = c.send + row[OWN] + first * (i64)sizeof(T);
  y.store = c.recv + row[STORE] + first * (i64)sizeof(T);
#pragma unroll
  for (int i = 0; i < K::INS; i++) y.in[i] = (const char*)r.ins[i].slots + slot * row[IN_BYTES];
#pragma unroll
  for (int i = 0; i < K::OUTS; i++) y.out[i] = (char*)r.outs[i].slots + slot * row[OUT_BYTES];
  move_all<K>(c, y);
  sync_named(MOVED);
  return true;
}

__device__ __forceinline__ i64 chunks_of(const i64* row) { return (row[COUNT] + row[CHUNK] - 1) / row[CHUNK]; }

template <class K> __device__ __forceinline__ Rounds rounds_of(const i64* row, u64 seq) {
  const Channel* ins = (const Channel*)(row + WORDS_BEFORE_CHANNELS);
  return {row, chunks_of(row), row[DEPTH], seq << 24, ins, ins + K::INS};
}

#if ROWS == 1
// All rounds of the row.
template <class K>
__device__ __forceinline__ void run_stage(const CommonArguments& c, const i64* row, u64 seq, Shared& s) {
  const Rounds r = rounds_of<K>(row, seq);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool ok = true;
  Round x = {0, row[FIRST], 0};
  if (warp == WORKERS / 32) {
    ok = await_peers<K>(c, r, seq, lane);
    for (; x.k < r.chunks; x.k += row[STRIDE], x.turn = ++x.j)
      if (!(ok = await_round<K>(c, r, x, seq, lane, ok, s))) return;
  } else if (warp == WORKERS / 32 + 1) {
    for (; x.k < r.chunks && ok; x.k += row[STRIDE], x.turn = ++x.j) ok = raise_flags<K>(r, x, lane, s);
  } else {
    for (; x.k < r.chunks && ok; x.k += row[STRIDE], x.turn = ++x.j) ok = move_chunk<K>(c, r, x, s);
  }
}
#else
// One round of a row. False: the call was aborted.
template <class K>
__device__ __forceinline__ bool run_round(const CommonArguments& c, const i64* row, const Round& x, u64 seq,
                                          Shared& s) {
  const Rounds r = rounds_of<K>(row, seq);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == WORKERS / 32) {
    const bool ok = x.j || await_peers<K>(c, r, seq, lane);
    return await_round<K>(c, r, x, seq, lane, ok, s);
  }
  if (warp == WORKERS / 32 + 1) return raise_flags<K>(r, x, lane, s);
  return move_chunk<K>(c, r, x, s);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) stages(const __grid_constant__ StageArguments a) {
  __shared__ i64 rows[ROWS][ROW_WORDS];
  __shared__ Shared s;
  const i64* const table = a.table + (i64)blockIdx.x * (ROWS * ROW_WORDS);
  for (int i = threadIdx.x; i < ROWS * ROW_WORDS; i += THREADS) {
    i64 word = table[i];
#if SPANS
    const i64 span = table[SPAN];  // both loads are under way at once
    if (i >= COUNT && i <= STORE) word = a.spans[span][i - COUNT];
#endif
    rows[0][i] = word;
  }
  if (threadIdx.x == 0) s.stop = 1ll << 62;
  const u64 seq = announce(a.c);  // its barrier also makes the copy of the rows visible to all threads
#if ROWS == 1
  const i64* const row = rows[0];
  switch (row[KIND]) { STAGE_KINDS }
#else
  bool ok = true, more = true;
  Round x = {0, 0, 0};
  for (; ok && more; x.j++) {
    more = false;
    for (int i = 0; i < ROWS && ok; i++) {
      const i64* const row = rows[i];
      x.k = row[FIRST] + x.j * row[STRIDE];
      if (x.k >= chunks_of(row)) continue;
      switch (row[KIND]) { STAGE_KINDS }
      x.turn++;
      more = true;
    }
  }
#endif
  if (a.c.destination && grid_barrier(a.c, seq)) move_to_destination(a.c);
  leave(a.c);
}
