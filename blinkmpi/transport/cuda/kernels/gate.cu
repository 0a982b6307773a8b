// The gate of a long call: one warp, on the stream before the call's kernel, that announces the call and waits until
// all ranks have announced it. So the kernel behind it, which fills the GPU, starts when its peers are there.
//
// Its arguments are the first part of that kernel's. That kernel announces the call once more, with the same words, and
// it alone counts the call: the two are one call, in graphs as well. If the gate gives up, the kernel behind it finds
// the abort word at its first long wait.
//
// It aborts in one place, behind the loop: so it has at most 32 registers, and fits on a multiprocessor beside a matrix
// product that has left no more than that (384 threads of 168 registers).

#include "sync.cuh"

extern "C" __global__ void __launch_bounds__(32, 1) gate(const __grid_constant__ CommonArguments c) {
  const int lane = threadIdx.x;
  SymmetricHeader* own = c.symmetric[c.rank];
  const u64 seq = load_relaxed(&own->seq) + 1;  // which the kernel before, that has ended, has stored
  bool waiting = lane < N && lane != c.rank;    // for the rank of this number
  if (waiting) {
    fence_system();  // publishes whatever the stream wrote into the buffers before this kernel, as in `announce`
    tell<true>(c, lane, seq);
  }
  u64 seen = 0, want = seq;
  int why = 0, peer = lane;  // why to abort, and for whom this thread has waited
  // The kernel behind finds its own word there.
  if (lane == 31 && (seen = atomicExch(&own->running, announcement_of(c, seq))))
    why = OVERLAP, peer = (int)c.rank, want = 0;
  const u64* word = &own->announced[lane % MAX_RANKS].words[seq % ANNOUNCED];
  Deadline d = {0, 0};
  while (__any_sync(~0u, waiting) && !__any_sync(~0u, why)) {
    if (!waiting) continue;
    seen = load_acquire(word);  // pairs with the fence_system before `tell`
    if ((int)((u32)(seen >> 32) - (u32)seq) < 0) {
      why = poll_deadline(d, c), waiting = !why;
      if (why) seen >>= 32;
    } else {
      waiting = false;
      if ((u32)(seen >> 32) == (u32)seq && (u32)seen != (u32)c.fingerprint)
        why = MISMATCH, want = c.fingerprint, seen = (u32)seen;
    }
  }
  if (why) broadcast_abort(c, why, seq, peer, ANNOUNCEMENT, 0, want, seen);
}
