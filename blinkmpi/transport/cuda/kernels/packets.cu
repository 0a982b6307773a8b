// Short vectors on all-to-all links: packets that carry their own flag.
//
// The flag is the call's number, so nothing is reset and no fence is needed. In one of two formats (NCCL calls them LL
// and LL128; mscclpp the first LL16):
// LINES 0: 16 bytes of data travel as two packets {data, flag, data, flag}, each of them one store.
// LINES 1: 112 bytes and a flag fill a line of 128, which eight threads write with one instruction and read with one;
//   it stays whole on the way over NVLink, but not over PCIe. Warps stay together, for they vote on what has come.
//
// Two sets of boxes take turns: a rank writes into a peer's when that peer has entered the call before this one, and so
// has finished the one before that. The formats have boxes of their own, for data of one may look like the other's flag.

struct Packets {
  Common c;
  i64 bytes;        // of one stream: what a rank sends to one peer
  i64 send_stride;  // between the streams for two peers in the send buffer; 0: all get the same
  i64 recv_stride;  // between the streams of two sources in the receive buffer; 0: they are folded
  u64 send_mask, recv_mask;  // by rank; recv_mask has our own bit where our stream counts
  u64 owners;             // two shots: each folds a slice of the vector, and gives it to all that want it; else 0
  u64 out_mask, in_mask;  // by rank: who wants my slice, whose slices I want
  i64 keep;               // whether what I have folded belongs into my receive buffer
  i64 slice;              // units of 16 bytes of a slice; in one shot, of a stream
  i64 box;                // bytes of one source's packets, in one stage of one set
  char* boxes[N];         // the packet buffers of all ranks
};

// A place is what one thread sends of a stream; of GROUP places side by side DATA carry 16 bytes each, a unit.
constexpr int GROUP = LINES ? 8 : 1, DATA = LINES ? 7 : 1, PLACE_BYTES = LINES ? 16 : 32;

__device__ __forceinline__ i64 first_unit(i64 place) { return LINES ? (place >> 3) * DATA : place; }
__device__ __forceinline__ i64 unit_of(i64 place) { return LINES ? first_unit(place) + (place & 7) : place; }
__device__ __forceinline__ bool carries(i64 place) { return !LINES || (place & 7) < DATA; }
// The first place of a thread's warp, or of those that have to stay together with it.
__device__ __forceinline__ i64 first_place(i64 place) { return LINES ? place & ~31ll : place; }
// Whether something holds for any of them.
__device__ __forceinline__ bool any(bool holds) { return LINES ? __any_sync(0xffffffff, holds) : holds; }

