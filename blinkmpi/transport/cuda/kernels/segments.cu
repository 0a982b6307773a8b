// Copies between many buffers of the user's and a bucket, which is contiguous memory of ours: gather before a launch of
// a group, scatter behind it. Nothing waits for other ranks.
//
// From kernel_layout.py: THREADS of a CTA, and how many SEGMENTS are among the arguments of a kernel. C++17 without system headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// offsetof, by the name that all versions of NVRTC know
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)

struct Segment {
  u64 at;      // the user's address
  u32 place;   // in each block of the bucket, in units of 16 bytes
  u32 nbytes;  // of each of its blocks, which lie one behind another
};

struct SegmentArguments {
  char* bucket;
  const u64* given_up;  // not 0: a kernel of this rank gave up, so the bucket has no results
  u64 stride;           // bytes from one of the bucket's blocks to the next
  u64 blocks;           // of the bucket, and of each segment
  u64 parts;            // CTAs for each segment's block
  Segment segments[SEGMENTS];
};

// Copy n elements, every `step`th by this thread from `first` on; four are on their way at a time.
template <class T>
__device__ __forceinline__ void copy_all(char* to, const char* from, u64 n, u64 first, u64 step) {
  T* target = reinterpret_cast<T*>(to);
  const T* source = reinterpret_cast<const T*>(from);
  u64 i = first;
  for (; i + 3 * step < n; i += 4 * step) {
    const T a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
    target[i] = a;
    target[i + step] = b;
    target[i + 2 * step] = c;
    target[i + 3 * step] = d;
  }
  for (; i < n; i += step) target[i] = source[i];
}

// Copy bytes in elements of the size that addresses allow, and what is left of them one by one.
__device__ __forceinline__ void copy_bytes(char* to, const char* from, u64 nbytes, u64 first, u64 step) {
  const u64 low = ((u64)to | (u64)from) & 15;
  u64 done;
  if (low == 0) {
    done = nbytes & ~15ull;
    copy_all<uint4>(to, from, done / 16, first, step);
  } else if ((low & 3) == 0) {
    done = nbytes & ~3ull;
    copy_all<u32>(to, from, done / 4, first, step);
  } else if ((low & 1) == 0) {
    done = nbytes & ~1ull;
    copy_all<u16>(to, from, done / 2, first, step);
  } else {
    done = 0;
  }
  copy_all<u8>(to + done, from + done, nbytes - done, first, step);
}

template <bool GATHERS>
__device__ __forceinline__ void copy_segment(const SegmentArguments& a) {
  const u64 item = blockIdx.x / a.parts, part = blockIdx.x % a.parts, block = item % a.blocks;
  const Segment s = a.segments[item / a.blocks];
  char* user = reinterpret_cast<char*>(s.at) + block * s.nbytes;
  char* ours = a.bucket + block * a.stride + 16ull * s.place;
  const u64 first = part * blockDim.x + threadIdx.x, step = a.parts * blockDim.x;
  if (GATHERS) {
    copy_bytes(ours, user, s.nbytes, first, step);
    const u64 pad = s.nbytes + threadIdx.x;  // up to the next segment, so that no reduction reads what nobody wrote
    if (part == 0 && threadIdx.x < 16 && pad < ((u64)s.nbytes + 15 & ~15ull)) ours[pad] = 0;
  } else {
    copy_bytes(user, ours, s.nbytes, first, step);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ SegmentArguments a) {
  copy_segment<true>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) scatter(const __grid_constant__ SegmentArguments a) {
  if (*a.given_up == 0) copy_segment<false>(a);
}
