/* The flags of the ranks, the clock, and how a rank waits: it spins, then yields its core, then sleeps. */
#pragma once
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

/* How a wait, or a call, ended. */
enum { DONE = 0, EXPIRED = 1, ABORTED = 2, DIFFER = 3, UNREADABLE = 4, FAULT = 5, UNTOLD = 6, NETWORK = 7, REMOTE_DIFFERS = 8 };

typedef _Atomic uint64_t flag_t;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Acquire pairs with release: what a rank wrote before it raised a flag (slots, buffers, records) is seen by whoever has
 * seen the flag. */
static uint64_t get(flag_t *f) { return atomic_load_explicit(f, memory_order_acquire); }
static void set(flag_t *f, uint64_t v) { atomic_store_explicit(f, v, memory_order_release); }

/* Timeouts: none, after one turn at what is ready; for as many polls as spin. And of whoever looks at clock and abort word
 * by himself: none, and nothing is done once all ranks have entered the call; one turn, and the call is not ended; one turn. */
enum { AT_ONCE = -1, BRIEFLY = -2, MEET = -3, AHEAD = -4, ONE_TURN = -5 };

/* Polling that spins, then yields, then sleeps, and looks at clock and abort word now and then. */
typedef struct {
  int64_t polls, since, waited;
} idle_t;

/* Whether this thread's core is that of a rank that waits, too, which to spin would keep from running: so it was when it was
 * last yielded, if it came back after a switch, and soon. Who computes keeps it for longer. */
static _Thread_local int shares_core;
enum { FEWEST_SPINS = 2, SWITCH_NS = 1000, SOON_BACK_NS = 100000 };

static void yield_core(void) {
  const int64_t before = now_ns();
  sched_yield();
  const int64_t away = now_ns() - before;
  shares_core = away > SWITCH_NS && away < SOON_BACK_NS;
}

static int idle(idle_t *w, int64_t spins, flag_t *heartbeat, flag_t *abort, int64_t timeout_ns) {
  if (timeout_ns <= MEET) return EXPIRED;
  if (shares_core && spins > FEWEST_SPINS) spins = FEWEST_SPINS;
  if (timeout_ns == BRIEFLY && w->polls >= spins) return EXPIRED;
  if (timeout_ns == BRIEFLY) {
    w->polls++;
    PAUSE();
    return DONE;
  }
  if (++w->polls % 64 == 0 || timeout_ns < 0) { /* the first polls ask neither clock nor abort word */
    const int64_t now = now_ns();
    if (!w->since) w->since = now;
    w->waited = now - w->since;
    set(heartbeat, (uint64_t)now);
    if (get(abort)) return ABORTED;
    if (w->waited > timeout_ns) return EXPIRED; /* at once if it is negative */
  }
  if (w->polls < spins) PAUSE();
  else if (w->waited < 20000000) yield_core();
  else nanosleep(&(struct timespec){0, 100000}, NULL);
  return DONE;
}
