/* Calls of blocks, each of a length and at a place of its own: Gatherv, Scatterv, Allgatherv, Alltoallv of one node.
 *
 * Nobody asks for lengths before. A rank announces, with the call, a sum over all lengths that its caller gave
 * (blink_sum_lengths). The sums of all ranks together are 0, unless two ranks were given different lengths of a block;
 * then no rank receives anything.
 *
 * A short block lies in a slot before its rank announces the call, as in one shot. A longer one goes in chunks, through a
 * ring in its sender's arena. The longest are read out of their senders' buffers, and a sender stays in the call until
 * that is done; the slot says where its block lies, or that it cannot be read and goes in chunks, too. In place all but
 * the short ones do, and a chunk comes as soon as the one that lay there has gone. */
#pragma once
#include "call.h"
#include "reduction.h"

enum { STEP_BYTES = 16 << 20, LINE_WORDS = 8 }; /* of a copy, after which a rank shows that it lives; of a cache line */
#define UNREADABLE_BLOCK UINT64_MAX /* in a slot, in place of a block's address */

static uint64_t mix(uint64_t x) { /* the end of splitmix64 */
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

static uint64_t length_hash(int64_t source, int64_t target, int64_t bytes) {
  return bytes ? mix(mix((uint64_t)source << 32 | (uint64_t)target) + 0x9e3779b97f4a7c15u * (uint64_t)bytes) : 0;
}

/* The sum: what this rank sends adds to it what the receiver of the same length subtracts. */
void blink_sum_lengths(call_t *j) {
  blocks_t *const b = j->blocks;
  b->sum = 0;
  for (int64_t r = 0; r < j->n; r++)
    if (r != j->rank) b->sum += length_hash(j->rank, r, b->each[r].sends) - length_hash(r, j->rank, b->each[r].receives);
}

/* Where a block lies, or the address of a long one, from `source` to `target`. */
static char *slot_between(const call_t *j, const blocks_t *b, int64_t source, int64_t target) {
  return (char *)b->slots + source * b->apart + (int64_t)(j->seq & 1) * b->odd + (b->shared ? 0 : target * b->room);
}

static char *ring_between(const blocks_t *b, int64_t source, int64_t target, int64_t chunk) {
  return (char *)b->arenas + source * b->apart + (b->shared ? 0 : target * b->ring) + chunk % b->depth * b->chunk;
}

/* Chunks that `source` has written for `target`, and those that `target` has read; a block that is read whole is one. */
static flag_t *head_between(const call_t *j, const blocks_t *b, int64_t source, int64_t target) {
  return (flag_t *)b->heads + source * j->stride + LINE_WORDS * (b->shared ? source : target);
}

static flag_t *tail_between(const call_t *j, const blocks_t *b, int64_t source, int64_t target) {
  return (flag_t *)b->tails + target * j->stride + LINE_WORDS * source;
}

/* A step of a row in a traced call ends now: it began when the one before it ended. */
static void step_took(call_t *j, int64_t row, int64_t chunk) {
  trace_t *const t = j->trace;
  const int64_t start = t->last;
  t->last = now_ns();
  j->timing[TIMING * row + BUSY] += t->last - start;
  record(t, EVENT_CHUNK, start, t->last, j->program, row, chunk);
}

/* Whether a block of this rank's goes in chunks. */
static int in_chunks(const blocks_t *b, int64_t bytes) { return bytes > b->longest && (bytes < b->read_from || b->closed); }

/* ---- before the call is announced */

/* Whether the others can read this rank's longest blocks; the first and the last byte of each are tried when the call is
 * made for the first time. */
static int blocks_readable(call_t *j, const blocks_t *b) {
  const int64_t me = (int64_t)get(j->pids + j->rank * j->stride);
  for (int64_t r = 0; r < j->n && !j->readable; r++) {
    char *const at = j->send + b->each[r].from;
    if (r != j->rank && b->each[r].sends >= b->read_from && !blink_readable(me, (char *[]){at, at + b->each[r].sends - 1}, 2)) return 0;
  }
  return j->readable = 1;
}

static void fill_slot(call_t *j, const blocks_t *b, int64_t target) {
  const block_t *const e = b->each + target;
  char *const slot = slot_between(j, b, j->rank, target), *const from = j->send + e->from;
  if (e->sends >= b->read_from) set((flag_t *)slot, b->closed ? UNREADABLE_BLOCK : (uint64_t)from);
  if (e->sends > b->longest) return;
  copy(slot, from, (size_t)e->sends, 0);
  if (j->trace) step_took(j, j->n + target, 0);
}

/* Fill this rank's slots, and say its sum of lengths. */
static void fill_blocks(call_t *j) {
  blocks_t *const b = j->blocks;
  block_t *const own = b->each + j->rank;
  b->closed = 0;
  for (int64_t r = 0; r < j->n && !b->closed; r++) b->closed = b->each[r].sends >= b->read_from && !blocks_readable(j, b);
  const int stream = b->shared && in_chunks(b, own->sends); /* of chunks that all read */
  for (int64_t r = 0; r < j->n; r++) {
    block_t *const e = b->each + r;
    const int later = b->shared ? (e == own) == stream : 1;
    e->received = 0;
    e->sent = e->sends > b->longest && later ? 0 : e->sends;
    if (e->sends && (b->shared ? e == own : e != own)) fill_slot(j, b, r);
  }
  set(j->calls + j->rank * j->stride + LENGTHS + (j->seq & 1), b->sum);
}

/* ---- when all have announced it */

static int lengths_fit(const call_t *j) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < j->n; r++) sum += get(j->calls + r * j->stride + LENGTHS + (j->seq & 1));
  return sum == 0;
}

