// Blocks: each rank sends a block to some ranks and receives one from some, each of a length and at a place of its own.
//
// A rank has a send end for each rank that it sends to, a receive end for each that it receives from, and a group of
// CTAs that copies its own block. An end is one of a FIFO (fifo.cuh), over memory that is the blocks' alone: messages
// have an order of their own.
//
// Each rank knows its own lengths alone. So both ends of a block announce to one another how long it is for them, and
// compare: where they differ, both ranks report it. A receiver compares before it writes into the user's memory. A
// sender fills free slots meanwhile. An empty block is announced, too. A word of an announcement has the number of the
// call beside a half of the length. There are two turns of them: who announces the call after the next one has seen that
// its peer had begun the next one.
//
// COUNTED: the lengths of what a rank sends are in its GPU memory, in elements, and nobody knows what it will receive.
// Each end that receives waits for all announcements, finds the places, and compares the end of each block with its
// buffer's.
//
// Macros from codegen.py, besides those of fifo.cuh: LANE_BYTES of a block from which it has another lane, COUNTED.

#include "fifo.cuh"

constexpr int TURNS = 2, SENT = 0, EXPECTED = 1;
struct Lengths {  // what a peer says of its blocks to and from this rank; one line, written by that peer alone
  u64 words[TURNS][2][2];  // by turn, SENT or EXPECTED, low and high half: (number of the call << 32) | half
  u64 pad[8];
};
struct BlockMemory {
  FifoMemory fifos;
  Lengths lengths[N - 1];
  Flag turns[N - 1];  // (number of the last call with this peer << 32) | how many there were; written by this rank
};
struct BlockEnd { i64 peer, sends, at, nbytes; };  // `at`: in the send or the receive buffer
struct BlockArguments {
  CommonArguments c;
  i64 memory_at;  // in every rank's symmetric memory
  i64 lanes;      // of a block, at most: the same on all ranks
  i64 ends;
  i64 own_from, own_to, own_bytes;  // the block that this rank keeps
  BlockEnd each[2 * (N - 1)];
#if COUNTED
  i64 item;                    // bytes of an element
  i64 send_count, recv_count;  // elements of the buffers
  const i64* counts;           // by rank
  i64* told;                   // likewise: what came
  const i64* places;           // where it is to lie, by rank; 0: one block behind another
#endif
};

__device__ __forceinline__ BlockMemory* memory_of(const BlockArguments& a, i64 rank) {
  return (BlockMemory*)((char*)a.c.symmetric[rank] + a.memory_at);
}
__device__ __forceinline__ i64 lanes_of(const BlockArguments& a, i64 nbytes) {
  const i64 lanes = (nbytes + LANE_BYTES - 1) / LANE_BYTES;
  return lanes < 1 ? 1 : lanes < a.lanes ? lanes : a.lanes;
}

// ---- lengths

// The number of the calls with a peer, this one among them. Whoever announces it stores it; nobody needs to wait for it.
__device__ __forceinline__ u32 turn_of(const BlockArguments& a, i64 peer, u64 seq) {
  const u64 last = load_relaxed(&memory_of(a, a.c.rank)->turns[place_of(peer, a.c.rank)].word);
  return (u32)last + ((u32)(last >> 32) != (u32)seq);
}

__device__ __forceinline__ void announce_length(const BlockArguments& a, i64 peer, int what, u64 nbytes, u64 seq) {
  const u32 turn = turn_of(a, peer, seq);
  u64* words = memory_of(a, peer)->lengths[place_of(a.c.rank, peer)].words[turn % TURNS][what];
  store_relaxed(words, seq << 32 | (u32)nbytes);
  store_relaxed(words + 1, seq << 32 | nbytes >> 32);
  store_relaxed(&memory_of(a, a.c.rank)->turns[place_of(peer, a.c.rank)].word, seq << 32 | turn);
}

// Whether a peer has said how much it sends to this rank, or expects from it, in this call; and how much.
__device__ __forceinline__ bool has_said(const BlockArguments& a, i64 peer, int what, u64 seq, u64& nbytes) {
  const u64* words = memory_of(a, a.c.rank)->lengths[place_of(peer, a.c.rank)].words[turn_of(a, peer, seq) % TURNS][what];
  const u64 low = load_relaxed(words), high = load_relaxed(words + 1);
  nbytes = high << 32 | (u32)low;
  return (u32)(low >> 32) == (u32)seq && (u32)(high >> 32) == (u32)seq;
}

