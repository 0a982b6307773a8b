// The protocol `direct`: one hop between registered buffers, without copies on the way.
//
// Every rank has mapped every registered buffer, and learns from a rank's announcement where its buffers are. A rank
// owns one segment of the vector: it loads it from the sources, reduces it in ascending order of rank, and stores it to
// the targets. The star trees of all ranks together are the collective.
//
// Macros from codegen.py, besides those of layout.cuh: WORKERS threads of a CTA, OFFSET_BITS of a buffer's reference.

#include "in_place.cuh"

struct DirectArguments {
  CommonArguments c;
  u64 src_mask, dst_mask;  // the ranks that our segment comes from and goes to
  i64 src_at, dst_at;      // bytes before it in their send and receive buffers
  i64 nbytes;
  i64 even;                // whether the segments of all ranks have the same length
  const u64* regions;      // [region][rank]: where we have mapped it
  const char* src[N];      // where the peers' buffers are if they lie in the same regions at the same offsets as ours
  char* dst[N];
};
constexpr u64 OFFSET_MASK = (1ull << OFFSET_BITS) - 1;
struct Buffers {  // by rank: where its part of our segment begins
  const char* src[N];
  char* dst[N];
};

// Where we have mapped the buffer that rank r names by a reference.
__device__ __forceinline__ u64 address_of(const DirectArguments& a, u64 ref, int r) {
  return a.regions[((ref >> OFFSET_BITS) - 1) * MAX_RANKS + r] + (ref & OFFSET_MASK);
}

// Move the packs at `at`, `at + step`, ...: all are loaded before the first is used.
template <int UNROLL, bool ALIGNED>
__device__ __forceinline__ void move_packs(const DirectArguments& a, const Buffers& e, i64 at, i64 step, int bytes) {
  Pack x[UNROLL][N];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.src_mask >> r & 1)
        x[u][r] = ALIGNED ? load_pack(e.src[r] + at + u * step) : load_user(e.src[r] + at + u * step, bytes);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    Partial sum;
    bool first = true;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.src_mask >> r & 1) {
        if (first) sum = widened(x[u][r]);
        else accumulate(sum, widened(x[u][r]));
        first = false;
      }
    if (a.c.divisor) divide(sum, (int)a.c.divisor);
    const Pack y = narrowed(sum);
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.dst_mask >> r & 1) {
        if (ALIGNED) store_pack(e.dst[r] + at + u * step, y);
        else store_user(e.dst[r] + at + u * step, y, bytes);
      }
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS, 1) direct(const __grid_constant__ DirectArguments a) {
  constexpr int UNROLL = N <= 2 ? 8 : N <= 4 ? 4 : N <= 8 ? 2 : 1;
  const CommonArguments& c = a.c;
  const u64 seq = announce(c);
  __shared__ Buffers e;
  bool ok = true;
  int skew = 0;  // how far the buffers are from an alignment of 16 bytes
  if (threadIdx.x < N) {
    const int r = threadIdx.x;
    u64 src = (u64)c.send, dst = (u64)c.recv;
    if (r != c.rank) {
      ok = await_announcement(c, r, seq);
      const Announcement* line = &c.symmetric[c.rank]->announced[r];
      const u64 from = load_relaxed(&line->send_ref), to = load_relaxed(&line->recv_ref);
      src = (u64)a.src[r], dst = (u64)a.dst[r];
      if (from && from != c.send_ref) src = address_of(a, from, r);
      if (to && to != c.recv_ref) dst = address_of(a, to, r);
    }
    e.src[r] = (const char*)src + a.src_at, e.dst[r] = (char*)dst + a.dst_at;
    if (a.src_mask >> r & 1) skew |= (int)((u64)e.src[r] & 15);
    if (a.dst_mask >> r & 1) skew |= (int)((u64)e.dst[r] & 15);
  }
  ok = __syncthreads_and(ok);
  skew = __syncthreads_or(skew);
  if (ok) {
    const i64 step = (i64)gridDim.x * blockDim.x * 16, whole = skew ? 0 : a.nbytes & ~15ll;
    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
    for (; at + (UNROLL - 1) * step < whole; at += UNROLL * step) move_packs<UNROLL, true>(a, e, at, step, 16);
    if (UNROLL > 4 && at + 3 * step < whole) { move_packs<4, true>(a, e, at, step, 16); at += 4 * step; }
    if (UNROLL > 2 && at + step < whole) { move_packs<2, true>(a, e, at, step, 16); at += 2 * step; }
    if (at < whole) { move_packs<1, true>(a, e, at, 0, 16); at += step; }
    for (; at < a.nbytes; at += step) move_packs<1, false>(a, e, at, 0, (int)(a.nbytes - at < 16 ? a.nbytes - at : 16));
  }
  __syncthreads();
  // Peers may use their buffers again when all ranks have read and written them. CTAs of one index do so for each
  // other: the grid is the same on all ranks.
  if (ok && threadIdx.x < N && threadIdx.x != c.rank) {
    // Publishes this CTA's stores to the peers' outputs, and completes its loads of their inputs: the barrier above
    // orders both before this fence. Pairs with the acquire in the peer's await_flag below.
    fence_system();
    store_relaxed(&c.symmetric[threadIdx.x]->finished[blockIdx.x][c.rank], seq);
    ok = await_flag(c, &c.symmetric[c.rank]->finished[blockIdx.x][threadIdx.x], seq, seq, threadIdx.x, FINISH, 0);
  }
  // In place, a peer has read the front of our vector. If all segments have one length, its CTA of our index read just
  // what this CTA overwrites. Otherwise all our CTAs must first have seen that all of theirs are finished.
  if (c.destination && __syncthreads_and(ok) && (a.even || grid_barrier(c, seq))) move_to_destination(c);
  leave(c);
}
