// Synchronisation: flags in symmetric memory, fences, deadlines, aborts, the entry barrier of a call, the grid barrier.

#include "layout.cuh"

// ---- flags: words of 64 bits that one thread writes and threads of this or another GPU poll

__device__ __forceinline__ u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ---- aborts and deadlines

// Abort the call on all ranks, and report why. Returns false, for the caller to pass on.
__device__ __noinline__ bool broadcast_abort(const CommonArguments& c, u64 code, u64 seq, int peer, i64 stage,
                                             i64 chunk, u64 want, u64 seen) {
  Report* r = c.report;
  // The first thread fills in the report. The word is not in host memory, where atomics may be refused.
  if (atomicCAS(&c.symmetric[c.rank]->report_taken, 0ull, 1ull) == 0) {
    r->seq = seq, r->peer = peer, r->stage = stage, r->chunk = chunk, r->want = want, r->seen = seen;
    fence_system();  // publishes the fields above to the host, which reads them after it has seen `code`
    store_relaxed(&r->code, code);
    store_relaxed(&r->abort, 1);
  }
  for (int p = 0; p < N; p++) store_relaxed(&c.symmetric[p]->abort, 1 + c.rank);  // peers poll it whenever they wait
  return false;
}

__device__ __forceinline__ bool poll_abort(const CommonArguments& c) {
  return load_relaxed(&c.symmetric[c.rank]->abort) != 0 || load_relaxed(&c.report->abort) != 0;
}

// The deadline of one wait. The clock and the abort words are slow to read, so only every 1024th poll reads them.
struct Deadline {
  u32 polls;
  u64 since;
};
__device__ __forceinline__ int poll_deadline(Deadline& d, const CommonArguments& c) {  // 0: wait on; else why to abort
  if (++d.polls & 1023) return 0;
  const u64 now = now_ns();
  if (d.since == 0) d.since = now;
  if (poll_abort(c)) return ABORTED;
  return now - d.since > c.timeout_ns ? TIMEOUT : 0;
}

// What a kernel does that learns of another rank's abort: nothing, or report a reason of its own, and say so.
struct KnowsNothing {
  __device__ __forceinline__ bool operator()() const { return false; }
};

// Wait until *flag >= want. What its writer wrote before it is then readable. False: the call was aborted.
template <class Knows = KnowsNothing>
__device__ __forceinline__ bool await_flag(const CommonArguments& c, const u64* flag, u64 want, u64 seq, int peer,
                                           i64 stage, i64 chunk, const Knows& knows = {}) {
  Deadline d = {0, 0};
  u64 seen;
  while ((i64)((seen = load_relaxed(flag)) - want) < 0) {
    const int why = poll_deadline(d, c);
    if (why == ABORTED && knows()) return false;
    if (why) return broadcast_abort(c, why, seq, peer, stage, chunk, want, seen);
  }
  // Pairs with the fence_system that the writer of the flag executed before it. An acquire in the loop would invalidate
  // the L1 cache at every poll.
  load_acquire(flag);
  return true;
}

// ---- the entry barrier: every rank announces a call to all peers, and waits for the announcements that it needs

// Look once whether `peer` has announced call `seq`, and compare what it calls with what we call. `ok` becomes false if
// the call is aborted. Returns whether there is nothing more to wait for.
template <class Knows = KnowsNothing>
__device__ __forceinline__ bool poll_announcement(const CommonArguments& c, int peer, u64 seq, Deadline& d, bool& ok,
                                                  const Knows& knows = {}) {
  // The acquire pairs with the fence_system of announce.
  const u64 seen = load_acquire(&c.symmetric[c.rank]->announced[peer].words[seq % ANNOUNCED]);
  if ((int)((u32)(seen >> 32) - (u32)seq) < 0) {
    const int why = poll_deadline(d, c);
    if (why) ok = !(why == ABORTED && knows()) && broadcast_abort(c, why, seq, peer, ANNOUNCEMENT, 0, seq, seen >> 32);
    return !ok;
  }
  if ((u32)(seen >> 32) == (u32)seq && (u32)seen != (u32)c.fingerprint)
    ok = broadcast_abort(c, MISMATCH, seq, peer, ANNOUNCEMENT, 0, c.fingerprint, (u32)seen);
  return true;
}

// Wait until `peer` has announced call `seq`. False: the call was aborted.
template <class Knows = KnowsNothing>
__device__ __forceinline__ bool await_announcement(const CommonArguments& c, int peer, u64 seq, const Knows& knows = {}) {
  Deadline d = {0, 0};
  bool ok = true;
  while (!poll_announcement(c, peer, seq, d, ok, knows)) {}
  return ok;
}

// Where the registered buffers of `peer` are in call `seq`, which it has announced. A word of another call is an old
// one: the new one is on its way, and stays until this rank has told the peer that it has finished the call.
__device__ __forceinline__ bool await_references(const CommonArguments& c, int peer, u64 seq, u64& send, u64& recv) {
  const u64* words = c.symmetric[c.rank]->announced[peer].references;
  Deadline d = {0, 0};
  while (true) {
    u64 seen[REFERENCE_WORDS];
    bool came = true;
#pragma unroll
    for (int i = 0; i < REFERENCE_WORDS; i++) seen[i] = load_relaxed(words + i);
#pragma unroll
    for (int i = 0; i < REFERENCE_WORDS; i++) came &= (u32)(seen[i] >> 32) == (u32)seq;
    send = seen[1] << 32 | (u32)seen[0], recv = seen[3] << 32 | (u32)seen[2];
    if (came) return true;
    const int why = poll_deadline(d, c);
    if (why) return broadcast_abort(c, why, seq, peer, ANNOUNCEMENT, 0, seq, seen[0] >> 32);
  }
}

