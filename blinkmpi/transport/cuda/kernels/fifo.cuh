// FIFOs from rank to rank, one for each ordered pair: what one puts in, the other takes out, in order.
//
// A FIFO has LANES rings of DEPTH slots in the reader's memory. As for a channel, a head flag at the reader counts the
// chunks that were written, a tail flag at the writer those that were read. Both counts go on from transfer to transfer,
// also in replays of a graph, and nothing is reset. A transfer has a CTA for each lane that it uses, and that of lane i
// moves every lanes-th chunk. Lanes and chunks follow from its length alone, so the two ends agree without having met.
//
// What fits into free slots is sent whether the reader has come or not. A chunk waits for earlier chunks of its FIFO
// alone, and each end of a FIFO has CTAs of its own.
//
// Macros from codegen.py, besides those of layout.cuh: WORKERS threads that move data, LANES, DEPTH, LONGEST_CHUNK.

#include "chunks.cuh"

struct Header { i64 nbytes, tag; };  // of a transfer, in the first chunk of a lane
struct Slot {
  Header header;
  u64 pad[14];
  char data[LONGEST_CHUNK];
};
struct Flag { u64 word, pad[15]; };
struct FifoMemory {  // of a rank; by the other rank, of which there are N - 1, and lane
  Flag heads[N - 1][LANES], tails[N - 1][LANES];    // written by the other rank
  Flag sent[N - 1][LANES], received[N - 1][LANES];  // chunks so far, at this rank's ends
  Slot slots[N - 1][LANES][DEPTH];                  // written by the other rank
};
struct End {  // what this rank has of a lane, for one transfer
  const u64* awaited;
  u64 *raised, *count;
  Slot* slots;
  u64 base;  // chunks before this transfer
  i64 chunk, lane, lanes, rounds;
  char* at;  // where it lies, or is to lie
  Header header;
};

// Where other ranks come in arrays of N - 1.
__device__ __forceinline__ i64 place_of(i64 other, i64 me) { return other - (other > me); }

// An end of a transfer of at least LEAST chunks: without bytes one chunk alone brings the header.
template <bool SENDS, int LEAST>
__device__ __forceinline__ End end_of(FifoMemory* own, FifoMemory* far, i64 me, i64 peer, i64 lane, i64 lanes, char* at,
                                      Header header) {
  const i64 here = place_of(peer, me), there = place_of(me, peer), nbytes = header.nbytes;
  End e;
  e.chunk = (nbytes / lanes + sizeof(Flag)) / sizeof(Flag) * sizeof(Flag);  // more than an equal share
  if (e.chunk > LONGEST_CHUNK) e.chunk = LONGEST_CHUNK;
  i64 chunks = (nbytes + e.chunk - 1) / e.chunk;
  if (chunks < LEAST) chunks = LEAST;
  e.lane = lane, e.lanes = lanes, e.at = at, e.header = header;
  e.rounds = (chunks - lane + lanes - 1) / lanes;
  e.count = SENDS ? &own->sent[here][lane].word : &own->received[here][lane].word;
  e.awaited = SENDS ? &own->tails[here][lane].word : &own->heads[here][lane].word;
  e.raised = SENDS ? &far->heads[there][lane].word : &far->tails[there][lane].word;
  e.slots = SENDS ? far->slots[there][lane] : own->slots[here][lane];
  e.base = load_relaxed(e.count);
  return e;
}

// What the awaited flag must be, for chunk j of this lane to be moved.
template <bool SENDS> __device__ __forceinline__ u64 wanted(const End& e, i64 j) {
  return SENDS ? e.base + j + 1 - DEPTH : e.base + j + 1;
}

template <bool SENDS> __device__ __forceinline__ void move_chunk(const CommonArguments& c, const End& e, i64 j) {
  using K = Kind<!SENDS, SENDS - 1, SENDS, !SENDS, false, 0, false>;
  Slot* slot = &e.slots[(e.base + j) % DEPTH];
  const i64 first = (e.lane + j * e.lanes) * e.chunk, left = e.header.nbytes - first;
  Chunk<K> x;
  x.elements = left < e.chunk ? left : e.chunk;
  if (SENDS) x.own = e.at + first, x.out[0] = slot->data;
  else x.store = e.at + first, x.in[0] = slot->data;
  if (SENDS && j == 0 && threadIdx.x == 0) slot->header = e.header;
  move_all<K>(c, x);
}

// Move what is a CTA's, when all its threads have their End. `await(j)` waits until chunk j may be moved, and says
// whether it may; one thread calls it, and then `end()`. `stop` is shared, and beyond all rounds.
template <bool SENDS, class Await>
__device__ __forceinline__ void move_through(const CommonArguments& c, const End& e, i64* stop, const Await& await) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == WORKERS / 32) {
    bool ok = true;
    for (i64 j = 0; j < e.rounds && ok; j++) {
      if (lane == 0 && !(ok = await(j))) *stop = j;
      ok = __all_sync(~0u, ok);
      sync_named(READY);
    }
    if (lane == 0 && ok) await.end();
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
      if (!stops) move_chunk<SENDS>(c, e, j);
      sync_named(MOVED);
      if (stops) break;
    }
  }
}
