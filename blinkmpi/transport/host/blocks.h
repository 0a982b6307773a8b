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
#include "fingerprints.h"
#include "reduction.h"

enum { STEP_BYTES = 16 << 20, LINE_WORDS = 8 }; /* of a copy, after which a rank shows that it lives; of a cache line */
#define UNREADABLE_BLOCK UINT64_MAX /* in a slot, in place of a block's address */

static uint64_t length_hash(int64_t source, int64_t target, int64_t bytes) {
  return bytes ? mix(mix((uint64_t)source << 32 | (uint64_t)target) + 0x9e3779b97f4a7c15u * (uint64_t)bytes) : 0;
}

/* The sum: what this rank sends adds to it what the receiver of the same length subtracts. */
void blink_sum_lengths(call_t *call) {
  blocks_t *const b = call->blocks;
  b->sum = 0;
  for (int64_t r = 0; r < call->n; r++)
    if (r != call->rank) b->sum += length_hash(call->rank, r, b->each[r].sends) - length_hash(r, call->rank, b->each[r].receives);
}

/* Where a block lies, or the address of a long one, from `source` to `target`. */
static char *slot_between(const call_t *call, const blocks_t *b, int64_t source, int64_t target) {
  return (char *)b->slots + source * b->apart + (int64_t)(call->seq & 1) * b->odd + (b->shared ? 0 : target * b->room);
}

static char *ring_between(const blocks_t *b, int64_t source, int64_t target, int64_t chunk) {
  return (char *)b->arenas + source * b->apart + (b->shared ? 0 : target * b->ring) + chunk % b->depth * b->chunk;
}

/* Chunks that `source` has written for `target`, and those that `target` has read; a block that is read whole is one. */
static flag_t *head_between(const call_t *call, const blocks_t *b, int64_t source, int64_t target) {
  return (flag_t *)b->heads + source * call->stride + LINE_WORDS * (b->shared ? source : target);
}

static flag_t *tail_between(const call_t *call, const blocks_t *b, int64_t source, int64_t target) {
  return (flag_t *)b->tails + target * call->stride + LINE_WORDS * source;
}

/* A step of a row in a traced call ends now: it began when the one before it ended. */
static void step_took(call_t *call, int64_t row, int64_t chunk) {
  trace_t *const t = call->trace;
  const int64_t start = t->last;
  t->last = now_ns();
  call->timing[TIMING * row + BUSY] += t->last - start;
  record(t, EVENT_CHUNK, start, t->last, call->program, row, chunk);
}

/* Whether a block of this rank's goes in chunks. */
static int in_chunks(const blocks_t *b, int64_t bytes) { return bytes > b->longest && (bytes < b->read_from || b->closed); }

/* ---- before the call is announced */

/* Whether the others can read this rank's longest blocks; the first and the last byte of each are tried when the call is
 * made for the first time. */
static int blocks_readable(call_t *call, const blocks_t *b) {
  const int64_t me = (int64_t)get(call->pids + call->rank * call->stride);
  for (int64_t r = 0; r < call->n && !call->readable; r++) {
    char *const at = call->send + b->each[r].from;
    if (r != call->rank && b->each[r].sends >= b->read_from && !blink_readable(me, (char *[]){at, at + b->each[r].sends - 1}, 2)) return 0;
  }
  return call->readable = 1;
}

static void fill_slot(call_t *call, const blocks_t *b, int64_t target) {
  const block_t *const e = b->each + target;
  char *const slot = slot_between(call, b, call->rank, target), *const from = call->send + e->from;
  if (e->sends >= b->read_from) set((flag_t *)slot, b->closed ? UNREADABLE_BLOCK : (uint64_t)from);
  if (e->sends > b->longest) return;
  copy(slot, from, (size_t)e->sends, 0);
  if (call->trace) step_took(call, call->n + target, 0);
}

/* Fill this rank's slots, and say its sum of lengths. */
static void fill_blocks(call_t *call) {
  blocks_t *const b = call->blocks;
  block_t *const own = b->each + call->rank;
  b->closed = 0;
  for (int64_t r = 0; r < call->n && !b->closed; r++) b->closed = b->each[r].sends >= b->read_from && !blocks_readable(call, b);
  const int all_read = b->shared && in_chunks(b, own->sends); /* chunks that all ranks read */
  for (int64_t r = 0; r < call->n; r++) {
    block_t *const e = b->each + r;
    const int later = b->shared ? (e == own) == all_read : 1;
    e->received = 0;
    e->sent = e->sends > b->longest && later ? 0 : e->sends;
    if (e->sends && (b->shared ? e == own : e != own)) fill_slot(call, b, r);
  }
  set(call->calls + call->rank * call->stride + LENGTHS + (call->seq & 1), b->sum);
}

/* ---- when all have announced it */

static int lengths_fit(const call_t *call) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < call->n; r++) sum += get(call->calls + r * call->stride + LENGTHS + (call->seq & 1));
  return sum == 0;
}

