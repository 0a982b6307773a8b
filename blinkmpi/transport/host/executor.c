/* The C executor: the stages of one rank, executed on shared memory in one call.
 *
 * It does exactly what numpy_executor.py does, on the same slots and flags, so either can take part with any peer. Waiting is
 * polling: whatever stage is ready runs; when none is, spin a little, then yield the core, then sleep. */
#define _GNU_SOURCE
#include "blocks.h"
#include "call.h"
#include "meeting.h"
#include "node_messages.h"
#include "stages.h"
#include "step_times.h"

enum { SEQ_BITS = 24 }; /* a flag is (number of the call << SEQ_BITS) + chunks */
#define CLOSED UINT64_MAX /* in place of a buffer's address: others cannot read it */

const int64_t blink_constants[] = {SEQ_BITS, SEND, RECV, TURN, DONE_CHUNKS, HEADER, IN, RUNNING, UNTOLD, TIMING,
  sizeof(event_t), sizeof(trace_t), EVENT_CHUNK, EVENT_WAIT, EVENT_ENTER, EVENT_CALL, NETWORK, REMOTE_DIFFERS, TOLD,
  sizeof(nodes_t), sizeof(node_t), sizeof(blocks_t), sizeof(block_t), PIECE_LENGTH, PIECES, SOON_NS, LATE_LOOKS, sizeof(call_t)};

/* Whether the others can read the buffers of a call, as memory of devices may not be: the first and the last byte of each
 * are tried, all in one call of the system, unless a call had these buffers before. */
static int buffers_readable(const call_t *call) {
  enum { TRIED_BITS = 8 };
  typedef struct { char *ends[4]; } buffers_t;
  static _Thread_local buffers_t tried[1 << TRIED_BITS]; /* those that can be read: one of each hash */
  buffers_t now = {{NULL}};
  int n = 0;
  if (call->send_bytes) now.ends[n++] = call->send, now.ends[n++] = call->send + call->send_bytes - 1;
  if (call->recv_bytes) now.ends[n++] = call->recv, now.ends[n++] = call->recv + call->recv_bytes - 1;
  buffers_t *const before = tried + (((uintptr_t)now.ends[0] * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - TRIED_BITS));
  if (!n || !memcmp(before, &now, sizeof now)) return 1;
  if (!blink_readable((int64_t)get(call->pids + call->rank * call->stride), now.ends, n)) return 0;
  return *before = now, 1;
}

/* Tell the others where this rank's buffers are in the call that it is about to announce; or that they cannot be read. */
void blink_export(call_t *call) {
  flag_t *line = call->calls + call->rank * call->stride;
  const int closed = !call->readable && !buffers_readable(call);
  call->readable = !closed;
  set(line + SEND + TURN * (call->seq & 1), closed ? CLOSED : (uint64_t)call->send);
  set(line + RECV + TURN * (call->seq & 1), (uint64_t)call->recv);
}

/* Wait until all ranks have entered call `seq`, which this rank has announced. Returns DONE, EXPIRED or ABORTED. */
int blink_barrier(const call_t *call) { return await(call, call->seq, 0, NULL); }

/* Announce call `seq`. Returns UNTOLD, and has done nothing, if this rank's record of the call before last was of another
 * call, and Python has to write it: where ranks may have met in kernels, its readers are waited for (own_records.py). */
int blink_begin(call_t *call, uint64_t seq) {
  flag_t *const record = call->records[seq & 1] + call->rank * call->stride; /* fingerprint, length, body */
  if (get(record) != call->fingerprint) {
    if (!call->body || call->in_kernels[~seq & 1] == seq - 1) return UNTOLD;
    set(record + 1, (uint64_t)call->body_bytes);
    memcpy((char *)(record + 2), call->body, (size_t)call->body_bytes);
    set(record, call->fingerprint);
  }
  call->seq = seq, call->base = seq << SEQ_BITS, call->phase = BEFORE;
  if (call->cma) blink_export(call);
  if (!call->one_shot) set(call->calls + call->rank * call->stride + ENTERED, seq); /* else when the slots are full */
  return DONE;
}

/* Run whatever stage is ready until all are finished. `traced` is a constant where this is called, so that a call that
 * is not traced has no test of it in the loop. */
