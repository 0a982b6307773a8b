/* The C executor: the stages of one rank, executed on shared memory in one call.
 *
 * It does exactly what executor.py does in NumPy, on the same slots and flags, so either can take part with any peer.
 * A stage's record is a row of 64-bit integers (layout: struct cursor below; written by records.py). Waiting is
 * polling: whatever stage is ready runs; when none is, spin a little, then yield the core, then sleep.
 *
 * By the road `cma` a chunk that lies in its writer's buffer passes no slot: the reader copies it from there.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE()
#endif
#include "single_copy.h"
#include "write_style.h"
#include "reduction.h"

typedef _Atomic uint64_t flag_t;

enum { PUSH_BYTES = 16384 };             /* shorter chunks are better off in the caches */
enum { BLOCK = 2048 };                  /* elements folded at a time: stays in the first-level cache */
enum { PIECE_BYTES = 131072, PIECES_BYTES = 1 << 20 }; /* of an operand, of all, read ahead by cma: in the second-level */
enum { SEND = 2, RECV = 3, TURN = 2 };  /* words of a line: the rank's buffers, for two calls by turns */
enum { DONE = 0, EXPIRED = 1, ABORTED = 2, DIFFER = 3, REFUSED = 4, FAULT = 5, OTHER = 6 };
enum { SEQ_BITS = 24 }; /* a flag is (number of the call << SEQ_BITS) + chunks */
#define CLOSED UINT64_MAX /* in place of a buffer's address: others cannot read it */

typedef struct {
  uint64_t base;      /* flag value before chunk 0 of this call */
  int64_t stages;      /* number of records */
  int64_t dtype, op;  /* codes above */
  int64_t item, acc;  /* bytes of an element, of a partial result */
  int64_t chunk;      /* elements that fit in a slot */
  int64_t depth;      /* slots per channel */
  int64_t divide;     /* avg: divide the final fold by this, else 0 */
  int64_t stream;     /* write the receive buffer past the caches */
  int64_t push;       /* write the slots past the caches, and results that others read from here */
  int64_t timeout_ns; /* without progress; negative: return as soon as nothing is ready */
  int64_t spins;      /* polls before yielding */
  char *send, *recv;  /* this rank's buffers; the records hold offsets into them, or -1 */
  flag_t *beat;       /* my sign of life, in ns */
  flag_t *abort;      /* anybody's cry for help: leave when not zero */
  int64_t left;       /* stages that are not finished */
  int64_t moved;      /* out: chunks done in this turn */
  int64_t phase;      /* in and out: 0 before the slots are free, 1 before all have entered, 2 from there on */
  int64_t n, rank;
  uint64_t seq, print; /* the call that this rank has announced, and its fingerprint */
  flag_t *calls;      /* rank 0's line: the call entered, the call finished */
  flag_t *prints;     /* rank 0's fingerprint of this call */
  int64_t begun_ns;   /* when all had entered */
  int64_t stride;     /* words from one rank's line to the next rank's */
  int64_t cma;        /* whether chunks are read from their writers' buffers */
  flag_t *pids;       /* rank 0's process id */
  int64_t fault, faulty; /* out: errno, and the rank whose memory could not be read */
  helper_t *helper;   /* a second thread for long copies from other processes, or NULL */
  style_t style;      /* what `push` is chosen by */
} job_t;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t get(flag_t *f) { return atomic_load_explicit(f, memory_order_acquire); }
static void set(flag_t *f, uint64_t v) { atomic_store_explicit(f, v, memory_order_release); }

/* Tell the others where this rank's buffers are in the call that it is about to announce; or that they cannot be read,
 * as memory of devices may not: the first and the last byte are tried. A length is 0 where nobody reads. */
void blink_lend(const job_t *j, int64_t send_bytes, int64_t recv_bytes) {
  flag_t *line = j->calls + j->rank * j->stride;
  const int64_t me = (int64_t)get(j->pids + j->rank * j->stride);
  char byte;
  const int closed = (send_bytes && (blink_read(me, &byte, 1, j->send) || blink_read(me, &byte, 1, j->send + send_bytes - 1))) ||
                     (recv_bytes && (blink_read(me, &byte, 1, j->recv) || blink_read(me, &byte, 1, j->recv + recv_bytes - 1)));
  set(line + SEND + TURN * (j->seq & 1), closed ? CLOSED : (uint64_t)j->send);
  set(line + RECV + TURN * (j->seq & 1), (uint64_t)j->recv);
}

/* ---- one step: fold a chunk of every operand into store and slots */

typedef struct { /* a stage's record, decoded; nops is 0 for one that only waits until its readers have read */
  int64_t count, chunk, final, out_partial, in_partial, nops, nins, nheads, nouts;
  char *local, *store;
  int64_t *fold, *ins; /* ins: head or 0, slots, my tail, writer's rank or -1, its buffer's word, offset there; each */
  int64_t *heads, *outs; /* heads: of what is read from my buffers; outs: head, slots, readers, their tails each */
} cursor;

