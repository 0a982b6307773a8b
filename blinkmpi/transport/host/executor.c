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
  sizeof(event_t), sizeof(trace_t), EVENT_CHUNK, EVENT_WAIT, EVENT_ENTER, EVENT_CALL, NETWORK, ELSEWHERE, TOLD,
  sizeof(nodes_t), sizeof(node_t), sizeof(blocks_t), sizeof(block_t), PIECE_LENGTH, PIECES, SOON_NS, LATE_LOOKS, sizeof(call_t)};

/* Tell the others where this rank's buffers are in the call that it is about to announce; or that they cannot be read,
 * as memory of devices may not: the first and the last byte of each are tried, all in one call of the system, when
 * the call is made for the first time. */
void blink_export(call_t *j) {
  flag_t *line = j->calls + j->rank * j->stride;
  const int64_t me = (int64_t)get(j->pids + j->rank * j->stride);
  char *ends[4];
  int n = 0;
  if (j->send_bytes) ends[n++] = j->send, ends[n++] = j->send + j->send_bytes - 1;
  if (j->recv_bytes) ends[n++] = j->recv, ends[n++] = j->recv + j->recv_bytes - 1;
  const int closed = n && !j->readable && !blink_readable(me, ends, n);
  j->readable = !closed;
  set(line + SEND + TURN * (j->seq & 1), closed ? CLOSED : (uint64_t)j->send);
  set(line + RECV + TURN * (j->seq & 1), (uint64_t)j->recv);
}

/* Wait until all ranks have entered call `seq`, which this rank has announced. Returns DONE, EXPIRED or ABORTED. */
int blink_barrier(const call_t *j) { return await(j, j->seq, 0, NULL); }

/* Announce call `seq`. Returns UNTOLD, and has done nothing, if this rank's record of the call before last was of another
 * call, and Python has to write it: where a call may have been made elsewhere, its readers are waited for (own_records.py). */
int blink_begin(call_t *j, uint64_t seq) {
  flag_t *const record = j->prints[seq & 1] + j->rank * j->stride; /* fingerprint, length, body */
  if (get(record) != j->print) {
    if (!j->body || j->elsewhere[~seq & 1] == seq - 1) return UNTOLD;
    set(record + 1, (uint64_t)j->body_bytes);
    memcpy((char *)(record + 2), j->body, (size_t)j->body_bytes);
    set(record, j->print);
  }
  j->seq = seq, j->base = seq << SEQ_BITS, j->phase = BEFORE;
  if (j->cma) blink_export(j);
  if (!j->one_shot) set(j->calls + j->rank * j->stride + ENTERED, seq); /* else when the slots are full */
  return DONE;
}

/* Run whatever stage is ready until all are finished. `traced` is a constant where this is called, so that a call that
 * is not traced has no test of it in the loop. */
static inline __attribute__((always_inline)) int run_stages(call_t *j, int64_t *rows, const int traced) {
  idle_t wait = {0, 0, 0};
  while (j->left) {
    const int64_t before = j->moved;
    int64_t *p = rows;
    stage_t c;
    for (int64_t i = 0; i < j->stages; i++) {
      int64_t *next = decode(j, p, &c);
      if (p[DONE_CHUNKS] * c.chunk < c.count) {
        flag_t *const lacked = lacking(j, &c, p[DONE_CHUNKS]);
        if (lacked && traced) j->timing[TIMING * i + LACKED] = (int64_t)lacked;
        if (!lacked && !(traced ? advance_traced(j, &c, p, i) : advance(j, &c, p))) return FAULT;
      }
      p = next;
    }
    if (!j->left) break;
    const int state = after_turn(&wait, j, before, traced);
    if (state != DONE) return state;
  }
  return DONE;
}

/* Execute the stages of this rank in the call that it has announced, until all are finished or nothing moved for the
 * timeout; calling again goes on from there (`phase` and the rows remember). `rows` holds the stages one after another.
 * Returns DONE, EXPIRED, ABORTED; DIFFER if some rank announced another call, or other lengths, or UNREADABLE if some rank's buffer cannot be
 * read by the others: then nothing was received; ELSEWHERE if Python must tell other nodes what was announced; or FAULT or NETWORK (see
 * call_t) in the middle of it. */
int blink_execute(call_t *j, int64_t *rows) {
  flag_t *const prints = j->prints[j->seq & 1];
  j->moved = j->fault = 0;
  if (j->trace && j->trace->seq != (int64_t)j->seq)
    j->trace->seq = (int64_t)j->seq, j->trace->waiting = 0, j->trace->began = j->trace->last = now_ns();
  if (j->phase == BEFORE) { /* slots are free once everybody has finished the call before, or, in one shot, the one before that */
    const int state = await_traced(j, j->seq - (uint64_t)j->one_shot, 1);
    if (state != DONE) return state;
    if (j->blocks) fill_blocks(j);
    else fill(j, rows);
    if (j->one_shot) set(j->calls + j->rank * j->stride + ENTERED, j->seq);
    j->phase = ANNOUNCED;
    if (j->timeout_ns == ANNOUNCE) return EXPIRED;
  }
  if (j->nodes && (j->phase == ANNOUNCED || j->phase == SENT)) {
    const int state = meet_nodes(j, rows);
    if (state != DONE) return state;
    j->phase = RUNNING;
  }
  if (j->phase != RUNNING) {
    const int state = await_traced(j, j->seq, 0);
    if (state != DONE) return state;
    for (int64_t r = 0; r < j->n; r++)
      if (get(prints + r * j->stride) != j->print || j->phase == TOLD) return DIFFER;
    if (j->blocks && !lengths_fit(j)) return DIFFER;
    for (int64_t r = 0; j->cma && r < j->n; r++)
      if (get(j->calls + r * j->stride + SEND + TURN * (j->seq & 1)) == CLOSED) return UNREADABLE;
    j->phase = RUNNING;
  }
  const int state = j->blocks  ? (j->trace ? run_blocks(j, 1) : run_blocks(j, 0))
                    : j->trace ? run_stages(j, rows, 1)
                               : run_stages(j, rows, 0);
  if (state != DONE) return state;
  if (j->nodes) { /* what others are sent lies in slots that the call after the next fills */
    const int gone = await_sent(j);
    if (gone != DONE) return gone;
  }
  if (get(j->abort)) return ABORTED; /* this rank may come late, or have read of one that had left the call */
  flag_t *const finished = j->calls + j->rank * j->stride + FINISHED;
  if (get(finished) == j->seq) return DONE; /* called again while messages are under way */
  set(finished, j->seq);
  count_call(j->tally, j->tallies);
  if (j->trace) {
    count_times(j->times, j->timed, j->timing, j->stages);
    record(j->trace, EVENT_CALL, j->trace->began, now_ns(), j->program, -1, -1);
  }
  return DONE;
}

/* Announce call `seq` and execute it, with the copies around it: those before it even before it is announced, for others
 * may then read what they make; those after it only if it is DONE. */
int blink_run(call_t *j, int64_t *rows, uint64_t seq) {
  copies(j->before, j->befores);
  int state = blink_begin(j, seq);
  if (state != DONE) return state;
  state = blink_execute(j, rows);
  if (state == DONE) copies(j->after, j->afters);
  return state;
}

#ifdef BLINK_PYTHON
#include "repeated_calls.h"
#endif
