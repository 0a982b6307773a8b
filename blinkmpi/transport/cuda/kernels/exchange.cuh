// What both algorithms over packets have in common: LL buffers, streams and slices, the first shot.
//
// Two sets of LL buffers take turns. A rank writes into a set of a peer when that peer has announced the call before
// this one: it has then finished the last call that used this set. The two codecs have LL buffers of their own, because
// data of one may look like a flag of the other.

#include "ll16.cuh"
#include "ll128.cuh"

constexpr int SETS = 2, SHOTS = 2;

#if SEGMENTS
struct Segment {  // of a group: the streams are made of many buffers of the user's
  u64 at;      // the user's address
  u32 place;   // in a stream, in packs; ascending, and the greatest number behind the last segment
  u32 nbytes;  // of each of its blocks, which lie one behind another: one for each stream
};
#endif

struct PacketArguments {
  CommonArguments c;
  i64 nbytes;       // of one stream: what a rank sends to one peer
  i64 send_stride;  // between the streams for two peers in the send buffer; 0: all get the same
  i64 recv_stride;  // between the streams of two sources in the receive buffer; 0: they are reduced
  u64 send_mask, recv_mask;  // by rank, of the first shot; recv_mask has our own bit if our stream counts
  u64 owners;             // two_shot: the ranks that each reduce a slice of the vector
  u64 out_mask, in_mask;  // two_shot, by rank: who wants our slice, whose slices we want
  i64 keep;               // two_shot: whether our slice belongs into our receive buffer
  i64 slice;              // packs of a slice; in one_shot, of a stream
  i64 buffer_bytes;       // of one LL buffer: one source's packets, in one shot of one set
  char* buffers[N];       // by rank: its LL buffers of this codec
#if SEGMENTS
  Segment sent[SEGMENTS], received[SEGMENTS];
#endif
};

struct Place {  // of a pack in the user's memory
  char* at;
  int bytes;  // of it that are there
};

#if SEGMENTS
// The place of a pack of a stream. All lanes take the same steps: arguments are read fastest where they read the same.
__device__ __forceinline__ Place place_of(const Segment (&segments)[SEGMENTS], i64 block, i64 pack) {
  int found = 0;
#pragma unroll
  for (int more = SEGMENTS > 64 ? 64 : SEGMENTS / 2; more; more /= 2) {
    const int next = found + more, at = next < SEGMENTS ? next : 0;
    found = (next < SEGMENTS) & (segments[at].place <= (u32)pack) ? next : found;
  }
  const Segment& s = segments[found];
  const i64 offset = (i64)((u32)pack - s.place) * 16, left = (i64)s.nbytes - offset;
  return {(char*)s.at + block * s.nbytes + offset, (int)(left < 16 ? left : 16)};
}
#endif

