/* What makes the calls of a kind over packets: a kernel, its arguments but for what follows from the count, and how that does.
 *
 * What a rank sends, as packets.py says it, and the grid, as transport.py has it, follow from the count in a few integers; so a
 * record makes calls of any count of its kind, and C makes them. */
#pragma once
#include "../../transport/host/fingerprints.h"
#include "binder.h"
#include "rules.h"
#include <pthread.h>
#include <string.h>

enum { PACK_BYTES = 16, MOST_WORDS = 512, EXTERNAL = 1, UNHANDLED_CUDA_ERROR = 1 };

/* Every field has 8 bytes. Python reads this structure here. */
typedef struct {
  /* the driver */
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  int (*current)(void **);                           /* cuCtxGetCurrent */
  int (*enter)(void *);                              /* cuCtxSetCurrent */
  int (*capturing)(void *, int *);                   /* cuStreamIsCapturing */
  int (*wait)(void *, void *, unsigned);             /* cuStreamWaitEvent */
  int (*mark)(void *, void *, unsigned);             /* cuEventRecordWithFlags */
  int (*copy)(uint64_t, uint64_t, uint64_t, void *); /* cuMemcpyDtoDAsync */
  void *context;                                     /* the communicator's */
  void *event;                                       /* behind all launches of this process on this GPU */
  /* the kernel */
  void *function;
  int64_t block, most; /* its threads, and groups of them at most */
  uint64_t *words;
  int64_t count, fingerprint_at, send_at, recv_at, packets_at; /* of the words, and where what differs begins */
  uint64_t form;                                               /* its fingerprint, but for the count */
  /* the kind */
  int64_t n, rank, collective, root, item_bytes;
  int64_t two_shot, group, data; /* of so many positions side by side, `data` carry a pack */
} record_t;

typedef struct { /* PacketStreams of packets.py, and the slice */
  uint64_t nbytes, send_stride, recv_stride, send_mask, recv_mask, owners, out_mask, in_mask, keep, slice;
} streams_t;

static streams_t streams_of(const record_t *r, uint64_t count) {
  const uint64_t everyone = (1ull << r->n) - 1, me = 1ull << r->rank, others = everyone & ~me;
  const uint64_t root = r->root < 0 ? 1 : 1ull << r->root, nbytes = count * (uint64_t)r->item_bytes, packs = (nbytes + PACK_BYTES - 1) / PACK_BYTES;
  const int at_root = me == root;
  const uint64_t owners = !r->two_shot ? 0 : r->collective == ALL_REDUCE ? everyone : everyone & ~root;
  const uint64_t slices = owners ? (uint64_t)__builtin_popcountll(owners) : 1;
  streams_t s = {.nbytes = nbytes, .owners = owners, .keep = 1, .slice = (packs + slices - 1) / slices};
  switch (r->collective) {
  case ALL_REDUCE:
    s.send_mask = others, s.recv_mask = everyone;
    if (owners) s.out_mask = s.in_mask = others;
    break;
  case ALL_GATHER:
    s.send_mask = others, s.recv_mask = everyone, s.recv_stride = nbytes;
    break;
  case REDUCE_SCATTER:
    s.send_mask = others, s.recv_mask = everyone, s.send_stride = nbytes;
    break;
  case ALL_TO_ALL:
    s.send_mask = others, s.recv_mask = everyone, s.send_stride = s.recv_stride = nbytes;
    break;
  case BROADCAST:
    if (at_root) s.send_mask = owners ? owners : others;
    else s.recv_mask = root;
    if (owners && !at_root) s.out_mask = s.in_mask = owners & ~me;
    break;
  default: /* REDUCE */
    s.send_mask = owners ? owners & ~me : at_root ? 0 : root;
    s.recv_mask = owners ? (at_root ? 0 : everyone) : at_root ? everyone : 0;
    if (owners) s.out_mask = at_root ? 0 : root, s.in_mask = at_root ? owners : 0, s.keep = 0;
  }
  return s;
}

/* The groups of threads of a call. */
static unsigned grid_of(const record_t *r, const streams_t *s) {
  const int64_t positions = ((int64_t)s->slice + r->data - 1) / r->data * r->group;
  const int64_t wanted = (positions + r->block - 1) / r->block;
  return (unsigned)(wanted < 1 ? 1 : wanted > r->most ? r->most : wanted);
}

/* The arguments of a call; `words` has room for as many as the record has. */
static unsigned fill_words(const record_t *r, const door_call_t *call, uint64_t *words) {
  const streams_t s = streams_of(r, call->count);
  const uint64_t said = with_count(r->form, (int64_t)call->count) & 0xFFFFFFFFu;
  memcpy(words, r->words, 8 * (size_t)r->count);
  words[r->fingerprint_at] = ((said ? said : 1) + call->number) & 0xFFFFFFFFu; /* two calls alike are not taken for each other */
  words[r->send_at] = (uint64_t)call->send, words[r->recv_at] = (uint64_t)call->recv;
  memcpy(words + r->packets_at, &s, sizeof s);
  return grid_of(r, &s);
}

/* Launch, in the record's context; CUDA's error, or 0. */
static int launch_here(const record_t *r, const door_call_t *call, unsigned grid, uint64_t *words) {
  void *parameters[] = {words};
  const int copies = r->collective == BROADCAST && r->rank == r->root && call->send != call->recv;
  int captured = 0, error = r->capturing(call->stream, &captured);
  const unsigned flags = captured == 1 ? EXTERNAL : 0;
  if (!error) error = r->wait(call->stream, r->event, flags);
  if (!error && copies) error = r->copy((uint64_t)call->recv, (uint64_t)call->send, call->count * (uint64_t)r->item_bytes, call->stream);
  if (!error) error = r->launch(r->function, grid, 1, 1, (unsigned)r->block, 1, 1, 0, call->stream, parameters, NULL);
  return error ? error : r->mark(r->event, call->stream, flags);
}

/* Put a call on its stream. All launches of this process, in graphs or not, keep one order: each waits for the event of the one
 * before, and marks it anew. In a graph both are nodes, for the event as it is when the graph is launched. So no two kernels run
 * beside one another that each wait for the other's peers. */
static int launch_record(const record_t *r, const door_call_t *call) {
  static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
  uint64_t words[MOST_WORDS];
  void *before = NULL;
  const unsigned grid = fill_words(r, call, words);
  pthread_mutex_lock(&order);
  int error = r->current(&before);
  if (!error && before != r->context) error = r->enter(r->context);
  if (!error) error = launch_here(r, call, grid, words);
  if (before != r->context) r->enter(before);
  pthread_mutex_unlock(&order);
  return error ? UNHANDLED_CUDA_ERROR : 0;
}
