/* The table of a communicator's kept calls, by which later ones are made without Python.
 *
 * What makes two calls the same is in arguments.h: everything but where their buffers lie. An entry keeps the objects that
 * it is found by, so that no other object can take their place, and nothing of the user's buffers: each time the words of
 * its call_t that are addresses of theirs are aimed at those of the call. Calls that are put on a stream (launches.h) are
 * aimed there. The entry that was used least recently goes when there are too many. Non-blocking calls (pending_calls.h) have
 * entries of their own, and so have calls of other lengths (kinds.h). */
#pragma once
#include "arguments.h"
#include "launches.h"
#include "repeated_groups.h"

enum { HELD_BYTES = 4096 }; /* calls of at most so many bytes hold the interpreter's lock */
enum { PENDING = 1 }; /* in the key, in place of a stream: a non-blocking call on host memory */
enum { MOST_SECONDS = 4000000 }; /* longer timeouts are left to Python */

typedef struct { /* a word of a call that is an address in one of its buffers */
  char **word;
  int64_t buffer, offset;
} aim_t;

typedef struct entry {
  struct entry *next;            /* entries of the same hash bucket */
  struct entry *newer, *older;   /* in the order of use */
  uint64_t hash;
  PyObject *bound; /* kept */
  call_t *call;
  int64_t *rows;   /* NULL: the call is found here, and Python makes it */
  launch_t *launch; /* instead of these two */
  int64_t aims;
  aim_t *aim;
  const struct kind *kind; /* not NULL: an entry for calls of blocks of any lengths */
  struct count_kind *counts; /* not NULL: an entry for calls of any counts */
  int64_t users;   /* the table, and non-blocking calls under way */
  char *at[MOST_BUFFERS]; /* the buffers that its addresses point to now */
  call_key_t key;  /* its objects are kept; it ends with the arguments that it has */
} entry_t;

typedef struct { /* what Python and this share; repeated.py mirrors its first four fields */
  uint64_t seq;  /* the number of the communicator's last call */
  int64_t open;  /* OPEN: calls may be made here, as nothing else is under way, and nothing has gone wrong; or INSIDE one */
  int64_t open_gpu; /* the same for calls on streams */
  int64_t pending;  /* non-blocking calls that have not ended */
  types_t types;
  gpu_t gpu;
  int64_t kinds; /* entries with `kind` or `counts` */
  int64_t places, most, kept; /* of the table, a power of two; entries at most, and now */
  entry_t **table;
  entry_t *newest, *oldest;
  groups_t groups;
  struct queue *queue; /* of non-blocking calls; NULL before the first */
} repeated_t;

/* Make a call with the interpreter's lock held, for to let go of it and to take it again costs as much as a short call:
 * only what nobody waits for long, few bytes and a few polls. What is not done by then goes on without the lock. */
static int run_briefly(call_t *call, int64_t *rows, uint64_t seq) {
  const int64_t patience = call->timeout_ns;
  call->timeout_ns = BRIEFLY;
  const int state = blink_run(call, rows, seq);
  call->timeout_ns = patience;
  return state;
}

/* Resume it. */
static int resume(call_t *call, int64_t *rows) {
  const int state = blink_execute(call, rows);
  if (state == DONE) copies(call->after, call->afters);
  return state;
}

static int is_brief(const call_t *call) {
  return call->one_shot && !call->nodes && !call->cma && call->chunk * call->item <= HELD_BYTES;
}

/* ---- the table */

static entry_t **place_of(repeated_t *t, uint64_t hash) { return t->table + (hash & (uint64_t)(t->places - 1)); }

static void take_out(repeated_t *t, entry_t *e) { /* of the order of use */
  *(e->newer ? &e->newer->older : &t->newest) = e->older;
  *(e->older ? &e->older->newer : &t->oldest) = e->newer;
}

static void put_first(repeated_t *t, entry_t *e) {
  e->newer = NULL, e->older = t->newest;
  *(t->newest ? &t->newest->newer : &t->oldest) = e;
  t->newest = e;
}

static void used(repeated_t *t, entry_t *e) {
  if (e != t->newest) take_out(t, e), put_first(t, e);
}

static entry_t *entry_of(repeated_t *t, const call_key_t *key, uint64_t hash) {
  for (entry_t *e = *place_of(t, hash); e; e = e->next) {
    if (e->hash != hash || !same_call(&e->key, key)) continue;
    used(t, e);
    return e;
  }
  return NULL;
}

static void no_longer_used(entry_t *e) {
  if (--e->users) return;
  for (int64_t i = 0; i < e->key.count; i++) Py_XDECREF(e->key.arguments[i].object);
  Py_DECREF(e->key.method);
  Py_DECREF(e->bound);
  PyMem_Free(e->aim);
  PyMem_Free(e);
}

static void drop(repeated_t *t, entry_t *e) {
  entry_t **at = place_of(t, e->hash);
  while (*at != e) at = &(*at)->next;
  *at = e->next;
  take_out(t, e);
  t->kept--;
  no_longer_used(e);
}

