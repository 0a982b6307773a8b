/* Groups of calls that were made before, looked up and made without Python: what repeated_calls.h does with single calls.
 * On host memory they are run one behind the other; on a stream there is one launch.
 *
 * A group is found by its method, its stream, and by all that its arguments are, however they lie in tuples and lists:
 * what `argument_of` or `read_array` says of each, and the length of each tuple or list before its items. To read an array
 * of CuPy's takes long, and what is read never changes: so a group that was found by the addresses of such arrays has a
 * second entry, by the very objects, of which it keeps weak references. */
#pragma once
#include "launches.h"

enum { KEPT_FLAGS = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE };
enum { SHUT, OPEN, INSIDE }; /* whether calls may be made; INSIDE: a thread makes one, without the interpreter's lock */
enum { GROUPS = 512, MOST_NESTED = 4, THE_OBJECT = -3 /* flags of an argument that is an array of CuPy's itself */ };

typedef struct { /* of a call: blink_run's arguments */
  call_t *call;
  int64_t *rows;
} begun_t;

typedef struct {
  argument_t *by; /* its objects are kept; NULL: no group here */
  Py_ssize_t count;
  PyObject *bound, *calls; /* kept: who goes on with it, and its begun_t as bytes */
  launch_t *launch;        /* instead of the calls */
} group_t;

typedef struct {
  argument_t *found; /* what the group that is looked up is found by */
  Py_ssize_t count, room;
  int library; /* whose arrays on a GPU are among it */
  int objects; /* whether these are found by the very objects, whose groups have places of their own */
  group_t groups[2][GROUPS];
} groups_t;

static argument_t argument_of(PyTypeObject *arrays, PyObject *object) {
  if (Py_TYPE(object) != arrays) return (argument_t){object, NULL, 0, -1, 0, 0};
  PyArrayObject *const array = (PyArrayObject *)object;
  int64_t elements = 1;
  for (int i = 0; i < PyArray_NDIM(array); i++) elements *= PyArray_DIM(array, i);
  return (argument_t){(PyObject *)PyArray_DESCR(array), PyArray_BYTES(array), elements, PyArray_FLAGS(array) & KEPT_FLAGS, 0, 0};
}

static int same_argument(const argument_t *kept, const argument_t *a) {
  if (kept->flags != THE_OBJECT || a->flags != THE_OBJECT) return alike(kept, a) && kept->at == a->at;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *now = NULL;
  PyWeakref_GetRef(kept->object, &now);
  Py_XDECREF(now);
#else
  PyObject *const now = PyWeakref_GET_OBJECT(kept->object);
#endif
  return now == a->object;
}

/* Append what an object is found by, an array of CuPy's itself if `unread`; 0 if it is Python's to read. */
static int append(groups_t *g, const gpu_t *gpu, PyTypeObject *arrays, PyObject *object, int unread, int nested) {
  argument_t a = {object, NULL, 0, THE_OBJECT, 0, 0};
  const int list = PyList_CheckExact(object), nest = list || PyTuple_Check(object);
  const int itself = unread && (PyObject *)Py_TYPE(object) == gpu->cupy;
  g->objects |= itself;
  const int kind = nest ? ON_HOST : itself ? OF_CUPY : read_array(gpu, object, &a); /* which may let other threads run */
  if (g->count == g->room) {
    const Py_ssize_t room = 2 * g->room + 64;
    argument_t *const more = PyMem_Realloc(g->found, (size_t)room * sizeof *more);
    if (!more) return 0;
    g->found = more, g->room = room;
  }
  if (!nest) {
    if (kind < 0 || kind == TENSOR_ON_HOST || (kind && g->library && kind != g->library)) return 0;
    if (kind) g->library = kind;
    else a = argument_of(arrays, object);
    g->found[g->count++] = a;
    return a.flags < 0 || a.flags & NPY_ARRAY_C_CONTIGUOUS;
  }
  const Py_ssize_t n = list ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
  g->found[g->count++] = (argument_t){NULL, NULL, n, list, 0, 0};
  if (nested == MOST_NESTED) return 0;
  for (Py_ssize_t i = 0; i < n; i++)
    if (!append(g, gpu, arrays, list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i), unread, nested + 1)) return 0;
  return 1;
}