enum { IN = 6 }; /* words of an input */

static int64_t *decode(const job_t *j, int64_t *p, cursor *c) {
  c->local = p[1] < 0 ? NULL : j->send + p[1];
  c->store = p[2] < 0 ? NULL : j->recv + p[2];
  c->count = p[0], c->final = p[3], c->in_partial = p[4];
  c->out_partial = p[5], c->nops = p[6], c->nins = p[7], c->nouts = p[8], c->chunk = p[10], c->nheads = p[11];
  c->fold = p + 12; /* p[9] counts the chunks done */
  c->ins = c->fold + c->nops;
  c->heads = c->ins + IN * c->nins;
  c->outs = c->heads + c->nheads;
  p = c->outs;
  for (int64_t i = 0; i < c->nouts; i++) p += 3 + p[2];
  return p;
}

static int lent(const int64_t *in) { return in[3] >= 0; }

/* Copy n bytes, from byte `at` of a stage's span on, out of the writer's buffer. */
static int pull(job_t *j, const int64_t *in, int64_t at, char *to, int64_t n) {
  char *buffer = (char *)get((flag_t *)in[4] + TURN * (j->seq & 1));
  const int64_t pid = (int64_t)get(j->pids + in[3] * j->stride);
  char *const from = buffer + in[5] + at;
  j->fault = j->helper && n >= SHARED_BYTES ? blink_read_shared(j->helper, pid, to, n, from) : blink_read(pid, to, n, from);
  if (j->fault) j->faulty = in[3];
  return !j->fault;
}

static _Thread_local char pieces[PIECES_BYTES] __attribute__((aligned(4096)));

/* Elements of each operand that are read ahead from their writers' buffers; 0 if all lie in slots. */
static int64_t piece_of(const job_t *j, const cursor *c) {
  int any = 0;
  for (int64_t i = 0; i < c->nins; i++) any |= lent(c->ins + IN * i);
  if (!any) return 0;
  const int64_t each = PIECES_BYTES / c->nins < PIECE_BYTES ? PIECES_BYTES / c->nins : PIECE_BYTES;
  return each / j->item / 64 * 64;
}

/* Copy n elements, from `first` of the stage's span on, of every operand that lies in its writer's buffer. */
static int read_ahead(job_t *j, const cursor *c, int64_t first, int64_t n, int64_t piece) {
  for (int64_t i = 0; i < c->nins; i++)
    if (lent(c->ins + IN * i) && !pull(j, c->ins + IN * i, first * j->item, pieces + i * piece * j->item, n * j->item)) return 0;
  return 1;
}

