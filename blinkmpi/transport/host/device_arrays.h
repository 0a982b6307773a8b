/* Read arrays on a GPU, and streams, as users pass them, without our Python code; launches.h launches calls on them. */
#pragma once
#include "objects.h"

enum { HOST_MEMORY = 1, CUDA_MEMORY = 2, COMPLEX = 5, FLOAT = 2 }; /* of DLPack: types of devices, codes of types */
enum { STREAM_TYPES = 4, ASKED = 1024 };
enum { CUPY_ARRAYS = 16, TENSORS = 1 << 24 }; /* flags of arguments begin below minus these */
enum { ON_HOST, OF_CUPY, OF_TORCH, TENSOR_ON_HOST }; /* kinds of arguments; the first is no array that is read here */

typedef struct { /* DLPack 1, DLTensor */
  char *data;
  int32_t device_type, device, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} tensor_t;

typedef struct { /* DLPack 1.3, DLPackExchangeAPI */
  uint32_t major, minor;
  void *before, *allocate, *own, *give;
  int (*show)(void *object, tensor_t *out);
  int (*stream)(int32_t device_type, int32_t device, void **out);
} exchange_t;

typedef struct {
  uint64_t begin, end;
  int64_t region;
} registered_t;

typedef struct { /* what the GPU calls of a communicator have in common; objects are kept */
  PyObject *cupy, *cupy_stream;  /* CuPy's array type, and what gives its current stream */
  PyObject *tensors[2];          /* torch's types */
  PyObject *capsule;             /* owns `exchange` */
  const exchange_t *exchange;    /* how a tensor is read */
  PyObject *is_neg;              /* torch's Tensor.is_neg: to look it up for each tensor of a group takes long; or None */
  PyObject *acquire, *release;   /* methods of the lock that all launches of the process take */
  PyObject *holders;             /* the list of what keeps the stream of the last one */
  PyObject *operands;            /* keeps operands until the work on them is through */
  int64_t enqueues, device;      /* whether calls without a stream return before they are through */
  PyObject *parts_bytes;
  const registered_t *parts;     /* registered regions */
  int64_t registered;
  struct { PyObject *type, *name; } streams[STREAM_TYPES]; /* types of streams, and what they call their address */
  uint64_t asked[ASKED];         /* addresses that the driver has said are this GPU's */
  PyObject *bound;               /* the last call that was launched here, and its number */
  uint64_t seq;
} gpu_t;

static PyObject *text_of[13];
enum { C_CONTIGUOUS, DATA, PTR, NBYTES, DTYPE, IS_NEG, CUDA_STREAM, NEWEST, KEEP, PENDING_CALL, FIT, FOLLOW, HOLDER };

static int intern_names(void) {
  static const char *const names[] = {"_c_contiguous", "data", "ptr", "nbytes", "dtype", "is_neg", "cuda_stream", "newest", "keep", "pending", "fit", "follow", "holder"};
  for (int i = 0; i < 13; i++)
    if (!text_of[i] && !(text_of[i] = PyUnicode_InternFromString(names[i]))) return 0;
  return 1;
}

/* A number that an object gives under a name; 0, and nothing raised, if it gives none, or an object that is no int. */
static int number_of(PyObject *object, PyObject *name, uint64_t *found) {
  PyObject *const value = PyObject_GetAttr(object, name);
  const int is_int = value && PyLong_CheckExact(value);
  *found = is_int ? PyLong_AsUnsignedLongLong(value) : 0;
  Py_XDECREF(value);
  if (!PyErr_Occurred()) return is_int;
  PyErr_Clear();
  return 0;
}

/* ---- arrays and streams */

typedef struct { /* an argument: an array, or another object */
  PyObject *object; /* the array's element type, a tensor's type, or the object; kept */
  char *data;       /* of an array on the host */
  int64_t elements; /* on a GPU: bytes */
  int64_t flags;    /* -1 for another object; less for an array on a GPU */
  int64_t region;   /* where an array on a GPU is registered, 0 if it is not; -1: in part */
  uint64_t at;      /* its address, in which calls may differ */
} argument_t;

static int alike(const argument_t *a, const argument_t *b) {
  return a->object == b->object && a->data == b->data && a->elements == b->elements && a->flags == b->flags && a->region == b->region;
}

static uint64_t mixed_with(uint64_t mixed, const argument_t *a) {
  return (mixed ^ (uint64_t)a->data ^ (uint64_t)a->object >> 4 ^ (uint64_t)a->elements << 32 ^ (uint64_t)a->region << 20) * 0x9E3779B97F4A7C15u;
}

static int64_t region_of(const gpu_t *g, uint64_t at, uint64_t nbytes) {
  int64_t found = 0;
  for (int64_t i = 0; i < g->registered; i++) {
    const registered_t *const p = g->parts + i;
    if (p->begin <= at && at + nbytes <= p->end) return p->region;
    if (at < p->end && p->begin < at + nbytes) found = -1;
  }
  return found;
}

