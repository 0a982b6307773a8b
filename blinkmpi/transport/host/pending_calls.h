/* Non-blocking calls: begun in order, and advanced by any thread that waits, tests or calls.
 *
 * A communicator has a queue of them. Whoever owns the queue runs its first call as far as it goes, then the next one: the
 * user's thread as it begins one, waits or tests; any thread that waits inside MPI, where this MPI lets us know of it; and
 * a thread of our own that looks now and then (watch_calls), for a program that is away for long. What C cannot end by
 * itself (a rank that is late, other announcements, a fault) is Python's, which owns the queue until it has said what
 * became of the call (finish_call).
 *
 * Two calls overlap if this rank passes nothing through slots in either. It announces the second as soon as all ranks
 * have met in the first, and runs it while the first only waits for those who read this rank's buffers. So each rank
 * takes its own steps in the order of the calls, and its flags only grow. The second ends behind the first. There are
 * never more than two, for a rank has two records, and two words for the address of a buffer.
 *
 * To MPI a call is a generalized request, which is complete when the call is. */
#pragma once
#include "kinds.h"
#include "meeting.h"
#include "stages.h"

enum { QUEUED, RUNS, HAS_ENDED, HAS_FAILED }; /* how far a call is */
enum { LANE_WORDS = 512 };       /* a call may overlap another one if its rows have at most so many words */
enum { LANE_POLL = 8 };          /* to look at calls that overlap takes as long as so many polls of one call */
enum { AGAIN = 100 };            /* a status: nothing has happened for a while */
enum { A_WHILE_NS = 100000000 }; /* after which a thread that waits looks for signals */
/* The thread looks so often, this many times after the last call; a call that moves is waited for that long, one that has
 * not moved for long is only looked at. */
enum { DOZE_NS = 300000, DOZES = 300, SLICE_NS = 2000000, IDLE_NS = 20000000 };

typedef int query_t(void *, void *);
typedef int free_t(void *);
typedef int cancel_t(void *, int);
typedef int start_request_t(query_t *, free_t *, cancel_t *, void *, void *);
typedef int wait_all_t(int, void **, double, void *);
typedef int start_polled_t(query_t *, free_t *, cancel_t *, query_t *, wait_all_t *, void *, void *);
typedef int by_pointer_t(void *);
typedef int by_number_t(int);
typedef int wait_request_t(void *, void *);
typedef int ended_t(int *);
typedef int elements_pointer_t(void *, void *, int); /* of a status, a type, and how many; types are handles, too */
typedef int elements_number_t(void *, int, int);
typedef int cancelled_t(void *, int);
typedef int hook_t(int (*)(void));

typedef struct pending { /* a call, as Python holds it */
  PyObject_HEAD
  struct pending *_Atomic next;
  PyObject *self; /* the capsule of its table, kept */
  entry_t *entry; /* the kept call that it uses */
  int64_t words;  /* words of its rows, if it may overlap another call, or 0 */
  uint64_t seq;   /* its number, once it RUNS */
  call_t *call;   /* with `rows`: how far it is; the entry's, or in a lane */
  int64_t *rows;
  char *at[MOST_BUFFERS];
  PyObject *method, *arguments; /* kept until it has ended, with the user's buffers */
  Py_buffer views[MOST_BUFFERS]; /* of some of these, so that nobody changes their lengths */
  int64_t held;
  PyObject *error;              /* of one that failed */
  int64_t timeout_ns;           /* its own, or 0 */
  atomic_int state, told, freed; /* whether MPI knows that it has ended; whether MPI has freed its request */
  int raised;                   /* whether the user knows its error */
  void *handle;                 /* MPI's, which may be a number */
} pending_t;

typedef struct { /* a call that may overlap another one, perhaps of the same entry */
  call_t call;
  int64_t rows[LANE_WORDS];
} lane_t;

/* What is atomic may be read at any time. The list is changed with the lock; or without it by an owner that holds Python's
 * lock, which all others hold who would change it. */
