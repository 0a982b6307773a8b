// One hop, nothing copied on the way: pull a segment from the sources, fold it, push it to the targets.
//
// Every buffer is registered, so all ranks reach it; where it lies comes with a rank's entry. A rank owns one segment of
// the vector; the star trees of all ranks together are the collective. Folds in ascending order of rank.

struct Direct {
  Common c;
  u64 src_mask, dst_mask;  // the ranks that my segment comes from and goes to
  i64 src_at, dst_at;      // bytes before it in their send and receive buffers
  i64 bytes;
  i64 even;                // all ranks' segments are of one length
  const u64* regions;      // [region][rank]: where this rank sees it
  const char* src[N];      // where the peers' buffers are if they lie in the same regions at the same places as ours
  char* dst[N];
};
struct Ends {
  const char* src[N];
  char* dst[N];
};

// Packs at `at`, `at + step`, ...: all are loaded before the first is used.
template <int UNROLL, bool ALIGNED> __device__ __forceinline__ void move(const Direct& a, const Ends& e, i64 at, i64 step, int bytes) {
  Pack x[UNROLL][N];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.src_mask >> r & 1) x[u][r] = ALIGNED ? load16(e.src[r] + at + u * step) : load_own(e.src[r] + at + u * step, bytes);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    Partial sum;
    bool first = true;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.src_mask >> r & 1) {
        if (first) sum = widened(x[u][r]);
        else fold(sum, widened(x[u][r]));
        first = false;
      }
    if (a.c.divide) divide(sum, (int)a.c.divide);
    const Pack y = narrowed(sum);
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.dst_mask >> r & 1) {
        if (ALIGNED) store16(e.dst[r] + at + u * step, y);
        else store_own(e.dst[r] + at + u * step, y, bytes);
      }
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS, 1) direct(const __grid_constant__ Direct a) {
  constexpr int UNROLL = N <= 2 ? 8 : N <= 4 ? 4 : N <= 8 ? 2 : 1;
  const Common& c = a.c;
  const u64 seq = enter(c);
  __shared__ Ends e;
  bool ok = true;
  int skew = 0;  // how far an end is from 16 bytes
  if (threadIdx.x < N) {
    const int r = threadIdx.x;
    u64 src = (u64)c.send, dst = (u64)c.recv;
    if (r != c.rank) {
      ok = await_entry(c, r, seq);
      const Line* line = &c.peer[c.rank]->entered[r];
      const u64 from = get(&line->send), to = get(&line->recv);
      src = (u64)a.src[r], dst = (u64)a.dst[r];
      if (from && from != c.send_ref) src = a.regions[((from >> 48) - 1) * MAX_RANKS + r] + (from & 0xffffffffffff);
      if (to && to != c.recv_ref) dst = a.regions[((to >> 48) - 1) * MAX_RANKS + r] + (to & 0xffffffffffff);
    }
    e.src[r] = (const char*)src + a.src_at, e.dst[r] = (char*)dst + a.dst_at;
    if (a.src_mask >> r & 1) skew |= (int)((u64)e.src[r] & 15);
    if (a.dst_mask >> r & 1) skew |= (int)((u64)e.dst[r] & 15);
  }
  ok = __syncthreads_and(ok);
  skew = __syncthreads_or(skew);
  if (ok) {
    const i64 step = (i64)gridDim.x * blockDim.x * 16, whole = skew ? 0 : a.bytes & ~15ll;
    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
    for (; at + (UNROLL - 1) * step < whole; at += UNROLL * step) move<UNROLL, true>(a, e, at, step, 16);
    if (UNROLL > 4 && at + 3 * step < whole) { move<4, true>(a, e, at, step, 16); at += 4 * step; }
    if (UNROLL > 2 && at + step < whole) { move<2, true>(a, e, at, step, 16); at += 2 * step; }
    if (at < whole) { move<1, true>(a, e, at, 0, 16); at += step; }
    for (; at < a.bytes; at += step) move<1, false>(a, e, at, 0, (int)(a.bytes - at < 16 ? a.bytes - at : 16));
  }
  __syncthreads();
  // peers may use their buffers again when all have read and written them: this CTA's part, that of their CTA
  if (ok && threadIdx.x < N && threadIdx.x != c.rank) {
    fence();
    set(&c.peer[threadIdx.x]->done[blockIdx.x][c.rank], seq);
    ok = await(c, &c.peer[c.rank]->done[blockIdx.x][threadIdx.x], seq, seq, threadIdx.x, FOR_FINISH, 0);
  }
  // In place, the front of my vector was read by a peer: if segments are alike, by its CTA with our index just what this
  // one overwrites; else all of ours must have seen the end of all of theirs.
  if (c.home && __syncthreads_and(ok) && (a.even || all_through(c, seq))) go_home(c);
}
