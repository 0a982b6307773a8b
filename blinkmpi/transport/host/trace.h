/* What calls count and record: bytes by tally, and, in a traced call, chunks and waits in a ring of events, working time
 * by row, waiting time by peer (recorder.py, events.py). A call that is not traced takes no time of day for this. */
#pragma once
#include <stdint.h>

enum { EVENT_CHUNK = 0, EVENT_WAIT = 1, EVENT_ENTER = 2, EVENT_CALL = 3 };

typedef struct { /* events.py has it, too */
  int64_t start, end, seq; /* ns of the monotonic clock; number of the call */
  int32_t program, row, number, kind; /* number: of the chunk, or the rank that was waited for, or -1 */
} event_t;

typedef struct {     /* of a communicator; events.py has it, too */
  int64_t capacity;  /* a power of two */
  int64_t written;   /* events ever: the ring holds the last `capacity` */
  event_t *events;
  int64_t **waits;   /* by rank: where the ns of waiting for it are counted */
  int64_t seq, began; /* the call under way, and its beginning */
  int64_t last;      /* when the last step ended */
  int64_t waiting;   /* since when no row is ready, or 0 */
} trace_t;

/* Of a row in a traced call: ns of its steps, and the flag that it lacked when it was looked at last. */
enum timing { BUSY, LACKED, TIMING };

static void record(trace_t *t, int kind, int64_t start, int64_t end, int64_t program, int64_t row, int64_t number) {
  t->events[t->written++ & (t->capacity - 1)] =
      (event_t){start, end, t->seq, (int32_t)program, (int32_t)row, (int32_t)number, kind};
}

/* A wait for `rank` ends now: it began when the last step ended. */
static void waited(trace_t *t, int kind, int64_t now, int64_t program, int64_t row, int64_t rank) {
  if (rank >= 0) *t->waits[rank] += now - t->last;
  record(t, kind, t->last, now, program, row, rank);
  t->last = now;
  t->waiting = 0;
}

/* Add what a completed call moves to the counters: (where, bytes, calls) each. */
static void count_call(const int64_t *tally, int64_t tallies) {
  for (int64_t i = 0; i < tallies; i++, tally += 3) {
    int64_t *const line = (int64_t *)tally[0];
    line[0] += tally[1], line[1] += tally[2];
  }
}

/* Add the rows' working time to the counters: (row, where) each. */
static void count_times(const int64_t *times, int64_t timed, int64_t *timing, int64_t rows) {
  for (int64_t i = 0; i < timed; i++, times += 2) *(int64_t *)times[1] += timing[TIMING * times[0] + BUSY];
  for (int64_t i = 0; i < rows; i++) timing[TIMING * i + BUSY] = 0;
}
