/* Calls that were made before, looked up and run without Python: one table for each communicator.
 *
 * What makes two calls the same is in arguments.h: everything but where their buffers lie. An entry keeps the objects that
 * it is found by, so that no other object can take their place, and nothing of the user's buffers: each time the words of
 * its call_t that are addresses of theirs are aimed at those of the call. Calls that are put on a stream (launches.h) are
 * aimed there. The entry that was used least recently goes when there are too many. Non-blocking calls (pending_calls.h) have
 * entries of their own, and so have calls of blocks of whatever lengths (block_kinds.h), and of other counts (count_kinds.h). */
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/ndarraytypes.h>
#include "launches.h"

enum { KEPT_FLAGS = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE };
enum { SHUT, OPEN, INSIDE }; /* INSIDE: a thread makes a call here, without the interpreter's lock */
enum { HELD_BYTES = 4096 }; /* of a call that is made with the interpreter's lock held */
enum { PENDING = 1 }; /* in place of a stream: of a non-blocking call on host memory */
enum { MOST_SECONDS = 4000000 }; /* of a timeout that is not Python's to look at */

#include "repeated_groups.h"
#include "arguments.h"

const int64_t blink_python = PY_VERSION_HEX >> 16; /* whose structures this was compiled for */

typedef struct { /* a word of a call that is an address in one of its buffers */
  char **word;
  int64_t buffer, offset;
} aim_t;

typedef struct entry {
  struct entry *next;            /* of those with the same place in the table */
  struct entry *newer, *older;   /* in the order of use */
  uint64_t hash;
  PyObject *bound; /* kept */
  call_t *call;
  int64_t *rows;   /* NULL: the call is found here, and Python makes it */
  launch_t *launch; /* instead of these two */
  int64_t aims;
  aim_t *aim;
  const struct kind *kind; /* of one for calls of blocks of whatever lengths */
  struct count_kind *counts; /* of one for calls in one shot of whatever counts */
  int64_t users;   /* the table, and non-blocking calls under way */
  char *at[MOST_BUFFERS]; /* at what it is aimed */
  call_key_t key;  /* its objects are kept; it ends with the arguments that it has */
} entry_t;

typedef struct { /* what Python and this share; repeated.py mirrors its first four fields */
  uint64_t seq;  /* the number of the communicator's last call */
  int64_t open;  /* OPEN: calls may be made here, as nothing else is under way, and nothing has gone wrong; or INSIDE one */
  int64_t open_gpu; /* the same of calls on streams */
  int64_t pending;  /* non-blocking calls that have not ended */
  types_t types;
  gpu_t gpu;
  int64_t kinds; /* entries of kinds that were made */
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

/* Go on with it. */
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
  entry_t *const before = made.counts ? NULL : entry_of(t, key, hash);
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

/* Run a call; see repeat_call. */
static PyObject *run_entry(repeated_t *t, entry_t *e, int64_t timeout_ns) {
  call_t *const call = e->call;
  int64_t *const rows = e->rows, patience = call->timeout_ns;
  PyObject *const bound = Py_NewRef(e->bound); /* the entry may go while it runs */
  const uint64_t seq = ++t->seq;
  const int brief = is_brief(call);
  if (timeout_ns && timeout_ns < patience) call->timeout_ns = timeout_ns;
  int state = brief ? run_briefly(call, rows, seq) : EXPIRED;
  if (state == EXPIRED) {
    t->open = INSIDE;
    Py_BEGIN_ALLOW_THREADS
    state = brief ? resume(call, rows) : blink_run(call, rows, seq);
    Py_END_ALLOW_THREADS
    if (t->open == INSIDE) t->open = OPEN; /* not, if it was shut meanwhile */
  }
  call->timeout_ns = patience;
  if (state == DONE) {
    Py_DECREF(bound);
    Py_RETURN_TRUE;
  }
  return Py_BuildValue("(NKi)", bound, (unsigned long long)seq, state);
}

#include "block_kinds.h"
#include "count_kinds.h"

/* The entry of a kind, filled from the arguments of one of its calls; NULL if there is none, if one of its calls is under way, or if
 * these are Python's to read. */
static entry_t *kind_of(repeated_t *t, const arguments_t *r, int pending) {
  call_key_t key;
  if (!t->kinds || !key_of_kind(&r->key, &key, pending)) return NULL;
  const uint64_t hash = hash_of(&key);
  for (entry_t *e = *place_of(t, hash); e; e = e->next) {
    if (e->hash != hash || e->users > 1 || !same_call(&e->key, &key)) continue;
    if (!(e->kind ? fill_kind(e->kind, e->call, r, &t->types) : fill_counts(e->counts, e->call, r, &t->types))) continue;
    used(t, e);
    return e;
  }
  return NULL;
}

#include "pending_calls.h"

/* (method, arguments, stream): True if the call was found and made; False if it is not known here; else (bound, number,
 * status): it was begun, and this is how far it came. A fourth argument, True, says that the caller keeps operands on a GPU
 * until the work on them is through; a fifth is the call's own timeout in seconds, or None. */
static PyObject *repeat_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n < 3 || n > 5 || !PyTuple_CheckExact(given[1]))
    return PyErr_Format(PyExc_TypeError, "expected a method, a tuple, a stream, whether operands are kept, and a timeout");
  const int64_t timeout_ns = n == 5 ? timeout_of(given[4]) : 0;
  if (t->pending && (t->open != OPEN || !drained(t))) Py_RETURN_FALSE;
  if (!timeout_ns && has_lists(&t->types, given[1])) {
    PyObject *const made = repeat_group(&t->groups, &t->gpu, t->types.array, &t->seq, given, &t->open, t->open_gpu != 0);
    if (made != Py_False) return made;
    Py_DECREF(made);
  }
  arguments_t r;
  const int open = t->open == OPEN;
  if (timeout_ns < 0 || !(open || t->open_gpu) || !read_arguments(&r, &t->types, &t->gpu, given[0], given[1], given[2])) Py_RETURN_FALSE;
  entry_t *e = entry_of(t, &r.key, hash_of(&r.key));
  if (!e && t->open == OPEN) e = kind_of(t, &r, 0);
  PyObject *made = Py_False;
  if (e && e->launch && t->open_gpu && !timeout_ns) {
    made = launch_again(&t->gpu, &t->seq, e->bound, e->launch, r.arrays, (int)r.key.arrays, n >= 4 && given[3] == Py_True ? NULL : given[1]);
  } else if (e && e->rows && t->open == OPEN) { /* to read the arguments may have let others make a call */
    char *at[MOST_BUFFERS];
    places(&r, at);
    if (!e->kind) aim_at(e, at);
    made = run_entry(t, e, timeout_ns);
  } else {
    Py_INCREF(made);
  }
  let_go(&r);
  return made;
}

