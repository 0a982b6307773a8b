/* How nodes meet in a call of one shot: the first rank of a node (whose call has `nodes`) sends each other node one
 * message, a header and the slots of its node's ranks, when these have all entered the call, and marks the ranks of
 * another node as entered when its message has come. So the other ranks of a node see nothing but flags.
 *
 * A receive for the next call is begun before this call's message is sent. By then all ranks here have finished the call
 * before, and no node sends its next message before it has this one: so what is received lies where nobody reads. */
#pragma once
#include "meeting.h"
#include "stages.h"

typedef struct { uint64_t seq, print, bytes; } header_t; /* of a message, a line before the slots; bytes: of it all */

typedef int start_t(void *);
typedef int test_t(void *, int *, void *);
typedef int begin_pointers_t(void *, int, void *, int, int, void *, void *); /* handles are pointers, or numbers */
typedef int begin_numbers_t(void *, int, int, int, int, int, void *);
enum { TOLD_POLLS = 16 }; /* polls between two looks for announcements that Python reads */

/* Whether a request is done; 0 also if MPI failed, which is then noted. */
static int tested(call_t *j, void *request) {
  int flag = 0;
  if (!j->fault) j->fault = ((test_t *)j->nodes->test)(request, &flag, (void *)j->nodes->status);
  return !j->fault && flag;
}

static void receive(call_t *j, node_t *x, int turn) {
  if (x->receiving[turn] || j->fault) return;
  j->fault = ((start_t *)j->nodes->start)((void *)x->receive[turn]);
  x->receiving[turn] = !j->fault;
}

/* MPI's Isend, or Irecv. */
static void begin(call_t *j, int64_t what, char *at, int64_t n, const node_t *x, int64_t tag, int64_t *request) {
  const nodes_t *const t = j->nodes;
  if (j->fault) return;
  if (t->pointers)
    j->fault = ((begin_pointers_t *)what)(at, (int)n, (void *)t->byte, (int)x->first, (int)tag, (void *)t->comm, request);
  else
    j->fault = ((begin_numbers_t *)what)(at, (int)n, (int)t->byte, (int)x->first, (int)tag, (int)t->comm, request);
}

static void send_to(call_t *j, node_t *x, const int64_t *what, int turn) {
  nodes_t *const t = j->nodes;
  char *const from = (char *)t->out[turn] + what[0];
  *(header_t *)from = (header_t){j->seq, j->print, (uint64_t)what[1]};
  x->sends[turn] = 0;
  for (int64_t at = 0; at < what[1]; at += PIECE_LENGTH)
    begin(j, t->isend, from + at, what[1] - at < PIECE_LENGTH ? what[1] - at : PIECE_LENGTH, x,
          t->tag + turn + (at ? 2 : 0), &x->sending[turn][x->sends[turn]++]);
}

/* Begin to receive the pieces behind the first of a message of n bytes. */
static void receive_rest(call_t *j, node_t *x, int64_t n, int turn) {
  char *const to = (char *)x->in[turn];
  x->rests = 0;
  for (int64_t at = PIECE_LENGTH; at < n && x->rests < PIECES; at += PIECE_LENGTH)
    begin(j, j->nodes->irecv, to + at, PIECE_LENGTH, x, j->nodes->tag + turn + 2, &x->rest[x->rests++]);
}

/* Whether they have come. */
static int rest_came(call_t *j, node_t *x) {
  while (x->rests && tested(j, &x->rest[x->rests - 1])) x->rests--;
  return !x->rests;
}

/* All ranks of another node have entered this very call: what they announced is what this rank did. */
static void entered_there(const call_t *j, const node_t *x) {
  for (int64_t i = 0; i < x->ranks; i++) {
    const int64_t r = x->rank[i];
    flag_t *const record = j->prints[j->seq & 1] + r * j->stride, *const line = j->calls + r * j->stride;
    if (get(record) != j->print) {
      set(record + 1, (uint64_t)j->body_bytes);
      memcpy((char *)(record + 2), j->body, (size_t)j->body_bytes);
      set(record, j->print);
    }
    set(line + FINISHED, j->seq); /* it uses no slot of this node */
    set(line + ENTERED, j->seq);
  }
}

/* Fold what this node's ranks have filled their slots with, into slots for other nodes. */
static void fold_here(call_t *j, int64_t *rows) {
  int64_t *p = rows;
  stage_t c;
  for (int64_t i = 0; i < j->stages; i++) {
    int64_t *next = decode(j, p, &c);
    if (c.nins && !c.store && p[DONE_CHUNKS] * c.chunk < c.count) (void)(j->trace ? advance_traced(j, &c, p, i) : advance(j, &c, p));
    p = next;
  }
}

/* Whether the sends of calls of this turn are done. */
static int sent(call_t *j, int turn) {
  int all = 1;
  for (int64_t i = 0; i < j->nodes->others; i++) {
    node_t *const x = j->nodes->each + i;
    while (x->sends[turn] && tested(j, &x->sending[turn][x->sends[turn] - 1])) x->sends[turn]--;
    all &= !x->sends[turn];
  }
  return all;
}

