// The LL128 codec (NCCL): 112 bytes of data and a flag fill a line of 128 bytes.
//
// Eight threads store a line with one instruction. It arrives whole over NVLink, but not over PCIe. Seven eighths of
// what crosses the link are data. A line is stored as one, but not loaded as one: a load of the whole line that has the
// new flag may bring older data. So the eighth thread polls the flag, and the others load their data afterwards.
//
// Threads whose ways have parted store one after another, and __syncwarp does not bring them together again: it waits
// for all, and lets each go on by itself. So the threads of a line look whether they are together before they store it.

#include "ll16.cuh"

// A position is a thread's 16 bytes of a line: a pack, or the flag. Whole warps stay together, because they vote on
// what has come; a mask of fewer threads, worked out at run time, would cost most of a microsecond.
struct LL128 {
  static constexpr int GROUP = 8, DATA = 7;  // of GROUP positions side by side, DATA carry a pack each
  static constexpr int BYTES = 16;           // of a position in an LL buffer

  static __device__ __forceinline__ i64 positions(i64 packs) { return ((u32)packs + DATA - 1) / DATA * GROUP; }
  static __device__ __forceinline__ i64 first_pack(i64 position) { return (position >> 3) * DATA; }  // of the line
  static __device__ __forceinline__ i64 pack_of(i64 position) { return first_pack(position) + (position & 7); }
  static __device__ __forceinline__ bool carries(i64 position) { return (position & 7) < DATA; }
  static __device__ __forceinline__ i64 first_together(i64 position) { return position & ~31ll; }  // of the warp's
  static __device__ __forceinline__ bool any(bool holds) { return __any_sync(0xffffffff, holds); }
  static __device__ __forceinline__ int agree(int why) {
    return any(why == ABORTED) ? ABORTED : any(why == TIMEOUT) ? TIMEOUT : 0;
  }

  static __device__ __forceinline__ void send(char* buffer, i64 position, bool wanted, const Pack& x, u32 flag) {
    char* p = buffer + position * BYTES;
    const bool data = carries(position);
    const Pack y = {{data ? x.w[0] : flag, data ? x.w[1] : flag, data ? x.w[2] : flag, data ? x.w[3] : flag}};
    const u32 line = 0xffu << (threadIdx.x & 24);
    __syncwarp();
    if ((active_threads() & line) == line) {  // no branch parts them between this and the store
      if (wanted) store_packet(p, y.w[0], y.w[1], y.w[2], y.w[3]);
      return;
    }
    if (wanted && data) store_packet(p, y.w[0], y.w[1], y.w[2], y.w[3]);
    fence_system();     // publishes this thread's pack before the line's flag, which another thread stores
    __syncwarp(line);
    if (wanted && !data) store_packet(p, y.w[0], y.w[1], y.w[2], y.w[3]);
  }

  static __device__ __forceinline__ u32 active_threads() {  // of this warp, those that execute this instruction now
    u32 mask;
    asm volatile("activemask.b32 %0;" : "=r"(mask) :: "memory");
    return mask;
  }

  // Look once for the flags of all ranks in `mask`, at source(rank). Returns a rank whose line is missing, or -1.
  template <class Source>
  static __device__ __forceinline__ int poll(Source source, u64 mask, i64 position, u32 flag, Pack (&x)[N]) {
    int missing = -1;
    __syncwarp();
    if (!carries(position)) {
#pragma unroll
      for (int r = 0; r < N; r++)
        if (mask >> r & 1) x[r] = load_packet(source(r));
#pragma unroll
      for (int r = 0; r < N; r++)
        if ((mask >> r & 1) && x[r].w[1] != flag) missing = r;
    }
    return missing;
  }

  // Load the data behind flags that `poll` has seen. The loads follow the vote of the warp that all flags have come.
  template <class Source>
  static __device__ __forceinline__ void load(Source source, u64 mask, i64 position, Pack (&x)[N]) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < N; r++)
      if ((mask >> r & 1) && carries(position)) x[r] = load_packet(source(r));
  }
};
