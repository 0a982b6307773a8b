/* Calls on GPU memory that were put on a stream before: the arrays are read, the kernel's arguments aimed at them, the
 * call announced and its kernel launched, all without Python. repeated_calls.h finds them.
 *
 * Whatever is not plain here (an address that is not this GPU's, a stream that is captured, a peer that is late, another
 * thread in the middle of a launch) is seen before anything has changed, and is Python's to do or to refuse. */

enum { CUDA_MEMORY = 2, COMPLEX = 5, FLOAT = 2 };       /* of DLPack: a type of devices, codes of types */
enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, OF_DEVICE = 2 }; /* of CUDA: pointer attributes, a value of the first */
enum { MOST_ARRAYS = 2, MOST_PARTS = 4, MOST_WORDS = 512, STREAM_TYPES = 4, ASKED = 1024 };
enum { ON_HOST, OF_CUPY, OF_TORCH };
#define MASK 0xFFFFFFFFu
#define SPREAD 0x9E3779B1u

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

/* A call: its kernels, what they were aimed at, and what is announced. Every field has 8 bytes. launches.py mirrors it:
 * LAUNCH_FIELDS below are compared with its list when the library is loaded. */
typedef struct {
  /* the driver */
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  int (*current)(void **);                  /* cuCtxGetCurrent */
  int (*attribute)(void *, int, uint64_t);  /* cuPointerGetAttribute */
  int (*capturing)(void *, int *);          /* cuStreamIsCapturing */
  void *context;
  int64_t device;
  /* the kernels */
  void *stream;
  int64_t asks; /* whether a captured stream is Python's: graphs may name what the kernel reads */
  int64_t parts;
  int64_t first, end; /* those that are the call's own; others copy what a group gathers, and scatter what it got */
  void *function[MOST_PARTS];
  int64_t grid[MOST_PARTS], block[MOST_PARTS];
  uint64_t *words[MOST_PARTS]; /* the arguments, for arrays at `base` */
  int64_t count[MOST_PARTS];
  int64_t print_at; /* the word of the fingerprint, to which a number is added */
  uint64_t base[MOST_ARRAYS];
  int64_t *moves; /* of each word that moves with an array: part, word, array */
  int64_t moving;
  int64_t nbytes;
  /* the announcement */
  int64_t n, rank, stride; /* as in call_t */
  flag_t *calls, *prints[2];
  uint64_t print;
  char *body;
  int64_t body_bytes;
  uint64_t *elsewhere;
  /* what is counted and looked at */
  int64_t *report;   /* of kernels: the second word is not 0 if one gave up */
  uint64_t *history; /* of the communicator's calls */
  int64_t *starts;   /* of such calls; whether anybody will look at that again */
  int64_t *kernels;
} launch_t;

#define LAUNCH_FIELDS(X) X(launch) X(current) X(attribute) X(capturing) X(context) X(device) X(stream) X(asks) X(parts) X(first) X(end) \
  X(function[0]) X(function[1]) X(function[2]) X(function[3]) X(grid[0]) X(grid[1]) X(grid[2]) X(grid[3]) \
  X(block[0]) X(block[1]) X(block[2]) X(block[3]) X(words[0]) X(words[1]) X(words[2]) X(words[3]) \
  X(count[0]) X(count[1]) X(count[2]) X(count[3]) \
  X(print_at) X(base[0]) X(base[1]) X(moves) X(moving) X(nbytes) X(n) X(rank) X(stride) X(calls) X(prints[0]) X(prints[1]) \
  X(print) X(body) X(body_bytes) X(elsewhere) X(report) X(history) X(starts) X(kernels)
#define LAUNCH_OFFSET(field) offsetof(launch_t, field),
const char blink_launch_fields[] = LAUNCH_FIELDS(NAME);
const int64_t blink_launch_offsets[] = {LAUNCH_FIELDS(LAUNCH_OFFSET) sizeof(launch_t)};