enum step { WAITS, MOVED, FAILED };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Receive what can be had from a rank now: all of a short block, a piece of a longer one. */
static enum step receive_block(call_t *j, blocks_t *b, int64_t source) {
  block_t *const e = b->each + source;
  const int64_t left = e->receives - e->received;
  char *const to = j->recv + e->to + e->received;
  int64_t n = least(left, STEP_BYTES);
  if (source == j->rank) {
    copy(to, j->send + e->from + e->received, (size_t)n, (int)j->stream);
  } else if (e->receives <= b->longest) {
    copy(to, slot_between(j, b, source, j->rank), (size_t)(n = left), 0);
  } else {
    const int chunks = e->receives < b->read_from;
    const uint64_t at = chunks ? UNREADABLE_BLOCK : get((flag_t *)slot_between(j, b, source, j->rank));
    flag_t *const tail = tail_between(j, b, source, j->rank);
    if (at != UNREADABLE_BLOCK) {
      const int64_t pid = (int64_t)get(j->pids + source * j->stride);
      char *const from = (char *)at + e->received;
      j->fault = j->helper && n >= SHARED_BYTES ? blink_read_shared(j->helper, pid, to, n, from) : blink_read(pid, to, n, from);
      if (n == left && !j->fault) set(tail, j->base + 1);
    } else {
      const int64_t chunk = e->received / b->chunk;
      if (get(head_between(j, b, source, j->rank)) <= j->base + (uint64_t)chunk) return WAITS;
      if (b->in_place && e->sent < e->sends && e->sent <= e->received) return WAITS;
      copy(to, ring_between(b, source, j->rank, chunk), (size_t)(n = least(left, b->chunk)), (int)j->stream);
      set(tail, j->base + (uint64_t)chunk + 1);
    }
  }
  if (j->fault) return j->faulty = source, FAILED;
  e->received += n;
  return MOVED;
}

/* Whether the ring to a rank, or to all, has room for a chunk. */
static int has_room(const call_t *j, const blocks_t *b, int64_t target, int64_t chunk) {
  const uint64_t want = j->base + (uint64_t)(chunk + 1 - b->depth);
  if (chunk < b->depth) return 1;
  for (int64_t r = 0; r < j->n; r++)
    if ((b->shared ? r != j->rank : r == target) && get(tail_between(j, b, j->rank, r)) < want) return 0;
  return 1;
}

/* Send a chunk of a block, or see that it was read. */
static enum step send_block(call_t *j, blocks_t *b, int64_t target) {
  block_t *const e = b->each + target;
  if (!in_chunks(b, e->sends)) {
    if (get(tail_between(j, b, j->rank, target)) <= j->base) return WAITS;
    return e->sent = e->sends, MOVED;
  }
  const int64_t chunk = e->sent / b->chunk, n = least(e->sends - e->sent, b->chunk);
  if (!has_room(j, b, target, chunk)) return WAITS;
  copy(ring_between(b, j->rank, target, chunk), j->send + e->from + e->sent, (size_t)n, 0);
  set(head_between(j, b, j->rank, target), j->base + (uint64_t)chunk + 1);
  e->sent += n;
  return MOVED;
}

/* A step of a row: the blocks that come are first, by rank, then those that go. A traced one is timed, and so is the wait
 * before it. */
static inline __attribute__((always_inline)) enum step block_step(call_t *j, int64_t row, const int traced) {
  blocks_t *const b = j->blocks;
  trace_t *const t = j->trace;
  const int comes = row < j->n;
  const int64_t peer = comes ? row : row - j->n, done = comes ? b->each[peer].received : b->each[peer].sent;
  const int64_t before = traced ? now_ns() : 0;
  const enum step made = comes ? receive_block(j, b, peer) : send_block(j, b, peer);
  if (made != MOVED) return made;
  j->moved++;
  if (!traced) return made;
  if (t->waiting) waited(t, EVENT_WAIT, before, j->program, row, peer);
  if (comes || in_chunks(b, b->each[peer].sends)) step_took(j, row, done / b->chunk);
  return made;
}

/* Receive all blocks, and send what did not fit into a slot; each rank begins with its neighbour. */
static inline __attribute__((always_inline)) int run_blocks(call_t *j, const int traced) {
  idle_t wait = {0, 0, 0};
  for (;;) {
    const int64_t before = j->moved;
    int open = 0;
    for (int64_t i = 1; i <= j->n; i++) {
      const int64_t peer = j->rank + i < j->n ? j->rank + i : j->rank + i - j->n;
      const block_t *const e = j->blocks->each + peer;
      if (e->sent < e->sends) block_step(j, j->n + peer, traced);
      if (e->received < e->receives && block_step(j, peer, traced) == FAILED) return FAULT;
      open |= e->sent < e->sends || e->received < e->receives;
    }
    if (!open) return streamed(), DONE;
    const int state = after_turn(&wait, j, before, traced);
    if (state != DONE) return state;
  }
}