/* (method, arguments): the bound call on host memory that was kept of such arguments, aimed at these; None if there is none.
 * The arguments have to live until it is through. */
static PyObject *find_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  arguments_t r;
  if (!t || n != 2 || !PyTuple_CheckExact(given[1])) return PyErr_Format(PyExc_TypeError, "expected a method and a tuple");
  if (!read_arguments(&r, &t->types, &t->gpu, given[0], given[1], Py_None)) Py_RETURN_NONE;
  entry_t *const e = entry_of(t, &r.key, hash_of(&r.key));
  PyObject *const found = e && e->call ? e->bound : Py_None;
  char *at[MOST_BUFFERS];
  places(&r, at);
  if (e && e->call) aim_at(e, at);
  Py_INCREF(found);
  let_go(&r);
  return found;
}

/* (bound, address of its call_t, address of its rows or 0, method, arguments, whether it is non-blocking): a call to be found
 * again; whether it will be. */
static PyObject *keep_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 6 || !PyTuple_CheckExact(given[4])) return PyErr_Format(PyExc_TypeError, "expected six arguments");
  entry_t made = {.bound = given[0], .call = PyLong_AsVoidPtr(given[1]), .rows = PyLong_AsVoidPtr(given[2])};
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[4]); i++) {
    PyObject *const one = PyTuple_GET_ITEM(given[4], i);
    if (Py_TYPE(one) == t->types.operation && !is_lasting(one)) Py_RETURN_FALSE;
  }
  arguments_t r;
  if (!read_arguments(&r, &t->types, &t->gpu, given[3], given[4], Py_None)) Py_RETURN_FALSE;
  const int host = !r.key.arrays;
  if (host && given[5] == Py_True) r.key.stream = PENDING;
  if (host && learn_aims(&made, &r) && !put(t, &r.key, made)) PyMem_Free(made.aim);
  let_go(&r);
  if (PyErr_Occurred()) return NULL;
  return PyBool_FromLong(host);
}

/* (bound, address of its call_t, address of its rows, method, arguments, address of its kind_t, whether they do not block): calls of
 * blocks of whatever lengths, to be found from now on; whether they will be. The table of the call is that of these arguments. */
