// The end of a reduce-scatter in place: the result moves from this rank's block to the front of its vector.

#include "sync.cuh"

// A reduce-scatter in place leaves its result in this rank's own block of the vector, which no other rank reads. When
// the front of the vector has been read, the result moves there. The two do not overlap.
__device__ __forceinline__ void move_to_destination(const CommonArguments& c) {
  constexpr int UNROLL = 8;
  const char* from = c.recv;
  const i64 step = (i64)gridDim.x * blockDim.x * 16, bytes = c.destination_bytes;
  const i64 whole = aligned(from) && aligned(c.destination) ? bytes & ~15ll : 0;
  i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
  for (; at < whole; at += UNROLL * step) {  // all loads are issued before the first store, also in the last round
    Pack x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * step < whole) x[u] = load_pack(from + at + u * step);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * step < whole) store_pack(c.destination + at + u * step, x[u]);
  }
  while (at - step >= whole) at -= step;
  for (; at < bytes; at += step) {
    const int here = (int)(bytes - at < 16 ? bytes - at : 16);
    store_user(c.destination + at, load_user(from + at, here), here);
  }
}
