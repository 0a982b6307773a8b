// The LL codec with 16-byte packets (LL in NCCL, LL16 in mscclpp): a pack travels as {data, flag, data, flag} twice.
//
// The flag is the number of the call. Each packet is one 16-byte store, which arrives whole: a reader that sees the
// right flags has the data too, without a fence. Half of what crosses the link is data.

#include "sync.cuh"

// 16 bytes of an LL buffer. No fence and no acquire: the flag is in the same 16 bytes as the data that it publishes.
__device__ __forceinline__ Pack load_packet(const char* p) {
  Pack x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_packet(char* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A position is what one thread sends of a stream: here a pack, in two packets. Threads work independently.
struct LL16 {
  static constexpr int GROUP = 1, DATA = 1;  // of GROUP positions side by side, DATA carry a pack each
  static constexpr int BYTES = 32;           // of a position in an LL buffer

  static __device__ __forceinline__ i64 positions(i64 packs) { return packs; }
  static __device__ __forceinline__ i64 first_pack(i64 position) { return position; }  // of the position's group
  static __device__ __forceinline__ i64 pack_of(i64 position) { return position; }
  static __device__ __forceinline__ bool carries(i64) { return true; }
  static __device__ __forceinline__ i64 first_together(i64 position) { return position; }  // of those in step
  static __device__ __forceinline__ bool any(bool holds) { return holds; }                 // for one of those
  static __device__ __forceinline__ int agree(int why) { return why; }

  static __device__ __forceinline__ void send(char* buffer, i64 position, bool wanted, const Pack& x, u32 flag) {
    char* p = buffer + position * BYTES;
    if (wanted) store_packet(p, x.w[0], flag, x.w[1], flag), store_packet(p + 16, x.w[2], flag, x.w[3], flag);
  }

  // Look once for the packets of all ranks in `mask`, at source(rank). Returns a rank whose packets are missing, or -1.
  template <class Source>
  static __device__ __forceinline__ int poll(Source source, u64 mask, i64, u32 flag, Pack (&x)[N]) {
    Pack more[N];
    int missing = -1;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (mask >> r & 1) {
        x[r] = load_packet(source(r));
        more[r] = load_packet(source(r) + 16);
      }
#pragma unroll
    for (int r = 0; r < N; r++)
      if (mask >> r & 1) {
        const bool whole = x[r].w[3] == flag && more[r].w[1] == flag && more[r].w[3] == flag;
        if (x[r].w[1] != flag || !whole) missing = r;
        x[r] = {{x[r].w[0], x[r].w[2], more[r].w[0], more[r].w[2]}};
      }
    return missing;
  }

  // Load the data behind flags that `poll` has seen: it has loaded them already.
  template <class Source> static __device__ __forceinline__ void load(Source, u64, i64, Pack (&)[N]) {}
};
