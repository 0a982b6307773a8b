/* Calls that were made before, looked up and run without Python: one function object for each communicator.
 *
 * What makes two calls the same is what runtime/call_keys.py says of NumPy arrays: address, type, elements, whether it may
 * be written; other arguments are the same objects. An entry keeps these objects and the types alive, so that no other
 * object can take their place; of the user's arrays it keeps the addresses alone. */
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/ndarraytypes.h>

enum { ENTRIES = 4096, MOST_ARGUMENTS = 6, KEPT_FLAGS = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE };

const int64_t blink_python = PY_VERSION_HEX >> 16; /* whose structures this was compiled for */

typedef struct { /* an argument: an array, or another object */
  PyObject *object; /* the array's type, or the object; kept */
  char *data;
  int64_t elements, flags; /* flags: -1 for another object */
} argument_t;

typedef struct {
  PyObject *method, *bound; /* kept; NULL: none here */
  int64_t count;
  argument_t arguments[MOST_ARGUMENTS];
  call_t *call;
  int64_t *rows;
} entry_t;

typedef struct { /* what Python and this share; repeated.py mirrors its first two fields */
  uint64_t seq;  /* the number of the communicator's last call */
  int64_t open;  /* whether calls may be made here: nothing else is under way, and nothing has gone wrong */
  PyTypeObject *array;
  entry_t entries[ENTRIES];
} repeated_t;

static argument_t argument_of(const repeated_t *t, PyObject *object) {
  if (Py_TYPE(object) != t->array) return (argument_t){object, NULL, 0, -1};
  PyArrayObject *const array = (PyArrayObject *)object;
  int64_t elements = 1;
  for (int i = 0; i < PyArray_NDIM(array); i++) elements *= PyArray_DIM(array, i);
  return (argument_t){(PyObject *)PyArray_DESCR(array), PyArray_BYTES(array), elements, PyArray_FLAGS(array) & KEPT_FLAGS};
}

static int alike(const argument_t *a, const argument_t *b) {
  return a->object == b->object && a->data == b->data && a->elements == b->elements && a->flags == b->flags;
}

/* The place of a call, and what its arguments are; NULL if it has too many, or an array whose elements lie apart. */
static entry_t *place_of(repeated_t *t, PyObject *method, PyObject *arguments, argument_t *found) {
  const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  uint64_t mixed = (uint64_t)method >> 4;
  if (count > MOST_ARGUMENTS) return NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    found[i] = argument_of(t, PyTuple_GET_ITEM(arguments, i));
    if (found[i].flags >= 0 && !(found[i].flags & NPY_ARRAY_C_CONTIGUOUS)) return NULL;
    mixed = (mixed ^ (uint64_t)found[i].data ^ (uint64_t)found[i].object >> 4 ^ (uint64_t)found[i].elements << 32) * 0x9E3779B97F4A7C15u;
  }
  return t->entries + (mixed >> 52) % ENTRIES;
}

static repeated_t *table_of(PyObject *self) { return PyCapsule_GetPointer(self, "blinkmpi.repeated_calls"); }

/* (method, arguments): True if the call was found and made; False if it is not known here; else (bound, number, status):
 * it was begun, and this is how far it came. */
static PyObject *repeat_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 2 || !PyTuple_CheckExact(given[1])) return PyErr_Format(PyExc_TypeError, "expected a method and a tuple");
  argument_t found[MOST_ARGUMENTS];
  entry_t *const e = t->open ? place_of(t, given[0], given[1], found) : NULL;
  if (!e || e->method != given[0] || e->count != PyTuple_GET_SIZE(given[1])) Py_RETURN_FALSE;
  for (int64_t i = 0; i < e->count; i++)
    if (!alike(e->arguments + i, found + i)) Py_RETURN_FALSE;
  call_t *const call = e->call;
  int64_t *const rows = e->rows;
  PyObject *const bound = Py_NewRef(e->bound); /* the entry may go while it runs */
  const uint64_t seq = ++t->seq;
  int state;
  Py_BEGIN_ALLOW_THREADS
  state = blink_run(call, rows, seq);
  Py_END_ALLOW_THREADS
  if (state == DONE) {
    Py_DECREF(bound);
    Py_RETURN_TRUE;
  }
  return Py_BuildValue("(NKi)", bound, (unsigned long long)seq, state);
}

static void drop(entry_t *e) {
  entry_t old = *e;
  *e = (entry_t){0};
  if (!old.method) return;
  for (int64_t i = 0; i < old.count; i++) Py_DECREF(old.arguments[i].object);
  Py_DECREF(old.method);
  Py_DECREF(old.bound);
}

/* (bound, address of its call_t, address of its rows, method, arguments): a call to be found again. */
static PyObject *keep_call(PyObject *self, PyObject *const *given, Py_ssize_t n) {
  repeated_t *const t = table_of(self);
  if (!t || n != 5 || !PyTuple_CheckExact(given[4])) return PyErr_Format(PyExc_TypeError, "expected five arguments");
  void *const call = PyLong_AsVoidPtr(given[1]), *const rows = PyLong_AsVoidPtr(given[2]);
  if (PyErr_Occurred()) return NULL;
  argument_t found[MOST_ARGUMENTS];
  entry_t *const e = place_of(t, given[3], given[4], found);
  if (!e) Py_RETURN_NONE;
  entry_t made = {Py_NewRef(given[3]), Py_NewRef(given[0]), PyTuple_GET_SIZE(given[4]), {{0}}, call, rows};
  for (int64_t i = 0; i < made.count; i++) made.arguments[i] = found[i], Py_INCREF(found[i].object);
  drop(e);
  *e = made;
  Py_RETURN_NONE;
}

static PyObject *forget_calls(PyObject *self, PyObject *none) {
  (void)none;
  repeated_t *const t = table_of(self);
  if (!t) return NULL;
  for (int i = 0; i < ENTRIES; i++) drop(t->entries + i);
  Py_RETURN_NONE;
}

static void free_table(PyObject *self) {
  repeated_t *const t = table_of(self);
  for (int i = 0; t && i < ENTRIES; i++) drop(t->entries + i);
  PyMem_Free(t);
}

static PyMethodDef functions[] = {
  {"repeat_call", (PyCFunction)(void (*)(void))repeat_call, METH_FASTCALL, "Make a call that was made before."},
  {"keep_call", (PyCFunction)(void (*)(void))keep_call, METH_FASTCALL, "Keep a call to be made again."},
  {"forget_calls", forget_calls, METH_NOARGS, "Keep no call."},
};

/* (address of what Python shares, repeat_call, keep_call, forget_calls) of a communicator. */
PyObject *blink_repeated_calls(PyObject *array_type) {
  repeated_t *const t = PyMem_Calloc(1, sizeof *t);
  if (!t) return PyErr_NoMemory();
  t->array = (PyTypeObject *)array_type;
  PyObject *const self = PyCapsule_New(t, "blinkmpi.repeated_calls", free_table);
  if (!self) return PyMem_Free(t), NULL;
  PyObject *const made = Py_BuildValue("(NNNN)", PyLong_FromVoidPtr(t), PyCFunction_New(functions, self),
                                       PyCFunction_New(functions + 1, self), PyCFunction_New(functions + 2, self));
  Py_DECREF(self);
  return made;
}