typedef struct queue {
  struct queue *next;          /* of this process */
  repeated_t *table;
  pending_t *_Atomic first, *last;
  pending_t *second;           /* the call behind the first, if it was begun; changed as the list is */
  lane_t lanes[2];             /* of calls of even and of odd number */
  pending_t *_Atomic ended;    /* ended calls whose references are to be dropped, with both locks held */
  atomic_int owned;            /* whether somebody runs the first, or finishes it */
  atomic_int waiters;          /* threads that wait for `changed`, or are about to */
  atomic_int moves;            /* counts how often the first has moved */
  int left;                    /* a status with which the first is Python's to take, or DONE */
  int stops, dozes;            /* of the thread: whether it is to end; how often it has looked in vain */
  pthread_mutex_t lock;
  pthread_cond_t changed, wake; /* a call has ended, or the queue is nobody's; for the thread */
} queue_t;

static struct { /* what this process knows of MPI, and its queues */
  start_request_t *start;
  start_polled_t *start_polled; /* instead, in MPICH and Intel MPI; or NULL */
  void *complete;
  wait_request_t *wait;
  free_t *free;
  ended_t *ended;
  void *elements;
  cancelled_t *cancelled;
  void *byte;                /* a handle */
  hook_t *hook;              /* Open MPI's progress hook; or NULL */
  int forked;                /* a forked child: its parent's calls are not its own */
  int pointers, failed;      /* whether handles are pointers; MPI's error class of a call that failed */
  atomic_int untold;         /* calls that were begun, and of which MPI does not know that they have ended */
  int tells;                 /* whether our own thread has to tell MPI, and may call it */
  PyTypeObject *type, *request; /* of pending_t; the user's, a subclass of MPI's */
  PyObject *none;            /* no arguments */
  pthread_mutex_t lock;      /* of the list; held by who looks at all queues */
  queue_t *queues;
} mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- MPI's requests */

/* Tell MPI that a call has ended. */
static void tell(pending_t *r) {
  if (atomic_exchange(&r->told, 1)) return;
  mpi.untold--;
  if (mpi.pointers) ((by_pointer_t *)mpi.complete)(r->handle);
  else ((by_number_t *)mpi.complete)((int)(intptr_t)r->handle);
}

/* What MPI asks when its own functions end a request. It can only be told that a call failed; why is printed. */
static int query_request(void *of, void *status) {
  pending_t *const r = of;
  if (mpi.pointers) ((elements_pointer_t *)mpi.elements)(status, mpi.byte, 0);
  else ((elements_number_t *)mpi.elements)(status, (int)(intptr_t)mpi.byte, 0);
  mpi.cancelled(status, 0);
  if (r->state != HAS_FAILED || r->raised) return 0;
  const PyGILState_STATE held = PyGILState_Ensure();
  r->raised = 1;
  PyErr_SetObject((PyObject *)Py_TYPE(r->error), r->error);
  PyErr_WriteUnraisable((PyObject *)r);
  PyGILState_Release(held);
  return mpi.failed;
}

static int freed_request(void *of) { return atomic_store(&((pending_t *)of)->freed, 1), 0; }
static int keep_request(void *of, int completed) { return (void)of, (void)completed, 0; }

/* ---- the queue */

static int own(queue_t *q) { return !atomic_exchange(&q->owned, 1); }

static void tell_waiters(queue_t *q) {
  if (!q->waiters) return;
  pthread_mutex_lock(&q->lock); /* waiters are past their look at the state, and sleep */
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
}

/* Let go of the queue, whose first call has come so far: it is nobody's, or Python's to take. */
static void disown(queue_t *q, int state) {
  if (state == DONE || state == EXPIRED) {
    atomic_store(&q->owned, 0);
  } else {
    pthread_mutex_lock(&q->lock);
    q->left = state;
    pthread_cond_signal(&q->wake);
    pthread_mutex_unlock(&q->lock);
  }
  tell_waiters(q);
}

/* The first call has ended; `alone` in a thread that holds Python's lock. */
static void end_first(queue_t *q, int state, int alone) {
  if (!alone) pthread_mutex_lock(&q->lock);
  pending_t *const r = q->first;
  if (!r->next) q->last = NULL;
  q->first = r->next;
  q->second = NULL;
  r->next = q->ended;
  q->ended = r;
  q->table->pending--;
  if (!alone) pthread_mutex_unlock(&q->lock);
  atomic_store(&r->state, state);
  tell_waiters(q);
}

