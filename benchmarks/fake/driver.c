/* A CUDA driver that launches nothing and remembers what it was given, and torch's way to show tensors, by which tensors
 * in host memory lie on GPU 0. For tests and measurements of what the host does, where there is no GPU. */
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { WORDS = 512, LOG = 64 };

typedef struct {
  uint64_t function, grid, block, stream, words[WORDS];
} launch_t;

typedef struct { /* a launch, a wait of a stream for an event, or a record of one behind a stream */
  uint64_t what, stream, event;
} did_t;

enum { LAUNCHED, WAITED, RECORDED };

launch_t fake_log[LOG];
did_t fake_done[LOG];
int64_t fake_did; /* of these, the last ones are remembered */
int64_t fake_launches, fake_words, fake_error, fake_captured, fake_asked; /* fake_words: to remember of the arguments */
uint64_t fake_only; /* the stream that is captured, if one is; 0: all are */
int64_t fake_event_error, fake_capturing_error; /* of waits and records; of asking whether a stream is captured */
int64_t fake_waits, fake_external, fake_before; /* waits for events, those of graphs; launches before the last one */
int64_t fake_records, fake_behind;              /* records of events; launches before the last one */
uint64_t fake_context = 77, fake_foreign = 1; /* the address of another GPU's memory */
uint64_t fake_current_stream;
uint64_t fake_copies, fake_context_of_last; /* copies on a stream; the context in which the last launch was made */
int64_t fake_gil; /* whether the last launch was made with the GIL held */

static void did(uint64_t what, void *stream, void *event) { fake_done[fake_did++ % LOG] = (did_t){what, (uint64_t)stream, (uint64_t)event}; }

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  launch_t *const l = fake_log + fake_launches++ % LOG;
  (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)extra;
  l->function = (uint64_t)function, l->grid = gx, l->block = bx, l->stream = (uint64_t)stream;
  memcpy(l->words, parameters[0], 8 * (size_t)fake_words);
  did(LAUNCHED, stream, NULL);
  fake_gil = PyGILState_Check(), fake_context_of_last = fake_context;
  return (int)fake_error;
}

int cuCtxGetCurrent(uint64_t *context) { return *context = fake_context, 0; }

int cuCtxSetCurrent(void *context) { return fake_context = (uint64_t)context, 0; }

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  (void)to, (void)from, (void)bytes, (void)stream;
  return fake_copies++, 0;
}

int cuPointerGetAttribute(void *found, int attribute, uint64_t at) {
  fake_asked++;
  *(int *)found = attribute == 2 ? 2 : at == fake_foreign;
  return 0;
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  did(WAITED, stream, event);
  fake_waits++, fake_external += flags & 1, fake_before = fake_launches;
  return (int)fake_event_error;
}

int cuEventRecord(void *event, void *stream) {
  did(RECORDED, stream, event);
  fake_records++, fake_behind = fake_launches;
  return (int)fake_event_error;
}

int cuEventRecordWithFlags(void *event, void *stream, unsigned flags) { return fake_external += flags & 1, cuEventRecord(event, stream); }

int cuStreamIsCapturing(void *stream, int *found) {
  *found = (int)fake_captured && (!fake_only || fake_only == (uint64_t)stream);
  return (int)fake_capturing_error;
}

typedef struct { /* DLPack 1.3 */
  uint32_t major, minor;
  void *before, *allocate, *own, *give;
  int (*show)(void *, int32_t *);
  int (*stream)(int32_t, int32_t, void **);
} exchange_t;

static exchange_t exchange;
static int (*show)(void *, int32_t *);

static int show_on_gpu(void *object, int32_t *tensor) {
  const int status = show(object, tensor);
  tensor[2] = 2, tensor[3] = 0; /* behind the address: the type of the device, and its number */
  return status;
}

static int current(int32_t type, int32_t device, void **stream) { return (void)type, (void)device, *stream = (void *)fake_current_stream, 0; }

/* What shows host tensors as if they lay on GPU 0, from torch's own capsule. */
PyObject *fake_exchange(PyObject *own) {
  const exchange_t *const real = PyCapsule_GetPointer(own, "dlpack_exchange_api");
  if (!real) return NULL;
  exchange = *real, show = real->show, exchange.show = show_on_gpu, exchange.stream = current;
  return PyCapsule_New(&exchange, "dlpack_exchange_api", NULL);
}