__device__ __forceinline__ bool report_mismatch(const BlockArguments& a, const BlockEnd& b, u64 seq, u64 theirs) {
  fence_system();  // what this thread has announced arrives before the abort, so that the peer finds it, too
  return broadcast_abort(a.c, MISMATCH, seq, b.peer, b.sends ? SEND_BLOCK : RECEIVE_BLOCK, b.nbytes, b.nbytes, theirs);
}

// Report a length that differs, if there is one, in place of another rank's abort: that rank may have given up for it.
__device__ __noinline__ bool reports_lengths(const BlockArguments& a, u64 seq) {
  fence_system();  // the announcements are read after the abort
  for (i64 i = 0; i < a.ends && !COUNTED; i++) {
    const BlockEnd& b = a.each[i];
    u64 theirs;
    if (has_said(a, b.peer, b.sends ? EXPECTED : SENT, seq, theirs) && theirs != (u64)b.nbytes)
      return !report_mismatch(a, b, seq, theirs);
  }
  return false;
}
struct LooksAtLengths {
  const BlockArguments& a;
  u64 seq;
  __device__ __forceinline__ bool operator()() const { return reports_lengths(a, seq); }
};

// Wait until a peer has begun this call and has said how long a block is.
__device__ __forceinline__ bool await_length(const BlockArguments& a, i64 peer, int what, u64 seq, u64& nbytes) {
  const LooksAtLengths looks{a, seq};
  if (!await_announcement(a.c, peer, seq, looks)) return false;
  Deadline d = {0, 0};
  while (!has_said(a, peer, what, seq, nbytes)) {
    const int why = poll_deadline(d, a.c);
    if (why == ABORTED && looks()) return false;
    if (why) return broadcast_abort(a.c, why, seq, peer, ANNOUNCEMENT, 0, seq, 0);
  }
  return true;
}

// Compare the length of a block with the peer's. The CTA of lane 0 reports it, which has announced this rank's.
__device__ __forceinline__ bool compare_length(const BlockArguments& a, const BlockEnd& b, i64 lane, u64 seq) {
  u64 theirs;
  if (!await_length(a, b.peer, b.sends ? EXPECTED : SENT, seq, theirs)) return false;
  if (theirs == (u64)b.nbytes) return true;
  return lane == 0 && report_mismatch(a, b, seq, theirs);
}

// ---- blocks

template <bool SENDS> struct AwaitBlock {
  const BlockArguments& a;
  const BlockEnd& b;
  const End& e;
  u64 seq;
  __device__ __forceinline__ bool operator()(i64 j) const {
    if (!SENDS && !COUNTED && j == 0 && !compare_length(a, b, e.lane, seq)) return false;
    return await_flag(a.c, e.awaited, wanted<SENDS>(e, j), seq, b.peer, SENDS ? SEND_BLOCK : RECEIVE_BLOCK, b.nbytes,
                      LooksAtLengths{a, seq});
  }
  // A sender compares when all is on its way, and who has an empty block when nothing is.
  __device__ __forceinline__ void end() const {
    if (!COUNTED && (SENDS ? e.lane == 0 : e.rounds == 0)) compare_length(a, b, e.lane, seq);
  }
};

template <bool SENDS>
__device__ __forceinline__ void move_block(const BlockArguments& a, const BlockEnd& b, i64 lane, u64 seq, i64* stop) {
  const i64 lanes = lanes_of(a, b.nbytes);
  if (lane >= lanes) return;
  if (lane == 0 && threadIdx.x == 0 && !COUNTED)
    announce_length(a, b.peer, SENDS ? SENT : EXPECTED, b.nbytes, seq);
  char* at = (SENDS ? (char*)a.c.send : a.c.recv) + b.at;
  const End e = end_of<SENDS, 0>(&memory_of(a, a.c.rank)->fifos, &memory_of(a, b.peer)->fifos, a.c.rank, b.peer, lane,
                                 lanes, at, {b.nbytes, 0});
  __syncthreads();  // the count is read by all before it grows
  move_through<SENDS>(a.c, e, stop, AwaitBlock<SENDS>{a, b, e, seq});
}

// Copy the block that this rank keeps. Inlined, it would take registers from what moves the others.
__device__ __noinline__ void copy_own(const BlockArguments& a, i64 from, i64 to, i64 nbytes, i64 lane) {
  using K = Kind<0, 0, 0, true, false, 0, false>;
  const i64 lanes = lanes_of(a, nbytes), share = (nbytes / lanes + sizeof(Flag)) / sizeof(Flag) * sizeof(Flag);
  const i64 first = lane * share;
  if (lane >= lanes || first >= nbytes || threadIdx.x >= WORKERS) return;
  Chunk<K> x;
  x.elements = nbytes - first < share ? nbytes - first : share;
  x.own = a.c.send + from + first, x.store = a.c.recv + to + first;
  move_all<K>(a.c, x);
}

