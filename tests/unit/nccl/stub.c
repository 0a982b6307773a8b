/* NCCL as far as programs of the tests call it: each function twice, ncclX weak and pncclX strong, and Bcast calls Broadcast by
 * its weak name, as NCCL's own library has it. A call moves nothing; it is counted, and one of 13 elements is an error. */
#include <stddef.h>
#include <stdlib.h>

typedef struct { int ranks, rank; } *comm_t;
enum { INVALID_ARGUMENT = 4 };

static int calls;
int stub_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

#define TWICE(name, types, ...)                                       \
  int pnccl##name types { __VA_ARGS__ }                               \
  __attribute__((weak, alias("pnccl" #name))) int nccl##name types;

#define TAKE __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); (void)comm; return count == 13 ? INVALID_ARGUMENT : 0;

TWICE(GetVersion, (int *version), *version = 22809; return 0;)
TWICE(CommCount, (comm_t comm, int *count), *count = comm->ranks; return 0;)
TWICE(CommUserRank, (comm_t comm, int *rank), *rank = comm->rank; return 0;)
TWICE(CommDestroy, (comm_t comm), free(comm); return 0;)
TWICE(CommAbort, (comm_t comm), free(comm); return 0;)
TWICE(GroupStart, (void), return 0;)
TWICE(GroupEnd, (void), return 0;)
TWICE(AllReduce, (const void *s, void *r, size_t count, int type, int op, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)stream; TAKE)
TWICE(AllGather, (const void *s, void *r, size_t count, int type, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)stream; TAKE)
TWICE(ReduceScatter, (const void *s, void *r, size_t count, int type, int op, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)stream; TAKE)
TWICE(Broadcast, (const void *s, void *r, size_t count, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)root, (void)stream; TAKE)
TWICE(Bcast, (void *b, size_t count, int type, int root, comm_t comm, void *stream), return ncclBroadcast(b, b, count, type, root, comm, stream);)
TWICE(Reduce, (const void *s, void *r, size_t count, int type, int op, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)root, (void)stream; TAKE)
TWICE(AlltoAll, (const void *s, void *r, size_t count, int type, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)stream; TAKE)
TWICE(Gather, (const void *s, void *r, size_t count, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)root, (void)stream; TAKE)
TWICE(Scatter, (const void *s, void *r, size_t count, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)root, (void)stream; TAKE)
TWICE(Send, (const void *s, size_t count, int type, int peer, comm_t comm, void *stream), (void)s, (void)type, (void)peer, (void)stream; TAKE)
TWICE(Recv, (void *r, size_t count, int type, int peer, comm_t comm, void *stream), (void)r, (void)type, (void)peer, (void)stream; TAKE)

int stub_comm(comm_t *made, int ranks, int rank) {
  *made = malloc(sizeof **made);
  (*made)->ranks = ranks, (*made)->rank = rank;
  return 0;
}