/* How long a call may wait without progress, in one go. */
static int64_t patience_of(const pending_t *r) {
  const int64_t usual = r->entry->call->timeout_ns;
  return r->timeout_ns && r->timeout_ns < usual ? r->timeout_ns : usual;
}

/* Give a call its number, and the state in which it runs. */
static void take_up(queue_t *q, pending_t *r) {
  entry_t *const e = r->entry;
  aim_at(e, r->at);
  r->call = e->call, r->rows = e->rows, r->seq = ++q->table->seq;
  if (r->words) {
    lane_t *const lane = q->lanes + (r->seq & 1);
    lane->call = *e->call, lane->call.phase = BEFORE;
    memcpy(lane->rows, e->rows, (size_t)r->words * sizeof *lane->rows);
    r->call = &lane->call, r->rows = lane->rows;
  }
  atomic_store(&r->state, RUNS);
}

/* Begin a call, or go on with it: its status. */
static int go_on(queue_t *q, pending_t *r, int64_t timeout_ns) {
  if (r->state == QUEUED) take_up(q, r);
  call_t *const call = r->call;
  const int64_t usual = call->timeout_ns;
  call->timeout_ns = timeout_ns;
  int state;
  if (call->seq == r->seq) {
    state = resume(call, r->rows);
  } else {
    state = blink_run(call, r->rows, r->seq);
    r->entry->call->readable = call->readable;
  }
  call->timeout_ns = usual;
  if (state != DONE && call->moved && r == q->first) q->moves++;
  return state;
}

/* Announce the first call, and the second once all ranks have met in the first. Their statuses come again later. */
static void announce_both(queue_t *q) {
  pending_t *const r = q->first;
  if (!r || !r->words || q->second) return;
  if (r->state == QUEUED || r->call->phase < RUNNING) (void)go_on(q, r, MEET);
  if (r->call->phase < RUNNING || !r->next) return;
  pthread_mutex_lock(&q->lock); /* the calls behind the first may be given up */
  pending_t *const next = r->next;
  if (next && next->words) take_up(q, next), q->second = next;
  pthread_mutex_unlock(&q->lock);
  if (q->second) (void)go_on(q, q->second, MEET);
}

/* Run the first call, and the second while the first only waits for readers: the status of the first. */
static int run_first(queue_t *q, pending_t *r, int64_t patience) {
  if (!r->words || !r->next) return go_on(q, r, patience);
  for (idle_t wait = {0, 0, 0};;) {
    announce_both(q);
    int state = go_on(q, r, ONE_TURN);
    if (state != EXPIRED) return state;
    int64_t moved = r->call->moved;
    if (q->second && only_waits(r->call, r->rows)) (void)go_on(q, q->second, AHEAD), moved += q->second->call->moved;
    if (moved) wait = (idle_t){0, 0, 0};
    if (moved) continue;
    state = idle(&wait, r->call->spins / LANE_POLL, r->call->heartbeat, r->call->abort, patience);
    if (state != DONE) return state;
  }
}

/* Run the first calls until one has ended, or all have (NULL): DONE, or the status of the one that has not. The caller owns
 * the queue. `patience` is in place of a call's own timeout, if not 0; who has one leaves the rest to threads that wait. With
 * `brief` the caller holds Python's lock, and it ends at a call that may take long. */
static int move_on(queue_t *q, const pending_t *until, int64_t patience, int brief) {
  for (;;) {
    pending_t *const r = q->first;
    announce_both(q);
    if (!r || (until && until->state >= HAS_ENDED)) return DONE;
    if (brief && !is_brief(r->entry->call)) return EXPIRED;
    const int state = run_first(q, r, patience ? patience : patience_of(r));
    if (state != DONE) return state;
    end_first(q, HAS_ENDED, brief);
    if (patience && q->waiters) return DONE;
  }
}

