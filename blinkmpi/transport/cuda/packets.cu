// Short vectors on all-to-all links: packets that carry their own flag (NCCL calls the idea LL, mscclpp LL16).
//
// 16 bytes of data travel as two packets {data, flag, data, flag}; the flag is the call's number, so nothing is reset
// and no fence is needed. Two sets of buffers take turns: a rank writes into a peer's when that peer has entered the
// call before this one, and so has finished the one before that.

struct Packets {
  Common c;
  i64 bytes;        // of one stream: what a rank sends to one peer
  i64 send_stride;  // between the streams for two peers in the send buffer; 0: all get the same
  i64 recv_stride;  // between the streams of two sources in the receive buffer; 0: they are folded
  u64 send_mask, recv_mask;  // by rank; recv_mask has our own bit where our stream counts
  i64 two_shot;     // fold my slice of the vector, then give it to all
  i64 box;          // bytes of one source's packets, in one stage of one set
  char* boxes[N];   // the packet buffers of all ranks
};

struct Packet { u32 d0, f0, d1, f1; };

__device__ __forceinline__ void put(Packet* p, u32 d0, u32 d1, u32 flag) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%2};" :: "l"(p), "r"(d0), "r"(flag), "r"(d1) : "memory");
}
__device__ __forceinline__ Packet peek(const Packet* p) {
  Packet x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.d0), "=r"(x.f0), "=r"(x.d1), "=r"(x.f1) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void send_unit(Packet* p, const Pack& x, u32 flag) {
  put(p, x.w[0], x.w[1], flag);
  put(p + 1, x.w[2], x.w[3], flag);
}

// Wait for a unit from every rank in the mask: all are asked for at once, until all are there. A rank's packets for it
// lie at index `at` of its box in `stage`.
template <class Boxes>
__device__ __forceinline__ bool receive(const Packets& a, Boxes box, int stage, u64 mask, i64 at, u64 seq, Pack (&x)[N]) {
  Patience w = {0, 0};
  const u32 flag = (u32)seq;
  while (true) {
    Packet lo[N], hi[N];
#pragma unroll
    for (int r = 0; r < N; r++)
      if (mask >> r & 1) {
        const Packet* p = box(a.c.rank, stage, r) + 2 * at;
        lo[r] = peek(p), hi[r] = peek(p + 1);
      }
    int late = -1;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (mask >> r & 1) {
        if (lo[r].f0 != flag || lo[r].f1 != flag || hi[r].f0 != flag || hi[r].f1 != flag) late = r;
        x[r] = {{lo[r].d0, lo[r].d1, hi[r].d0, hi[r].d1}};
      }
    if (late < 0) return true;
    const int state = impatient(w, a.c);
    if (state) return give_up(a.c, state, seq, late, FOR_PACKET, at, flag, 0);
  }
}