__device__ __forceinline__ Pack peek(const char* p) {
  Pack x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void put(char* p, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void send_unit(char* box, i64 place, bool wanted, const Pack& x, u32 flag) {
  char* p = box + place * PLACE_BYTES;
  const bool data = carries(place);
  if (LINES) __syncwarp();
  if (wanted && LINES) put(p, data ? x.w[0] : flag, data ? x.w[1] : flag, data ? x.w[2] : flag, data ? x.w[3] : flag);
  if (wanted && !LINES) put(p, x.w[0], flag, x.w[1], flag), put(p + 16, x.w[2], flag, x.w[3], flag);
}

// Wait for a unit from every rank in the mask: all are asked for at once, until all are there. A rank's packets for it
// lie at `place` of its box in `stage`. A line is stored as one, but not loaded as one: its data are loaded when the
// flag has been seen.
template <class Boxes>
__device__ __forceinline__ bool receive(const Packets& a, Boxes box, int stage, u64 mask, i64 place, u64 seq, Pack (&x)[N]) {
  Patience w = {0, 0};
  const u32 flag = (u32)seq;
  const bool asks = !LINES || !carries(place);
  auto at = [&](int r) { return box(a.c.rank, stage, r) + place * PLACE_BYTES; };
  while (true) {
    Pack more[N];
    int late = -1;
    if (LINES) __syncwarp();
    if (asks) {
#pragma unroll
      for (int r = 0; r < N; r++)
        if (mask >> r & 1) {
          x[r] = peek(at(r));
          if (!LINES) more[r] = peek(at(r) + 16);
        }
#pragma unroll
      for (int r = 0; r < N; r++)
        if (mask >> r & 1) {
          const bool whole = LINES || (x[r].w[3] == flag && more[r].w[1] == flag && more[r].w[3] == flag);
          if (x[r].w[1] != flag || !whole) late = r;
          if (!LINES) x[r] = {{x[r].w[0], x[r].w[2], more[r].w[0], more[r].w[2]}};
        }
    }
    if (!any(late >= 0)) break;
    int state = impatient(w, a.c);
    if (LINES) state = any(state == ABORTED) ? ABORTED : any(state == LATE) ? LATE : 0;
    if (state) return late >= 0 ? give_up(a.c, state, seq, late, FOR_PACKET, place, flag, 0) : false;
  }
  if (LINES) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < N; r++)
      if ((mask >> r & 1) && !asks) x[r] = peek(at(r));
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(PACKET_THREADS, 1) packets(const __grid_constant__ Packets a) {
  const Common& c = a.c;
  const u64* entry = &c.peer[c.rank]->entered[threadIdx.x < N ? threadIdx.x : 0].word;
  u64 seen = get(entry);  // needed below: the load runs while the call's number comes
  const u64 seq = enter(c);
  const u32 flag = (u32)seq;
  const i64 units = (a.bytes + 15) >> 4, step = (i64)gridDim.x * blockDim.x;
  const i64 end = LINES ? ((u32)a.slice + DATA - 1) / DATA * GROUP : a.slice;
  const i64 begin = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  auto box = [&](int at, int stage, int from) {
    return a.boxes[at] + ((i64)((seq & 1) * 2 + stage) * N + from) * a.box;
  };
  auto first_of = [&](int owner) { return a.owners ? __popcll(a.owners & ((1ull << owner) - 1)) * a.slice : 0; };
  auto span = [&](i64 first) { const i64 left = units - first; return left < a.slice ? left : a.slice; };  // of a slice
  auto bytes_at = [&](i64 unit) { const i64 left = a.bytes - unit * 16; return (int)(left < 16 ? left : 16); };
  auto own = [&](const char* stream, i64 first, i64 place) {  // of what lies in the send buffer
    const i64 unit = unit_of(place);
    Pack x = {{0, 0, 0, 0}};
    if (carries(place) && unit < span(first)) x = load_own(stream + (first + unit) * 16, bytes_at(first + unit));
    return x;
  };
  auto keep = [&](char* stream, i64 first, i64 place, const Pack& x) {
    const i64 unit = unit_of(place);
    if (carries(place) && unit < span(first)) store_own(stream + (first + unit) * 16, x, bytes_at(first + unit));
  };
  const bool same = !a.owners && !a.send_stride;  // all peers get the same
  Pack head;
  if (same && a.send_mask && begin < end) head = own(c.send, 0, begin);

  bool ok = true;  // whoever gets packets from me has finished the call before the last
  if (threadIdx.x < N && ((a.send_mask | a.out_mask) >> threadIdx.x & 1)) {
    Patience w = {0, 0};
    for (; (int)((u32)(seen >> 32) - (u32)(seq - 1)) < 0 && ok; seen = get(entry)) {
      const int state = impatient(w, c);
      if (state) ok = give_up(c, state, seq, threadIdx.x, FOR_ENTRY, 0, seq - 1, seen >> 32);
    }
  }
  if (!__syncthreads_and(ok)) return;
  auto push = [&](i64 i) {
    if (first_place(i) >= end || !a.send_mask) return;
    if (same) {
      const Pack x = i == begin ? head : own(c.send, 0, i);
#pragma unroll
      for (int p = 0; p < N; p++)
        if (a.send_mask >> p & 1) send_unit(box(p, 0, c.rank), i, i < end, x, flag);
      return;
    }
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.send_mask >> p & 1) {
        const i64 first = first_of(p);
        const bool wanted = first_unit(i) < span(first);
        send_unit(box(p, 0, c.rank), i, wanted, own(c.send + p * a.send_stride, first, i), flag);
      }
  };
  push(begin);
  // Whose packets I take has called the same: known before anything is written to the user's memory. The first round's
  // packets come in meanwhile, and the second's are sent.
  if (threadIdx.x < N && threadIdx.x != c.rank && ((a.recv_mask | a.in_mask) >> threadIdx.x & 1))
    ok = await_entry(c, threadIdx.x, seq);
  const i64 mine = first_of(c.rank);
  for (i64 i = begin; i == begin || first_place(i) < end; i += step) {
    push(i + step);
    const bool here = a.recv_mask && first_place(i) < end;
    const bool wanted = here && first_unit(i) < span(mine);
    bool came = true;
    Pack x[N];
    if (here) {
      Pack y;
      if (a.recv_mask >> c.rank & 1) y = own(c.send + c.rank * a.send_stride, mine, i);
      came = receive(a, box, 0, wanted ? a.recv_mask & ~(1ull << c.rank) : 0, i, seq, x);
#pragma unroll
      for (int r = 0; r < N; r++)
        x[r] = r == c.rank ? y : x[r];
    }
    if (i == begin && !__syncthreads_and(ok && came)) return;
    if (!came) return;
    if (!here) continue;
    if (a.recv_stride) {
#pragma unroll
      for (int r = 0; r < N; r++)
        if (a.recv_mask >> r & 1) keep(c.recv + r * a.recv_stride, 0, i, x[r]);
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
#pragma unroll
    for (int p = 0; p < N; p++)
      if (a.out_mask >> p & 1) send_unit(box(p, 1, c.rank), i, wanted, y, flag);
    if (a.keep) keep(c.recv, mine, i, y);
  }
  if (!a.in_mask) return;
  for (i64 i = begin; first_place(i) < end; i += step) {
    u64 mask = 0;  // the last slices may be shorter
#pragma unroll
    for (int p = 0; p < N; p++)
      if ((a.in_mask >> p & 1) && first_unit(i) < span(first_of(p))) mask |= 1ull << p;
    Pack x[N];
    if (!receive(a, box, 1, mask, i, seq, x)) return;
#pragma unroll
    for (int p = 0; p < N; p++)
      if (mask >> p & 1) keep(c.recv, first_of(p), i, x[p]);
  }
}