/* Wait on a condition for so long at most; the lock is held. */
static void wait_for_ns(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t ns) {
  const int64_t end = now_ns() + ns;
  (void)pthread_cond_timedwait(condition, lock, &(struct timespec){end / 1000000000, end % 1000000000});
}

/* The same for who owns the queue and waits: its status, with which the first call is the caller's to finish, or DONE. */
static int stay_until(queue_t *q, const pending_t *until) {
  const int state = move_on(q, until, 0, 0);
  if (state == DONE) disown(q, DONE);
  return state;
}

/* Wait until a call has ended, or all have: DONE; AGAIN after a while; else the status of the first call, which is the
 * caller's to finish, with the queue. */
static int wait_until(queue_t *q, const pending_t *until) {
  if (own(q)) return stay_until(q, until);
  const int64_t end = now_ns() + A_WHILE_NS;
  int state = DONE;
  pthread_mutex_lock(&q->lock);
  q->waiters++;
  while (state == DONE && (until ? until->state < HAS_ENDED : q->first != NULL)) {
    if (q->left) {
      state = q->left, q->left = DONE;
    } else if (own(q)) {
      q->waiters--;
      pthread_mutex_unlock(&q->lock);
      return stay_until(q, until);
    } else if (now_ns() < end) {
      wait_for_ns(&q->changed, &q->lock, A_WHILE_NS);
    } else {
      state = AGAIN;
    }
  }
  q->waiters--;
  pthread_mutex_unlock(&q->lock);
  return state;
}

static void tell_ended(queue_t *q) {
  pthread_mutex_lock(&q->lock);
  for (pending_t *r = q->ended; r; r = r->next) tell(r);
  pthread_mutex_unlock(&q->lock);
}

/* Called by MPI when a thread waits in it: move all queues of this process on. Returns how many calls have ended. */
static int come_by(void) {
  int ended = 0;
  if (!mpi.untold || mpi.forked || pthread_mutex_trylock(&mpi.lock)) return 0;
  for (queue_t *q = mpi.queues; q; q = q->next) {
    const int64_t before = q->table->pending;
    if (before && own(q)) disown(q, move_on(q, NULL, AT_ONCE, 0));
    if (q->ended) tell_ended(q);
    ended += (int)(before - q->table->pending);
  }
  pthread_mutex_unlock(&mpi.lock);
  return ended;
}

/* The same where MPI asks for requests of ours: it polls one, or has us wait for some. */
static int poll_request(void *of, void *status) { return (void)of, (void)status, come_by(), 0; }

static int wait_requests(int n, void **of, double timeout, void *status) {
  (void)timeout, (void)status;
  for (int i = 0; i < n; i++)
    while (!((pending_t *)of[i])->told)
      if (!come_by()) sched_yield();
  return 0;
}

/* ---- for Python: its lock is held */

/* Let go of what has ended. */
static void let_ended_go(queue_t *q) {
  pthread_mutex_lock(&q->lock);
  pending_t *r = q->ended;
  q->ended = NULL;
  pthread_mutex_unlock(&q->lock);
  while (r) {
    pending_t *const next = r->next;
    tell(r);
    no_longer_used(r->entry);
    r->entry = NULL;
    while (r->held) PyBuffer_Release(r->views + --r->held);
    Py_CLEAR(r->arguments);
    Py_CLEAR(r->method);
    Py_DECREF(r);
    r = next;
  }
}

static queue_t *queue_of(const pending_t *r) { return table_of(r->self)->queue; }

/* The first call, which Python finishes: (it, what it is bound to, its number, status, timeout in seconds or None, method, arguments). */
static PyObject *unfinished(queue_t *q, int state) {
  pending_t *const r = q->first;
  entry_t *const e = r->entry;
  if (r->call != e->call) { /* Python goes on with the entry's */
    aim_at(e, r->at);
    *e->call = *r->call;
    memcpy(e->rows, r->rows, (size_t)r->words * sizeof *r->rows);
  }
  PyObject *const timeout = r->timeout_ns ? PyFloat_FromDouble((double)r->timeout_ns * 1e-9) : Py_NewRef(Py_None);
  return Py_BuildValue("(OOKiNOO)", r, e->bound, (unsigned long long)r->seq, state, timeout, r->method, r->arguments);
}

