// Short vectors on all-to-all links: packets that carry their own flags, in one or two shots.
//
// Macros from codegen.py, besides those of layout.cuh: PACKET_THREADS of a CTA, CODEC (LL16 or LL128), ALGORITHM
// (one_shot or two_shot), and how many SEGMENTS of a group are among the arguments, each way; 0: one buffer each way.

#include "exchange.cuh"

// Every rank sends its stream to all that need it. They reduce the streams of all sources, or store each.
template <class Codec> __device__ __forceinline__ void one_shot(const PacketArguments& a) {
  const CommonArguments& c = a.c;
  Exchange<Codec> e(a);
  const u32 flag = e.flag;
  const bool same = !a.send_stride;  // all peers get the same
  Pack head;
  if (same && a.send_mask && e.begin < e.end) head = e.load(0, 0, e.begin);  // while the peers announce the call
  if (!e.await_buffers(a.send_mask)) return;
  auto push = [&](i64 i) {
    if (Codec::first_together(i) >= e.end || !a.send_mask) return;
    if (same) {
      const Pack x = i == e.begin ? head : e.load(0, 0, i);
#pragma unroll
      for (int p = 0; p < N; p++)
        if (a.send_mask >> p & 1) Codec::send(e.buffer(p, 0, c.rank), i, i < e.end, x, flag);
      return;
    }
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.send_mask >> p & 1) {
        const bool wanted = Codec::first_pack(i) < e.span(0);
        Codec::send(e.buffer(p, 0, c.rank), i, wanted, e.load(p, 0, i), flag);
      }
  };
  auto take = [&](i64 i, bool, const Pack (&x)[N]) {
    if (!a.recv_stride) return e.store(0, 0, i, e.reduce(x));
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.recv_mask >> r & 1) e.store(r, 0, i, x[r]);
  };
  e.first_shot(a.recv_mask, 0, push, take);
}

// Every owner gets its slice of the vector from all sources, reduces it, and sends the result to all that want it: two
// steps, but no link carries a whole vector for every rank.
template <class Codec> __device__ __forceinline__ void two_shot(const PacketArguments& a) {
  const CommonArguments& c = a.c;
  Exchange<Codec> e(a);
  const u32 flag = e.flag;
  auto first_of = [&](int owner) { return __popcll(a.owners & ((1ull << owner) - 1)) * a.slice; };
  const i64 mine = first_of(c.rank);
  if (!e.await_buffers(a.send_mask | a.out_mask)) return;
  auto push = [&](i64 i) {
    if (Codec::first_together(i) >= e.end || !a.send_mask) return;
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.send_mask >> p & 1) {
        const i64 first = first_of(p);
        const bool wanted = Codec::first_pack(i) < e.span(first);
        Codec::send(e.buffer(p, 0, c.rank), i, wanted, e.load(0, first, i), flag);
      }
  };
  auto take = [&](i64 i, bool wanted, const Pack (&x)[N]) {
    const Pack y = e.reduce(x);
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.out_mask >> p & 1) Codec::send(e.buffer(p, 1, c.rank), i, wanted, y, flag);
    if (a.keep) e.store(0, mine, i, y);
  };
  if (!e.first_shot(a.recv_mask | a.in_mask, mine, push, take) || !a.in_mask) return;
  for (i64 i = e.begin; Codec::first_together(i) < e.end; i += e.step) {
    u64 mask = 0;  // the last slices may be shorter
#pragma unroll
    for (int p = 0; p < N; p++)
      if ((a.in_mask >> p & 1) && Codec::first_pack(i) < e.span(first_of(p))) mask |= 1ull << p;
    Pack x[N];
    if (!e.receive(1, mask, i, x)) return;
#pragma unroll
    for (int p = 0; p < N; p++)
      if (mask >> p & 1) e.store(0, first_of(p), i, x[p]);
  }
}

extern "C" __global__ void __launch_bounds__(PACKET_THREADS, 1) packets(const __grid_constant__ PacketArguments a) {
  ALGORITHM<CODEC>(a);
  leave(a.c);
}
