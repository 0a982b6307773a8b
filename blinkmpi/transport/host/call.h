/* A call: what it is, the memory of the ranks, and how far it is. Python reads these structures here (c_structs.py). */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "single_copy.h"
#include "trace.h"
#include "waiting.h"

/* Words of line 0 of a rank's control pages (control_pages.py); those behind SEND are for even calls, then odd ones. */
enum { ENTERED = 0, FINISHED = 1, SEND = 2, RECV = 3, TURN = 2, LENGTHS = 6 };
enum { SOON_NS = 1000000, LATE_LOOKS = 4 }; /* when, and how often, to look for aborts elsewhere: control_pages.py */
enum { PIECE_LENGTH = 32768, PIECES = 40 }; /* a message goes in pieces, short enough for MPI to send them at once */

/* Another node, and all other nodes, in calls of one shot (node_messages.h); shots.py writes both. */
typedef struct {
  int64_t first;        /* its first rank, which receives for it */
  int64_t ranks, *rank; /* its ranks */
  int64_t in[2];        /* where its messages of even and odd calls lie */
  int64_t receive[2];   /* addresses of MPI's persistent requests for them */
  int64_t receiving[2]; /* whether these receives were started */
  int64_t told;         /* address of such a request, for announcements that Python reads */
  uint64_t *told_seq;   /* the call number in such an announcement */
  int64_t sending[2][PIECES], sends[2]; /* MPI's requests for sends to this node, and how many */
  int64_t rest[PIECES], rests; /* those of the pieces behind the first that are being received, and how many */
  uint64_t came, began; /* the last call whose message has arrived; the last whose first piece has */
} node_t;

typedef struct {
  int64_t start, test, isend, irecv; /* MPI's functions */
  int64_t pointers;           /* whether MPI's handles are pointers, and not numbers */
  int64_t comm, byte, tag;    /* handles; the tag of messages of even calls; two behind it, of pieces behind the first */
  int64_t status;             /* memory for an MPI_Status */
  int64_t out[2];             /* this node's messages of even and odd calls */
  int64_t *here, ranks;       /* this node's ranks */
  int64_t aborts;             /* address of the persistent request for errors of ranks elsewhere */
  int64_t others;
  node_t *each;
  int64_t met; /* when all ranks were last known to have entered a call */
} nodes_t;

/* What goes to another rank, and comes from it. In its own row a rank has the block that it keeps, and `sends` is 0 but
 * for one that all others are sent. */
typedef struct {
  int64_t from, sends;    /* where it lies, from call_t.send on; bytes */
  int64_t to, receives;   /* where it goes, from call_t.recv on; bytes */
  int64_t sent, received; /* bytes of them that are done in the call under way */
} block_t;

/* What a call of blocks moves, and where between the ranks (blocks.h); block_call.py writes both. */
typedef struct {
  int64_t shared;        /* whether each rank sends all others one block */
  int64_t in_place;      /* whether blocks come where blocks lie that are sent */
  int64_t read_from;     /* bytes from which on a block is read out of its sender's buffer, if that can be */
  int64_t slots, arenas; /* rank 0's slots of even calls, and its arena */
  int64_t apart, odd;    /* bytes to those of the next rank, and to the slots of odd calls */
  int64_t room;          /* bytes of a slot */
  int64_t longest;       /* bytes of the longest block that goes through a slot whole */
  int64_t ring, chunk, depth; /* bytes of a ring of chunks in an arena, and of a chunk; chunks of a ring */
  int64_t heads, tails;  /* rank 0's first head and tail (control_pages.py) */
  uint64_t sum;          /* of the lengths (sum_lengths) */
  int64_t closed;        /* out: whether this rank's buffer cannot be read, in the call under way */
  block_t each[];        /* by rank */
} blocks_t;

/* A call: its program, the shared window, the buffers it is bound to, and how far it is. Every field has 8 bytes. */
typedef struct {
  /* the program */
  int64_t stages;     /* number of rows */
  int64_t dtype, op;  /* codes of reduction.h */
  int64_t item, acc;  /* bytes of an element, of a partial result */
  int64_t chunk;      /* elements that fit in a slot */
  int64_t depth;      /* slots per channel */
  int64_t divide;     /* avg: divide the complete fold by this, else 0 */
  int64_t nontemporal; /* write the receive buffer past the caches */
  int64_t one_shot;   /* slots are for calls of even and of odd number, and are filled before the announcement */
  int64_t cma;        /* whether chunks are read from their writers' buffers */
  helper_t *helper;   /* a second thread for long copies from other processes, or NULL */
  nodes_t *nodes;     /* the other nodes, if this rank sends their messages in one shot, or NULL */
  int64_t *sends;     /* (first byte, bytes) of the message to each of them */
  blocks_t *blocks;   /* what a call of blocks moves in place of rows, or NULL */
  int64_t *tally, tallies; /* what a completed call adds to the counters */
  trace_t *trace;     /* where a traced call records, or NULL */
  int64_t program;    /* its number in the trace */
  int64_t *timing;    /* of a traced call's rows */
  int64_t *times, timed; /* the counters to which that goes */
  /* the shared window */
  int64_t n, rank;
  int64_t stride;     /* words from one rank's control pages to the next rank's */
  flag_t *calls;      /* rank 0's line 0 */
  flag_t *records[2]; /* rank 0's, which begin with fingerprints, of calls of even and of odd number */
  flag_t *pids;       /* rank 0's process id */
  flag_t *heartbeat;  /* this rank's sign of life, in ns */
  flag_t *abort;      /* not zero: some rank aborted */
  int64_t spins;      /* polls before yielding */
  /* the buffers */
  char *send, *recv;  /* the rows hold offsets into them, or -1 */
  int64_t send_bytes, recv_bytes; /* bytes that others read; 0: none do */
  int64_t readable;   /* whether the others can read the buffers: it was tried when the call was first made */
  uint64_t fingerprint;
  char *body;         /* what this rank announces, for its record; NULL: Python writes it */
  int64_t body_bytes;
  uint64_t *in_kernels; /* the numbers of this rank's last calls of even and odd number whose ranks meet in kernels */
  int64_t *before, *after; /* copies before the call and after it: to, from and bytes of each */
  int64_t befores, afters;
  /* the call under way */
  uint64_t seq, base; /* its number; the flags' value before chunk 0 */
  int64_t timeout_ns; /* without progress; or one of waiting.h */
  int64_t phase;
  int64_t left;       /* stages that are not finished */
  int64_t moved;      /* out: chunks done by this invocation */
  int64_t fault, faulty; /* out: errno, and the rank whose memory could not be read; or an error of MPI */
} call_t;

static int idle_call(idle_t *w, const call_t *call) { return idle(w, call->spins, call->heartbeat, call->abort, call->timeout_ns); }

/* After a turn at all that this rank has to do: wait a little if nothing has moved since `before`. */
static inline int after_turn(idle_t *w, const call_t *call, int64_t before, const int traced) {
  const int once = call->timeout_ns == AT_ONCE || call->timeout_ns <= AHEAD;
  if (call->moved != before) return w->polls = w->since = 0, once ? EXPIRED : DONE;
  if (traced) call->trace->waiting = 1;
  return idle_call(w, call);
}

static void copies(const int64_t *each, int64_t n) { /* those around a call: (to, from, bytes) */
  for (; n--; each += 3) memmove((char *)each[0], (const char *)each[1], (size_t)each[2]);
}
