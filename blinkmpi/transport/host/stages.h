/* The stages of a rank, chunk by chunk: what a row says, when a chunk of it is ready, and the work that it is.
 *
 * A stage is a row of 64-bit integers (see `enum row`; native_rows.py writes them). By the protocol `cma` a chunk that lies in
 * its writer's buffer passes no slot: the reader copies it from there. */
#pragma once
#include "call.h"
#include "reduction.h"

enum { BLOCK = 2048 };                  /* elements folded at a time: stays in the first-level cache */
enum { PIECE_BYTES = 131072, PIECES_BYTES = 1 << 20 }; /* of an operand, of all, read ahead by cma: in the second-level */

/* A stage's row: these words, then the operands in order of folding (-1: the own one), the inputs, the heads of what
 * others read from this rank's buffers, the outputs (head, slots, number of readers, their tails). A row without
 * operands only waits until its readers have read. */
enum row { COUNT, LOCAL, STORE, FINAL, OUT_WIDE, OUT_STRIDE, OPERANDS, INPUTS, OUTPUTS, DONE_CHUNKS, CHUNK, HEADS, HEADER };
/* An input: head or 0, slots, my tail, writer's rank, the word with its buffer's address, the offset there; or, if it
 * comes through slots, -1, whether its elements are those of partial results, and the bytes of a slot. One without a tail
 * is a channel of this rank's own, on whose chunks the store only waits; what is there in place of slots is its reader's
 * tail, for which the channel waits. */
enum input { IN_HEAD, IN_SLOTS, IN_TAIL, IN_WRITER, IN_BUFFER, IN_OFFSET, IN, IN_WIDE = IN_BUFFER, IN_STRIDE = IN_OFFSET };

/* ---- one step: fold a chunk of every operand into store and slots */

typedef struct { /* a row, decoded */
  int64_t count, chunk, final, out_wide, out_stride, nops, nins, nheads, nouts;
  char *local, *store;
  int64_t *fold, *ins, *heads, *outs;
} stage_t;

static int64_t *decode(const call_t *call, int64_t *p, stage_t *c) {
  c->local = p[LOCAL] < 0 ? NULL : call->send + p[LOCAL];
  c->store = p[STORE] < 0 ? NULL : call->recv + p[STORE];
  c->count = p[COUNT], c->final = p[FINAL], c->out_wide = p[OUT_WIDE], c->out_stride = p[OUT_STRIDE];
  c->nops = p[OPERANDS], c->nins = p[INPUTS], c->nouts = p[OUTPUTS], c->chunk = p[CHUNK], c->nheads = p[HEADS];
  c->fold = p + HEADER;
  c->ins = c->fold + c->nops;
  c->heads = c->ins + IN * c->nins;
  c->outs = c->heads + c->nheads;
  p = c->outs;
  for (int64_t i = 0; i < c->nouts; i++) p += 3 + p[2];
  return p;
}

static int exported(const int64_t *in) { return in[IN_WRITER] >= 0; }
static int wide_in(const int64_t *in) { return !exported(in) && in[IN_WIDE]; }
static char *slot_in(const int64_t *in, int64_t slot) { return (char *)in[IN_SLOTS] + slot * in[IN_STRIDE]; }

/* Copy n bytes, from byte `at` of a stage's span on, out of the writer's buffer. */
static int pull(call_t *call, const int64_t *in, int64_t at, char *to, int64_t n) {
  char *buffer = (char *)get((flag_t *)in[IN_BUFFER] + TURN * (call->seq & 1));
  const int64_t pid = (int64_t)get(call->pids + in[IN_WRITER] * call->stride);
  char *const from = buffer + in[IN_OFFSET] + at;
  call->fault = call->helper && n >= SHARED_BYTES ? blink_read_shared(call->helper, pid, to, n, from) : blink_read(pid, to, n, from);
  if (call->fault) call->faulty = in[IN_WRITER];
  return !call->fault;
}

static _Thread_local char pieces[PIECES_BYTES] __attribute__((aligned(4096)));

/* Elements of each operand that are read ahead from their writers' buffers; 0 if all lie in slots. */
static int64_t piece_of(const call_t *call, const stage_t *c) {
  int any = 0;
  for (int64_t i = 0; i < c->nins; i++) any |= exported(c->ins + IN * i);
  if (!any) return 0;
  const int64_t each = PIECES_BYTES / c->nins < PIECE_BYTES ? PIECES_BYTES / c->nins : PIECE_BYTES;
  return each / call->item / 64 * 64;
}