static PyObject *keep_kind(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 7 || !PyTuple_CheckExact(given[4])) return PyErr_Format(PyExc_TypeError, "expected seven arguments");
  entry_t made = {.bound = given[0], .call = PyLong_AsVoidPtr(given[1]), .rows = PyLong_AsVoidPtr(given[2]), .kind = PyLong_AsVoidPtr(given[5])};
  if (PyErr_Occurred()) return NULL;
  arguments_t r;
  call_key_t key;
  if (!read_arguments(&r, &t->types, &t->gpu, given[3], given[4], Py_None)) Py_RETURN_FALSE;
  const size_t bytes = (size_t)made.call->n * sizeof(block_t);
  block_t *const table = PyMem_Malloc(bytes);
  if (table) memcpy(table, made.call->blocks->each, bytes);
  int known = table && key_of_kind(&r.key, &key, given[6] == Py_True) && fill_kind(made.kind, made.call, &r, &t->types) && same_blocks(table, made.call);
  PyMem_Free(table);
  known = known && put(t, &key, made);
  t->kinds += known;
  let_go(&r);
  if (PyErr_Occurred()) return NULL;
  return PyBool_FromLong(known);
}

/* (bound, address of its call_t, address of its rows, method, arguments, address of its count_kind_t, whether they do not block): calls
 * of other counts, to be found from now on; whether they will be. The call is that of these arguments. */
static PyObject *keep_counts(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 7 || !PyTuple_CheckExact(given[4])) return PyErr_Format(PyExc_TypeError, "expected seven arguments");
  entry_t made = {.bound = given[0], .call = PyLong_AsVoidPtr(given[1]), .rows = PyLong_AsVoidPtr(given[2]), .counts = PyLong_AsVoidPtr(given[5])};
  if (PyErr_Occurred()) return NULL;
  arguments_t r;
  call_key_t key;
  if (!read_arguments(&r, &t->types, &t->gpu, given[3], given[4], Py_None)) Py_RETURN_FALSE;
  int known = key_of_kind(&r.key, &key, given[6] == Py_True) && learn_counts(made.counts, made.call, &r, &t->types) && learn_aims(&made, &r);
  for (int64_t i = 0; known && i < made.aims; i++) known = !made.aim[i].offset;
  if (!known || !put(t, &key, made)) known = 0, PyMem_Free(made.aim);
  t->kinds += known;
  let_go(&r);
  if (PyErr_Occurred()) return NULL;
  return PyBool_FromLong(known);
}

/* See keep_group_of. */
static PyObject *keep_group(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 6) return PyErr_Format(PyExc_TypeError, "expected six arguments");
  if (!keep_group_of(&t->groups, &t->gpu, t->types.array, given)) return NULL;
  Py_RETURN_NONE;
}

/* (bound, address of its launch_t, method, arguments, stream): a call on a stream to be found again; whether it will be. */
static PyObject *keep_launch(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 5 || !PyTuple_CheckExact(given[3])) return PyErr_Format(PyExc_TypeError, "expected five arguments");
  launch_t *const launch = PyLong_AsVoidPtr(given[1]);
  if (PyErr_Occurred()) return NULL;
  arguments_t r;
  learn_stream(&t->gpu, given[4]);
  if (!read_arguments(&r, &t->types, &t->gpu, given[2], given[3], given[4])) Py_RETURN_FALSE;
  const int known = r.key.arrays && r.key.arrays <= MOST_ARRAYS && r.key.stream == (uint64_t)launch->stream;
  for (int64_t i = 0; known && i < r.key.arrays; i++) launch->base[i] = r.arrays[i]->at;
  if (known) put(t, &r.key, (entry_t){.bound = given[0], .launch = launch});
  let_go(&r);
  if (PyErr_Occurred()) return NULL;
  return PyBool_FromLong(known);
}

/* What GPU calls need: see set_launches. */
static PyObject *aim_launches(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 11) return PyErr_Format(PyExc_TypeError, "expected eleven arguments");
  if (!set_launches(&t->gpu, given)) return NULL;
  return PyBool_FromLong(t->gpu.exchange != NULL);
}

/* (torch's tensor types, the capsule of their exchange): tensors on the host are read from now on. */
static PyObject *read_tensors(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 2) return PyErr_Format(PyExc_TypeError, "expected types and a capsule");
  if (!learn_tensors(&t->gpu, given[0], given[1])) return NULL;
  Py_RETURN_NONE;
}

/* The last call that was launched here, and its number; None if there is none. */
static PyObject *last_launch(PyObject *self, PyObject *none) {
  (void)none;
  repeated_t *const t = table_of(self);
  if (!t) return NULL;
  if (!t->gpu.bound) Py_RETURN_NONE;
  return Py_BuildValue("(OK)", t->gpu.bound, (unsigned long long)t->gpu.seq);
}

