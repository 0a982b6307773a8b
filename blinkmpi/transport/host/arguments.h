/* The arguments of a call, as a user passes them: the key by which a kept call is found, and where its buffers lie.
 *
 * A call is found by its method and by one argument_t for each thing among its arguments, whatever the addresses of its
 * buffers: how a buffer is typed, its length and whether it may be written; numbers by their values; datatypes and
 * operations of MPI by their handles; texts by what they say; lengths in GPU memory by their address; all else is the same
 * object. A list or a tuple comes before its items. Buffers are plain arrays of NumPy's, whatever else shows its memory to Python (memoryview, bytearray,
 * array.array), torch's tensors, and arrays of CuPy's. Anything else is Python's to read. */
#pragma once
#include "device_arrays.h"

enum { MOST_ARGUMENTS = 600, MOST_BUFFERS = 3, MOST_NUMBERS = 144, FORMAT_BYTES = 7 };
enum { MOST_NESTED_NUMBERS = 3 }; /* as in [array, (counts, displacements), type] */
enum { AN_OBJECT = -1, A_LIST = -2, A_TUPLE = -3, A_NUMBER = -4, A_HANDLE = -5, A_MEMORY = -6, A_WRITABLE_MEMORY = -7, AN_ARRAY_OF_NUMBERS = -8 };
/* flags of host arrays are 0 or NPY_ARRAY_WRITEABLE, those of arrays on GPUs, and of tensors, below these */

typedef struct { /* types by which arguments are recognised; references are held */
  PyTypeObject *array, *integer, *datatype, *operation; /* NumPy's array and integers; MPI's */
  PyObject *in_place;                                   /* MPI.IN_PLACE shows a buffer of no bytes */
  int64_t handle;                                       /* bytes of a handle of MPI's */
} types_t;

typedef struct { /* the key of a kept call */
  PyObject *method;
  int64_t count;
  int64_t arrays;                                       /* buffers on a GPU; and the stream that they are on */
  uint64_t stream;
  int64_t apart[MOST_BUFFERS * (MOST_BUFFERS - 1) / 2]; /* how each two buffers lie to each other */
  argument_t arguments[MOST_ARGUMENTS];
} call_key_t;

typedef struct { /* a buffer in host memory */
  char *at;
  int64_t nbytes;
  const PyObject *object;
} buffer_t;

typedef struct { /* the arguments of a call, read */
  call_key_t key;
  const argument_t *arrays[MOST_BUFFERS]; /* those of `key` that are on a GPU, */
  int library;                            /* and the library that they come from */
  buffer_t buffers[MOST_BUFFERS];         /* those in host memory */
  int64_t held;
  int64_t buffered;
  Py_buffer views[MOST_BUFFERS];          /* views of some buffers, held until `let_go` */
} arguments_t;

static void let_go(arguments_t *r) {
  while (r->held) PyBuffer_Release(r->views + --r->held);
}

/* Add a word to the key; 0 if the key is full. */
static int found_by(arguments_t *r, argument_t a) {
  if (r->key.count == MOST_ARGUMENTS) return 0;
  r->key.arguments[r->key.count++] = a;
  return 1;
}

static int found_by_buffer(arguments_t *r, PyObject *object, void *at, int64_t nbytes, argument_t a) {
  if (r->buffered == MOST_BUFFERS) return 0;
  r->buffers[r->buffered++] = (buffer_t){at, nbytes, object};
  return found_by(r, a);
}

static int64_t item_bytes(PyArrayObject *array) {
#if NPY_ABI_VERSION >= 0x02000000
  return ((_PyArray_DescrNumPy2 *)PyArray_DESCR(array))->elsize;
#else
  return PyArray_DESCR(array)->elsize;
#endif
}

static int64_t elements_of(PyArrayObject *array) {
  int64_t elements = 1;
  for (int i = 0; i < PyArray_NDIM(array); i++) elements *= PyArray_DIM(array, i);
  return elements;
}

static int read_numpy(arguments_t *r, PyArrayObject *array) {
  const int flags = PyArray_FLAGS(array);
  const int64_t elements = elements_of(array);
  if (!(flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS))) return 0;
  const argument_t a = {(PyObject *)PyArray_DESCR(array), NULL, elements, flags & NPY_ARRAY_WRITEABLE, 0, 0};
  return found_by_buffer(r, (PyObject *)array, PyArray_BYTES(array), elements * item_bytes(array), a);
}

