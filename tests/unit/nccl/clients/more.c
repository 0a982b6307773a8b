/* What nccl-tests calls of NCCL besides the door's stub: memory is the host's, and messages go nowhere. */
#include "../door/stub.h"
#include <stdlib.h>

#define TWICE(name, types, ...)         \
  int pnccl##name types { __VA_ARGS__ } \
  __attribute__((weak, alias("pnccl" #name))) int nccl##name types;

TWICE(MemAlloc, (void **at, size_t n), *at = calloc(1, n); return !*at;)
TWICE(MemFree, (void *at), free(at); return 0;)
TWICE(CommRegister, (comm_t comm, void *at, size_t n, void **handle), (void)comm, (void)n; *handle = at; return 0;)
TWICE(CommDeregister, (comm_t comm, void *handle), (void)comm, (void)handle; return 0;)
TWICE(CommWindowDeregister, (comm_t comm, void *window), (void)comm, (void)window; return 0;)
TWICE(RedOpCreatePreMulSum, (int *op, void *scalar, int type, int where, comm_t comm), (void)scalar, (void)type, (void)where, (void)comm; *op = 9; return 0;)
TWICE(RedOpDestroy, (int op, comm_t comm), (void)op, (void)comm; return 0;)
TWICE(DevCommCreate, (comm_t comm, void *wanted, void *made), (void)comm, (void)wanted, (void)made; return 3;)
TWICE(DevCommDestroy, (comm_t comm, void *made), (void)comm, (void)made; return 3;)
TWICE(Send, (const void *at, size_t n, int type, int peer, comm_t comm, void *stream), (void)at, (void)n, (void)type, (void)peer, (void)comm, (void)stream; return 0;)
TWICE(Recv, (void *at, size_t n, int type, int peer, comm_t comm, void *stream), (void)at, (void)n, (void)type, (void)peer, (void)comm, (void)stream; return 0;)
TWICE(Gather, (const void *s, void *r, size_t n, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)n, (void)type, (void)root, (void)comm, (void)stream; return 0;)
TWICE(Scatter, (const void *s, void *r, size_t n, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)n, (void)type, (void)root, (void)comm, (void)stream; return 0;)
const char *ncclGetErrorString(int code) { return (void)code, "an error of the stub"; }