/* The place of a group, NULL if it is not one to be kept; what it is found by is in `found`. */
static group_t *group_place(groups_t *g, const gpu_t *gpu, PyTypeObject *arrays, PyObject *const *given, int unread) {
  PyObject *const method = given[0], *const arguments = given[1], *const stream = given[2];
  uint64_t on = 0;
  g->count = g->library = g->objects = 0;
  if (!append(g, gpu, arrays, method, unread, 0) || !append(g, gpu, arrays, arguments, unread, 0)) return NULL;
  if (g->library ? is_awaited(gpu, stream) || !read_stream(gpu, stream, g->library, &on) : stream != Py_None) return NULL;
  g->found[0].at = on;
  uint64_t mixed = 0;
  for (const argument_t *a = g->found; a < g->found + g->count; a++) mixed = mixed_with(mixed ^ a->at << 8, a);
  return g->groups[g->objects] + (mixed >> 52) % GROUPS;
}

/* What a launch is given, as it is now: the user may put other arrays into a list. */
static PyObject *as_it_is(PyObject *arguments) {
  PyObject *const now = PyTuple_New(PyTuple_GET_SIZE(arguments));
  for (Py_ssize_t i = 0; now && i < PyTuple_GET_SIZE(arguments); i++) {
    PyObject *const one = PyTuple_GET_ITEM(arguments, i), *const kept = PyList_CheckExact(one) ? PyList_AsTuple(one) : Py_NewRef(one);
    if (!kept) return Py_DECREF(now), NULL;
    PyTuple_SET_ITEM(now, i, kept);
  }
  return now;
}

static void drop_group(group_t *e) {
  const group_t old = *e;
  *e = (group_t){0};
  for (Py_ssize_t i = 0; i < old.count; i++) Py_XDECREF(old.by[i].object);
  PyMem_Free(old.by);
  Py_XDECREF(old.bound);
  Py_XDECREF(old.calls);
}

/* Put a group at a place, by what is in `found`. Returns 0 if that raises. */
static int put_group(const groups_t *g, group_t *e, PyObject *bound, PyObject *calls, launch_t *launch) {
  group_t made = {PyMem_Malloc((size_t)g->count * sizeof *made.by), g->count, Py_NewRef(bound), Py_NewRef(calls), launch};
  if (!made.by) return Py_DECREF(bound), Py_DECREF(calls), PyErr_NoMemory(), 0;
  memcpy(made.by, g->found, (size_t)g->count * sizeof *made.by);
  for (argument_t *a = made.by; a < made.by + made.count; a++)
    a->object = PyErr_Occurred() ? NULL : a->flags == THE_OBJECT ? PyWeakref_NewRef(a->object, NULL) : Py_XNewRef(a->object);
  if (PyErr_Occurred()) return drop_group(&made), 0;
  drop_group(e);
  *e = made;
  return 1;
}

/* The entry of a group; NULL if there is none. */
static group_t *known_group(groups_t *g, const gpu_t *gpu, PyTypeObject *arrays, PyObject *const *given, int unread) {
  group_t *const e = group_place(g, gpu, arrays, given, unread);
  if (!e || e->count != g->count) return NULL;
  for (Py_ssize_t i = 0; i < g->count; i++)
    if (!same_argument(e->by + i, g->found + i)) return NULL;
  return e;
}

/* Whether all arrays that were read are this GPU's. */
static int are_here(const groups_t *g, gpu_t *gpu, const launch_t *launch) {
  for (const argument_t *a = g->found + 1; a < g->found + g->count; a++)
    if (a->at && !a->region && !is_here(gpu, launch, a->at)) return 0;
  return 1;
}

