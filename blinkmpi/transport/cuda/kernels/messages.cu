// Messages: one rank sends, another receives, in order, by a FIFO that each ordered pair of ranks has (fifo.cuh).
//
// A message has a kernel at each end, and a CTA for each lane. The first chunk of a message in a lane begins with a
// header. The reader compares it with what it asks for, before it writes anything into the user's memory.
//
// Each end of a FIFO has CTAs of its own. So where their kernels run at once, messages of two FIFOs do not wait for one
// another; two messages of one FIFO run one after the other.

#include "fifo.cuh"

struct MessageArguments {
  CommonArguments c;
  i64 memory_at;  // in every rank's symmetric memory
  i64 peer;
  i64 sends;  // 0: receives
  i64 nbytes, tag;
};

__device__ __forceinline__ FifoMemory* memory_of(const MessageArguments& a, i64 rank) {
  return (FifoMemory*)((char*)a.c.symmetric[rank] + a.memory_at);
}

// Wait until a chunk may be moved. Of the first one, compare the header.
template <bool SENDS> struct AwaitChunk {
  const MessageArguments& a;
  const End& e;
  __device__ __forceinline__ bool operator()(i64 j) const {
    const CommonArguments& c = a.c;
    if (!await_flag(c, e.awaited, wanted<SENDS>(e, j), a.tag, a.peer, SENDS ? SEND : RECEIVE, a.nbytes)) return false;
    if (SENDS || j) return true;
    const Header* h = &e.slots[e.base % DEPTH].header;
    const u64 nbytes = load_relaxed((const u64*)&h->nbytes), tag = load_relaxed((const u64*)&h->tag);
    if (nbytes == (u64)a.nbytes && tag == (u64)a.tag) return true;
    return broadcast_abort(c, MISMATCH, a.tag, a.peer, RECEIVE, a.nbytes, nbytes, tag);
  }
  __device__ __forceinline__ void end() const {}
};

template <bool SENDS> __device__ __forceinline__ void move_message(const MessageArguments& a, i64* stop) {
  char* at = SENDS ? (char*)a.c.send : a.c.recv;
  const End e = end_of<SENDS, 1>(memory_of(a, a.c.rank), memory_of(a, a.peer), a.c.rank, a.peer, blockIdx.x, gridDim.x,
                                 at, {a.nbytes, a.tag});
  __syncthreads();  // the count is read by all before it grows
  move_through<SENDS>(a.c, e, stop, AwaitChunk<SENDS>{a, e});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) messages(const __grid_constant__ MessageArguments a) {
  __shared__ i64 stop;  // the first round that is not taken, because some rank aborted
  if (threadIdx.x == 0) stop = 1ll << 62;
  if (a.sends) move_message<true>(a, &stop);
  else move_message<false>(a, &stop);
}