static PyObject *forget_calls(PyObject *self, PyObject *none) {
  (void)none;
  repeated_t *const t = table_of(self);
  if (!t) return NULL;
  drop_all(t);
  forget_groups(&t->groups);
  forget_launches(&t->gpu);
  Py_RETURN_NONE;
}

/* How many calls are kept. */
static PyObject *kept_calls(PyObject *self, PyObject *none) {
  (void)none;
  repeated_t *const t = table_of(self);
  return t ? PyLong_FromLongLong(t->kept) : NULL;
}

static void free_table(PyObject *self) {
  repeated_t *const t = table_of(self);
  if (!t) return;
  if (t->queue) free_queue(t->queue);
  drop_all(t);
  forget_groups(&t->groups), PyMem_Free(t->groups.found), free_launches(&t->gpu);
  Py_XDECREF(t->types.array), Py_XDECREF(t->types.integer), Py_XDECREF(t->types.datatype), Py_XDECREF(t->types.operation), Py_XDECREF(t->types.in_place);
  PyMem_Free(t->table);
  PyMem_Free(t);
}

static PyMethodDef functions[] = {
  {"repeat_call", (PyCFunction)(void (*)(void))repeat_call, METH_FASTCALL, "Make a call that was made before."},
  {"find_call", (PyCFunction)(void (*)(void))find_call, METH_FASTCALL, "Find a call that was made before."},
  {"keep_call", (PyCFunction)(void (*)(void))keep_call, METH_FASTCALL, "Keep a call to be made again."},
  {"keep_kind", (PyCFunction)(void (*)(void))keep_kind, METH_FASTCALL, "Keep a call of blocks of whatever lengths."},
  {"keep_counts", (PyCFunction)(void (*)(void))keep_counts, METH_FASTCALL, "Keep calls of whatever counts."},
  {"keep_group", (PyCFunction)(void (*)(void))keep_group, METH_FASTCALL, "Keep a group of calls to be made again."},
  {"keep_launch", (PyCFunction)(void (*)(void))keep_launch, METH_FASTCALL, "Keep a call on a stream to be made again."},
  {"aim_launches", (PyCFunction)(void (*)(void))aim_launches, METH_FASTCALL, "Say what calls on streams need."},
  {"read_tensors", (PyCFunction)(void (*)(void))read_tensors, METH_FASTCALL, "Say how torch's tensors are read."},
  {"last_launch", last_launch, METH_NOARGS, "The last call that was launched here."},
  {"forget_calls", forget_calls, METH_NOARGS, "Keep no call."},
  {"kept_calls", kept_calls, METH_NOARGS, "How many calls are kept."},
  {"serve_pending", (PyCFunction)(void (*)(void))serve_pending, METH_FASTCALL, "Say what non-blocking calls need."},
};

/* (address of what Python shares, and the functions above, in their order) of a communicator.
 * Given: (NumPy's array type and that of its integers, MPI's types of datatypes and operations, IN_PLACE, bytes of a handle,
 * entries at most). */
PyObject *blink_repeated_calls(PyObject *given) {
  PyObject *types[4], *in_place;
  long long handle, most;
  if (!intern_names() || !PyArg_ParseTuple(given, "OOOOOLL", types, types + 1, types + 2, types + 3, &in_place, &handle, &most)) return NULL;
  repeated_t *const t = PyMem_Calloc(1, sizeof *t);
  if (!t) return PyErr_NoMemory();
  t->most = most;
  for (t->places = 16; t->places < 2 * most;) t->places *= 2;
  t->table = PyMem_Calloc((size_t)t->places, sizeof *t->table);
  if (!t->table) return PyMem_Free(t), PyErr_NoMemory();
  PyTypeObject **const kept[] = {&t->types.array, &t->types.integer, &t->types.datatype, &t->types.operation};
  for (int i = 0; i < 4; i++) *kept[i] = (PyTypeObject *)Py_NewRef(types[i]);
  t->types.in_place = Py_NewRef(in_place), t->types.handle = handle;
  PyObject *const self = PyCapsule_New(t, "blinkmpi.repeated_calls", free_table);
  if (!self) return PyMem_Free(t->table), PyMem_Free(t), NULL;
  enum { COUNT_OF = sizeof functions / sizeof *functions };
  PyObject *made = PyTuple_New(1 + COUNT_OF);
  for (int i = 0; made && i <= COUNT_OF; i++) {
    PyObject *const item = i ? PyCFunction_New(functions + i - 1, self) : PyLong_FromVoidPtr(t);
    if (item) PyTuple_SET_ITEM(made, i, item);
    else Py_CLEAR(made);
  }
  Py_DECREF(self);
  return made;
}
