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

enum How {
  ALIGNED,  // all buffers are aligned to 16 bytes
  LAST,     // likewise; packs behind `whole` are left out
  BLOCKS,   // some are not; blocks behind `whole` are left out
  EDGE      // `bytes` of one pack, wherever it lies
};
// Move the packs at `at`, `at + step`, ...: all are loaded before the first is used.
template <int UNROLL, How HOW>
__device__ __forceinline__ void move_packs(const DirectArguments& a, const Buffers& e, i64 at, i64 step, i64 whole,
                                           int bytes) {
  constexpr bool LATE = HOW == BLOCKS && N > 8;  // pieces of so many ranks would not fit the registers
  Piece x[UNROLL][N];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < N; r++)
      if (!LATE && (a.src_mask >> r & 1) && (HOW == ALIGNED || HOW == EDGE || at + u * step <= whole)) {
        const char* from = e.src[r] + at + u * step;
        if (HOW == BLOCKS) x[u][r] = load_piece(from);
        else x[u][r].x = HOW == EDGE ? load_user(from, bytes) : load_pack(from);
      }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if ((HOW == LAST || HOW == BLOCKS) && at + u * step > whole) continue;
    auto operand = [&](int r) {
      const char* from = e.src[r] + at + u * step;
      return LATE ? realigned(from, load_piece(from)) : HOW == BLOCKS ? realigned(from, x[u][r]) : x[u][r].x;
    };
    Pack y;
    if (ADDS_PAIRS && N == 2 && a.src_mask == 3 && !a.c.divisor) {
      y = pair_sums(operand(0), operand(N - 1));
    } else {
      Partial sum;
      bool first = true;
#pragma unroll (LATE ? 1 : N)
      for (int r = 0; r < N; r++)
        if (a.src_mask >> r & 1) {
          const Partial z = widened(operand(r));
          if (first) sum = z;
          else accumulate(sum, z);
          first = false;
        }
      if (a.c.divisor) divide(sum, (int)a.c.divisor);
      y = narrowed(sum);
    }
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.dst_mask >> r & 1) {
        char* to = e.dst[r] + at + u * step;
        if (HOW == BLOCKS) store_block(to, y);
        else if (HOW == EDGE) store_user(to, y, bytes);
        else store_pack(to, y);
      }
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS, 1) direct(const __grid_constant__ DirectArguments a) {
  constexpr int UNROLL = N <= 2 ? 8 : N <= 4 ? 4 : N <= 8 ? 2 : 1;  // packs of a thread that are under way at once
  constexpr int TAIL = UNROLL > 1 ? UNROLL / 2 : 1, APART = N <= 2 ? 4 : 1;
  const CommonArguments& c = a.c;
  const u64 seq = announce<true>(c);
  __shared__ Buffers e;
  bool ok = true;
  // If all addresses of our segment lie alike, packs begin where they are aligned, `shift` bytes before it; but not where
  // the result moves at the end, which wants CTAs of one index to have the same bytes.
  const u64 own = a.dst_mask >> c.rank & 1 ? (u64)c.recv + a.dst_at : (u64)c.send + a.src_at;
  const int shift = c.destination ? 0 : skew_of((const void*)own);
  int apart = 0;  // not 0: an address lies elsewhere
  if (threadIdx.x < N) {
    const int r = threadIdx.x;
    u64 src = (u64)c.send, dst = (u64)c.recv;
    if (r != c.rank) {
      u64 from = 0, to = 0;
      ok = await_announcement(c, r, seq) && await_references(c, r, seq, from, to);
      src = (u64)a.src[r], dst = (u64)a.dst[r];
      if (ok && from && from != c.send_ref) src = address_of(a, from, r);
      if (ok && to && to != c.recv_ref) dst = address_of(a, to, r);
    }
    e.src[r] = (const char*)src + a.src_at, e.dst[r] = (char*)dst + a.dst_at;
    if (a.src_mask >> r & 1) apart |= skew_of(e.src[r]) ^ shift;
    if (a.dst_mask >> r & 1) apart |= skew_of(e.dst[r]) ^ shift;
  }
  ok = __syncthreads_and(ok);
  apart = __syncthreads_or(apart);
  if (ok) {
    const i64 step = (i64)gridDim.x * blockDim.x * 16;
    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16 - (apart ? 0 : shift);
    if (at < 0) at += step;
    for (; !apart && at + (UNROLL - 1) * step + 16 <= a.nbytes; at += UNROLL * step)
      move_packs<UNROLL, ALIGNED>(a, e, at, step, 0, 16);
    // The last place where a pack is whole. Among unaligned ones the whole block must be, for its warp moves it.
    const i64 whole = a.nbytes - (apart ? BLOCK - lane_of_warp() * 16 : 16);
    for (; UNROLL > 2 && !apart && at <= whole; at += TAIL * step) move_packs<TAIL, LAST>(a, e, at, step, whole, 16);
    for (; at <= whole; at += APART * step) move_packs<APART, BLOCKS>(a, e, at, step, whole, 16);
    while (at >= step && at - step > whole) at -= step;
    // What is left to this thread: a piece of the first pack, and a piece of the last one or a pack of the last block.
    const int head = apart || blockIdx.x || threadIdx.x || !shift ? 0 : 16 - shift;
#pragma unroll 1
    for (int last = head == 0; last < 2; last++) {
      const i64 p = last ? at : 0, most = last ? 16 : head;
      if (p < a.nbytes) move_packs<1, EDGE>(a, e, p, 0, 0, (int)(a.nbytes - p < most ? a.nbytes - p : most));
    }
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
