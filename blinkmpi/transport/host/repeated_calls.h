/* Calls that were made before, looked up and run without Python: one function object for each communicator.
 *
 * What makes two calls the same is what runtime/call_keys.py says of NumPy arrays: address, type, elements, whether it may
 * be written; other arguments are the same objects. An entry keeps these objects and the types alive, so that no other
 * object can take their place; of the user's arrays it keeps the addresses alone. Calls that are put on a stream
 * (launches.h) are the same whatever the addresses of their arrays, on one stream. */
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/ndarraytypes.h>
#include "launches.h"

enum { ENTRIES = 4096, MOST_ARGUMENTS = 6, KEPT_FLAGS = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE };
enum { SHUT, OPEN, INSIDE }; /* INSIDE: a thread makes a call here, without the interpreter's lock */
enum { HELD_BYTES = 4096 }; /* of a call that is made with the interpreter's lock held */

#include "repeated_groups.h"

const int64_t blink_python = PY_VERSION_HEX >> 16; /* whose structures this was compiled for */

typedef struct { /* what a call is found by */
  PyObject *method;
  int64_t count;
  argument_t arguments[MOST_ARGUMENTS];
  int64_t arrays; /* on a GPU; and whether it is one array twice, and the stream */
  int64_t same;
  uint64_t stream;
} found_t;

typedef struct {
  found_t by;      /* its objects are kept; method NULL: none here */
  PyObject *bound; /* kept */
  call_t *call;
  int64_t *rows;
  launch_t *launch; /* instead of these two */
} entry_t;

typedef struct { /* what Python and this share; repeated.py mirrors its first three fields */
  uint64_t seq;  /* the number of the communicator's last call */
  int64_t open;  /* OPEN: calls may be made here, as nothing else is under way, and nothing has gone wrong; or INSIDE one */
  int64_t open_gpu; /* the same of calls on streams */
  PyTypeObject *array;
  gpu_t gpu;
  entry_t entries[ENTRIES];
  groups_t groups;
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

static int same_call(const found_t *a, const found_t *b) {
  if (a->method != b->method || a->count != b->count || a->arrays != b->arrays || a->same != b->same || a->stream != b->stream) return 0;
  for (int64_t i = 0; i < a->count; i++)
    if (!alike(a->arguments + i, b->arguments + i)) return 0;
  return 1;
}

/* The place of a call, and what its arguments are; NULL if it has too many, or an array that is Python's to read.
 * `arrays` has those on a GPU. */
static entry_t *place_of(repeated_t *t, PyObject *method, PyObject *arguments, PyObject *stream, found_t *found,
                         const argument_t **arrays) {
  const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  int library = ON_HOST;
  if (count > MOST_ARGUMENTS) return NULL;
  found->method = method, found->count = count, found->arrays = found->same = 0, found->stream = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *const object = PyTuple_GET_ITEM(arguments, i);
    argument_t *const a = found->arguments + i;
    const int kind = read_array(&t->gpu, object, a);
    if (kind < 0 || (kind && library && kind != library)) return NULL;
    if (kind) {
      if (found->arrays == MOST_ARRAYS) return NULL;
      library = kind, arrays[found->arrays++] = a;
      continue;
    }
    *a = argument_of(t->array, object);
    if (a->flags >= 0 && !(a->flags & NPY_ARRAY_C_CONTIGUOUS)) return NULL;
  }
  if (library) {
    found->same = found->arrays == 2 && arrays[0]->at == arrays[1]->at;
    if (!read_stream(&t->gpu, stream, library, &found->stream)) return NULL;
  } else if (stream != Py_None) {
    return NULL;
  }
  uint64_t mixed = (uint64_t)method >> 4 ^ found->stream ^ (uint64_t)found->same << 60;
  for (const argument_t *a = found->arguments; a < found->arguments + count; a++)
    mixed = mixed_with(mixed, a);
  return t->entries + (mixed >> 52) % ENTRIES;
}

static repeated_t *table_of(PyObject *self) { return PyCapsule_GetPointer(self, "blinkmpi.repeated_calls"); }

/* (method, arguments, stream): True if the call was found and made; False if it is not known here; else (bound, number,
 * status): it was begun, and this is how far it came. A fourth argument, True, says that the caller keeps operands on a GPU
 * until the work on them is through. */
static PyObject *repeat_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n < 3 || n > 4 || !PyTuple_CheckExact(given[1]))
    return PyErr_Format(PyExc_TypeError, "expected a method, a tuple, a stream, and whether operands are kept");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[1]); i++) {
    PyObject *const one = PyTuple_GET_ITEM(given[1], i);
    if (!PyList_CheckExact(one) && !PyTuple_Check(one)) continue;
    return repeat_group(&t->groups, &t->gpu, t->array, &t->seq, given, &t->open, t->open_gpu != 0);
  }
  found_t found;
  const argument_t *arrays[MOST_ARRAYS];
  const int open = t->open == OPEN;
  entry_t *const e = open || t->open_gpu ? place_of(t, given[0], given[1], given[2], &found, arrays) : NULL;
  if (!e || !same_call(&e->by, &found) || !(e->launch ? t->open_gpu : open)) Py_RETURN_FALSE;
  if (e->launch) {
    PyObject *const operands = n == 4 && given[3] == Py_True ? NULL : given[1];
    return launch_again(&t->gpu, &t->seq, e->bound, e->launch, arrays, (int)found.arrays, operands);
  }
  call_t *const call = e->call;
  int64_t *const rows = e->rows;
  PyObject *const bound = Py_NewRef(e->bound); /* the entry may go while it runs */
  const uint64_t seq = ++t->seq;
  const int brief = is_brief(call);
  int state = brief ? run_briefly(call, rows, seq) : EXPIRED;
  if (state == EXPIRED) {
    t->open = INSIDE;
    Py_BEGIN_ALLOW_THREADS
    state = brief ? resume(call, rows) : blink_run(call, rows, seq);
    Py_END_ALLOW_THREADS
    if (t->open == INSIDE) t->open = OPEN; /* not, if it was shut meanwhile */
  }
  if (state == DONE) {
    Py_DECREF(bound);
    Py_RETURN_TRUE;
  }
  return Py_BuildValue("(NKi)", bound, (unsigned long long)seq, state);
}