/* Hear what another node has sent: the first piece of a message, then those behind it. `began` is the number of this call
 * when the first piece of its message has come, and the message is whole when there are no `rests`. One of a call that was
 * refused is received and forgotten, for its sender waits. Returns 0 if the other node announced something else. */
static int hear(call_t *j, node_t *x, int turn) {
  if (!rest_came(j, x) || x->began == j->seq) return 1;
  receive(j, x, turn);
  if (!tested(j, (void *)x->receive[turn])) return 1;
  const header_t said = *(header_t *)x->in[turn];
  x->receiving[turn] = 0;
  receive_rest(j, x, (int64_t)said.bytes, turn);
  if (said.seq == j->seq && said.print == j->print) x->began = j->seq;
  return said.seq != j->seq || said.print == j->print;
}

/* Idle, and look now and then for messages that Python reads. Returns DONE, EXPIRED, ABORTED, NETWORK, or ELSEWHERE. */
static int idle_or_told(call_t *j, idle_t *wait) {
  const nodes_t *const t = j->nodes;
  if (wait->polls % TOLD_POLLS == TOLD_POLLS - 1) {
    if (tested(j, (void *)t->aborts)) return ABORTED; /* Python reads why */
    for (int64_t i = 0; i < t->others; i++) {
      (void)tested(j, (void *)t->each[i].told);
      if (*t->each[i].told_seq == j->seq) return j->phase = TOLD, ELSEWHERE; /* or Python read it in the call before */
    }
  }
  return j->fault ? NETWORK : idle_call(wait, j);
}

/* Until what was sent in calls of this turn has gone. The other nodes may wait for the same, so they are heard. */
static int await_sent(call_t *j) {
  const int turn = (int)(j->seq & 1);
  idle_t wait = {0, 0, 0};
  while (!sent(j, turn)) {
    for (int64_t i = 0; i < j->nodes->others; i++)
      if (!hear(j, j->nodes->each + i, turn)) return j->phase = TOLD, ELSEWHERE;
    const int state = idle_or_told(j, &wait);
    if (state != DONE) return state;
  }
  return DONE;
}

/* Until all ranks of all nodes have entered this call. Returns DONE, EXPIRED, ABORTED, NETWORK; or ELSEWHERE: some rank
 * announced something else, or in a message that only Python reads, and `phase` is TOLD. */
static int meet_nodes(call_t *j, int64_t *rows) {
  nodes_t *const t = j->nodes;
  const int turn = (int)(j->seq & 1);
  idle_t wait = {0, 0, 0};
  if (j->phase == ANNOUNCED) {
    for (int64_t i = 0; i < t->ranks;) {
      if (get(j->calls + t->here[i] * j->stride + ENTERED) >= j->seq) { i++; continue; }
      const int state = idle_call(&wait, j);
      if (state != DONE) return state;
    }
    for (int64_t i = 0; i < t->ranks; i++)
      if (get(j->prints[turn] + t->here[i] * j->stride) != j->print) return j->phase = TOLD, ELSEWHERE;
    for (int64_t i = 0; i < t->others; i++) receive(j, t->each + i, turn), receive(j, t->each + i, !turn);
    const int state = await_sent(j); /* of a call before last that was refused */
    if (state != DONE) return state;
    fold_here(j, rows);
    for (int64_t i = 0; i < t->others; i++) send_to(j, t->each + i, j->sends + 2 * i, turn);
    if (j->fault) return NETWORK;
    j->phase = SENT;
  }
  wait = (idle_t){0, 0, 0};
  for (int64_t missing = t->others; missing;) { /* all are heard in each turn, for each may wait for what it sent another */
    missing = 0;
    for (int64_t i = 0; i < t->others; i++) {
      node_t *const x = t->each + i;
      if (x->came == j->seq) continue;
      if (!hear(j, x, turn)) return j->phase = TOLD, ELSEWHERE;
      if (x->began != j->seq || x->rests) { missing++; continue; }
      /* Who comes late may find that others gave up. MPI may read their data at one look and that at a later one, so
       * whether the data was there at the first one does not tell. */
      for (int left = now_ns() - t->met > SOON_NS ? LATE_LOOKS : 0; left; left--)
        if (tested(j, (void *)t->aborts)) return ABORTED;
      entered_there(j, x), x->came = j->seq;
    }
    const int state = missing ? idle_or_told(j, &wait) : DONE;
    if (state != DONE) return state;
  }
  t->met = now_ns();
  if (j->trace && wait.polls) waited(j->trace, EVENT_ENTER, now_ns(), j->program, -1, t->each[t->others - 1].rank[0]);
  return DONE;
}

/* Whether nothing of this rank's messages is under way but receives that no message has met. */
int blink_idle(call_t *j) {
  int all = 1;
  j->fault = 0;
  for (int64_t i = 0; i < j->nodes->others; i++) all &= rest_came(j, j->nodes->each + i);
  return (sent(j, 0) & sent(j, 1) & all) || j->fault;
}