/* A torch tensor that lies on this GPU, or on the host, with the values that it shows, one behind another: its kind; else
 * ON_HOST. */
static int read_tensor(const gpu_t *g, PyObject *object, argument_t *a) {
  tensor_t t;
  if (!g->exchange) return ON_HOST;
  if (g->exchange->show(object, &t)) return PyErr_Clear(), ON_HOST;
  const int host = t.device_type == HOST_MEMORY;
  if (t.code == COMPLEX || (!host && (t.device_type != CUDA_MEMORY || t.device != g->device))) return ON_HOST;
  int64_t elements = 1;
  for (int i = t.dims; i--; elements *= t.shape[i])
    if (t.shape[i] != 1 && t.strides && t.strides[i] != elements) return ON_HOST;
  if (t.code == FLOAT && g->is_neg != Py_None) { /* it may show the negatives of what it holds, as imaginary parts of conjugates do */
    PyObject *const negative = PyObject_CallOneArg(g->is_neg, object);
    Py_XDECREF(negative);
    if (!negative) PyErr_Clear();
    if (negative != Py_False) return ON_HOST;
  }
  *a = (argument_t){(PyObject *)Py_TYPE(object), NULL, elements * t.bits * t.lanes / 8, -(TENSORS + (t.lanes << 16 | t.bits << 8 | t.code)),
                    0, (uint64_t)t.data + t.byte_offset};
  return host ? TENSOR_ON_HOST : OF_TORCH;
}

static int read_cupy(PyObject *object, argument_t *a) {
  uint64_t nbytes = 0, at = 0;
  PyObject *const dense = PyObject_GetAttr(object, text_of[C_CONTIGUOUS]);
  PyObject *const data = dense == Py_True ? PyObject_GetAttr(object, text_of[DATA]) : NULL;
  PyObject *const dtype = data ? PyObject_GetAttr(object, text_of[DTYPE]) : NULL;
  const int read = dtype && number_of(data, text_of[PTR], &at) && number_of(object, text_of[NBYTES], &nbytes);
  *a = (argument_t){dtype, NULL, (int64_t)nbytes, -CUPY_ARRAYS, 0, at};
  Py_XDECREF(dense);
  Py_XDECREF(data);
  Py_XDECREF(dtype); /* which NumPy keeps, or else it is compared with what an entry keeps, and never used */
  if (PyErr_Occurred()) PyErr_Clear();
  return read;
}

/* Read an object that may be a tensor, or an array on this GPU: its kind, or -1 for one that is Python's to read. */
static int read_array(const gpu_t *g, PyObject *object, argument_t *a) {
  PyObject *const type = (PyObject *)Py_TYPE(object);
  int kind = ON_HOST;
  if (type == g->cupy) kind = read_cupy(object, a) ? OF_CUPY : -1;
  else if (type == g->tensors[0] || type == g->tensors[1]) kind = (kind = read_tensor(g, object, a)) ? kind : -1;
  if (kind <= ON_HOST || kind == TENSOR_ON_HOST) return kind;
  a->region = region_of(g, a->at, (uint64_t)a->elements);
  return a->elements && a->region >= 0 ? kind : -1;
}

/* The address of the stream that a call is told, or of the current one of its arrays' library; 0 if it is Python's to find. */
static int read_stream(const gpu_t *g, PyObject *stream, int kind, uint64_t *found) {
  if (PyLong_CheckExact(stream)) {
    *found = PyLong_AsUnsignedLongLong(stream);
    return PyErr_Occurred() ? PyErr_Clear(), 0 : 1;
  }
  if (stream != Py_None) {
    for (int i = 0; i < STREAM_TYPES; i++)
      if (g->streams[i].type == (PyObject *)Py_TYPE(stream)) return number_of(stream, g->streams[i].name, found);
    return 0;
  }
  if (kind == OF_TORCH) {
    void *current = NULL;
    if (g->exchange->stream(CUDA_MEMORY, (int32_t)g->device, &current)) return PyErr_Clear(), 0;
    *found = (uint64_t)current;
    return 1;
  }
  PyObject *const current = PyObject_CallNoArgs(g->cupy_stream);
  const int read = current && number_of(current, text_of[PTR], found);
  Py_XDECREF(current);
  PyErr_Clear();
  return read;
}

/* Know what streams of this type call their address, in the order in which cuda/buffers.py asks them. */
static void learn_stream(gpu_t *g, PyObject *stream) {
  PyObject *const type = (PyObject *)Py_TYPE(stream);
  uint64_t ignored;
  if (stream == Py_None || PyLong_CheckExact(stream)) return;
  for (int i = 0; i < STREAM_TYPES; i++) {
    if (g->streams[i].type == type) return;
    if (g->streams[i].type) continue;
    PyObject *const name = number_of(stream, text_of[PTR], &ignored)           ? text_of[PTR]
                           : number_of(stream, text_of[CUDA_STREAM], &ignored) ? text_of[CUDA_STREAM]
                                                                               : NULL;
    if (name) g->streams[i].type = Py_NewRef(type), g->streams[i].name = name;
    return;
  }
}
