/* The memory of other processes, read by the C executor (process_vm_readv), with a helper where a core is idle. */
#pragma once
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/uio.h>
#endif

static ssize_t read_vm(pid_t pid, char *to, size_t n, char *from) {
#if defined(__linux__)
  return process_vm_readv(pid, &(struct iovec){to, n}, 1, &(struct iovec){from, n}, 1, 0);
#else
  return errno = ENOSYS, (ssize_t)-1;
#endif
}

/* Whether all of at most four bytes can be read. */
static int blink_readable(int64_t pid, char *const *bytes, int n) {
#if defined(__linux__)
  char found[4];
  struct iovec each[4];
  for (int i = 0; i < n; i++) each[i] = (struct iovec){bytes[i], 1};
  return process_vm_readv((pid_t)pid, &(struct iovec){found, (size_t)n}, 1, each, (unsigned long)n, 0) == n;
#else
  return (void)pid, (void)bytes, (void)n, 0;
#endif
}

/* Copy n bytes from another process; returns 0 or errno. */
int blink_read(int64_t pid, char *to, int64_t n, char *from) {
  while (n > 0) {
    const ssize_t got = read_vm((pid_t)pid, to, (size_t)n, from);
    if (got <= 0) return got ? errno : EFAULT;
    to += got, from += got, n -= got;
  }
  return 0;
}

/* ---- a second thread of this process, which takes the core that a waiting rank leaves idle.
 *
 * It sleeps until it is offered a copy, of which both threads take pieces until none is left. A copy that is over before
 * it wakes is withdrawn, so nobody waits for a thread that has not begun; one that has, has a piece at most to do. */

enum { SHARED_BYTES = 3 << 19, SHARE_BYTES = 1 << 18 }; /* copies of so many bytes or more are shared, a piece at a time */

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t thread;
  pid_t process; /* a child after fork has no such thread */
  int offered, ended;
  atomic_int busy, error;
  _Atomic int64_t next; /* where the first byte lies that nobody has taken */
  int64_t pid, n;
  char *to, *from;
#if defined(__linux__)
  cpu_set_t allowed; /* where this process may run */
  int away;          /* the core that the thread keeps away from, or -1 */
#endif
} helper_t;

/* Keep the thread off the core of the caller: the scheduler would often leave it there, while the other core only polls. */
static void keep_away(helper_t *h) {
#if defined(__linux__)
  const int here = sched_getcpu();
  if (here < 0 || here == h->away) return;
  cpu_set_t others = h->allowed;
  CPU_CLR(here, &others);
  if (CPU_COUNT(&others) && !pthread_setaffinity_np(h->thread, sizeof others, &others)) h->away = here;
#else
  (void)h;
#endif
}

static void take_pieces(helper_t *h) {
  int64_t at;
  while ((at = atomic_fetch_add(&h->next, SHARE_BYTES)) < h->n) {
    const int error = blink_read(h->pid, h->to + at, h->n - at < SHARE_BYTES ? h->n - at : SHARE_BYTES, h->from + at);
    if (error) atomic_store(&h->error, error), atomic_store(&h->next, h->n);
  }
}

static void *help(void *argument) {
  helper_t *h = argument;
  pthread_mutex_lock(&h->lock);
  for (;;) {
    while (!h->offered && !h->ended) pthread_cond_wait(&h->wake, &h->lock);
    if (h->ended) break;
    h->offered = 0;
    atomic_store(&h->busy, 1);
    pthread_mutex_unlock(&h->lock);
    take_pieces(h);
    atomic_store(&h->busy, 0);
    pthread_mutex_lock(&h->lock);
  }
  pthread_mutex_unlock(&h->lock);
  return NULL;
}

/* Start a helper, which takes no signals; NULL, and errno, if there can be none. */
helper_t *blink_help(void) {
  helper_t *h = calloc(1, sizeof *h);
  if (!h) return NULL;
  sigset_t all, kept;
  sigfillset(&all);
  pthread_mutex_init(&h->lock, NULL), pthread_cond_init(&h->wake, NULL);
  h->process = getpid();
#if defined(__linux__)
  h->away = -1;
  if (pthread_getaffinity_np(pthread_self(), sizeof h->allowed, &h->allowed)) CPU_ZERO(&h->allowed);
#endif
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  const int error = pthread_create(&h->thread, NULL, help, h);
  pthread_sigmask(SIG_SETMASK, &kept, NULL);
#if defined(__linux__)
  if (!error) pthread_setname_np(h->thread, "blinkmpi-reader");
#endif
  if (!error) return h;
  free(h);
  return errno = error, NULL;
}

void blink_help_no_more(helper_t *h) {
  if (h->process != getpid()) return;
  pthread_mutex_lock(&h->lock);
  h->ended = 1;
  pthread_cond_signal(&h->wake);
  pthread_mutex_unlock(&h->lock);
  pthread_join(h->thread, NULL);
  pthread_cond_destroy(&h->wake), pthread_mutex_destroy(&h->lock);
  free(h);
}

/* As blink_read, with the helper. Nobody reads any more when it returns. */
int blink_read_shared(helper_t *h, int64_t pid, char *to, int64_t n, char *from) {
  keep_away(h);
  pthread_mutex_lock(&h->lock);
  h->pid = pid, h->to = to, h->n = n, h->from = from;
  atomic_store(&h->next, 0), atomic_store(&h->error, 0);
  h->offered = 1;
  pthread_cond_signal(&h->wake);
  pthread_mutex_unlock(&h->lock);
  take_pieces(h);
  pthread_mutex_lock(&h->lock);
  h->offered = 0;
  pthread_mutex_unlock(&h->lock);
  while (atomic_load(&h->busy)) sched_yield();
  return atomic_load(&h->error);
}