/* (method, arguments, timeout): begin a call that is kept; the request, or None if it is not known here. */
static PyObject *begin_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 3 || !PyTuple_CheckExact(given[1])) return PyErr_Format(PyExc_TypeError, "expected a method, a tuple and a timeout");
  queue_t *const q = t->queue;
  const int64_t timeout_ns = timeout_of(given[2]);
  arguments_t a;
  if (t->open != OPEN || timeout_ns < 0 || !read_arguments(&a, &t->types, &t->gpu, given[0], given[1], Py_None)) Py_RETURN_NONE;
  const int host = !a.key.arrays;
  a.key.stream = PENDING;
  entry_t *e = host ? entry_of(t, &a.key, hash_of(&a.key)) : NULL;
  if (!e && host && t->open == OPEN) e = kind_of(t, &a, 1);
  pending_t *const r = e && t->open == OPEN ? PyObject_New(pending_t, mpi.type) : NULL;
  if (!r) {
    let_go(&a);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
  }
  memset((char *)r + sizeof(PyObject), 0, sizeof *r - sizeof(PyObject));
  e->users++; /* what follows may run Python */
  r->entry = e;
  r->words = e->call->trace || e->call->befores || e->call->afters ? 0 : words_without_slots(e->call, e->rows);
  if (r->words > LANE_WORDS) r->words = 0;
  places(&a, r->at);
  memcpy(r->views, a.views, (size_t)a.held * sizeof *a.views);
  r->held = a.held;
  PyObject *const request = mpi.request->tp_new(mpi.request, mpi.none, NULL);
  if (!request || PyObject_SetAttr(request, text_of[PENDING_CALL], (PyObject *)r)) return Py_XDECREF(request), Py_DECREF(r), NULL;
  void **const handle = (void **)((char *)request + sizeof(PyObject));
  const int failed = mpi.start_polled ? mpi.start_polled(query_request, freed_request, keep_request, poll_request, wait_requests, r, &r->handle)
                                      : mpi.start(query_request, freed_request, keep_request, r, &r->handle);
  if (failed) return Py_DECREF(request), Py_DECREF(r), PyErr_Format(PyExc_RuntimeError, "MPI cannot start a request: error %d", failed);
  memcpy(handle, &r->handle, mpi.pointers ? sizeof(void *) : sizeof(int));
  r->self = Py_NewRef(self), r->timeout_ns = timeout_ns;
  r->method = Py_NewRef(given[0]), r->arguments = Py_NewRef(given[1]);
  if (q->ended) let_ended_go(q);
  const int mine = own(q), lock = !mine || q->dozes > DOZES;
  if (lock) pthread_mutex_lock(&q->lock);
  pending_t *const before = q->last; /* and the queue keeps the object */
  if (before) before->next = r;
  else q->first = r;
  q->last = r, t->open_gpu = 0;
  t->pending++;
  mpi.untold++;
  if (lock) pthread_cond_signal(&q->wake), pthread_mutex_unlock(&q->lock);
  if (!mine) return request;
  if (before || is_brief(e->call)) {
    disown(q, move_on(q, NULL, AT_ONCE, 1));
  } else {
    Py_BEGIN_ALLOW_THREADS
    disown(q, move_on(q, r, MEET, 0));
    Py_END_ALLOW_THREADS
  }
  return request;
}

/* How a call is, for a user who waits for it, or only looks: True or False, whether it has ended; its error; None, if nothing has
 * happened for a while; or what Python is to finish. `given`: the request, and a status of MPI's or None. */