/* Returns 0 if the memory of another process could not be read. */
static int step(job_t *j, const cursor *c, int64_t k) {
  const int64_t first = k * c->chunk, n = c->count - first < c->chunk ? c->count - first : c->chunk;
  const int64_t slot = k % j->depth, wide = j->item != j->acc;
  const int push = j->push && n * j->item >= PUSH_BYTES, past = j->stream || (j->cma && push);
  const int64_t in_item = c->in_partial ? j->acc : j->item, out_item = c->out_partial ? j->acc : j->item;
  const int64_t in_slot = slot * ((j->chunk * in_item + 63) & ~63), out_slot = slot * ((j->chunk * out_item + 63) & ~63);
  char buffer[BLOCK * 8] __attribute__((aligned(64)));
  char wider[BLOCK * 8] __attribute__((aligned(64)));
  char out16[BLOCK * 2] __attribute__((aligned(64)));

  if (c->nops == 1 && !(wide && (c->in_partial || c->out_partial)) && !(c->final && j->divide)) { /* plain copy */
    const int64_t *in = c->fold[0] < 0 ? NULL : c->ins + IN * c->fold[0];
    const size_t bytes = (size_t)(n * j->item);
    char *const store = c->store ? c->store + first * j->item : NULL;
    const char *from = !in ? c->local + first * j->item : (char *)in[1] + in_slot;
    if (in && lent(in)) {
      char *const to = store ? store : (char *)c->outs[1] + out_slot;
      if (!pull(j, in, first * j->item, to, (int64_t)bytes)) return 0;
      from = to;
    }
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      if ((char *)p[1] + out_slot != from) copy((char *)p[1] + out_slot, from, bytes, push);
    if (store && store != from) copy(store, from, bytes, past);
    return 1;
  }
  /* fold straight into the first slot (or the result) where no rounding comes between and no operand is overwritten */
  const int direct = !push && !wide && !(c->final && j->divide) && (c->nouts || c->nops == 2);
  const int64_t piece = piece_of(j, c);
  int64_t from = 0, to = piece ? 0 : n; /* what has been read ahead */
  for (int64_t at = 0, m; at < n; at += m) {
    if (at == to) {
      from = at, to = n - at < piece ? n : at + piece;
      if (!read_ahead(j, c, first + from, to - from, piece)) return 0;
    }
    m = to - at < BLOCK ? to - at : BLOCK;
    const char *value = NULL;
    char *const slot0 = c->nouts ? (char *)c->outs[1] + out_slot + at * out_item : NULL;
    char *const store = c->store ? c->store + (first + at) * j->item : NULL;
    char *const acc = !direct ? buffer : slot0 ? slot0 : store;
    for (int64_t i = 0; i < c->nops; i++) {
      const int64_t *in = c->fold[i] < 0 ? NULL : c->ins + IN * c->fold[i];
      const int64_t item = !in || lent(in) ? j->item : in_item;
      const char *x = !in        ? c->local + (first + at) * item
                      : lent(in) ? pieces + (c->fold[i] * piece + at - from) * item
                                 : (char *)in[1] + in_slot + at * item;
      if (wide && item == j->item) {
        widen((int)j->dtype, (float *)(i ? wider : buffer), (const uint16_t *)x, m);
        x = i ? wider : buffer;
      }
      if (i) combine((int)j->dtype, (int)j->op, acc, value, x, m);
      value = i ? acc : x;
    }
    if (c->final && j->divide) {
      if (j->dtype == F64) for (int64_t i = 0; i < m; i++) ((double *)buffer)[i] = ((const double *)value)[i] / (double)j->divide;
      else for (int64_t i = 0; i < m; i++) ((float *)buffer)[i] = ((const float *)value)[i] / (float)j->divide;
      value = buffer;
    }
    const char *rounded = value;
    if (wide && !(c->out_partial && !c->store)) {
      narrow((int)j->dtype, (uint16_t *)out16, (const float *)value, m);
      rounded = out16;
    }
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      if (o || !direct)
        copy((char *)p[1] + out_slot + at * out_item, c->out_partial ? value : rounded, (size_t)(m * out_item), push);
    if (store && store != value) copy(store, rounded, (size_t)(m * j->item), past);
  }
  return 1;
}

static int ready(const job_t *j, const cursor *c, int64_t k) {
  const uint64_t want = j->base + (uint64_t)k + 1, ahead = c->nops ? (uint64_t)j->depth : 0;
  for (int64_t i = 0; i < c->nins; i++)
    if (c->ins[IN * i] && get((flag_t *)c->ins[IN * i]) < want) return 0;
  if (k >= (int64_t)ahead)
    for (int64_t o = 0, *p = c->outs; o < c->nouts; o++, p += 3 + p[2])
      for (int64_t r = 0; r < p[2]; r++)
        if (get((flag_t *)p[3 + r]) < want - ahead) return 0;
  return 1;
}

/* Polling that spins, then yields, then sleeps, and looks at clock and abort word now and then. */
typedef struct {
  int64_t polls, since, waited;
} idle_t;

static int idle(idle_t *w, int64_t spins, flag_t *beat, flag_t *abort, int64_t timeout_ns) {
  if (w->polls++ % 64 == 0) {
    const int64_t now = now_ns();
    if (!w->since) w->since = now;
    w->waited = now - w->since;
    set(beat, (uint64_t)now);
    if (get(abort)) return ABORTED;
    if (w->waited > timeout_ns) return EXPIRED; /* at once if it is negative */
  }
  if (w->polls < spins) PAUSE();
  else if (w->waited < 20000000) sched_yield();
  else nanosleep(&(struct timespec){0, 100000}, NULL);
  return DONE;
}

static int idle_job(idle_t *w, const job_t *j) { return idle(w, j->spins, j->beat, j->abort, j->timeout_ns); }

/* Do chunk k of a stage and raise its flags. Returns 0 if the memory of another process could not be read. */
static int advance(job_t *j, cursor *c, int64_t *p) {
  const int64_t k = p[9];
  const uint64_t flag = j->base + (uint64_t)k + 1;
  if (c->nops) {
    if (!step(j, c, k)) return 0;
#if defined(__x86_64__)
    _mm_sfence(); /* what was written past the caches comes before the flags */
#endif
    for (int64_t i = 0; i < c->nheads; i++) set((flag_t *)c->heads[i], flag);
    for (int64_t o = 0, *q = c->outs; o < c->nouts; o++, q += 3 + q[2]) set((flag_t *)q[0], flag);
    for (int64_t i = 0; i < c->nins; i++) set((flag_t *)c->ins[IN * i + 2], flag);
  }
  p[9] = k + 1;
  j->left -= (k + 1) * c->chunk >= c->count;
  j->moved++;
  return 1;
}