/* A memoryview, a bytearray, or another object with the buffer protocol: its format is a part of the key. */
static int read_memory(arguments_t *r, PyObject *object) {
  if (r->held == MOST_BUFFERS) return 0;
  Py_buffer *const view = r->views + r->held;
  if (PyObject_GetBuffer(object, view, PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT)) return PyErr_Clear(), 0;
  r->held++;
  const char *const format = view->format ? view->format : "B";
  const size_t letters = strlen(format);
  int64_t region = 0;
  if (letters > FORMAT_BYTES) return 0;
  memcpy(&region, format, letters);
  const argument_t a = {NULL, NULL, view->len, view->readonly ? A_MEMORY : A_WRITABLE_MEMORY, region, 0};
  return found_by_buffer(r, object, view->buf, view->len, a);
}

static int read_number(arguments_t *r, PyObject *number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return !overflow && found_by(r, (argument_t){NULL, NULL, value, A_NUMBER, 0, 0});
}

/* An integer of NumPy's. */
static int read_scalar(arguments_t *r, PyObject *scalar) {
  PyObject *const number = PyNumber_Index(scalar);
  const int read = number && read_number(r, number);
  Py_XDECREF(number);
  if (!number) PyErr_Clear();
  return read;
}

/* A datatype or an operation of MPI's: mpi4py's objects have the handle in front. */
static int read_handle(arguments_t *r, const types_t *types, PyObject *object) {
  int64_t handle = 0;
  memcpy(&handle, (const char *)object + sizeof(PyObject), (size_t)types->handle);
  return found_by(r, (argument_t){(PyObject *)Py_TYPE(object), NULL, handle, A_HANDLE, 0, 0});
}

/* The counts or displacements of a buffer's blocks, or a number, as an array of NumPy's. */
static int read_numbers(arguments_t *r, PyArrayObject *array) {
  const int64_t n = elements_of(array), item = item_bytes(array);
  const char kind = PyArray_DESCR(array)->kind;
  if ((kind != 'i' && kind != 'u') || item < 4 || PyArray_NDIM(array) > 1 || n > MOST_NUMBERS) return 0;
  if (!(PyArray_FLAGS(array) & NPY_ARRAY_ALIGNED) || !PyArray_ISNBO(PyArray_DESCR(array)->byteorder)) return 0;
  const int64_t stride = PyArray_NDIM(array) ? PyArray_STRIDE(array, 0) : 0;
  if (PyArray_NDIM(array) && !found_by(r, (argument_t){NULL, NULL, n, AN_ARRAY_OF_NUMBERS, 0, 0})) return 0;
  for (int64_t i = 0; i < n; i++) {
    const char *const at = PyArray_BYTES(array) + i * stride;
    const int64_t value = item == 8 ? *(const int64_t *)at : kind == 'i' ? (int64_t)*(const int32_t *)at : (int64_t)*(const uint32_t *)at;
    if ((kind == 'u' && value < 0) || !found_by(r, (argument_t){NULL, NULL, value, A_NUMBER, 0, 0})) return 0;
  }
  return 1;
}

/* One argument, or an item of one: of a list or a tuple that names a buffer, the first item is the buffer itself. */
static int read_one(arguments_t *r, const types_t *types, const gpu_t *gpu, PyObject *object, int is_buffer, int nested) {
  PyTypeObject *const type = Py_TYPE(object);
  if (type == types->array) return is_buffer ? read_numpy(r, (PyArrayObject *)object) : read_numbers(r, (PyArrayObject *)object);
  if (object == Py_None || object == types->in_place) return found_by(r, (argument_t){object, NULL, 0, AN_OBJECT, 0, 0});
  if (type == &PyLong_Type) return read_number(r, object);
  if (type == types->datatype || type == types->operation) return read_handle(r, types, object);
  const int list = type == &PyList_Type;
  if (list || type == &PyTuple_Type) {
    const Py_ssize_t n = list ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
    if (nested == MOST_NESTED_NUMBERS || n > MOST_NUMBERS || !found_by(r, (argument_t){NULL, NULL, n, list ? A_LIST : A_TUPLE, 0, 0})) return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
      if (i >= (list ? PyList_GET_SIZE(object) : n)) return 0; /* reading the items before may have changed the list */
      PyObject *const one = Py_NewRef(list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i));
      const int read = read_one(r, types, gpu, one, is_buffer && !i, nested + 1);
      Py_DECREF(one);
      if (!read) return 0;
    }
    return 1;
  }
  argument_t a = {NULL}; /* what cannot be read leaves it so */
  int kind = read_array(gpu, object, &a);
  if (kind < 0 && nested && is_buffer && a.object && !a.elements) kind = a.flags <= -TENSORS ? OF_TORCH : OF_CUPY; /* of empty blocks */
  if (kind > ON_HOST && kind == r->library && !is_buffer && nested) { /* lengths in GPU memory, where they are */
    a.data = (char *)a.at, a.at = 0;
    return found_by(r, a);
  }
  if (kind && !is_buffer) return 0;
  if (kind < 0 || (kind > ON_HOST && ((r->library && kind != r->library) || r->key.arrays == MOST_BUFFERS))) return 0;
  if (kind == TENSOR_ON_HOST) {
    const uint64_t at = a.at;
    a.at = 0;
    return found_by_buffer(r, object, (void *)at, a.elements, a);
  }
  if (kind != ON_HOST) {
    r->library = kind;
    r->arrays[r->key.arrays++] = r->key.arguments + r->key.count;
    return found_by(r, a);
  }
  if (PyUnicode_CheckExact(object)) {
    PyObject *text = Py_NewRef(object);
    PyUnicode_InternInPlace(&text);
    const int read = found_by(r, (argument_t){text, NULL, 0, AN_OBJECT, 0, 0});
    Py_DECREF(text);
    return read;
  }
  if (PyObject_TypeCheck(object, types->integer)) return read_scalar(r, object);
  if (type->tp_as_buffer && type->tp_as_buffer->bf_getbuffer) return is_buffer && read_memory(r, object);
  return found_by(r, (argument_t){object, NULL, 0, AN_OBJECT, 0, 0});
}

