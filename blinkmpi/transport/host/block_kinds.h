/* Make calls of blocks whose like was made before with other lengths: lengths and places are numbers among the arguments,
 * so C fills the table of such a call (blocks.h) from them, and checks what Python would have checked.
 *
 * An entry of a kind is found by all that its calls are found by but these numbers and the lengths of their buffers. When it
 * is made, it is filled from the arguments of the call that Python has bound, and kept if that comes out as Python's table. */
#pragma once
#include "arguments.h"
#include "blocks.h"

enum { OF_KIND = 2, PENDING_OF_KIND = 3 }; /* in the key, in place of a stream: a kind; a kind of non-blocking calls */
enum { NO_BLOCK, ONE_BLOCK, EACH_A_BLOCK }; /* what an argument has: for the root or from it, or for all; for each rank */
enum { TALLY_CALL, TALLY_TREE, TALLY_SLOTS, TALLY_CMA, TALLY_OUT, TALLY_WORDS = 3 }; /* then what comes in, by rank */

typedef struct kind { /* made by Python (block_call.py) */
  int64_t item, root;  /* bytes of an element */
  int64_t nontemporal_from; /* bytes of the larger buffer from which on results are written past the caches */
  int64_t rings;       /* whether there is memory for blocks that go in chunks */
  int64_t send_has, recv_has; /* NO_BLOCK, ONE_BLOCK or EACH_A_BLOCK: what this rank's buffers must have */
  int64_t *tally;      /* (counter, bytes, calls): of the call, of its tree, by protocol, what goes out and in by rank */
} kind_t;

typedef struct {
  int how;
  char *at;
  int64_t nbytes;
  const argument_t *counts, *displs; /* n numbers each, or one; no displs: one behind another; no counts: the whole buffer */
} side_t;

static int is_list(const argument_t *a) { return a->flags == A_LIST || a->flags == A_TUPLE || a->flags == AN_ARRAY_OF_NUMBERS; }

/* The argument behind one with all its items. */
static const argument_t *behind(const argument_t *a) {
  const int64_t items = is_list(a) ? a->elements : 0;
  a++;
  for (int64_t i = 0; i < items; i++) a = behind(a);
  return a;
}

/* Whether these are so many numbers. */
static int are_numbers(const argument_t *a, int64_t n) {
  if (!is_list(a) || a->elements != n) return 0;
  for (int64_t i = 1; i <= n; i++)
    if (a[i].flags != A_NUMBER) return 0;
  return 1;
}

/* Read one of the first two arguments; 0 if its form is Python's to read. */
static int read_side(const buffer_t *buffers, int64_t many, const types_t *types, const argument_t *a, int64_t *buffer, int64_t n, side_t *s) {
  *s = (side_t){NO_BLOCK};
  if (a->flags == AN_OBJECT) return a->object != types->in_place;
  const argument_t *const end = behind(a);
  const argument_t *const numbers = is_list(a) ? a + 2 : end;
  if ((is_list(a) && !a->elements) || *buffer >= many) return 0;
  s->how = ONE_BLOCK, s->at = buffers[*buffer].at, s->nbytes = buffers[*buffer].nbytes, ++*buffer;
  if (numbers < end && numbers->flags == A_NUMBER) {
    s->counts = numbers;
    if (numbers + 1 < end && numbers[1].flags == A_NUMBER) s->displs = numbers + 1;
  }
  if (numbers == end || !is_list(numbers)) return 1;
  const int pair = numbers->flags == A_TUPLE; /* (counts, displacements); `unpack` in buffers.py reads it so, too */
  const argument_t *const counts = numbers + pair, *const next = behind(counts);
  if (!are_numbers(counts, n) || (pair && (numbers->elements != 2 || !are_numbers(next, n)))) return 0;
  s->how = EACH_A_BLOCK, s->counts = counts + 1;
  if (next == end || next->flags == A_HANDLE || next->flags == AN_OBJECT) return 1; /* what follows is a type, if anything */
  if (!are_numbers(next, n)) return 0;
  s->displs = next + 1;
  return 1;
}

/* The block of a rank: where it lies in its buffer, and its bytes; 0 if it does not lie in there, or others are before it. */
static int block_in(const side_t *s, const kind_t *k, int64_t rank, int shared, int64_t *free, int64_t *at, int64_t *bytes) {
  const int each = s->how == EACH_A_BLOCK;
  const int64_t which = each ? rank : 0, most = s->nbytes / k->item;
  *at = *bytes = 0;
  if (!each && (s->how == NO_BLOCK || !(shared || rank == k->root))) return 1;
  const int64_t count = s->counts ? s->counts[which].elements : most, first = s->displs ? s->displs[which].elements : each ? *free : 0;
  if (count < 0 || count > most || first < 0 || first > most - count || (each && first < *free)) return 0;
  *free = first + count, *at = first * k->item, *bytes = count * k->item;
  return 1;
}

