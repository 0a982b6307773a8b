/* How nodes meet in a call of one shot: the first rank of a node (whose call has `nodes`) sends each other node one
 * message, a header and the slots of its node's ranks, when these have all entered the call, and marks the ranks of
 * another node as entered when its message has come. So the other ranks of a node see nothing but flags.
 *
 * A receive for the next call is begun before this call's message is sent. By then all ranks here have finished the call
 * before, and no node sends its next message before it has this one: so what is received lies where nobody reads. */
#pragma once
#include "meeting.h"
#include "stages.h"

typedef struct { uint64_t seq, fingerprint, bytes; } header_t; /* of a message, a line before the slots; bytes: of it all */

typedef int start_t(void *);
typedef int test_t(void *, int *, void *);
typedef int begin_pointers_t(void *, int, void *, int, int, void *, void *); /* handles are pointers, or numbers */
typedef int begin_numbers_t(void *, int, int, int, int, int, void *);
enum { TOLD_POLLS = 16 }; /* polls between two looks for announcements that Python reads */

/* Whether a request is done; 0 also if MPI failed, which is then noted. */
static int tested(call_t *call, void *request) {
  int flag = 0;
  if (!call->fault) call->fault = ((test_t *)call->nodes->test)(request, &flag, (void *)call->nodes->status);
  return !call->fault && flag;
}

static void receive(call_t *call, node_t *node, int turn) {
  if (node->receiving[turn] || call->fault) return;
  call->fault = ((start_t *)call->nodes->start)((void *)node->receive[turn]);
  node->receiving[turn] = !call->fault;
}

/* MPI's Isend, or Irecv. */
static void begin(call_t *call, int64_t what, char *at, int64_t n, const node_t *node, int64_t tag, int64_t *request) {
  const nodes_t *const t = call->nodes;
  if (call->fault) return;
  if (t->pointers)
    call->fault = ((begin_pointers_t *)what)(at, (int)n, (void *)t->byte, (int)node->first, (int)tag, (void *)t->comm, request);
  else
    call->fault = ((begin_numbers_t *)what)(at, (int)n, (int)t->byte, (int)node->first, (int)tag, (int)t->comm, request);
}

static void send_to(call_t *call, node_t *node, const int64_t *what, int turn) {
  nodes_t *const t = call->nodes;
  char *const from = (char *)t->out[turn] + what[0];
  *(header_t *)from = (header_t){call->seq, call->fingerprint, (uint64_t)what[1]};
  node->sends[turn] = 0;
  for (int64_t at = 0; at < what[1]; at += PIECE_LENGTH)
    begin(call, t->isend, from + at, what[1] - at < PIECE_LENGTH ? what[1] - at : PIECE_LENGTH, node,
          t->tag + turn + (at ? 2 : 0), &node->sending[turn][node->sends[turn]++]);
}

/* Begin to receive the pieces behind the first of a message of n bytes. */
static void receive_rest(call_t *call, node_t *node, int64_t n, int turn) {
  char *const to = (char *)node->in[turn];
  node->rests = 0;
  for (int64_t at = PIECE_LENGTH; at < n && node->rests < PIECES; at += PIECE_LENGTH)
    begin(call, call->nodes->irecv, to + at, PIECE_LENGTH, node, call->nodes->tag + turn + 2, &node->rest[node->rests++]);
}

/* Whether they have come. */
static int rest_came(call_t *call, node_t *node) {
  while (node->rests && tested(call, &node->rest[node->rests - 1])) node->rests--;
  return !node->rests;
}

/* All ranks of another node have entered this very call: what they announced is what this rank did. */
static void entered_there(const call_t *call, const node_t *node) {
  for (int64_t i = 0; i < node->ranks; i++) {
    const int64_t r = node->rank[i];
    flag_t *const record = call->records[call->seq & 1] + r * call->stride, *const line = call->calls + r * call->stride;
    if (get(record) != call->fingerprint) {
      set(record + 1, (uint64_t)call->body_bytes);
      memcpy((char *)(record + 2), call->body, (size_t)call->body_bytes);
      set(record, call->fingerprint);
    }
    set(line + FINISHED, call->seq); /* so it uses none of this node's slots */
    set(line + ENTERED, call->seq);
  }
}

/* Fold what this node's ranks have filled their slots with, into slots for other nodes. */
static void fold_here(call_t *call, int64_t *rows) {
  int64_t *p = rows;
  stage_t c;
  for (int64_t i = 0; i < call->stages; i++) {
    int64_t *next = decode(call, p, &c);
    if (c.nins && !c.store && p[DONE_CHUNKS] * c.chunk < c.count) (void)(call->trace ? advance_traced(call, &c, p, i) : advance(call, &c, p));
    p = next;
  }
}

/* Whether the sends of calls of this turn are done. */
static int sent(call_t *call, int turn) {
  int all = 1;
  for (int64_t i = 0; i < call->nodes->others; i++) {
    node_t *const node = call->nodes->each + i;
    while (node->sends[turn] && tested(call, &node->sending[turn][node->sends[turn] - 1])) node->sends[turn]--;
    all &= !node->sends[turn];
  }
  return all;
}