static PyObject *look_at(pending_t *r, PyObject *const *given, Py_ssize_t n, int waits) {
  queue_t *const q = queue_of(r);
  int state = DONE;
  if (n != 2 || !PyObject_TypeCheck(given[0], mpi.request)) return PyErr_Format(PyExc_TypeError, "expected a request and a status");
  if (mpi.forked) return PyErr_Format(PyExc_RuntimeError, "this process was forked by a rank, which alone makes its calls");
  if (r->state < HAS_ENDED && own(q)) disown(q, move_on(q, r, waits ? BRIEFLY : AT_ONCE, 1));
  if (r->state < HAS_ENDED) {
    Py_BEGIN_ALLOW_THREADS
    if (waits) state = wait_until(q, r);
    else if (own(q)) disown(q, move_on(q, r, AT_ONCE, 0));
    Py_END_ALLOW_THREADS
  }
  if (state == AGAIN) Py_RETURN_NONE;
  if (state != DONE) return unfinished(q, state);
  if (r->state < HAS_ENDED) Py_RETURN_FALSE;
  let_ended_go(q);
  PyObject *const error = r->state == HAS_FAILED && !r->raised ? r->error : NULL;
  r->raised = 1;
  if (!r->freed) {
    char ignored[256];
    mpi.wait((char *)given[0] + sizeof(PyObject), given[1] == Py_None ? ignored : (char *)given[1] + sizeof(PyObject));
  }
  return Py_NewRef(error ? error : Py_True);
}

static PyObject *wait_call(PyObject *r, PyObject *const *given, Py_ssize_t n) { return look_at((pending_t *)r, given, n, 1); }
static PyObject *test_call(PyObject *r, PyObject *const *given, Py_ssize_t n) { return look_at((pending_t *)r, given, n, 0); }

/* Wait until no call is pending: 1; 0 where that is Python's to do. */
static int drained(repeated_t *t) {
  queue_t *const q = t->queue;
  int state = DONE;
  if (own(q)) disown(q, move_on(q, NULL, BRIEFLY, 1));
  if (t->pending) {
    Py_BEGIN_ALLOW_THREADS
    state = wait_until(q, NULL);
    Py_END_ALLOW_THREADS
    if (state != DONE && state != AGAIN) disown(q, state);
  }
  if (q->ended) let_ended_go(q);
  return !t->pending;
}

/* Wait until no call is pending: True; None, if nothing has happened for a while; or what is to be finished. */
static PyObject *drain_calls(PyObject *self, PyObject *none) {
  queue_t *const q = table_of(self)->queue;
  int state;
  (void)none;
  if (mpi.forked) Py_RETURN_TRUE;
  Py_BEGIN_ALLOW_THREADS
  state = wait_until(q, NULL);
  Py_END_ALLOW_THREADS
  let_ended_go(q);
  if (state == AGAIN) Py_RETURN_NONE;
  if (state != DONE) return unfinished(q, state);
  Py_RETURN_TRUE;
}

/* (call, error or None): what became of the first call, which was Python's to finish. */
static PyObject *finish_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  queue_t *const q = table_of(self)->queue;
  if (n != 2 || given[0] != (PyObject *)q->first) return PyErr_Format(PyExc_ValueError, "expected the first call, and an error or None");
  if (given[1] != Py_None) q->first->error = Py_NewRef(given[1]);
  end_first(q, given[1] == Py_None ? HAS_ENDED : HAS_FAILED, 1);
  disown(q, DONE);
  Py_RETURN_NONE;
}

/* (error): no call is begun any more, and those that are fail, but for what somebody runs or finishes. */
static PyObject *give_up_calls(PyObject *self, PyObject *error) {
  queue_t *const q = table_of(self)->queue;
  if (mpi.forked) Py_RETURN_NONE;
  pthread_mutex_lock(&q->lock);
  const int mine = own(q);
  pending_t *const kept = mine ? NULL : q->second ? q->second : q->first;
  pending_t *next = kept ? kept->next : q->first;
  if (mine) q->first = q->second = NULL;
  q->last = kept;
  if (kept) kept->next = NULL;
  while (next) {
    pending_t *const r = next;
    next = r->next;
    r->error = Py_NewRef(error);
    atomic_store(&r->state, HAS_FAILED);
    r->next = q->ended;
    q->ended = r;
    q->table->pending--;
  }
  if (mine) q->owned = 0;
  pthread_cond_broadcast(&q->changed);
  pthread_mutex_unlock(&q->lock);
  Py_RETURN_NONE;
}

