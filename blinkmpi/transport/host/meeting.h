/* How ranks enter a call: how far one is, and how a rank waits until all have come. */
#pragma once
#include "call.h"

/* phases: slots may be in use; not all have entered; other nodes were sent a message; Python tells them; all have entered */
enum { BEFORE = 0, ANNOUNCED = 1, SENT = 2, TOLD = 3, RUNNING = 4 };

/* Wait until every rank's call number is at least `want`; a rank that has finished a call counts as having entered the
 * next one if `finished`. Returns DONE, EXPIRED or ABORTED; `last` is the rank that was waited for last. */
static int await(const call_t *call, uint64_t want, int finished, int64_t *last) {
  idle_t wait = {0, 0, 0};
  for (int64_t r = 0; r < call->n;) {
    flag_t *line = call->calls + r * call->stride;
    if (get(line + ENTERED) >= want || (finished && get(line + FINISHED) + 1 >= want)) { r++; continue; }
    if (last) *last = r;
    const int state = idle_call(&wait, call);
    if (state != DONE) return state;
  }
  return DONE;
}

/* The same in a call that may be traced. */
static int await_traced(const call_t *call, uint64_t want, int finished) {
  int64_t last = -1;
  const int state = await(call, want, finished, &last);
  if (call->trace && state == DONE && last >= 0) waited(call->trace, EVENT_ENTER, now_ns(), call->program, -1, last);
  return state;
}