static void drop_all(repeated_t *t) {
  while (t->oldest) drop(t, t->oldest);
}

/* Whether nothing that a call is found by can be freed and made anew with the same handle: derived datatypes, and the
 * user's own operations. */
static int is_lasting(PyObject *argument) {
  PyObject *const said = PyObject_GetAttrString(argument, "is_predefined");
  const int lasting = said == Py_True;
  Py_XDECREF(said);
  PyErr_Clear();
  return lasting;
}

/* Add an entry for a call that was read; NULL, and an error is set, if there is no memory. One of the same goes, but not of a kind
 * with other counts. */
static entry_t *put(repeated_t *t, const call_key_t *key, entry_t made) {
  const uint64_t hash = hash_of(key);
  entry_t *const before = made.counts || (made.launch && made.launch->each[0]) ? NULL : entry_of(t, key, hash);
  if (before) drop(t, before);
  while (t->kept >= t->most) drop(t, t->oldest);
  const size_t size = offsetof(entry_t, key) + offsetof(call_key_t, arguments) + (size_t)key->count * sizeof *key->arguments;
  entry_t *const e = PyMem_Malloc(size);
  if (!e) return PyErr_NoMemory(), NULL;
  memcpy(e, &made, offsetof(entry_t, key));
  memcpy(&e->key, key, size - offsetof(entry_t, key));
  for (int64_t i = 0; i < key->count; i++) Py_XINCREF(key->arguments[i].object);
  Py_INCREF(key->method);
  Py_INCREF(e->bound);
  entry_t **const at = place_of(t, hash);
  e->hash = hash, e->next = *at, *at = e, e->users = 1;
  put_first(t, e);
  t->kept++;
  return e;
}

/* ---- a call on host memory */

/* Where the buffers of a call lie. */
static void places(const arguments_t *r, char **at) {
  for (int64_t b = 0; b < MOST_BUFFERS; b++) at[b] = b < r->buffered ? r->buffers[b].at : NULL;
}

/* Aim the words of a call that lie in its buffers as they were when it was bound. Returns 0 if there is no memory. */
static int learn_aims(entry_t *e, const arguments_t *r) {
  call_t *const call = e->call;
  int64_t *const copies[] = {call->before, call->after}, numbers[] = {call->befores, call->afters};
  aim_t *const aim = PyMem_Calloc((size_t)(2 + 2 * (numbers[0] + numbers[1])), sizeof *aim);
  if (!aim) return PyErr_NoMemory(), 0;
  e->aim = aim;
  char **words[2] = {&call->send, &call->recv};
  for (int64_t w = 0, all = 2 + 2 * (numbers[0] + numbers[1]); w < all; w++) {
    const int64_t of_copy = w - 2, second = of_copy >= 2 * numbers[0];
    char **const word = w < 2 ? words[w] : (char **)(copies[second] + 3 * ((of_copy - second * 2 * numbers[0]) / 2) + of_copy % 2);
    for (int64_t b = 0; b < r->buffered; b++) {
      const int64_t offset = *word - r->buffers[b].at;
      if (!*word || offset < 0 || (offset >= r->buffers[b].nbytes && offset)) continue;
      aim[e->aims++] = (aim_t){word, b, offset};
      break;
    }
  }
  places(r, e->at);
  return 1;
}

static void aim_at(entry_t *e, char *const *at) {
  if (!memcmp(e->at, at, sizeof e->at)) return;
  memcpy(e->at, at, sizeof e->at);
  for (aim_t *a = e->aim; a < e->aim + e->aims; a++) *a->word = at[a->buffer] + a->offset;
  e->call->readable = 0; /* it is tried whether others can read them */
}

static repeated_t *table_of(PyObject *self) { return PyCapsule_GetPointer(self, "blinkmpi.repeated_calls"); }

/* Whether there are lists of buffers among the arguments, or the calls of a group: not those that name one buffer. */
static int has_lists(const types_t *types, PyObject *arguments) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
    PyObject *const one = PyTuple_GET_ITEM(arguments, i);
    if (PyTuple_Check(one) && !PyTuple_CheckExact(one)) return 1;
    if (!PyList_CheckExact(one) || !PyList_GET_SIZE(one)) continue;
    PyTypeObject *const last = Py_TYPE(PyList_GET_ITEM(one, PyList_GET_SIZE(one) - 1));
    if (last != types->datatype && last != &PyLong_Type && last != &PyTuple_Type && last != &PyList_Type && last != &PyUnicode_Type) return 1;
  }
  return 0;
}

/* Nanoseconds of a call's own timeout, given in seconds; 0 for none, -1 for one that is Python's to look at. */
static int64_t timeout_of(PyObject *seconds) {
  if (seconds == Py_None) return 0;
  const double given = PyFloat_CheckExact(seconds) ? PyFloat_AS_DOUBLE(seconds) : PyLong_CheckExact(seconds) ? PyLong_AsDouble(seconds) : -1;
  if (PyErr_Occurred()) return PyErr_Clear(), -1;
  return given >= 1e-9 && given <= MOST_SECONDS ? (int64_t)(given * 1e9) : -1;
}