static void drop(entry_t *e) {
  entry_t old = *e;
  *e = (entry_t){0};
  if (!old.by.method) return;
  for (int64_t i = 0; i < old.by.count; i++) Py_DECREF(old.by.arguments[i].object);
  Py_DECREF(old.by.method);
  Py_DECREF(old.bound);
}

static void put(entry_t *e, entry_t made) {
  for (int64_t i = 0; i < made.by.count; i++) Py_INCREF(made.by.arguments[i].object);
  Py_INCREF(made.by.method);
  Py_INCREF(made.bound);
  drop(e);
  *e = made;
}

/* (bound, address of its call_t, address of its rows, method, arguments): a call to be found again. */
static PyObject *keep_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 5 || !PyTuple_CheckExact(given[4])) return PyErr_Format(PyExc_TypeError, "expected five arguments");
  void *const call = PyLong_AsVoidPtr(given[1]), *const rows = PyLong_AsVoidPtr(given[2]);
  if (PyErr_Occurred()) return NULL;
  entry_t made = {.bound = given[0], .call = call, .rows = rows};
  const argument_t *arrays[MOST_ARRAYS];
  entry_t *const e = place_of(t, given[3], given[4], Py_None, &made.by, arrays);
  if (e && !made.by.arrays) put(e, made);
  Py_RETURN_NONE;
}

/* See keep_group_of. */
static PyObject *keep_group(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 6) return PyErr_Format(PyExc_TypeError, "expected six arguments");
  if (!keep_group_of(&t->groups, &t->gpu, t->array, given)) return NULL;
  Py_RETURN_NONE;
}

/* (bound, address of its launch_t, method, arguments, stream): a call on a stream to be found again; whether it will be. */
static PyObject *keep_launch(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 5 || !PyTuple_CheckExact(given[3])) return PyErr_Format(PyExc_TypeError, "expected five arguments");
  launch_t *const launch = PyLong_AsVoidPtr(given[1]);
  if (PyErr_Occurred()) return NULL;
  entry_t made = {.bound = given[0], .launch = launch};
  const argument_t *arrays[MOST_ARRAYS];
  learn_stream(&t->gpu, given[4]);
  entry_t *const e = place_of(t, given[2], given[3], given[4], &made.by, arrays);
  if (!e || !made.by.arrays || made.by.stream != (uint64_t)launch->stream) Py_RETURN_FALSE;
  for (int64_t i = 0; i < made.by.arrays; i++) launch->base[i] = arrays[i]->at;
  put(e, made);
  Py_RETURN_TRUE;
}

/* What GPU calls need: see set_launches. */
static PyObject *aim_launches(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 11) return PyErr_Format(PyExc_TypeError, "expected eleven arguments");
  if (!set_launches(&t->gpu, given)) return NULL;
  return PyBool_FromLong(t->gpu.exchange != NULL);
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
  for (int i = 0; i < ENTRIES; i++) drop(t->entries + i);
  forget_groups(&t->groups);
  forget_launches(&t->gpu);
  Py_RETURN_NONE;
}

static void free_table(PyObject *self) {
  repeated_t *const t = table_of(self);
  for (int i = 0; t && i < ENTRIES; i++) drop(t->entries + i);
  if (t) forget_groups(&t->groups), PyMem_Free(t->groups.found), free_launches(&t->gpu);
  PyMem_Free(t);
}

static PyMethodDef functions[] = {
  {"repeat_call", (PyCFunction)(void (*)(void))repeat_call, METH_FASTCALL, "Make a call that was made before."},
  {"keep_call", (PyCFunction)(void (*)(void))keep_call, METH_FASTCALL, "Keep a call to be made again."},
  {"keep_group", (PyCFunction)(void (*)(void))keep_group, METH_FASTCALL, "Keep a group of calls to be made again."},
  {"keep_launch", (PyCFunction)(void (*)(void))keep_launch, METH_FASTCALL, "Keep a call on a stream to be made again."},
  {"aim_launches", (PyCFunction)(void (*)(void))aim_launches, METH_FASTCALL, "Say what calls on streams need."},
  {"last_launch", last_launch, METH_NOARGS, "The last call that was launched here."},
  {"forget_calls", forget_calls, METH_NOARGS, "Keep no call."},
};

/* (address of what Python shares, and the functions above, in their order) of a communicator. */
PyObject *blink_repeated_calls(PyObject *array_type) {
  if (!intern_names()) return NULL;
  repeated_t *const t = PyMem_Calloc(1, sizeof *t);
  if (!t) return PyErr_NoMemory();
  t->array = (PyTypeObject *)array_type;
  PyObject *const self = PyCapsule_New(t, "blinkmpi.repeated_calls", free_table);
  if (!self) return PyMem_Free(t), NULL;
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
