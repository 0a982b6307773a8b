/* Calls on GPU memory that were put on a stream before: the arrays are read, the kernel's arguments aimed at them, the
 * call announced and its kernel launched, all without Python. repeated_calls.h finds them.
 *
 * Whatever is not plain here (an address that is not this GPU's, a stream that is captured, a peer that is late, another
 * thread in the middle of a launch) is seen before anything has changed, and is Python's to do or to refuse. */
#pragma once
#include "device_arrays.h"
#include "fingerprints.h"

enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, OF_DEVICE = 2 }; /* of CUDA: pointer attributes, a value of the first */
enum { PER_THREAD = 2, IMPLICIT = 906 }; /* each thread's default stream; an error: the default stream, while another is captured */
enum { MOST_ARRAYS = 2, MOST_PARTS = 4, MOST_WORDS = 512, MOST_RANKS = 16, GATE_THREADS = 32 };
#define MASK 0xFFFFFFFFu
#define SPREAD 0x9E3779B1u

/* The order of all calls of the process (transport/cuda/order.py); who changes it holds the lock of all launches. */
typedef struct {
  void *event;     /* stands for the last call, where it was recorded behind that; NULL before the first that needs it */
  int64_t chained; /* whether every call waits for it and records it, as what is captured does */
  int64_t stands;  /* whether it was recorded behind the last call */
  int64_t made;    /* whether there was a call outside of graphs */
  uint64_t stream; /* of the last one */
} order_t;

/* A call: its kernels, what they were aimed at, and what is announced. Every field has 8 bytes.
 * Python reads this structure here (c_structs.py). */
typedef struct {
  /* the driver */
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  int (*current)(void **);                  /* cuCtxGetCurrent */
  int (*attribute)(void *, int, uint64_t);  /* cuPointerGetAttribute */
  int (*capturing)(void *, int *);          /* cuStreamIsCapturing */
  int (*wait)(void *, void *, unsigned);    /* cuStreamWaitEvent */
  int (*record)(void *, void *);            /* cuEventRecord */
  void *context;
  int64_t device;
  /* the kernels */
  void *stream;
  order_t *order;
  int64_t asks; /* whether a captured stream is always Python's: to begin a chain, or as graphs may name what is read */
  int64_t parts;
  int64_t first, end; /* those that are the call's own; others copy what a group gathers, and scatter what it got */
  void *gate; /* what is launched before them, on the arguments of the first, for calls of so many bytes; NULL: nothing */
  int64_t gate_from;
  void *function[MOST_PARTS];
  int64_t grid[MOST_PARTS], block[MOST_PARTS];
  uint64_t *words[MOST_PARTS]; /* the arguments, for arrays at `base` */
  int64_t count[MOST_PARTS];
  int64_t fingerprint_at; /* the argument with the fingerprint, to which a number is added */
  uint64_t base[MOST_ARRAYS];
  int64_t *moves; /* (part, word, array) for each argument that is an address in an array */
  int64_t moving;
  int64_t nbytes;
  /* the announcement */
  int64_t n, rank, stride; /* as in call_t */
  flag_t *calls, *records[2];
  uint64_t fingerprint;
  char *body;
  int64_t body_bytes;
  uint64_t *in_kernels;
  /* what is counted and looked at */
  int64_t *report;   /* from kernels: the second word is not 0 if one has aborted */
  uint64_t *history; /* of the communicator's calls */
  int64_t *starts;   /* of such calls; whether anybody will look at that again; bytes of calls of blocks */
  int64_t *kernels;
  /* of calls that differ in their counts: the count that the kernel is fit to, 0 if it is to none; the least and the greatest;
   * bytes of each array for each of the count, 0 in the first where the count is always the same, and of the call; the
   * fingerprints without the count, of the announcement and of the kernel */
  int64_t elements, least, most, each[MOST_ARRAYS], each_bytes;
  uint64_t form, kernel_form;
  int64_t of_blocks;           /* whether it is a call of blocks */
  struct block_launch *blocks; /* of such of whatever lengths */
} launch_t;

/* ---- calls of other counts */