/* Fill the slots that depend on nobody: on what this rank sends, before it knows that the others send the same. The
 * user's receive buffer is not touched here. */
static void fill(job_t *j, int64_t *code) {
  int64_t *p = code;
  cursor c;
  for (int64_t i = 0; i < j->stages; i++) {
    int64_t *next = decode(j, p, &c);
    if (c.nops && !c.nins && !c.store)
      while (p[9] < j->depth && p[9] * c.chunk < c.count) advance(j, &c, p);
    p = next;
  }
}

/* Wait until every rank's call number is at least `want`; a rank that has finished a call counts as having entered the
 * next one if `finished`. Returns DONE, EXPIRED or ABORTED. */
static int await(const job_t *j, uint64_t want, int finished) {
  idle_t wait = {0, 0, 0};
  for (int64_t r = 0; r < j->n;) {
    flag_t *line = j->calls + r * j->stride;
    if (get(line) >= want || (finished && get(line + 1) + 1 >= want)) { r++; continue; }
    const int state = idle_job(&wait, j);
    if (state != DONE) return state;
  }
  return DONE;
}

/* Meet all ranks in call `seq`, which this rank has announced. Returns DONE, EXPIRED or ABORTED. */
int blink_enter(const job_t *j) { return await(j, j->seq, 0); }

/* Execute the stages of this rank in call `seq`, which it has announced, until all are finished or nothing moved for the
 * timeout; calling again goes on from there (`phase` and the records remember). `code` holds the records one after
 * another. Returns DONE, EXPIRED, ABORTED; DIFFER if some rank announced another call, or REFUSED if some rank's buffer
 * cannot be read by the others: then nothing was received; or FAULT (see job_t) in the middle of it. */
int blink_call(job_t *j, int64_t *code) {
  j->moved = 0;
  if (j->phase == 0) { /* slots are free once everybody has finished the call before */
    const int state = await(j, j->seq, 1);
    if (state != DONE) return state;
    int64_t *p = code;
    cursor c;
    j->left = j->stages;
    for (int64_t i = 0; i < j->stages; i++) {
      int64_t *next = decode(j, p, &c);
      p[9] = 0;
      p = next;
    }
    j->push = blink_style(&j->style);
    fill(j, code);
    j->phase = 1;
  }
  if (j->phase == 1) {
    const int state = await(j, j->seq, 0);
    if (state != DONE) return state;
    for (int64_t r = 0; r < j->n; r++)
      if (get(j->prints + r * j->stride) != j->print) return DIFFER;
    for (int64_t r = 0; j->cma && r < j->n; r++)
      if (get(j->calls + r * j->stride + SEND + TURN * (j->seq & 1)) == CLOSED) return REFUSED;
    j->phase = 2;
    j->begun_ns = now_ns();
  }
  idle_t wait = {0, 0, 0};
  while (j->left) {
    const int64_t before = j->moved;
    int64_t *p = code;
    cursor c;
    for (int64_t i = 0; i < j->stages; i++) {
      int64_t *next = decode(j, p, &c);
      if (p[9] * c.chunk < c.count && ready(j, &c, p[9]) && !advance(j, &c, p)) return FAULT;
      p = next;
    }
    if (j->moved != before) {
      wait.polls = wait.since = 0;
      continue;
    }
    const int state = idle_job(&wait, j);
    if (state != DONE) return state;
  }
  if (j->cma && get(j->abort)) return ABORTED; /* what was read may be of a rank that had left the call */
  set(j->calls + j->rank * j->stride + 1, j->seq);
  blink_learn(&j->style, now_ns() - j->begun_ns);
  return DONE;
}

/* ---- a call that was made before, on the same buffers */

typedef struct {
  job_t *job;
  int64_t *code;
  char *send, *recv;
  int64_t send_bytes, recv_bytes; /* of what others read */
  int64_t lends;                  /* whether anybody reads anybody's */
  flag_t *prints[2];              /* rank 0's fingerprints in calls of even and of odd number */
  uint64_t print;
  int64_t slice_ns;
} again_t;

/* Begin call `seq` and execute it, as blink_call does. Returns OTHER, and has done nothing, if this rank's call before
 * last was not the same: then its text has to be told first. */
int blink_again(const again_t *a, uint64_t seq) {
  job_t *j = a->job;
  flag_t *prints = a->prints[seq & 1];
  if (get(prints + j->rank * j->stride) != a->print) return OTHER;
  j->base = seq << SEQ_BITS, j->phase = 0, j->seq = seq;
  j->prints = prints, j->print = a->print;
  j->send = a->send, j->recv = a->recv, j->timeout_ns = a->slice_ns;
  if (a->lends) blink_lend(j, a->send_bytes, a->recv_bytes);
  set(j->calls + j->rank * j->stride, seq);
  return blink_call(j, a->code);
}
