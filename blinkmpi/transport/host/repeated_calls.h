/* Calls that were made before, found and made again without Python; and all that Python has done here (see `functions`). */
#pragma once
#include "kept_calls.h"
#include "kinds.h"
#include "pending_calls.h"

const int64_t blink_python = PY_VERSION_HEX >> 16; /* whose structures this was compiled for */
const int64_t blink_sizes[] = {sizeof(launch_t), sizeof(kind_t), sizeof(count_kind_t), sizeof(block_launch_t)};

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
  if (!e && (r.key.arrays ? t->open_gpu && !timeout_ns : t->open == OPEN)) e = kind_of(t, &r, 0);
  if (PyErr_Occurred()) return let_go(&r), NULL;
  PyObject *made = Py_False;
  if (e && e->launch && t->open_gpu && !timeout_ns) {
    const int awaited = is_awaited(&t->gpu, given[2]), kept = awaited || (n >= 4 && given[3] == Py_True);
    made = launch_again(&t->gpu, &t->seq, e->bound, e->launch, r.arrays, (int)r.key.arrays, kept ? NULL : given[1], awaited);
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

/* (bound, address of its launch_t, method, arguments, stream, whether of whatever counts): a call on a stream to be found again,
 * one of blocks with whatever lengths; whether it will be. */
static PyObject *keep_launch(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 6 || !PyTuple_CheckExact(given[3])) return PyErr_Format(PyExc_TypeError, "expected six arguments");
  launch_t *const launch = PyLong_AsVoidPtr(given[1]);
  if (PyErr_Occurred()) return NULL;
  arguments_t r;
  learn_stream(&t->gpu, given[4]);
  if (!read_arguments(&r, &t->types, &t->gpu, given[2], given[3], given[4])) Py_RETURN_FALSE;
  call_key_t key;
  const int counts = given[5] == Py_True, kind = counts || launch->blocks;
  int known = r.key.arrays && r.key.arrays <= MOST_ARRAYS && r.key.stream == (uint64_t)launch->stream;
  for (int64_t i = 0; known && i < r.key.arrays; i++) launch->base[i] = r.arrays[i]->at;
  known = known && (!kind || key_of_kind(&r.key, &key, 0));
  known = known && (!counts || learn_elements(launch, r.arrays, (int)r.key.arrays));
  known = known && (!launch->blocks || fits_as_python(launch, &r, &t->types));
  known = known && put(t, kind ? &key : &r.key, (entry_t){.bound = given[0], .launch = launch});
  t->kinds += known && kind;
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