extern "C" __global__ void __launch_bounds__(PACKET_THREADS, 1) packets(const __grid_constant__ Packets a) {
  const Common& c = a.c;
  const u64* entry = &c.peer[c.rank]->entered[threadIdx.x < N ? threadIdx.x : 0].word;
  u64 seen = get(entry);  // needed below: the load runs while the call's number comes
  const u64 seq = enter(c);
  const u32 flag = (u32)seq;
  const i64 units = (a.bytes + 15) / 16, slice = a.two_shot ? (units + N - 1) / N : units;
  const i64 step = (i64)gridDim.x * blockDim.x, begin = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  auto box = [&](int at, int stage, int from) {
    return (Packet*)(a.boxes[at] + ((i64)((seq & 1) * 2 + stage) * N + from) * a.box);
  };
  auto bytes_at = [&](i64 unit) { const i64 left = a.bytes - unit * 16; return (int)(left < 16 ? left : 16); };
  const bool same = !a.two_shot && !a.send_stride;  // all peers get the same
  Pack head;
  if (same && a.send_mask && begin < slice) head = load_own(c.send + begin * 16, bytes_at(begin));

  bool ok = true;  // whoever gets packets from me has finished the call before the last
  if (threadIdx.x < N && (a.send_mask >> threadIdx.x & 1)) {
    Patience w = {0, 0};
    for (; (int)((u32)(seen >> 32) - (u32)(seq - 1)) < 0 && ok; seen = get(entry)) {
      const int state = impatient(w, c);
      if (state) ok = give_up(c, state, seq, threadIdx.x, FOR_ENTRY, 0, seq - 1, seen >> 32);
    }
  }
  if (!__syncthreads_and(ok)) return;
  // push: stage 0
  for (i64 i = begin; i < slice; i += step) {
    if (same) {
      if (!a.send_mask) break;
      if (i != begin) head = load_own(c.send + i * 16, bytes_at(i));
#pragma unroll
      for (int p = 0; p < N; p++)
        if (a.send_mask >> p & 1) send_unit(box(p, 0, c.rank) + 2 * i, head, flag);
      continue;
    }
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.send_mask >> p & 1) {
        const i64 unit = a.two_shot ? p * slice + i : i;
        if (unit >= units) continue;
        send_unit(box(p, 0, c.rank) + 2 * i, load_own(c.send + p * a.send_stride + unit * 16, bytes_at(unit)), flag);
      }
  }
  // Whose packets I take has called the same: known before anything is written to the user's memory. The first round's
  // packets come in meanwhile.
  if (threadIdx.x < N && threadIdx.x != c.rank && (a.recv_mask >> threadIdx.x & 1)) ok = await_entry(c, threadIdx.x, seq);
  const i64 mine = a.two_shot ? c.rank * slice : 0;  // my first unit
  bool agreed = false;
  for (i64 i = begin; !agreed || i < slice; i += step) {
    const i64 unit = mine + i;
    const bool here = ok && i < slice && unit < units && a.recv_mask;
    Pack x[N];
    if (here) {
      Pack own;
      if (a.recv_mask >> c.rank & 1) own = load_own(c.send + c.rank * a.send_stride + unit * 16, bytes_at(unit));
      ok = receive(a, box, 0, a.recv_mask & ~(1ull << c.rank), i, seq, x);
#pragma unroll
      for (int r = 0; r < N; r++)
        x[r] = r == c.rank ? own : x[r];
    }
    if (!agreed && !__syncthreads_and(ok)) return;
    agreed = true;
    if (!ok) return;
    if (!here) continue;
    if (a.recv_stride) {
#pragma unroll
      for (int r = 0; r < N; r++)
        if (a.recv_mask >> r & 1) store_own(c.recv + r * a.recv_stride + unit * 16, x[r], bytes_at(unit));
      continue;
    }
    Partial sum;
    bool first = true;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.recv_mask >> r & 1) {
        if (first) sum = widened(x[r]);
        else fold(sum, widened(x[r]));
        first = false;
      }
    if (c.divide) divide(sum, (int)c.divide);
    const Pack y = narrowed(sum);
    if (a.two_shot) {
#pragma unroll
      for (int p = 0; p < N; p++)
        if (p != c.rank) send_unit(box(p, 1, c.rank) + 2 * i, y, flag);
    }
    store_own(c.recv + unit * 16, y, bytes_at(unit));
  }
  if (!a.two_shot) return;
  for (i64 i = begin; i < slice; i += step) {
    u64 mask = 0;  // the last slices may be shorter
#pragma unroll
    for (int p = 0; p < N; p++)
      if (p != c.rank && p * slice + i < units) mask |= 1ull << p;
    Pack x[N];
    if (!receive(a, box, 1, mask, i, seq, x)) return;
#pragma unroll
    for (int p = 0; p < N; p++)
      if (mask >> p & 1) store_own(c.recv + (p * slice + i) * 16, x[p], bytes_at(p * slice + i));
  }
}
