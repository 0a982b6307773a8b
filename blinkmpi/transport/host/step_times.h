/* Time the steps of calls, for predictions (forecast/calibrate.py). */
#pragma once
#include "stages.h"

/* Time the chunks `first` to `last` of a row as if nobody had to be waited for, and raise no flag: what a step of it costs.
 * Returns the nanoseconds of this thread, or -1 if the memory of another process could not be read; `passed` gets those
 * of the clock. Every rank is between two calls, and has exported its buffers. */
int64_t blink_time_steps(call_t *call, int64_t *row, int64_t first, int64_t last, int64_t *passed) {
  stage_t c;
  struct timespec spent[2];
  decode(call, row, &c);
  const int64_t start = now_ns();
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, spent);
  for (int64_t k = first; k < last && k * c.chunk < c.count; k++)
    if (!step(call, &c, k)) return -1;
  fence_nontemporal();
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, spent + 1);
  *passed = now_ns() - start;
  return (int64_t)(spent[1].tv_sec - spent[0].tv_sec) * 1000000000 + spent[1].tv_nsec - spent[0].tv_nsec;
}