/* How many bytes the arrays have for each of the count, which the kernel is fit to; 0 if that is no number. */
static int learn_elements(launch_t *l, const argument_t *const *arrays, int n) {
  for (int i = 0; i < n; i++) {
    if (arrays[i]->elements % l->elements) return 0;
    l->each[i] = arrays[i]->elements / l->elements;
  }
  return 1;
}

/* Fit the kernel to arrays, unless it is; 0 if they are of no such call, if Python does not want that, or if it raises. */
static int fit_launch(launch_t *l, PyObject *bound, const argument_t *const *arrays, int n) {
  const int64_t count = arrays[0]->elements / l->each[0];
  if (count < l->least || count > l->most) return 0;
  for (int i = 0; i < n; i++)
    if (arrays[i]->elements != count * l->each[i]) return 0;
  if (count == l->elements) return 1;
  const int64_t before = l->elements;
  l->elements = 0; /* until all of it is done */
  PyObject *const number = PyLong_FromLongLong(count);
  PyObject *const done = number ? PyObject_CallMethodOneArg(bound, text_of[FIT], number) : NULL;
  Py_XDECREF(number);
  Py_XDECREF(done);
  if (done == Py_False) l->elements = before;
  if (done != Py_True) return 0;
  const uint64_t said = with_count(l->kernel_form, count) & MASK;
  l->words[l->first][l->fingerprint_at] = said ? said : 1;
  l->fingerprint = with_count(l->form, count);
  write_count(l->body, l->body_bytes, count);
  l->nbytes = count * l->each_bytes;
  l->elements = count;
  return 1;
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
  if (l->in_kernels[~seq & 1] != seq - 1 || (int64_t)l->in_kernels[seq & 1] >= read) return 1;
  for (int64_t r = 0; r < l->n; r++) {
    flag_t *const line = l->calls + r * l->stride;
    if ((int64_t)get(line + ENTERED) <= read && (int64_t)get(line + FINISHED) < read) return 0;
  }
  return 1;
}