typedef struct {
  uint64_t begin, end;
  int64_t region;
} registered_t;

typedef struct { /* what the GPU calls of a communicator have in common; objects are kept */
  PyObject *cupy, *cupy_stream;  /* CuPy's array type, and what gives its current stream */
  PyObject *tensors[2];          /* torch's types */
  PyObject *capsule;             /* of `exchange` */
  const exchange_t *exchange;    /* how a tensor is read */
  PyCFunction is_neg;            /* Tensor.is_neg itself, NULL if it is no C function that takes nothing */
  PyObject *acquire, *release;   /* of the lock that all launches of the process take */
  PyObject *last;                /* the list of the stream of the last one */
  PyObject *operands;            /* keeps operands until the work on them is through */
  int64_t enqueues, device;      /* whether calls without a stream go on the current one */
  PyObject *parts_bytes;
  const registered_t *parts;     /* what is registered of arrays */
  int64_t registered;
  struct { PyObject *type, *name; } streams[STREAM_TYPES]; /* types of streams, and what they call their address */
  uint64_t asked[ASKED];         /* addresses that the driver has said are this GPU's */
  PyObject *bound;               /* the last call that was launched here, and its number */
  uint64_t seq;
} gpu_t;

static PyObject *text_of[9];
enum { C_CONTIGUOUS, DATA, PTR, NBYTES, DTYPE, IS_NEG, CUDA_STREAM, NEWEST, KEEP };