static inline __attribute__((always_inline)) int run_stages(call_t *call, int64_t *rows, const int traced) {
  idle_t wait = {0, 0, 0};
  while (call->left) {
    const int64_t before = call->moved;
    int64_t *p = rows;
    stage_t c;
    for (int64_t i = 0; i < call->stages; i++) {
      int64_t *next = decode(call, p, &c);
      if (p[DONE_CHUNKS] * c.chunk < c.count) {
        flag_t *const lacked = lacking(call, &c, p[DONE_CHUNKS]);
        if (lacked && traced) call->timing[TIMING * i + LACKED] = (int64_t)lacked;
        if (!lacked && !(traced ? advance_traced(call, &c, p, i) : advance(call, &c, p))) return FAULT;
      }
      p = next;
    }
    if (!call->left) break;
    const int state = after_turn(&wait, call, before, traced);
    if (state != DONE) return state;
  }
  return DONE;
}

/* Execute the stages of this rank in the call that it has announced, until all are finished or nothing moved for the
 * timeout; calling again goes on from there (`phase` and the rows remember). `rows` holds the stages one after another.
 * Returns DONE, EXPIRED, ABORTED; DIFFER if some rank announced another call, or other lengths, or UNREADABLE if some rank's buffer cannot be
 * read by the others: then nothing was received; REMOTE_DIFFERS if Python must tell other nodes what was announced; or FAULT or NETWORK (see
 * call_t) in the middle of it. */
int blink_execute(call_t *call, int64_t *rows) {
  flag_t *const records = call->records[call->seq & 1];
  call->moved = call->fault = 0;
  if (call->trace && call->trace->seq != (int64_t)call->seq)
    call->trace->seq = (int64_t)call->seq, call->trace->waiting = 0, call->trace->began = call->trace->last = now_ns();
  /* Slots are free once everybody has finished the call before or uses none in it; in one shot, the one before that. */
  if (call->phase == BEFORE) {
    const int state = await_traced(call, call->seq - (uint64_t)call->one_shot, 1);
    if (state != DONE) return state;
    if (call->blocks) fill_blocks(call);
    else fill(call, rows);
    if (call->one_shot) set(call->calls + call->rank * call->stride + ENTERED, call->seq);
    call->phase = ANNOUNCED;
  }
  if (call->nodes && (call->phase == ANNOUNCED || call->phase == SENT)) {
    const int state = meet_nodes(call, rows);
    if (state != DONE) return state;
    call->phase = RUNNING;
  }
  if (call->phase != RUNNING) {
    const int state = await_traced(call, call->seq, 0);
    if (state != DONE) return state;
    for (int64_t r = 0; r < call->n; r++)
      if (get(records + r * call->stride) != call->fingerprint || call->phase == TOLD) return DIFFER;
    if (call->blocks && !lengths_fit(call)) return DIFFER;
    for (int64_t r = 0; call->cma && r < call->n; r++)
      if (get(call->calls + r * call->stride + SEND + TURN * (call->seq & 1)) == CLOSED) return UNREADABLE;
    call->phase = RUNNING;
  }
  if (call->timeout_ns == MEET) return EXPIRED;
  const int state = call->blocks  ? (call->trace ? run_blocks(call, 1) : run_blocks(call, 0))
                    : call->trace ? run_stages(call, rows, 1)
                               : run_stages(call, rows, 0);
  if (state != DONE) return state;
  if (call->timeout_ns == AHEAD) return EXPIRED; /* an earlier call ends first */
  if (call->nodes) { /* what others are sent lies in slots that the call after the next fills */
    const int gone = await_sent(call);
    if (gone != DONE) return gone;
  }
  if (get(call->abort)) return ABORTED; /* this rank may be late, or have read from one that had left the call */
  flag_t *const finished = call->calls + call->rank * call->stride + FINISHED;
  if (get(finished) == call->seq) return DONE; /* called again while messages are under way */
  set(finished, call->seq);
  count_call(call->tally, call->tallies);
  if (call->trace) {
    count_times(call->times, call->timed, call->timing, call->stages);
    record(call->trace, EVENT_CALL, call->trace->began, now_ns(), call->program, -1, -1);
  }
  return DONE;
}

/* Announce call `seq` and execute it, with the copies around it: those before it even before it is announced, for others
 * may then read what they make; those after it only if it is DONE. */
int blink_run(call_t *call, int64_t *rows, uint64_t seq) {
  copies(call->before, call->befores);
  int state = blink_begin(call, seq);
  if (state != DONE) return state;
  state = blink_execute(call, rows);
  if (state == DONE) copies(call->after, call->afters);
  return state;
}

#ifdef BLINK_PYTHON
#include "repeated_calls.h"
#endif
