// The structs that kernels share with the host and with other ranks: headers of symmetric memory, reports, arguments.
//
// kernel_layout.py has their offsets too, and asserts at the end of every source that both agree.
// Macros from codegen.py: N ranks (of at most MAX_RANKS), MAX_CTAS of a call by the protocol `direct`,
// ANNOUNCED: how many calls back a peer's announcement can be read.

#include "types.cuh"

// offsetof, by the name that all versions of NVRTC know (12 and 13.0 lack the compiler's builtin).
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)

constexpr int REFERENCE_WORDS = 4;
struct Announcement {  // what a peer calls; one line of 128 bytes, written by that peer alone
  u64 last;              // (number of the call << 32) | fingerprint
  u64 words[ANNOUNCED];  // the same word of the last calls, by number modulo ANNOUNCED
  // `direct` only: where its registered buffers are, as in CommonArguments. Each word is (number of the call << 32) | a
  // half: the low and the high one of send_ref, then of recv_ref. So a word tells by itself of which call it is.
  u64 references[REFERENCE_WORDS];
  u64 pad[15 - ANNOUNCED - REFERENCE_WORDS];
};

struct SymmetricHeader {  // the head of every rank's symmetric memory, which all ranks have mapped
  u64 seq;             // the last call that all CTAs of this rank have begun
  u32 announced_ctas;  // how many CTAs have begun the next one
  u32 barrier_ctas;    // how many CTAs have arrived at the grid barrier
  u64 barrier_seq;     // the last call in which all of them have
  u64 running;         // the call whose CTA 0 runs now; while its gate waits, what is announced of it; or 0
  u32 pad[24];
  u64 abort;           // not 0: some rank aborted; 1 + its number
  u64 report_taken;    // not 0: a thread of this rank fills in the report
  u64 pad2[14];
  Announcement announced[MAX_RANKS];  // by peer
  u64 finished[MAX_CTAS][MAX_RANKS];  // by CTA and peer: the last call in which it has used all buffers
};

struct Report {  // in pinned host memory: who aborted, and what for; the first thread to abort fills it in
  u64 abort;     // not 0: the host or a thread of this rank aborted
  u64 code, seq, peer, stage, chunk, want, seen;
};
enum ReportCode { ABORTED = 1, TIMEOUT = 2, MISMATCH = 3, OVERLAP = 4, COUNTS = 5 };
// What a thread waited for, if not for a stage. Of messages and blocks, a report has the bytes as `chunk`; of messages
// the tag as `seq`.
enum ReportStage {
  ANNOUNCEMENT = -1, FINISH = -2, PACKET = -3, SEND = -4, RECEIVE = -5, SEND_BLOCK = -6, RECEIVE_BLOCK = -7
};

struct CommonArguments {  // the first part of every kernel's arguments
  SymmetricHeader* symmetric[N];  // symmetric[rank] is our own
  Report* report;
  u64 fingerprint;  // of the call, 32 bits
  u64 timeout_ns;   // of one wait
  i64 rank;
  i64 divisor;  // of averages, else 0
  const char* send;
  char* recv;
  u64 send_ref, recv_ref;  // registered buffers as (region + 1) << OFFSET_BITS | offset, or 0
  char* destination;       // not 0: where the first `destination_bytes` of recv move at the end of the call
  i64 destination_bytes;
};