/* The thread's: look after the queue until a call is Python's to finish; None when the thread is to end. */
static PyObject *watch_calls(PyObject *self, PyObject *none) {
  queue_t *const q = table_of(self)->queue;
  const pending_t *seen = NULL; /* the first, when it last looked; how often that had moved, and since when it has not */
  int moves = 0, state = DONE;
  int64_t since = 0;
  (void)none;
  Py_BEGIN_ALLOW_THREADS
  pthread_mutex_lock(&q->lock);
  while (!q->stops && state == DONE) {
    const pending_t *const first = q->first, *const before = seen;
    const int64_t now = now_ns();
    if (first != seen || q->moves != moves) since = now, moves = q->moves, seen = first;
    for (pending_t *r = mpi.tells ? q->ended : NULL; r; r = r->next) tell(r);
    if (q->left) {
      state = q->left, q->left = DONE;
    } else if (!first && q->dozes > DOZES) {
      pthread_cond_wait(&q->wake, &q->lock);
    } else if (!first || first != before || !own(q)) {
      q->dozes = first ? 0 : q->dozes + 1;
      wait_for_ns(&q->wake, &q->lock, DOZE_NS);
    } else {
      pthread_mutex_unlock(&q->lock);
      state = move_on(q, NULL, now - since < IDLE_NS ? SLICE_NS : AT_ONCE, 0);
      if (state == EXPIRED && (q->moves != moves || now - since <= patience_of(q->first))) state = DONE;
      if (state == DONE) disown(q, DONE);
      pthread_mutex_lock(&q->lock);
      if (state == DONE && q->first == first) wait_for_ns(&q->wake, &q->lock, DOZE_NS);
    }
  }
  pthread_mutex_unlock(&q->lock);
  Py_END_ALLOW_THREADS
  if (state == DONE) Py_RETURN_NONE;
  return unfinished(q, state);
}

/* Have the thread end. */
static PyObject *stop_watching(PyObject *self, PyObject *none) {
  queue_t *const q = table_of(self)->queue;
  (void)none;
  if (!mpi.forked) {
    pthread_mutex_lock(&q->lock);
    q->stops = 1;
    pthread_cond_signal(&q->wake);
    pthread_mutex_unlock(&q->lock);
  }
  Py_RETURN_NONE;
}

static void free_pending(PyObject *object) {
  pending_t *const r = (pending_t *)object;
  PyTypeObject *const type = Py_TYPE(r);
  int ended = 0;
  if (r->told && !r->freed && !mpi.ended(&ended) && !ended) mpi.free(&r->handle); /* nobody has waited for it */
  while (r->held) PyBuffer_Release(r->views + --r->held); /* it was not begun */
  if (r->entry) no_longer_used(r->entry);
  Py_XDECREF(r->error);
  Py_XDECREF(r->self);
  PyObject_Free(r);
  Py_DECREF(type);
}

/* ---- setting up */

static PyMethodDef pending_methods[] = {
  {"wait", (PyCFunction)(void (*)(void))wait_call, METH_FASTCALL, "Wait for the call."},
  {"test", (PyCFunction)(void (*)(void))test_call, METH_FASTCALL, "Look whether the call has ended."},
  {NULL, NULL, 0, NULL},
};
static PyType_Slot pending_slots[] = {{Py_tp_methods, pending_methods}, {Py_tp_dealloc, free_pending}, {0, NULL}};
static PyType_Spec pending_spec = {"blinkmpi.PendingCall", sizeof(pending_t), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, pending_slots};

static PyMethodDef queue_functions[] = {
  {"begin_call", (PyCFunction)(void (*)(void))begin_call, METH_FASTCALL, "Begin a call that was made before."},
  {"drain_calls", drain_calls, METH_NOARGS, "Wait until no call is pending."},
  {"finish_call", (PyCFunction)(void (*)(void))finish_call, METH_FASTCALL, "Say what became of the first call."},
  {"give_up_calls", give_up_calls, METH_O, "Let all calls fail that nobody runs."},
  {"watch_calls", watch_calls, METH_NOARGS, "Look after the queue."},
  {"stop_watching", stop_watching, METH_NOARGS, "Have `watch_calls` return."},
};

