/* How a program's slots are best written, found while it runs.
 *
 * Where two ranks' cores share a cache, a slot is read from it. Where they do not (other sockets, other core complexes,
 * many virtual machines), fetching a line that another core has just written is slow, and a slot written past the caches
 * is read faster from memory. What is best changes with the size and, seen on a virtual machine, within minutes (its
 * cores may have been moved; that was not established). So every program times its own calls and tries the other way now
 * and then. Each rank chooses for the slots that it writes; results do not depend on it.
 */
#include <stdint.h>

enum { STYLE_AGAIN = 64 }; /* every so many calls a program tries the other way */
enum { STYLE_FIRST = 4 };  /* its first calls: each way twice, because a first call finds nothing warm */

typedef struct {
  int64_t calls, way;  /* that were learned from; 1 past the caches, 0 through them */
  int64_t spent_ns[2]; /* what calls took lately, by way */
} style_t;

/* The way of the next call; the same until one was learned from. */
int64_t blink_style(style_t *s) {
  if (s->calls < STYLE_FIRST) s->way = s->calls < STYLE_FIRST / 2;
  else s->way = (s->spent_ns[1] < s->spent_ns[0]) ^ (s->calls % STYLE_AGAIN == 0);
  return s->way;
}

/* What the call took. A trial counts in full, as things may have changed since the last. */
void blink_learn(style_t *s, int64_t spent_ns) {
  const int trial = s->calls < STYLE_FIRST || s->calls % STYLE_AGAIN == 0;
  s->spent_ns[s->way] += (spent_ns - s->spent_ns[s->way]) / (trial ? 1 : 4);
  s->calls++;
}