static int intern_names(void) {
  static const char *const names[] = {"_c_contiguous", "data", "ptr", "nbytes", "dtype", "is_neg", "cuda_stream", "newest", "keep"};
  for (int i = 0; i < 9; i++)
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

static int64_t region_of(const gpu_t *g, uint64_t at, uint64_t nbytes) {
  int64_t found = 0;
  for (int64_t i = 0; i < g->registered; i++) {
    const registered_t *const p = g->parts + i;
    if (p->begin <= at && at + nbytes <= p->end) return p->region;
    if (at < p->end && p->begin < at + nbytes) found = -1;
  }
  return found;
}

/* A torch tensor that lies on this GPU with the values that it shows, one behind another; else 0. */
static int read_tensor(const gpu_t *g, PyObject *object, argument_t *a) {
  tensor_t t;
  if (!g->exchange) return 0;
  if (g->exchange->show(object, &t)) return PyErr_Clear(), 0;
  if (t.device_type != CUDA_MEMORY || t.device != g->device || t.code == COMPLEX) return 0;
  int64_t elements = 1;
  for (int i = t.dims; i--; elements *= t.shape[i])
    if (t.shape[i] != 1 && t.strides && t.strides[i] != elements) return 0;
  if (t.code == FLOAT) { /* it may show the negatives of what it holds, as imaginary parts of conjugates do */
    PyObject *const negative = g->is_neg ? g->is_neg(object, NULL) : PyObject_CallMethodNoArgs(object, text_of[IS_NEG]);
    Py_XDECREF(negative);
    if (!negative) PyErr_Clear();
    if (negative != Py_False) return 0;
  }
  *a = (argument_t){(PyObject *)Py_TYPE(object), NULL, elements * t.bits * t.lanes / 8, -2 - (t.lanes << 16 | t.bits << 8 | t.code),
                    0, (uint64_t)t.data + t.byte_offset};
  return 1;
}

static int read_cupy(PyObject *object, argument_t *a) {
  uint64_t nbytes = 0, at = 0;
  PyObject *const dense = PyObject_GetAttr(object, text_of[C_CONTIGUOUS]);
  PyObject *const data = dense == Py_True ? PyObject_GetAttr(object, text_of[DATA]) : NULL;
  PyObject *const dtype = data ? PyObject_GetAttr(object, text_of[DTYPE]) : NULL;
  const int read = dtype && number_of(data, text_of[PTR], &at) && number_of(object, text_of[NBYTES], &nbytes);
  *a = (argument_t){dtype, NULL, (int64_t)nbytes, -2, 0, at};
  Py_XDECREF(dense);
  Py_XDECREF(data);
  Py_XDECREF(dtype); /* which NumPy keeps, or else it is compared with what an entry keeps, and never used */
  if (PyErr_Occurred()) PyErr_Clear();
  return read;
}

/* Read an object that may be an array on this GPU: its kind, or -1 for one that is Python's to read. */
static int read_array(const gpu_t *g, PyObject *object, argument_t *a) {
  PyObject *const type = (PyObject *)Py_TYPE(object);
  int kind = ON_HOST;
  if (type == g->cupy) kind = read_cupy(object, a) ? OF_CUPY : -1;
  else if (type == g->tensors[0] || type == g->tensors[1]) kind = read_tensor(g, object, a) ? OF_TORCH : -1;
  if (kind <= ON_HOST) return kind;
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
  if (!g->enqueues) return 0;
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

/* ---- a call */

/* Whether the driver says that an address is this GPU's; it is asked once for each. */
static int is_here(gpu_t *g, const launch_t *l, uint64_t at) {
  uint64_t *const asked = g->asked + (at * 0x9E3779B97F4A7C15u >> 54) % ASKED;
  unsigned type = 0;
  int device = -1;
  if (*asked == at) return 1;
  if (l->attribute(&type, MEMORY_TYPE, at) || type != OF_DEVICE) return 0;
  if (l->attribute(&device, DEVICE_ORDINAL, at) || device != l->device) return 0;
  *asked = at;
  return 1;
}

/* Whether all ranks have read this rank's record of call seq - 2: see own_records.py. */
static int have_read(const launch_t *l, uint64_t seq) {
  const int64_t read = (int64_t)seq - 2;
  if (l->elsewhere[~seq & 1] != seq - 1 || (int64_t)l->elsewhere[seq & 1] >= read) return 1;
  for (int64_t r = 0; r < l->n; r++) {
    flag_t *const line = l->calls + r * l->stride;
    if ((int64_t)get(line + ENTERED) <= read && (int64_t)get(line + FINISHED) < read) return 0;
  }
  return 1;
}

static void announce(const launch_t *l, uint64_t seq) {
  flag_t *const record = l->prints[seq & 1] + l->rank * l->stride, *const line = l->calls + l->rank * l->stride;
  l->elsewhere[seq & 1] = seq;
  if (get(record) != l->print) {
    set(record + 1, (uint64_t)l->body_bytes);
    memcpy((char *)(record + 2), l->body, (size_t)l->body_bytes);
    set(record, l->print);
  }
  set(line + ENTERED, seq);
  set(line + FINISHED, seq);
}

/* Whether a call of arrays at these addresses can be launched here and now. */
static int may_launch(gpu_t *g, const launch_t *l, uint64_t seq, const argument_t *const *arrays, int n) {
  void *context = NULL;
  int captured = 0;
  if (l->report[1] || !l->starts[1] || l->current(&context) || context != l->context || !have_read(l, seq)) return 0;
  if (n == 2 && arrays[1]->at - arrays[0]->at != l->base[1] - l->base[0] &&
      arrays[0]->at < arrays[1]->at + (uint64_t)arrays[1]->elements && arrays[1]->at < arrays[0]->at + (uint64_t)arrays[0]->elements)
    return 0; /* they overlap, and not as those for which Python has allowed it, if it has */
  for (int i = 0; i < n; i++)
    if (!arrays[i]->region && !is_here(g, l, arrays[i]->at)) return 0;
  return !l->asks || (!l->capturing(l->stream, &captured) && !captured);
}

/* Take the lock of all launches, if nobody has it and the last one was on this stream. */
static int take_order(const gpu_t *g, const launch_t *l) {
  PyObject *const got = PyObject_CallOneArg(g->acquire, Py_False);
  Py_XDECREF(got);
  if (got != Py_True) return PyErr_Clear(), 0;
  if (PyList_GET_SIZE(g->last) && PyLong_CheckExact(PyList_GET_ITEM(g->last, 0)) &&
      PyLong_AsUnsignedLongLong(PyList_GET_ITEM(g->last, 0)) == (uint64_t)l->stream)
    return 1;
  PyErr_Clear();
  Py_XDECREF(PyObject_CallNoArgs(g->release));
  return 0;
}

/* Announce a call and put its kernels on the stream, with the arguments moved to the arrays; returns CUDA's error, or 0. */
static int launch(const launch_t *l, uint64_t seq, const argument_t *const *arrays) {
  uint64_t words[MOST_PARTS][MOST_WORDS];
  int error = 0;
  *l->history = ((*l->history ^ l->print) * SPREAD + seq) & MASK;
  announce(l, seq);
  for (int64_t p = 0; p < l->parts; p++) {
    memcpy(words[p], l->words[p], 8 * (size_t)l->count[p]);
    if (p >= l->first && p < l->end) words[p][l->print_at] = (words[p][l->print_at] + *l->history) & MASK;
  }
  for (const int64_t *m = l->moves, *end = m + 3 * l->moving; m < end; m += 3)
    words[m[0]][m[1]] += arrays[m[2]]->at - l->base[m[2]];
  *l->kernels += l->end - l->first;
  l->starts[0]++;
  Py_BEGIN_ALLOW_THREADS /* the queue of launches may be full */
  for (int64_t p = 0; p < l->parts && !error; p++) {
    void *parameters[] = {words[p]};
    error = l->launch(l->function[p], (unsigned)l->grid[p], 1, 1, (unsigned)l->block[p], 1, 1, 0, l->stream, parameters, NULL);
  }
  Py_END_ALLOW_THREADS
  return error;
}

/* Keep the operands until the work on them is through, unless they are those of the call before. Returns 0 if that raises. */
static int keep_operands(const gpu_t *g, PyObject *arguments, int64_t nbytes, uint64_t stream) {
  PyObject *const newest = PyObject_GetAttr(g->operands, text_of[NEWEST]);
  const Py_ssize_t kept = newest && PyList_CheckExact(newest) ? PyList_GET_SIZE(newest) : 0, n = PyTuple_GET_SIZE(arguments);
  PyObject *const before = kept ? PyList_GET_ITEM(newest, kept - 1) : NULL;
  int alike = before && PyTuple_CheckExact(before) && PyTuple_GET_SIZE(before) == n;
  for (Py_ssize_t i = 0; alike && i < n; i++) alike = PyTuple_GET_ITEM(before, i) == PyTuple_GET_ITEM(arguments, i);
  Py_XDECREF(newest);
  if (!newest) return 0;
  if (alike) return 1;
  PyObject *const bytes = PyLong_FromLongLong(nbytes), *const on = PyLong_FromUnsignedLongLong(stream);
  PyObject *const done = bytes && on ? PyObject_CallMethodObjArgs(g->operands, text_of[KEEP], arguments, bytes, on, NULL) : NULL;
  Py_XDECREF(bytes);
  Py_XDECREF(on);
  Py_XDECREF(done);
  return done != NULL;
}

/* Make a call again: True; False if it is Python's to make; else (bound, number, error), of a launch that failed. */
static PyObject *launch_again(gpu_t *g, uint64_t *numbers, PyObject *bound, const launch_t *l, const argument_t *const *arrays, int n,
                              PyObject *arguments) {
  if (!may_launch(g, l, *numbers + 1, arrays, n) || !take_order(g, l)) Py_RETURN_FALSE;
  const uint64_t seq = ++*numbers, stream = (uint64_t)l->stream;
  const int64_t nbytes = l->nbytes;
  Py_INCREF(bound); /* which keeps l; the entry may go meanwhile */
  PyObject *const before = g->bound;
  g->bound = Py_NewRef(bound), g->seq = seq;
  Py_XDECREF(before);
  const int error = launch(l, seq, arrays);
  Py_XDECREF(PyObject_CallNoArgs(g->release));
  if (error) return Py_BuildValue("(NKi)", bound, (unsigned long long)seq, error);
  Py_DECREF(bound);
  if (PyErr_Occurred() || !keep_operands(g, arguments, nbytes, stream)) return NULL;
  Py_RETURN_TRUE;
}

static void forget_launches(gpu_t *g) {
  memset(g->asked, 0, sizeof g->asked);
  g->registered = 0, g->parts = NULL;
  Py_CLEAR(g->parts_bytes);
  Py_CLEAR(g->bound);
}

static void free_launches(gpu_t *g) {
  forget_launches(g);
  for (int i = 0; i < STREAM_TYPES; i++) Py_CLEAR(g->streams[i].type);
  PyObject **const kept[] = {&g->cupy, &g->cupy_stream, g->tensors, g->tensors + 1, &g->capsule, &g->acquire, &g->release, &g->last, &g->operands};
  for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_CLEAR(*kept[i]);
}

/* The C function behind a method without arguments: to look a method up and to call it by Python's rules takes several
 * times as long as torch's short ones, which a group needs of each tensor. NULL if it is another kind of method. */
static PyCFunction function_of(PyObject *type, PyObject *name) {
  PyObject *const found = type == Py_None ? NULL : PyObject_GetAttr(type, name);
  const PyMethodDef *const method = found && Py_IS_TYPE(found, &PyMethodDescr_Type) ? ((PyMethodDescrObject *)found)->d_method : NULL;
  Py_XDECREF(found);
  PyErr_Clear();
  return method && method->ml_flags == METH_NOARGS ? method->ml_meth : NULL;
}

/* (CuPy's array type, its function of the current stream, torch's tensor types, the capsule of their exchange; acquire and
 * release of the lock; the list of the last stream; the keeper of operands; whether calls are enqueued; the device; what is
 * registered, as bytes): what GPU calls need, for each None if there is none. */
static int set_launches(gpu_t *g, PyObject *const *given) {
  PyObject *const types = given[2];
  const exchange_t *exchange = NULL;
  if (!PyTuple_CheckExact(types) || !PyList_CheckExact(given[6]) || !PyBytes_CheckExact(given[10])) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of types, a list, and bytes");
    return 0;
  }
  if (given[3] != Py_None && !(exchange = PyCapsule_GetPointer(given[3], "dlpack_exchange_api"))) return 0;
  if (exchange && (exchange->major != 1 || !exchange->show || !exchange->stream)) exchange = NULL;
  const long long enqueues = PyLong_AsLongLong(given[8]), device = PyLong_AsLongLong(given[9]);
  if (PyErr_Occurred()) return 0;
  PyObject *const first = PyTuple_GET_SIZE(types) > 0 ? PyTuple_GET_ITEM(types, 0) : Py_None;
  PyObject *const second = PyTuple_GET_SIZE(types) > 1 ? PyTuple_GET_ITEM(types, 1) : Py_None;
  PyObject **const kept[] = {&g->cupy, &g->cupy_stream, g->tensors, g->tensors + 1, &g->capsule, &g->acquire, &g->release, &g->last, &g->operands, &g->parts_bytes};
  PyObject *const values[] = {given[0], given[1], first, second, given[3], given[4], given[5], given[6], given[7], given[10]};
  for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
    PyObject *const old = *kept[i];
    *kept[i] = Py_NewRef(values[i]);
    Py_XDECREF(old);
  }
  g->is_neg = function_of(first, text_of[IS_NEG]);
  g->exchange = exchange, g->enqueues = enqueues, g->device = device;
  g->parts = (const registered_t *)PyBytes_AS_STRING(g->parts_bytes);
  g->registered = PyBytes_GET_SIZE(g->parts_bytes) / (Py_ssize_t)sizeof(registered_t);
  return 1;
}