/* Copy n elements, from `first` of the stage's span on, of every operand that lies in its writer's buffer. */
static int read_ahead(call_t *call, const stage_t *c, int64_t first, int64_t n, int64_t piece) {
  for (int64_t i = 0; i < c->nins; i++)
    if (exported(c->ins + IN * i) && !pull(call, c->ins + IN * i, first * call->item, pieces + i * piece * call->item, n * call->item)) return 0;
  return 1;
}

/* Returns 0 if the memory of another process could not be read. */
static int step(call_t *call, const stage_t *c, int64_t k) {
  const int64_t first = k * c->chunk, n = c->count - first < c->chunk ? c->count - first : c->chunk;
  const int64_t slot = (k + (call->one_shot & (int64_t)call->seq)) % call->depth, wide = call->item != call->acc;
  const int64_t out_item = c->out_wide ? call->acc : call->item, out_slot = slot * c->out_stride;
  char buffer[BLOCK * 8] __attribute__((aligned(64)));
  char wider[BLOCK * 8] __attribute__((aligned(64)));
  char out16[BLOCK * 2] __attribute__((aligned(64)));

  const int64_t *const only = c->nops == 1 && c->fold[0] >= 0 ? c->ins + IN * c->fold[0] : NULL;
  if (c->nops == 1 && !(wide && (c->out_wide || (only && wide_in(only)))) && !(c->final && call->divide)) { /* plain copy */
    const int64_t *const in = only;
    const size_t bytes = (size_t)(n * call->item);
    char *const store = c->store ? c->store + first * call->item : NULL;
    const char *from = !in ? c->local + first * call->item : slot_in(in, slot);
    if (in && exported(in)) {
      char *const to = store ? store : (char *)c->outs[1] + out_slot;
      if (!pull(call, in, first * call->item, to, (int64_t)bytes)) return 0;
      from = to;
    }
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      if ((char *)p[1] + out_slot != from) copy((char *)p[1] + out_slot, from, bytes, 0);
    if (store && store != from) copy(store, from, bytes, (int)call->nontemporal);
    return 1;
  }
  /* fold straight into the first slot (or the result) where no rounding comes between and no operand is overwritten */
  const int direct = !wide && !(c->final && call->divide) && (c->nouts || c->nops == 2);
  const int64_t piece = piece_of(call, c);
  int64_t from = 0, to = piece ? 0 : n; /* what has been read ahead */
  for (int64_t at = 0, m; at < n; at += m) {
    if (at == to) {
      from = at, to = n - at < piece ? n : at + piece;
      if (!read_ahead(call, c, first + from, to - from, piece)) return 0;
    }
    m = to - at < BLOCK ? to - at : BLOCK;
    const char *value = NULL;
    char *const slot0 = c->nouts ? (char *)c->outs[1] + out_slot + at * out_item : NULL;
    char *const store = c->store ? c->store + (first + at) * call->item : NULL;
    char *const acc = !direct ? buffer : slot0 ? slot0 : store;
    for (int64_t i = 0; i < c->nops; i++) {
      const int64_t *in = c->fold[i] < 0 ? NULL : c->ins + IN * c->fold[i];
      const int64_t item = in && wide_in(in) ? call->acc : call->item;
      const char *x = !in        ? c->local + (first + at) * item
                      : exported(in) ? pieces + (c->fold[i] * piece + at - from) * item
                                 : slot_in(in, slot) + at * item;
      if (wide && item == call->item) {
        widen((int)call->dtype, (float *)(i ? wider : buffer), (const uint16_t *)x, m);
        x = i ? wider : buffer;
      }
      if (i) combine((int)call->dtype, (int)call->op, acc, value, x, m);
      value = i ? acc : x;
    }
    if (c->final && call->divide) {
      divide((int)call->dtype, buffer, value, call->divide, m);
      value = buffer;
    }
    const char *rounded = value;
    if (wide && !(c->out_wide && !c->store)) {
      narrow((int)call->dtype, (uint16_t *)out16, (const float *)value, m);
      rounded = out16;
    }
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      if (o || !direct)
        copy((char *)p[1] + out_slot + at * out_item, c->out_wide ? value : rounded, (size_t)(m * out_item), 0);
    if (store && store != value) copy(store, rounded, (size_t)(m * call->item), (int)call->nontemporal);
  }
  return 1;
}

