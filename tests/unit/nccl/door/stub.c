/* NCCL as far as programs of the tests call it, among processes: init and split wait for all ranks, a call moves nothing and is
 * written down. Each function is there twice, ncclX weak and pncclX strong, and Bcast calls Broadcast by its weak name. */
#include "stub.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_ARGUMENT = 4, MOST = 8, SPLITS = 16, LOG = 1 << 17, WAITING = 32 };

typedef struct { /* of all ranks of a communicator, in a file */
  int arrived, color[SPLITS][MOST], key[SPLITS][MOST];
} shared_t;

struct comm {
  int n, rank, splits, arrivals;
  shared_t *shared;
};

typedef struct { /* a split that waits for the end of its group */
  comm_t parent, *made;
} split_t;

static __thread int depth, inits, splits;
static __thread comm_t init[WAITING];
static __thread split_t split[WAITING];
static struct { char who; int function; size_t count; uint64_t number; } written[LOG];
static int lines;

void stub_write(char who, int function, size_t count, uint64_t number) {
  const int at = __atomic_fetch_add(&lines, 1, __ATOMIC_RELAXED);
  if (at < LOG) written[at].who = who, written[at].function = function, written[at].count = count, written[at].number = number;
}

char stub_last(void) { return lines ? written[lines - 1].who : 0; }

void stub_print(void) {
  for (int i = 0; i < lines && i < LOG; i++)
    printf("%c %d %zu %llu\n", written[i].who, written[i].function, written[i].count, (unsigned long long)written[i].number);
  fflush(stdout);
  lines = 0;
}

static void come(comm_t c) { __atomic_fetch_add(&c->shared->arrived, 1, __ATOMIC_SEQ_CST); }

static void await(comm_t c) {
  const int wanted = ++c->arrivals * c->n;
  while (__atomic_load_n(&c->shared->arrived, __ATOMIC_SEQ_CST) < wanted) usleep(50);
}

static void arrive(comm_t c) { come(c), await(c); }

void stub_barrier(comm_t c) { arrive(c); }

static comm_t new_comm(const char *name, int n, int rank) {
  char path[512];
  comm_t const c = calloc(1, sizeof *c);
  snprintf(path, sizeof path, "%s/%.100s", getenv("STUB_FOLDER"), name);
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (ftruncate(file, sizeof(shared_t))) abort();
  c->n = n, c->rank = rank;
  c->shared = mmap(NULL, sizeof(shared_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return c;
}

static void end_split(const split_t *s) {
  comm_t const p = s->parent;
  char name[128];
  const int which = p->splits++;
  const int *const color = p->shared->color[which], *const key = p->shared->key[which];
  arrive(p);
  int n = 0, rank = 0;
  for (int r = 0; r < p->n; r++) {
    if (color[r] != color[p->rank]) continue;
    n++;
    rank += key[r] < key[p->rank] || (key[r] == key[p->rank] && r < p->rank);
  }
  snprintf(name, sizeof name, "split-%d-%d-%d-%d", p->n, which, color[p->rank], (int)(color[p->rank] < 0 ? p->rank : 0));
  *s->made = color[p->rank] < 0 ? NULL : new_comm(name, n, rank);
}

#define TWICE(name, types, ...)         \
  int pnccl##name types { __VA_ARGS__ } \
  __attribute__((weak, alias("pnccl" #name))) int nccl##name types;

#define TAKE(function)                       \
  if (count == 13) return INVALID_ARGUMENT;  \
  stub_write('N', function, count, 0);       \
  (void)comm;                                \
  return 0;

TWICE(CommInitRank, (comm_t *made, int n, unique_id_t id, int rank),
  if (getenv("STUB_DIES")) raise(SIGKILL);
  if (getenv("STUB_REFUSES")) return INVALID_ARGUMENT;
  *made = new_comm(id.internal, n, rank);
  if (depth) init[inits++] = *made;
  else arrive(*made);
  return 0;)
TWICE(CommInitRankConfig, (comm_t *made, int n, unique_id_t id, int rank, void *config), (void)config; return pncclCommInitRank(made, n, id, rank);)
TWICE(CommInitRankScalable, (comm_t *made, int n, int rank, int ids, unique_id_t *id, void *config),
  (void)config, (void)ids; return pncclCommInitRank(made, n, id[0], rank);)
TWICE(CommSplit, (comm_t comm, int color, int key, comm_t *made, void *config),
  const split_t one = {comm, made};
  (void)config;
  comm->shared->color[comm->splits][comm->rank] = color, comm->shared->key[comm->splits][comm->rank] = key;
  if (depth) split[splits++] = one;
  else end_split(&one);
  return 0;)
TWICE(GetUniqueId, (unique_id_t *id), memset(id, 0, sizeof *id); snprintf(id->internal, 64, "unique-%d", (int)getpid()); return 0;)
TWICE(GetVersion, (int *version), *version = 22809; return 0;)
TWICE(CommCount, (comm_t comm, int *n), *n = comm->n; return 0;)
TWICE(CommUserRank, (comm_t comm, int *rank), *rank = comm->rank; return 0;)
TWICE(CommGetAsyncError, (comm_t comm, int *error), (void)comm; *error = 0; return 0;)
const char *pncclGetLastError(comm_t comm) { return (void)comm, "NCCL's words"; }
__attribute__((weak, alias("pncclGetLastError"))) const char *ncclGetLastError(comm_t);
TWICE(CommFinalize, (comm_t comm), (void)comm; return 0;)
TWICE(CommDestroy, (comm_t comm), munmap(comm->shared, sizeof(shared_t)); free(comm); return 0;)
TWICE(CommAbort, (comm_t comm), return pncclCommDestroy(comm);)
TWICE(CommRevoke, (comm_t comm, int flags), (void)comm, (void)flags; return 0;)
TWICE(CommWindowRegister, (comm_t comm, void *at, size_t size, void *window, int flags),
  (void)comm, (void)at, (void)size, (void)window, (void)flags; return 0;)
TWICE(GroupStart, (void), depth++; return 0;)
TWICE(GroupEnd, (void),
  if (--depth) return 0;
  for (int i = 0; i < inits; i++) come(init[i]); /* a process may have several ranks of a communicator */
  for (int i = 0; i < inits; i++) await(init[i]);
  for (int i = 0; i < splits; i++) end_split(split + i);
  inits = splits = 0;
  return 0;)
TWICE(GroupSimulateEnd, (void *told), (void)told; depth--; return 0;)
TWICE(AllReduce, (const void *s, void *r, size_t count, int type, int op, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)stream; TAKE(0))
TWICE(AllGather, (const void *s, void *r, size_t count, int type, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)stream; TAKE(1))
TWICE(ReduceScatter, (const void *s, void *r, size_t count, int type, int op, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)stream; TAKE(2))
TWICE(Broadcast, (const void *s, void *r, size_t count, int type, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)root, (void)stream; TAKE(3))
TWICE(Bcast, (void *b, size_t count, int type, int root, comm_t comm, void *stream), return ncclBroadcast(b, b, count, type, root, comm, stream);)
TWICE(Reduce, (const void *s, void *r, size_t count, int type, int op, int root, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)op, (void)root, (void)stream; TAKE(4))
TWICE(AlltoAll, (const void *s, void *r, size_t count, int type, comm_t comm, void *stream), (void)s, (void)r, (void)type, (void)stream; TAKE(5))