#if COUNTED
struct Counted {  // in shared memory, by rank: elements that are sent and that come, and where they begin
  i64 sent[N], from[N], came[N], to[N];
  i64 bad, first;  // the first rank whose block does not lie in the buffer, and where it begins; N if there is none
  BlockEnd block;  // of the CTA
};

// Find where blocks lie in a buffer of `most` elements, by one thread.
__device__ __forceinline__ void find_places(Counted& k, const i64* counts, const i64* places, i64 most, i64* at) {
  i64 end = 0;
  for (k.bad = 0; k.bad < N; k.bad++) {
    const i64 count = counts[k.bad];
    k.first = places ? places[k.bad] : end;
    if (count < 0 || count > most || k.first < 0 || k.first > most - count) break;
    at[k.bad] = k.first, end = k.first + count;
  }
}

// Read this rank's counts. False: they are no counts of its buffer, and the CTA of number 0 reports it.
__device__ __forceinline__ bool read_counts(const BlockArguments& a, Counted& k, u64 seq) {
  if (threadIdx.x < N) k.sent[threadIdx.x] = a.counts[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    find_places(k, k.sent, nullptr, a.send_count, k.from);
    if (k.bad < N && blockIdx.x == 0)
      broadcast_abort(a.c, COUNTS, seq, k.bad, SEND_BLOCK, k.first, a.send_count, k.sent[k.bad]);
  }
  __syncthreads();
  return k.bad == N;
}

// Wait for what all ranks send to this one. False: some rank aborted, or it is too much, which one CTA reports.
__device__ __forceinline__ bool await_counts(const BlockArguments& a, Counted& k, u64 seq, bool reports) {
  const int r = threadIdx.x;
  bool ok = true;
  if (r < N) {
    u64 count = k.sent[r];
    if (r != a.c.rank) ok = await_length(a, r, SENT, seq, count);
    k.came[r] = count;
  }
  if (!__syncthreads_and(ok)) return false;
  if (r == 0) {
    find_places(k, k.came, a.places, a.recv_count, k.to);
    if (k.bad < N && reports)
      broadcast_abort(a.c, COUNTS, seq, k.bad, RECEIVE_BLOCK, k.first, a.recv_count, k.came[k.bad]);
  }
  __syncthreads();
  if (reports && k.bad == N && r < N) a.told[r] = k.came[r];
  return k.bad == N;
}

__device__ __forceinline__ void run(const BlockArguments& a, u64 seq, i64 group, i64 lane, i64* stop) {
  __shared__ Counted known;
  const bool own = group == a.ends, sends = !own && a.each[group].sends;
  if (!read_counts(a, known, seq)) return;
  if (!sends && !await_counts(a, known, seq, own && lane == 0)) return;
  const i64 r = own ? a.c.rank : a.each[group].peer;
  if (own) {
    copy_own(a, known.from[r] * a.item, known.to[r] * a.item, known.sent[r] * a.item, lane);
    return;
  }
  if (threadIdx.x == 0)
    known.block = {r, sends, (sends ? known.from[r] : known.to[r]) * a.item,
                   (sends ? known.sent[r] : known.came[r]) * a.item};
  __syncthreads();
  if (sends && lane == 0 && threadIdx.x == 0) announce_length(a, r, SENT, known.sent[r], seq);
  if (sends) move_block<true>(a, known.block, lane, seq, stop);
  else move_block<false>(a, known.block, lane, seq, stop);
}
#else
__device__ __forceinline__ void run(const BlockArguments& a, u64 seq, i64 group, i64 lane, i64* stop) {
  if (group == a.ends) copy_own(a, a.own_from, a.own_to, a.own_bytes, lane);
  else if (a.each[group].sends) move_block<true>(a, a.each[group], lane, seq, stop);
  else move_block<false>(a, a.each[group], lane, seq, stop);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) blocks(const __grid_constant__ BlockArguments a) {
  __shared__ i64 stop;  // the first round that is not taken, because some rank aborted
  if (threadIdx.x == 0) stop = 1ll << 62;
  const u64 seq = announce(a.c);
  const i64 groups = a.ends + 1;
  run(a, seq, blockIdx.x % groups, blockIdx.x / groups, &stop);
  leave(a.c);
}