/* How two buffers lie to each other: 0 if they have no byte in common and are not the same object. */
static int64_t apart(const buffer_t *a, const buffer_t *b) {
  const int64_t to = b->at - a->at;
  const int overlap = a->nbytes && b->nbytes && to < a->nbytes && -to < b->nbytes;
  return overlap ? to * 4 + 2 + (a->object == b->object) : a->object == b->object;
}

/* Whether no two buffers have a byte in common, and none is the same object as another. */
static int all_apart(const call_key_t *key) {
  for (size_t i = 0; i < sizeof key->apart / sizeof *key->apart; i++)
    if (key->apart[i]) return 0;
  return 1;
}

/* Which arguments of a method are buffers, a bit each: the last item of its tuple (collectives.py). */
static int64_t buffers_of(PyObject *method) {
  const Py_ssize_t n = PyTuple_Check(method) ? PyTuple_GET_SIZE(method) : 0;
  PyObject *const last = n ? PyTuple_GET_ITEM(method, n - 1) : NULL;
  return last && PyLong_CheckExact(last) ? PyLong_AsLongLong(last) : 0;
}

/* Read the arguments of a call, which are a tuple. Returns 0 if they are Python's to read; then there is nothing to let go. */
static int read_arguments(arguments_t *r, const types_t *types, const gpu_t *gpu, PyObject *method, PyObject *arguments, PyObject *stream) {
  call_key_t *const key = &r->key;
  const Py_ssize_t n = PyTuple_GET_SIZE(arguments);
  const int64_t buffers = buffers_of(method);
  int read = 1;
  key->method = method, key->count = key->arrays = 0, key->stream = 0;
  r->library = ON_HOST, r->held = r->buffered = 0;
  for (Py_ssize_t i = 0; read && i < n; i++) read = read_one(r, types, gpu, PyTuple_GET_ITEM(arguments, i), buffers >> i & 1, 0);
  if (read && r->library) read = !r->buffered && read_stream(gpu, stream, r->library, &key->stream);
  else if (stream != Py_None) read = 0;
  if (!read) return let_go(r), 0;
  int64_t *to = key->apart;
  for (int64_t i = 0; i < MOST_BUFFERS; i++)
    for (int64_t j = i + 1; j < MOST_BUFFERS; j++) *to++ = j < r->buffered ? apart(r->buffers + i, r->buffers + j) : 0;
  if (key->arrays == 2) key->apart[0] = r->arrays[0]->at == r->arrays[1]->at && r->arrays[0]->elements && r->arrays[1]->elements;
  return 1;
}

static int same_call(const call_key_t *a, const call_key_t *b) {
  if (a->method != b->method || a->count != b->count || a->arrays != b->arrays || a->stream != b->stream) return 0;
  if (memcmp(a->apart, b->apart, sizeof a->apart)) return 0;
  for (int64_t i = 0; i < a->count; i++)
    if (!alike(a->arguments + i, b->arguments + i)) return 0;
  return 1;
}

static uint64_t hash_of(const call_key_t *key) {
  uint64_t mixed = (uint64_t)key->method >> 4 ^ key->stream;
  for (size_t i = 0; i < sizeof key->apart / sizeof *key->apart; i++) mixed = (mixed ^ (uint64_t)key->apart[i]) * 0x9E3779B97F4A7C15u;
  for (const argument_t *a = key->arguments; a < key->arguments + key->count; a++) mixed = mixed_with(mixed, a);
  return mixed ^ mixed >> 32;
}
