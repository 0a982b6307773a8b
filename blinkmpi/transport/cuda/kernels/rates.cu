// The kernels that `blinkmpi topo --measure` times: 16-byte stores into a peer's memory, and round trips of a flag.
// C++17 without system headers, so that NVRTC compiles it for whatever GPU is found.

typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void __launch_bounds__(512) push(uint4* to, const uint4* from, u64 packs) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < packs; i += 4 * step) {
    const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < packs; i += step) to[i] = from[i];
}

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ void store_relaxed(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_relaxed(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// One thread here and one at the peer. `mine` and `theirs` are a flag each, in the memory of the rank that polls it.
// Flags only grow: `base` is the value that earlier round trips have left. `spent` gets the nanoseconds of `trips`
// round trips behind `warm` others, or stays 0 if the peer does not answer for `patience` ns. Relaxed accesses are
// enough, because no data follows a flag.
extern "C" __global__ void __launch_bounds__(32) flag(u32* theirs, const u32* mine, u64* spent, u32 base, u32 warm,
                                                      u32 trips, u32 first, u64 patience) {
  if (threadIdx.x) return;
  u64 began = 0;
  for (u32 i = 1; i <= warm + trips; i++) {
    if (first) store_relaxed(theirs, base + i);
    u64 since = 0;
    for (u32 polls = 1; load_relaxed(mine) < base + i; polls++) {
      if (polls & 1023) continue;
      const u64 t = now_ns();
      if (!since) since = t;
      if (t - since > patience) return;
    }
    if (!first) store_relaxed(theirs, base + i);
    if (i == warm) began = now_ns();
  }
  *spent = now_ns() - began;
}