static void announce(const launch_t *l, uint64_t seq) {
  flag_t *const record = l->records[seq & 1] + l->rank * l->stride, *const line = l->calls + l->rank * l->stride;
  l->in_kernels[seq & 1] = seq;
  if (get(record) != l->fingerprint) {
    set(record + 1, (uint64_t)l->body_bytes);
    memcpy((char *)(record + 2), l->body, (size_t)l->body_bytes);
    set(record, l->fingerprint);
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
    if (arrays[i]->elements && !arrays[i]->region && !is_here(g, l, arrays[i]->at)) return 0;
  return (!l->asks && !l->order->chained) || (!l->capturing(l->stream, &captured) && !captured);
}

/* Let a call's stream wait for the last call, which was on another one; 0 if that is Python's to do or to refuse. */
static int wait_for_last(const launch_t *l) {
  order_t *const o = l->order;
  int captured = 0;
  if (o->chained) return 1; /* every call waits as it is launched */
  if (!o->event || l->capturing(l->stream, &captured) || captured) return 0;
  if (!o->made) return 1;
  if (!o->stands) {
    const int code = l->capturing((void *)o->stream, &captured);
    if (code == IMPLICIT || (!code && captured)) return 1; /* in a graph there is no last call to wait for */
    if (code || l->record(o->event, (void *)o->stream)) return 0;
    o->stands = 1;
  }
  return !l->wait(l->stream, o->event, 0);
}

/* Be the last call, on another stream than the one before, whose stream is kept no longer. Returns 0 if that raises. */
static int be_last(const gpu_t *g, PyObject *bound, const launch_t *l) {
  PyObject *const holder = PyObject_GetAttr(bound, text_of[HOLDER]);
  if (!holder) return 0;
  l->order->made = 1, l->order->stream = (uint64_t)l->stream;
  if (PyList_GET_SIZE(g->holders)) return !PyList_SetItem(g->holders, 0, holder);
  const int failed = PyList_Append(g->holders, holder);
  Py_DECREF(holder);
  return !failed;
}

/* Take the lock of all launches, if nobody has it; where the last one was on another stream, let this one's follow it, and
 * `records` then says that the event is to be recorded behind the call. Returns 0 without the lock, which an interrupt may
 * have raised; then it is still there. */
static int take_order(const gpu_t *g, PyObject *bound, const launch_t *l, int *records) {
  PyObject *const got = PyObject_CallOneArg(g->acquire, Py_False);
  Py_XDECREF(got);
  if (got != Py_True) return PyErr_Clear(), 0;
  order_t *const o = l->order;
  const uint64_t stream = (uint64_t)l->stream;
  *records = o->chained || !o->made || o->stream != stream || stream == PER_THREAD;
  if (!*records) {
    int captured = 0; /* may_launch has seen that it is not, of a call that asks */
    if (l->asks || (!l->capturing(l->stream, &captured) && !captured)) o->stands = 0;
    return 1;
  }
  PyObject *done = NULL;
  if (wait_for_last(l)) {
    o->stands = 0;
    if ((o->made && o->stream == stream) || be_last(g, bound, l)) return 1;
  } else {
    *records = o->chained; /* Python has done what there is to do; what is captured is not recorded */
    done = PyObject_CallMethodNoArgs(bound, text_of[FOLLOW]);
    Py_XDECREF(done);
    if (done) return 1;
  }
  if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(); /* Python meets it again, and says so */
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  Py_XDECREF(PyObject_CallNoArgs(g->release));
  PyErr_Restore(type, value, traceback);
  return 0;
}

/* Announce a call and put its kernels on the stream, with the arguments moved to the arrays, and `records` the event behind them;
 * returns CUDA's error, or 0. */
static int launch(const launch_t *l, uint64_t seq, const argument_t *const *arrays, int records) {
  uint64_t words[MOST_PARTS][MOST_WORDS];
  order_t *const order = l->order;
  int error = 0;
  *l->history = ((*l->history ^ l->fingerprint) * SPREAD + seq) & MASK;
  announce(l, seq);
  for (int64_t p = 0; p < l->parts; p++) {
    memcpy(words[p], l->words[p], 8 * (size_t)l->count[p]);
    if (p >= l->first && p < l->end) words[p][l->fingerprint_at] = (words[p][l->fingerprint_at] + *l->history) & MASK;
  }
  for (const int64_t *m = l->moves, *end = m + 3 * l->moving; m < end; m += 3)
    words[m[0]][m[1]] += arrays[m[2]]->at - l->base[m[2]];
  *l->kernels += l->end - l->first;
  l->starts[0]++;
  if (l->of_blocks) l->starts[2] += l->nbytes;
  Py_BEGIN_ALLOW_THREADS /* the queue of launches may be full */
  if (order->chained) error = l->wait(l->stream, order->event, 0);
  for (int64_t p = 0; p < l->parts && !error; p++) {
    void *parameters[] = {words[p]};
    if (l->gate && p == l->first && l->nbytes >= l->gate_from)
      error = l->launch(l->gate, 1, 1, 1, GATE_THREADS, 1, 1, 0, l->stream, parameters, NULL);
    if (!error) error = l->launch(l->function[p], (unsigned)l->grid[p], 1, 1, (unsigned)l->block[p], 1, 1, 0, l->stream, parameters, NULL);
  }
  if (records && !error) order->stands = !(error = l->record(order->event, l->stream));
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

/* Whether a call that is told this stream is waited for. */
static int is_awaited(const gpu_t *g, PyObject *stream) { return stream == Py_None && !g->enqueues; }

/* Make a call again: True; False if it is Python's to make; else (bound, number, error), of a launch that failed, or that is to
 * be `awaited` and has not. The operands to be kept are NULL where the caller keeps them. */
static PyObject *launch_again(gpu_t *g, uint64_t *numbers, PyObject *bound, const launch_t *l, const argument_t *const *arrays, int n,
                              PyObject *operands, int awaited) {
  if (!may_launch(g, l, *numbers + 1, arrays, n)) Py_RETURN_FALSE;
  int records = 0;
  if (!take_order(g, bound, l, &records)) {
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_FALSE;
  }
  const uint64_t seq = ++*numbers, stream = (uint64_t)l->stream;
  const int64_t nbytes = l->nbytes;
  Py_INCREF(bound); /* keeps l alive: the entry may be dropped meanwhile */
  PyObject *const before = g->bound;
  g->bound = Py_NewRef(bound), g->seq = seq;
  Py_XDECREF(before);
  const int error = launch(l, seq, arrays, records);
  Py_XDECREF(PyObject_CallNoArgs(g->release));
  if (error || (awaited && !PyErr_Occurred())) return Py_BuildValue("(NKi)", bound, (unsigned long long)seq, error);
  Py_DECREF(bound);
  if (PyErr_Occurred() || (operands && !keep_operands(g, operands, nbytes, stream))) return NULL;
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
  PyObject **const kept[] = {&g->cupy, &g->cupy_stream, g->tensors, g->tensors + 1, &g->capsule, &g->is_neg, &g->acquire, &g->release, &g->holders, &g->operands};
  for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_CLEAR(*kept[i]);
}

/* Keep objects in place of others. */
static void keep_instead(PyObject **const *kept, PyObject *const *values, size_t n) {
  for (size_t i = 0; i < n; i++) {
    PyObject *const old = *kept[i];
    *kept[i] = Py_NewRef(values[i]);
    Py_XDECREF(old);
  }
}

/* Torch's tensor types, and the capsule of their exchange or None: how tensors are read. Returns 0 if that raises. */
static int learn_tensors(gpu_t *g, PyObject *types, PyObject *capsule) {
  const exchange_t *exchange = NULL;
  if (!PyTuple_CheckExact(types)) return PyErr_SetString(PyExc_TypeError, "expected a tuple of types"), 0;
  if (capsule != Py_None && !(exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))) return 0;
  if (exchange && (exchange->major != 1 || !exchange->show || !exchange->stream)) exchange = NULL;
  PyObject *const first = PyTuple_GET_SIZE(types) > 0 ? PyTuple_GET_ITEM(types, 0) : Py_None;
  PyObject *const second = PyTuple_GET_SIZE(types) > 1 ? PyTuple_GET_ITEM(types, 1) : Py_None;
  const int asks = exchange && !PyCapsule_GetContext(capsule); /* torch_extension.cpp has one, and refuses negatives */
  PyObject *const is_neg = asks ? PyObject_GetAttr(first, text_of[IS_NEG]) : Py_NewRef(Py_None);
  if (!is_neg) return 0;
  PyObject **const kept[] = {g->tensors, g->tensors + 1, &g->capsule, &g->is_neg};
  PyObject *const values[] = {first, second, capsule, is_neg};
  keep_instead(kept, values, sizeof kept / sizeof *kept);
  Py_DECREF(is_neg);
  g->exchange = exchange;
  return 1;
}

/* (CuPy's array type, its function of the current stream, torch's tensor types, the capsule of their exchange; acquire and
 * release of the lock; the list of what keeps the last stream; the keeper of operands; whether calls are enqueued; the device; what is
 * registered, as bytes): what GPU calls need, for each None if there is none. */
static int set_launches(gpu_t *g, PyObject *const *given) {
  if (!PyList_CheckExact(given[6]) || !PyBytes_CheckExact(given[10])) {
    PyErr_SetString(PyExc_TypeError, "expected a list, and bytes");
    return 0;
  }
  const long long enqueues = PyLong_AsLongLong(given[8]), device = PyLong_AsLongLong(given[9]);
  if (PyErr_Occurred() || !learn_tensors(g, given[2], given[3])) return 0;
  PyObject **const kept[] = {&g->cupy, &g->cupy_stream, &g->acquire, &g->release, &g->holders, &g->operands, &g->parts_bytes};
  PyObject *const values[] = {given[0], given[1], given[4], given[5], given[6], given[7], given[10]};
  keep_instead(kept, values, sizeof kept / sizeof *kept);
  g->enqueues = enqueues, g->device = device;
  g->parts = (const registered_t *)PyBytes_AS_STRING(g->parts_bytes);
  g->registered = PyBytes_GET_SIZE(g->parts_bytes) / (Py_ssize_t)sizeof(registered_t);
  return 1;
}