/* Hear what another node has sent: the first piece of a message, then those behind it. `began` is the number of this call
 * when the first piece of its message has come, and the message is whole when there are no `rests`. One of a call that was
 * refused is received and forgotten, for its sender waits. Returns 0 if the other node announced something else. */
static int hear(call_t *call, node_t *node, int turn) {
  if (!rest_came(call, node) || node->began == call->seq) return 1;
  receive(call, node, turn);
  if (!tested(call, (void *)node->receive[turn])) return 1;
  const header_t said = *(header_t *)node->in[turn];
  node->receiving[turn] = 0;
  receive_rest(call, node, (int64_t)said.bytes, turn);
  if (said.seq == call->seq && said.fingerprint == call->fingerprint) node->began = call->seq;
  return said.seq != call->seq || said.fingerprint == call->fingerprint;
}

/* Idle, and look now and then for messages that Python reads. Returns DONE, EXPIRED, ABORTED, NETWORK, or REMOTE_DIFFERS. */
static int idle_or_told(call_t *call, idle_t *wait) {
  const nodes_t *const t = call->nodes;
  if (wait->polls % TOLD_POLLS == TOLD_POLLS - 1) {
    if (tested(call, (void *)t->aborts)) return ABORTED; /* Python reads why */
    for (int64_t i = 0; i < t->others; i++) {
      (void)tested(call, (void *)t->each[i].told);
      if (*t->each[i].told_seq == call->seq) return call->phase = TOLD, REMOTE_DIFFERS; /* or Python read it in the call before */
    }
  }
  return call->fault ? NETWORK : idle_call(wait, call);
}

/* Until what was sent in calls of this turn has gone. The other nodes may wait for the same, so they are heard. */
static int await_sent(call_t *call) {
  const int turn = (int)(call->seq & 1);
  idle_t wait = {0, 0, 0};
  while (!sent(call, turn)) {
    for (int64_t i = 0; i < call->nodes->others; i++)
      if (!hear(call, call->nodes->each + i, turn)) return call->phase = TOLD, REMOTE_DIFFERS;
    const int state = idle_or_told(call, &wait);
    if (state != DONE) return state;
  }
  return DONE;
}

/* Until all ranks of all nodes have entered this call. Returns DONE, EXPIRED, ABORTED, NETWORK; or REMOTE_DIFFERS: some rank
 * announced something else, or in a message that only Python reads, and `phase` is TOLD. */
static int meet_nodes(call_t *call, int64_t *rows) {
  nodes_t *const t = call->nodes;
  const int turn = (int)(call->seq & 1);
  idle_t wait = {0, 0, 0};
  if (call->phase == ANNOUNCED) {
    for (int64_t i = 0; i < t->ranks;) {
      if (get(call->calls + t->here[i] * call->stride + ENTERED) >= call->seq) { i++; continue; }
      const int state = idle_call(&wait, call);
      if (state != DONE) return state;
    }
    for (int64_t i = 0; i < t->ranks; i++)
      if (get(call->records[turn] + t->here[i] * call->stride) != call->fingerprint) return call->phase = TOLD, REMOTE_DIFFERS;
    for (int64_t i = 0; i < t->others; i++) receive(call, t->each + i, turn), receive(call, t->each + i, !turn);
    const int state = await_sent(call); /* sends of an earlier call that was refused */
    if (state != DONE) return state;
    fold_here(call, rows);
    for (int64_t i = 0; i < t->others; i++) send_to(call, t->each + i, call->sends + 2 * i, turn);
    if (call->fault) return NETWORK;
    call->phase = SENT;
  }
  wait = (idle_t){0, 0, 0};
  for (int64_t missing = t->others; missing;) { /* all are heard in each turn, for each may wait for what it sent another */
    missing = 0;
    for (int64_t i = 0; i < t->others; i++) {
      node_t *const node = t->each + i;
      if (node->came == call->seq) continue;
      if (!hear(call, node, turn)) return call->phase = TOLD, REMOTE_DIFFERS;
      if (node->began != call->seq || node->rests) { missing++; continue; }
      /* Who comes late may find that others gave up. MPI may read their data at one look and that at a later one, so
       * whether the data was there at the first one does not tell. */
      for (int left = now_ns() - t->met > SOON_NS ? LATE_LOOKS : 0; left; left--)
        if (tested(call, (void *)t->aborts)) return ABORTED;
      entered_there(call, node), node->came = call->seq;
    }
    const int state = missing ? idle_or_told(call, &wait) : DONE;
    if (state != DONE) return state;
  }
  t->met = now_ns();
  if (call->trace && wait.polls) waited(call->trace, EVENT_ENTER, now_ns(), call->program, -1, t->each[t->others - 1].rank[0]);
  return DONE;
}

/* Whether nothing of this rank's messages is under way but receives that no message has met. */
int blink_messages_done(call_t *call) {
  int all = 1;
  call->fault = 0;
  for (int64_t i = 0; i < call->nodes->others; i++) all &= rest_came(call, call->nodes->each + i);
  return (sent(call, 0) & sent(call, 1) & all) || call->fault;
}