/* The first flag that chunk k of a stage still waits for; NULL if it is ready. */
static flag_t *lacking(const call_t *call, const stage_t *c, int64_t k) {
  const uint64_t want = call->base + (uint64_t)k + 1, ahead = c->nops ? (uint64_t)call->depth : 0;
  for (int64_t i = 0; i < c->nins; i++)
    if (c->ins[IN * i] && get((flag_t *)c->ins[IN * i]) < want)
      return (flag_t *)c->ins[IN * i + (c->ins[IN * i + IN_TAIL] ? IN_HEAD : IN_SLOTS)];
  if (k >= (int64_t)ahead)
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      for (int64_t r = 0; r < p[2]; r++)
        if (get((flag_t *)p[3 + r]) < want - ahead) return (flag_t *)p[3 + r];
  return NULL;
}

/* The words of all rows of a call that passes nothing through slots on this rank; 0 for one that does. */
static int64_t words_without_slots(const call_t *call, int64_t *rows) {
  int64_t *p = rows;
  stage_t c;
  if (!call->cma || call->one_shot || call->blocks || call->nodes) return 0;
  for (int64_t i = 0; i < call->stages; i++) {
    p = decode(call, p, &c);
    if (c.nops && c.nouts) return 0;
    for (int64_t j = 0; j < c.nins; j++)
      if (!exported(c.ins + IN * j)) return 0;
  }
  return p - rows;
}

/* Whether all that is left of a call is that others read this rank's buffers. */
static int only_waits(const call_t *call, int64_t *rows) {
  stage_t c;
  for (int64_t i = 0, *p = rows, *next; i < call->stages; i++, p = next) {
    next = decode(call, p, &c);
    if (c.nops && p[DONE_CHUNKS] * c.chunk < c.count) return 0;
  }
  return 1;
}

/* Do chunk k of a stage and raise its flags. Returns 0 if the memory of another process could not be read. */
static int advance(call_t *call, stage_t *c, int64_t *p) {
  const int64_t k = p[DONE_CHUNKS];
  const uint64_t flag = call->base + (uint64_t)k + 1;
  if (c->nops) {
    if (!step(call, c, k)) return 0;
    fence_nontemporal();
    for (int64_t i = 0; i < c->nheads; i++) set((flag_t *)c->heads[i], flag);
    for (int64_t o = 0, *q = c->outs; o < c->nouts; o++, q += 3 + q[2]) set((flag_t *)q[0], flag);
    for (int64_t i = 0; i < c->nins; i++)
      if (c->ins[IN * i + IN_TAIL]) set((flag_t *)c->ins[IN * i + IN_TAIL], flag);
  }
  p[DONE_CHUNKS] = k + 1;
  call->left -= (k + 1) * c->chunk >= c->count;
  call->moved++;
  return 1;
}

/* The same in a traced call; before it, the rank may have waited for the peer whose flag the row lacked. */
static int advance_traced(call_t *call, stage_t *c, int64_t *p, int64_t row) {
  trace_t *const t = call->trace;
  int64_t *const timing = call->timing + TIMING * row;
  if (t->waiting) waited(t, EVENT_WAIT, now_ns(), call->program, row, ((flag_t *)timing[LACKED] - call->calls) / call->stride);
  const int64_t k = p[DONE_CHUNKS], start = t->last;
  if (!advance(call, c, p)) return 0;
  if (!c->nops) return 1;
  t->last = now_ns();
  timing[BUSY] += t->last - start;
  record(t, EVENT_CHUNK, start, t->last, call->program, row, k);
  return 1;
}

/* Begin all stages, and fill the slots that depend on nobody: on what this rank sends, before it knows that the others send the same. The
 * user's receive buffer is not touched here. */
static void fill(call_t *call, int64_t *rows) {
  int64_t *p = rows;
  stage_t c;
  call->left = call->stages;
  for (int64_t i = 0; i < call->stages; i++) {
    int64_t *next = decode(call, p, &c);
    p[DONE_CHUNKS] = 0;
    p = next;
  }
  p = rows;
  for (int64_t i = 0; i < call->stages; i++) {
    int64_t *next = decode(call, p, &c);
    if (c.nops && !c.nins && !c.store)
      while (p[DONE_CHUNKS] < call->depth && p[DONE_CHUNKS] * c.chunk < c.count)
        (void)(call->trace ? advance_traced(call, &c, p, i) : advance(call, &c, p));
    p = next;
  }
}