enum step { WAITS, MOVED, FAILED };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Receive what a rank has ready: all of a short block, a piece of a longer one. */
static enum step receive_block(call_t *call, blocks_t *b, int64_t source) {
  block_t *const e = b->each + source;
  const int64_t left = e->receives - e->received;
  char *const to = call->recv + e->to + e->received;
  int64_t n = least(left, STEP_BYTES);
  if (source == call->rank) {
    copy(to, call->send + e->from + e->received, (size_t)n, (int)call->nontemporal);
  } else if (e->receives <= b->longest) {
    copy(to, slot_between(call, b, source, call->rank), (size_t)(n = left), 0);
  } else {
    const int chunks = e->receives < b->read_from;
    const uint64_t at = chunks ? UNREADABLE_BLOCK : get((flag_t *)slot_between(call, b, source, call->rank));
    flag_t *const tail = tail_between(call, b, source, call->rank);
    if (at != UNREADABLE_BLOCK) {
      const int64_t pid = (int64_t)get(call->pids + source * call->stride);
      char *const from = (char *)at + e->received;
      call->fault = call->helper && n >= SHARED_BYTES ? blink_read_shared(call->helper, pid, to, n, from) : blink_read(pid, to, n, from);
      if (n == left && !call->fault) set(tail, call->base + 1);
    } else {
      const int64_t chunk = e->received / b->chunk;
      if (get(head_between(call, b, source, call->rank)) <= call->base + (uint64_t)chunk) return WAITS;
      if (b->in_place && e->sent < e->sends && e->sent <= e->received) return WAITS;
      copy(to, ring_between(b, source, call->rank, chunk), (size_t)(n = least(left, b->chunk)), (int)call->nontemporal);
      set(tail, call->base + (uint64_t)chunk + 1);
    }
  }
  if (call->fault) return call->faulty = source, FAILED;
  e->received += n;
  return MOVED;
}

/* Whether the ring to a rank, or to all, has room for a chunk. */
static int has_room(const call_t *call, const blocks_t *b, int64_t target, int64_t chunk) {
  const uint64_t want = call->base + (uint64_t)(chunk + 1 - b->depth);
  if (chunk < b->depth) return 1;
  for (int64_t r = 0; r < call->n; r++)
    if ((b->shared ? r != call->rank : r == target) && get(tail_between(call, b, call->rank, r)) < want) return 0;
  return 1;
}

/* Send a chunk of a block, or see that it was read. */
static enum step send_block(call_t *call, blocks_t *b, int64_t target) {
  block_t *const e = b->each + target;
  if (!in_chunks(b, e->sends)) {
    if (get(tail_between(call, b, call->rank, target)) <= call->base) return WAITS;
    return e->sent = e->sends, MOVED;
  }
  const int64_t chunk = e->sent / b->chunk, n = least(e->sends - e->sent, b->chunk);
  if (!has_room(call, b, target, chunk)) return WAITS;
  copy(ring_between(b, call->rank, target, chunk), call->send + e->from + e->sent, (size_t)n, 0);
  set(head_between(call, b, call->rank, target), call->base + (uint64_t)chunk + 1);
  e->sent += n;
  return MOVED;
}

/* A step of a row: the blocks that come are first, by rank, then those that go. A traced one is timed, and so is the wait
 * before it. */
static inline __attribute__((always_inline)) enum step block_step(call_t *call, int64_t row, const int traced) {
  blocks_t *const b = call->blocks;
  trace_t *const t = call->trace;
  const int comes = row < call->n;
  const int64_t peer = comes ? row : row - call->n, done = comes ? b->each[peer].received : b->each[peer].sent;
  const int64_t before = traced ? now_ns() : 0;
  const enum step made = comes ? receive_block(call, b, peer) : send_block(call, b, peer);
  if (made != MOVED) return made;
  call->moved++;
  if (!traced) return made;
  if (t->waiting) waited(t, EVENT_WAIT, before, call->program, row, peer);
  if (comes || in_chunks(b, b->each[peer].sends)) step_took(call, row, done / b->chunk);
  return made;
}

/* Receive all blocks, and send what did not fit into a slot; each rank begins with its neighbour. */
static inline __attribute__((always_inline)) int run_blocks(call_t *call, const int traced) {
  idle_t wait = {0, 0, 0};
  for (;;) {
    const int64_t before = call->moved;
    int open = 0;
    for (int64_t i = 1; i <= call->n; i++) {
      const int64_t peer = call->rank + i < call->n ? call->rank + i : call->rank + i - call->n;
      const block_t *const e = call->blocks->each + peer;
      if (e->sent < e->sends) block_step(call, call->n + peer, traced);
      if (e->received < e->receives && block_step(call, peer, traced) == FAILED) return FAULT;
      open |= e->sent < e->sends || e->received < e->receives;
    }
    if (!open) return fence_nontemporal(), DONE;
    const int state = after_turn(&wait, call, before, traced);
    if (state != DONE) return state;
  }
}