static void add_to(int64_t *tally, int64_t which, int64_t bytes, int64_t calls) {
  int64_t *const at = tally + TALLY_WORDS * which;
  at[1] += bytes;
  if (calls) at[2] = 1;
}

/* Fill the table and the counters of a call, aimed at its buffers, from its arguments; 0 if they are Python's to check. */
static int fill_kind(const kind_t *k, call_t *call, const arguments_t *r, const types_t *types) {
  blocks_t *const b = call->blocks;
  const int64_t n = call->n, me = call->rank;
  side_t send, recv;
  int64_t buffer = 0, sent = 0, received = 0, own[2] = {0, 0}, free[2] = {0, 0}, longest = 0;
  const argument_t *const first = r->key.arguments;
  if (r->key.count < 2 || !read_side(r->buffers, r->buffered, types, first, &buffer, n, &send)) return 0;
  if (!read_side(r->buffers, r->buffered, types, behind(first), &buffer, n, &recv)) return 0;
  if (send.how != k->send_has || recv.how != k->recv_has || !all_apart(&r->key)) return 0;
  for (int64_t i = 0; i < call->tallies; i++) call->tally[TALLY_WORDS * i + 1] = call->tally[TALLY_WORDS * i + 2] = 0;
  for (int64_t p = 0; p < n; p++) {
    block_t *const e = b->each + p;
    int64_t out, in;
    if (!block_in(&send, k, p, b->shared, &free[0], &e->from, &out) || !block_in(&recv, k, p, 0, &free[1], &e->to, &in)) return 0;
    e->sends = p != me || (b->shared && n > 1) ? out : 0, e->receives = in;
    sent += out, received += in;
    if (p == me) own[0] = out, own[1] = in;
    if (out > longest && e->sends) longest = out;
    if (in > longest && p != me) longest = in;
    if (p == me) continue;
    if (out) add_to(call->tally, TALLY_OUT + p, out, 1), add_to(call->tally, TALLY_TREE, out, 1);
    if (out) add_to(call->tally, out >= b->read_from ? TALLY_CMA : TALLY_SLOTS, out, 1);
    if (in) add_to(call->tally, TALLY_OUT + n + p, in, 1), add_to(call->tally, in >= b->read_from ? TALLY_CMA : TALLY_SLOTS, 0, 1);
  }
  if (own[0] != own[1] || (longest > b->longest && !k->rings)) return 0;
  const int64_t whole = b->shared ? sent / n : sent, nbytes = whole > received ? whole : received;
  add_to(call->tally, TALLY_CALL, nbytes, 1);
  call->chunk = sent + received, call->nontemporal = nbytes > k->nontemporal_from;
  call->send = send.at, call->recv = recv.at, call->readable = 0;
  blink_sum_lengths(call);
  return 1;
}

/* What a kind is found by: of the first two arguments no length and no number, but for one that is an argument itself (a root). */
static int key_of_kind(const call_key_t *key, call_key_t *kind, int pending) {
  if (key->arrays && pending) return 0;
  memcpy(kind, key, offsetof(call_key_t, arguments) + (size_t)key->count * sizeof *key->arguments);
  if (!key->arrays) kind->stream = pending ? PENDING_OF_KIND : OF_KIND;
  const argument_t *const end = key->arguments + key->count, *a = key->arguments;
  for (int i = 0; i < 2 && a < end; i++) {
    const argument_t *const next = behind(a);
    for (const argument_t *b = a; b < next && a->flags != A_NUMBER; b++) {
      const int buffer = (b->flags >= 0 && b->object) || b->flags <= -CUPY_ARRAYS || b->flags == A_MEMORY || b->flags == A_WRITABLE_MEMORY;
      if (b->flags == A_NUMBER || buffer) kind->arguments[b - key->arguments].elements = 0;
    }
    a = next;
  }
  return 1;
}

/* Whether a call has these blocks where it moves anything. */
static int same_blocks(const block_t *table, const call_t *call) {
  for (int64_t p = 0; p < call->n; p++) {
    const block_t *const a = table + p, *const b = call->blocks->each + p;
    if (a->sends != b->sends || a->receives != b->receives) return 0;
    const int kept = p == call->rank && a->receives; /* this rank's own block, from the send to the receive buffer */
    if ((a->sends || kept) && a->from != b->from) return 0;
    if (a->receives && a->to != b->to) return 0;
  }
  return 1;
}