// As await_announcement, for all ranks in `peers`, by the first warp of a CTA, which stays together: its threads wait
// for the slowest.
__device__ __forceinline__ bool await_announcements(const CommonArguments& c, u64 peers, u64 seq) {
  bool ok = true;
  if (threadIdx.x >= 32) return ok;
  Deadline d = {0, 0};
  bool waiting = threadIdx.x < N && (peers >> threadIdx.x & 1);
  while (__any_sync(~0u, waiting)) waiting = waiting && !poll_announcement(c, threadIdx.x, seq, d, ok);
  return ok;
}

// Every CTA ends with this. CTA 0 stands for all: until here no other call of the communicator may begin.
__device__ __forceinline__ void leave(const CommonArguments& c) {
  if (blockIdx.x) return;
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) store_relaxed(&c.symmetric[c.rank]->running, 0);
}

// What a rank announces of a call.
__device__ __forceinline__ u64 announcement_of(const CommonArguments& c, u64 seq) {
  return (seq << 32) | (u32)c.fingerprint;
}

// Announce call `seq` to a peer; with REFERENCES, tell it where our registered buffers are.
template <bool REFERENCES> __device__ __forceinline__ void tell(const CommonArguments& c, int peer, u64 seq) {
  Announcement* line = &c.symmetric[peer]->announced[c.rank];
  const u64 word = announcement_of(c, seq);
  store_relaxed(&line->words[seq % ANNOUNCED], word);
  if (REFERENCES) {  // in no order with the word above: each has the number of the call
    const u64 halves[REFERENCE_WORDS] = {(u32)c.send_ref, c.send_ref >> 32, (u32)c.recv_ref, c.recv_ref >> 32};
#pragma unroll
    for (int i = 0; i < REFERENCE_WORDS; i++) store_relaxed(&line->references[i], (seq << 32) | halves[i]);
  }
  store_relaxed(&line->last, word);  // of which nothing but the number is read
}

// Every CTA begins with this, and gets the number of the call. CTA 0 announces it to the peers; the last CTA counts it.
// Calls of one communicator must not overlap: streams and graphs that overlap are reported here.
//
// With REFERENCES, peers are told where our registered buffers are, and use them.
template <bool REFERENCES = false> __device__ __forceinline__ u64 announce(const CommonArguments& c) {
  __shared__ u64 shared_seq;
  SymmetricHeader* own = c.symmetric[c.rank];
  const bool announces = blockIdx.x == 0 && threadIdx.x < N && threadIdx.x != c.rank;
  if (threadIdx.x == blockDim.x - 1) shared_seq = load_relaxed(&own->seq) + 1;
  // Publishes whatever the stream wrote into the buffers before this kernel: the end of that work synchronizes with the
  // start of this thread. Pairs with the acquire of await_announcement. Nothing of ours is on its way to a peer yet, so
  // this waits for no link, and it goes on while another warp loads the number. Without references peers read nothing
  // of ours that it would publish.
  if (REFERENCES && announces) fence_system();
  __syncthreads();
  const u64 seq = shared_seq;
  if (announces) tell<REFERENCES>(c, threadIdx.x, seq);
  if (threadIdx.x == blockDim.x - 1) {
    // Orders this CTA's load of `seq`, before the barrier above, before its count. The last CTA to count stores the new
    // `seq`, which no CTA of this call may read.
    __threadfence();
    const u64 other = blockIdx.x ? 0 : atomicExch(&own->running, seq);  // both atomics are under way at once
    if (atomicAdd(&own->announced_ctas, 1u) == gridDim.x - 1) {
      own->announced_ctas = 0;
      store_relaxed(&own->seq, seq);
    }
    if (other && other != announcement_of(c, seq))  // which this call's own gate has left
      broadcast_abort(c, OVERLAP, seq, c.rank, ANNOUNCEMENT, 0, 0, other);
  }
  return seq;
}

// ---- the grid barrier

// Wait until all CTAs of this rank have arrived: what they have read may be overwritten, what they wrote may be read.
__device__ __forceinline__ bool grid_barrier(const CommonArguments& c, u64 seq) {
  bool ok = true;
  __syncthreads();
  if (threadIdx.x == 0) {
    SymmetricHeader* own = c.symmetric[c.rank];
    // Publishes what this CTA wrote, and completes its loads, before it counts itself. Pairs with the fence_system of
    // the CTA that counts last.
    __threadfence();
    if (atomicAdd(&own->barrier_ctas, 1u) == gridDim.x - 1) {
      own->barrier_ctas = 0;
      fence_system();  // passes on what all CTAs published before they counted; pairs with load_acquire below
      store_relaxed(&own->barrier_seq, seq);
    } else {
      u32 polls = 0;  // no deadline: the other CTAs wait for peers, each time with a deadline, and abort for us too
      while (ok && (i64)(load_relaxed(&own->barrier_seq) - seq) < 0) ok = (++polls & 1023) || !poll_abort(c);
      load_acquire(&own->barrier_seq);
    }
  }
  return __syncthreads_and(ok);
}