template <class Codec> struct Exchange {
  const PacketArguments& a;
  const u64* announced;  // by the peer of this thread's index
  u64 seen;
  u64 seq;
  u32 flag;  // of the packets of this call; never 0, which is what memory holds at first
  i64 packs, step, begin, end;  // packs of a stream; positions of a thread: begin, begin + step, ... below end

  __device__ __forceinline__ explicit Exchange(const PacketArguments& arguments) : a(arguments) {
    announced = &a.c.symmetric[a.c.rank]->announced[threadIdx.x < N ? threadIdx.x : 0].last;
    seen = load_relaxed(announced);  // for await_buffers: this load overlaps with that of the call's number
    seq = announce(a.c);
    flag = (u32)seq ? (u32)seq : ~0u;  // the call before has the same flag then, but the other set
    packs = (a.nbytes + 15) >> 4, step = (i64)gridDim.x * blockDim.x;
    end = Codec::positions(a.slice), begin = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  }

  // The packets of rank `from` at rank `at`.
  __device__ __forceinline__ char* buffer(int at, int shot, int from) const {
    return a.buffers[at] + ((i64)((seq & 1) * SHOTS + shot) * N + from) * a.buffer_bytes;
  }
  // Packs of the slice that begins with pack `first`: the last ones may be shorter.
  __device__ __forceinline__ i64 span(i64 first) const {
    const i64 left = packs - first;
    return left < a.slice ? left : a.slice;
  }
  __device__ __forceinline__ int bytes_at(i64 pack) const {
    const i64 left = a.nbytes - pack * 16;
    return (int)(left < 16 ? left : 16);
  }
  // Where a pack of the stream for a peer is sent from, and where one of the stream from a peer is received.
  __device__ __forceinline__ Place sent(i64 peer, i64 pack) const {
#if SEGMENTS
    return place_of(a.sent, a.send_stride ? peer : 0, pack);
#else
    return {(char*)a.c.send + peer * a.send_stride + pack * 16, bytes_at(pack)};
#endif
  }
  __device__ __forceinline__ Place received(i64 peer, i64 pack) const {
#if SEGMENTS
    return place_of(a.received, a.recv_stride ? peer : 0, pack);
#else
    return {a.c.recv + peer * a.recv_stride + pack * 16, bytes_at(pack)};
#endif
  }
  // What this thread sends of the slice of a peer's stream that begins with pack `first`, at a position.
  __device__ __forceinline__ Pack load(i64 peer, i64 first, i64 position) const {
    const i64 pack = Codec::pack_of(position);
    Pack x = {{0, 0, 0, 0}};
    if (Codec::carries(position) && pack < span(first)) {
      const Place from = sent(peer, first + pack);
      x = load_user(from.at, from.bytes);
    }
    return x;
  }
  __device__ __forceinline__ void store(i64 peer, i64 first, i64 position, const Pack& x) const {
    const i64 pack = Codec::pack_of(position);
    if (Codec::carries(position) && pack < span(first)) {
      const Place to = received(peer, first + pack);
      store_user(to.at, x, to.bytes);
    }
  }

  // Wait until the LL buffers of all ranks in `targets` are free: they have finished the call before the last.
  __device__ __forceinline__ bool await_buffers(u64 targets) {
    bool ok = true;
    if (threadIdx.x < N && (targets >> threadIdx.x & 1)) {
      Deadline d = {0, 0};
      // Relaxed: nothing is read of what the peer wrote before its announcement.
      for (; (int)((u32)(seen >> 32) - (u32)(seq - 1)) < 0 && ok; seen = load_relaxed(announced)) {
        const int why = poll_deadline(d, a.c);
        if (why) ok = broadcast_abort(a.c, why, seq, threadIdx.x, ANNOUNCEMENT, 0, seq - 1, seen >> 32);
      }
    }
    return __syncthreads_and(ok);
  }

  // Wait for a pack from every rank in `mask`, all polled at once.
  __device__ __forceinline__ bool receive(int shot, u64 mask, i64 position, Pack (&x)[N]) const {
    Deadline d = {0, 0};
    auto source = [&](int r) { return buffer(a.c.rank, shot, r) + position * Codec::BYTES; };
    while (true) {
      const int missing = Codec::poll(source, mask, position, flag, x);
      if (!Codec::any(missing >= 0)) break;
      const int why = Codec::agree(poll_deadline(d, a.c));
      if (why) return missing >= 0 ? broadcast_abort(a.c, why, seq, missing, PACKET, position, flag, 0) : false;
    }
    Codec::load(source, mask, position, x);
    return true;
  }

  // Send with push(position), and give what all ranks in recv_mask sent to take(position, wanted, packs), for every
  // position of this thread. Our own part is the slice of our stream that begins with pack `first`.
  // `compared`: the ranks whose announcements are compared with ours before anything is written to the user's memory.
  template <class Push, class Take>
  __device__ __forceinline__ bool first_shot(u64 compared, i64 first, Push push, Take take) const {
    const CommonArguments& c = a.c;
    push(begin);
    // While the announcements come, the packets of the first round do too, and the second round is sent.
    const bool ok = await_announcements(c, compared & ~(1ull << c.rank), seq);
    for (i64 i = begin; i == begin || Codec::first_together(i) < end; i += step) {
      push(i + step);
      const bool here = a.recv_mask && Codec::first_together(i) < end;
      const bool wanted = here && Codec::first_pack(i) < span(first);
      bool came = true;
      Pack x[N];
      if (here) {
        Pack own;
        if (a.recv_mask >> c.rank & 1) own = load(c.rank, first, i);
        came = receive(0, wanted ? a.recv_mask & ~(1ull << c.rank) : 0, i, x);
#pragma unroll
        for (int r = 0; r < N; r++) x[r] = r == c.rank ? own : x[r];
      }
      if (i == begin && !__syncthreads_and(ok && came)) return false;
      if (!came) return false;
      if (here) take(i, wanted, x);
    }
    return true;
  }

  // The packs of all ranks in recv_mask, reduced in ascending order of rank.
  __device__ __forceinline__ Pack reduce(const Pack (&x)[N]) const {
    if (ADDS_PAIRS && N == 2 && a.recv_mask == 3 && !a.c.divisor) return pair_sums(x[0], x[N - 1]);
    Partial sum;
    bool first = true;
#pragma unroll
    for (int r = 0; r < N; r++)
      if (a.recv_mask >> r & 1) {
        if (first) sum = widened(x[r]);
        else accumulate(sum, widened(x[r]));
        first = false;
      }
    if (a.c.divisor) divide(sum, (int)a.c.divisor);
    return narrowed(sum);
  }
};