static void forget_parent(void) { mpi.forked = 1; }

/* What is the same for all communicators of a process, given by the first. Returns 0 if that raises. */
static int learn_mpi(PyObject *const *given) {
  if (mpi.type) return 1;
  enum { ADDRESSES = 9 };
  void *at[ADDRESSES];
  for (int i = 0; i < ADDRESSES; i++) at[i] = PyLong_AsVoidPtr(given[i + 1]);
  PyObject *const *const numbers = given + 1 + ADDRESSES;
  const long pointers = PyLong_AsLong(numbers[0]), tells = PyLong_AsLong(numbers[1]), failed = PyLong_AsLong(numbers[2]);
  const long long byte = PyLong_AsLongLong(numbers[3]);
  PyObject *const none = PyTuple_New(0), *const type = PyType_FromSpec(&pending_spec);
  if (PyErr_Occurred()) return 0;
  mpi.start = (start_request_t *)at[0], mpi.complete = at[1], mpi.wait = (wait_request_t *)at[2], mpi.free = (free_t *)at[3];
  mpi.ended = (ended_t *)at[4], mpi.elements = at[5], mpi.cancelled = (cancelled_t *)at[6], mpi.byte = (void *)byte;
  mpi.start_polled = (start_polled_t *)at[7], mpi.hook = (hook_t *)at[8];
  mpi.pointers = (int)pointers, mpi.tells = (int)tells, mpi.failed = (int)failed;
  mpi.request = (PyTypeObject *)Py_NewRef(given[0]), mpi.none = none, mpi.type = (PyTypeObject *)type;
  pthread_atfork(NULL, NULL, forget_parent);
  if (mpi.hook) mpi.hook(come_by);
  return 1;
}

/* (the user's requests' type; addresses of MPI_Grequest_start, MPI_Grequest_complete, MPI_Wait, MPI_Request_free,
 * MPI_Finalized, MPI_Status_set_elements and MPI_Status_set_cancelled, and of MPIX_Grequest_start and opal_progress_register
 * or 0; whether handles are pointers; whether our thread has to tell MPI what has ended; MPI's error class of what failed;
 * the handle of MPI_BYTE): the functions above, of a communicator. */
static PyObject *serve_pending(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  enum { COUNT_OF = sizeof queue_functions / sizeof *queue_functions };
  repeated_t *const t = table_of(self);
  if (!t || n != 14 || !PyType_Check(given[0])) return PyErr_Format(PyExc_TypeError, "expected a type and thirteen numbers");
  if (!learn_mpi(given)) return NULL;
  PyObject *const made = PyTuple_New(COUNT_OF);
  for (int i = 0; made && i < COUNT_OF; i++) {
    PyObject *const function = PyCFunction_New(queue_functions + i, self);
    if (!function) return Py_DECREF(made), NULL;
    PyTuple_SET_ITEM(made, i, function);
  }
  queue_t *const q = made && !t->queue ? PyMem_RawCalloc(1, sizeof *q) : NULL;
  if (!q) return made;
  pthread_condattr_t clock;
  pthread_condattr_init(&clock), pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_mutex_init(&q->lock, NULL), pthread_cond_init(&q->changed, &clock), pthread_cond_init(&q->wake, &clock);
  pthread_condattr_destroy(&clock);
  q->table = t;
  pthread_mutex_lock(&mpi.lock);
  q->next = mpi.queues, mpi.queues = q, t->queue = q;
  pthread_mutex_unlock(&mpi.lock);
  return made;
}

static void free_queue(queue_t *q) {
  if (mpi.forked) return; /* another thread may have had its locks */
  let_ended_go(q);
  pthread_mutex_lock(&mpi.lock);
  queue_t **at = &mpi.queues;
  while (*at != q) at = &(*at)->next;
  *at = q->next;
  pthread_mutex_unlock(&mpi.lock);
  pthread_mutex_destroy(&q->lock), pthread_cond_destroy(&q->changed), pthread_cond_destroy(&q->wake);
  PyMem_RawFree(q);
}
