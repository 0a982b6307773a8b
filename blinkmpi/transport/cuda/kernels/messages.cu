// Messages: one rank sends, another receives, in order, by a FIFO that each ordered pair of ranks has.
//
// A FIFO has LANES rings of DEPTH slots in the reader's memory. As for a channel, a head flag at the reader counts the
// chunks that were written, a tail flag at the writer those that were read. Both counts go on from message to message,
// also in replays of a graph, and nothing is reset. A message has a CTA for each lane that it uses, and CTA i moves every
// gridDim.x-th chunk. Lanes and chunks follow from its length alone, so the two ends agree without having met.
//
// The first chunk of a message in a lane begins with a header. The reader compares it with what it asks for, before it
// writes anything into the user's memory. A message that fits into free slots is sent whether the reader has come or not.
//
// A chunk waits for earlier chunks of its FIFO alone, and each end of a FIFO has CTAs of its own. So where their kernels
// run at once, messages of two FIFOs do not wait for one another; two messages of one FIFO run one after the other.
//
// Macros from codegen.py, besides those of layout.cuh: WORKERS threads that move data, LANES, DEPTH, LONGEST_CHUNK.

#include "chunks.cuh"

struct Header { i64 nbytes, tag; };
struct Slot {
  Header header;
  u64 pad[14];
  char data[LONGEST_CHUNK];
};
struct Flag { u64 word, pad[15]; };
struct MessageMemory {  // of a rank; by the other rank, of which there are N - 1, and lane
  Flag heads[N - 1][LANES], tails[N - 1][LANES];    // written by the other rank
  Flag sent[N - 1][LANES], received[N - 1][LANES];  // chunks so far, at this rank's ends
  Slot slots[N - 1][LANES][DEPTH];                  // written by the other rank
};
struct MessageArguments {
  CommonArguments c;
  i64 memory_at;  // in every rank's symmetric memory
  i64 peer;
  i64 sends;  // 0: receives
  i64 nbytes, tag;
};
struct End {  // what this rank has of a lane
  const u64* awaited;
  u64 *raised, *count;
  Slot* slots;
  u64 base;  // chunks before this message
  i64 chunk, rounds;
};

__device__ __forceinline__ MessageMemory* memory_of(const MessageArguments& a, i64 rank) {
  return (MessageMemory*)((char*)a.c.symmetric[rank] + a.memory_at);
}

// Wait until a chunk may be moved. Of the first one, compare the header.
template <bool SENDS> __device__ __forceinline__ bool await_chunk(const MessageArguments& a, const End& e, i64 j) {
  const CommonArguments& c = a.c;
  const u64 want = SENDS ? e.base + j + 1 - DEPTH : e.base + j + 1;
  if (!await_flag(c, e.awaited, want, a.tag, a.peer, SENDS ? SEND : RECEIVE, a.nbytes)) return false;
  if (SENDS || j) return true;
  const Header* h = &e.slots[e.base % DEPTH].header;
  const u64 nbytes = load_relaxed((const u64*)&h->nbytes), tag = load_relaxed((const u64*)&h->tag);
  if (nbytes == (u64)a.nbytes && tag == (u64)a.tag) return true;
  return broadcast_abort(c, MISMATCH, a.tag, a.peer, RECEIVE, a.nbytes, nbytes, tag);
}

template <bool SENDS> __device__ __forceinline__ void move_chunk(const MessageArguments& a, const End& e, i64 j) {
  using K = Kind<!SENDS, SENDS - 1, SENDS, !SENDS, false, 0, false>;
  Slot* slot = &e.slots[(e.base + j) % DEPTH];
  const i64 first = (blockIdx.x + j * gridDim.x) * e.chunk;
  Chunk<K> x;
  x.elements = a.nbytes - first < e.chunk ? a.nbytes - first : e.chunk;
  if (SENDS) x.own = a.c.send + first, x.out[0] = slot->data;
  else x.store = a.c.recv + first, x.in[0] = slot->data;
  if (SENDS && j == 0 && threadIdx.x == 0) slot->header = {a.nbytes, a.tag};
  move_all<K>(a.c, x);
}

template <bool SENDS> __device__ __forceinline__ void move_message(const MessageArguments& a, const End& e, i64* stop) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == WORKERS / 32) {
    bool ok = true;
    for (i64 j = 0; j < e.rounds && ok; j++) {
      if (lane == 0 && !(ok = await_chunk<SENDS>(a, e, j))) *stop = j;
      ok = __all_sync(~0u, ok);
      sync_named(READY);
    }
  } else if (warp == WORKERS / 32 + 1) {
    i64 j = 0;
    for (; j < e.rounds; j++) {
      sync_named(MOVED);
      if (j >= *(volatile i64*)stop) break;
      // Publishes the workers' stores to the slot, or completes their loads of it: the named barrier orders both before
      // this fence. Pairs with the acquire in the peer's await_flag.
      fence_system();
      if (lane == 0) store_relaxed(e.raised, e.base + j + 1);
    }
    if (lane == 0) store_relaxed(e.count, e.base + j);
  } else {
    for (i64 j = 0; j < e.rounds; j++) {
      sync_named(READY);
      const bool stops = j >= *(volatile i64*)stop;
      if (!stops) move_chunk<SENDS>(a, e, j);
      sync_named(MOVED);
      if (stops) break;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) messages(const __grid_constant__ MessageArguments a) {
  __shared__ i64 stop;  // the first round that is not taken, because some rank aborted
  const i64 me = a.c.rank, peer = a.peer, here = peer - (peer > me), there = me - (me > peer), lane = blockIdx.x;
  MessageMemory *own = memory_of(a, me), *far = memory_of(a, peer);
  End e;
  e.chunk = (a.nbytes / gridDim.x + sizeof(Flag)) / sizeof(Flag) * sizeof(Flag);  // more than an equal share
  if (e.chunk > LONGEST_CHUNK) e.chunk = LONGEST_CHUNK;
  const i64 chunks = a.nbytes > e.chunk ? (a.nbytes + e.chunk - 1) / e.chunk : 1;
  e.rounds = (chunks - lane + gridDim.x - 1) / gridDim.x;
  e.count = a.sends ? &own->sent[here][lane].word : &own->received[here][lane].word;
  e.awaited = a.sends ? &own->tails[here][lane].word : &own->heads[here][lane].word;
  e.raised = a.sends ? &far->heads[there][lane].word : &far->tails[there][lane].word;
  e.slots = a.sends ? far->slots[there][lane] : own->slots[here][lane];
  e.base = load_relaxed(e.count);
  if (threadIdx.x == 0) stop = 1ll << 62;
  __syncthreads();  // the count is read by all before it grows
  if (a.sends) move_message<true>(a, e, &stop);
  else move_message<false>(a, e, &stop);
}