/* Put a group on its stream. */
static PyObject *launch_group(gpu_t *gpu, uint64_t *numbers, const group_t *e, PyObject *arguments) {
  const launch_t *const launch = e->launch;
  PyObject *const bound = Py_NewRef(e->bound), *const now = as_it_is(arguments);
  PyObject *const made = now ? launch_again(gpu, numbers, bound, launch, NULL, 0, now, 0) : NULL;
  Py_XDECREF(now);
  Py_DECREF(bound);
  return made;
}

/* Make a group again, if it is known: as repeat_call; the status is that of the call which could not be ended, and above
 * its 8 bits are how many were made before it. */
static PyObject *repeat_group(groups_t *g, gpu_t *gpu, PyTypeObject *arrays, uint64_t *numbers, PyObject *const *given, int64_t *state_of_calls, int open_gpu) {
  const int open = *state_of_calls == OPEN;
  if (!open && !open_gpu) Py_RETURN_FALSE;
  group_t *e = known_group(g, gpu, arrays, given, 1);
  const int unread = !e && g->library == OF_CUPY; /* by their objects; now by what they are */
  if (unread) e = known_group(g, gpu, arrays, given, 0);
  if (!e || !(e->launch ? open_gpu : open) || (e->launch && !are_here(g, gpu, e->launch))) Py_RETURN_FALSE;
  if (unread) {
    group_t *const by_objects = group_place(g, gpu, arrays, given, 1);
    if (by_objects && put_group(g, by_objects, e->bound, e->calls, e->launch)) e = by_objects;
    else PyErr_Clear(); /* a kind of arrays that has no weak references is read each time */
  }
  if (e->launch) return launch_group(gpu, numbers, e, given[1]);
  PyObject *const bound = Py_NewRef(e->bound), *const calls = Py_NewRef(e->calls); /* the entry may go while it runs */
  const begun_t *const all = (const begun_t *)PyBytes_AS_STRING(calls);
  const Py_ssize_t n = PyBytes_GET_SIZE(calls) / (Py_ssize_t)sizeof *all;
  Py_ssize_t made = 0;
  int state = DONE;
  *state_of_calls = INSIDE;
  Py_BEGIN_ALLOW_THREADS
  while (made < n && (state = blink_run(all[made].call, all[made].rows, ++*numbers)) == DONE) made++;
  Py_END_ALLOW_THREADS
  if (*state_of_calls == INSIDE) *state_of_calls = OPEN;
  Py_DECREF(calls);
  if (state != DONE) return Py_BuildValue("(NKn)", bound, (unsigned long long)*numbers, made << 8 | state);
  Py_DECREF(bound);
  Py_RETURN_TRUE;
}

static void forget_groups(groups_t *g) {
  for (int i = 0; i < GROUPS; i++) drop_group(g->groups[0] + i), drop_group(g->groups[1] + i);
}

/* (bound, the begun_t of its calls as bytes, the address of a launch_t instead or 0, method, arguments, stream): a group to
 * be found again. */
static int keep_group_of(groups_t *g, gpu_t *gpu, PyTypeObject *arrays, PyObject *const *given) {
  launch_t *const launch = PyLong_AsVoidPtr(given[2]);
  if (PyErr_Occurred()) return 0;
  if (!PyBytes_CheckExact(given[1]) || PyBytes_GET_SIZE(given[1]) % (Py_ssize_t)sizeof(begun_t)) {
    PyErr_SetString(PyExc_TypeError, "expected pairs of addresses as bytes");
    return 0;
  }
  learn_stream(gpu, given[5]);
  group_t *const e = group_place(g, gpu, arrays, given + 3, 0);
  if (!e || !launch != !g->library || (launch && g->found[0].at != (uint64_t)launch->stream)) return 1;
  return put_group(g, e, given[0], given[1], launch);
}
