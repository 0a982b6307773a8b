/* Counts what a program asks of NCCL, and passes each call on unchanged.
 *
 * A program meets these functions before NCCL's: by LD_PRELOAD if it is linked with NCCL, or through the library that
 * library.py makes beside this one if it opens NCCL by name. A handle that the program holds is NCCL's own, and whatever is
 * not here goes to NCCL without us. NCCL calls some of its functions through these names, too, from threads of its own: what
 * is here takes no lock while NCCL is called, and counts nothing that NCCL itself calls inside a call.
 *
 * The counts lie in a page that others can read while the process runs: counts.py reads it. Its 8-byte words have one writer
 * at a time, under a lock. A forked child has counts of its own, and so has a program that it executes. */
#define _GNU_SOURCE
#include "own.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };
enum { COMMS = 256, RECORDS = 4096, NAME = 64 };
enum { NO_OP = -1, CUSTOM_OP = 5 }; /* ncclRedOp_t: from 5 on a program's own */
#define MAGIC 0x31746e75636e6c62u   /* "blncunt1" */

typedef struct { /* calls that are alike: of a communicator, of sizes of one power of two */
  int64_t comm, function, type, op, size_class, calls, bytes, grouped, captured;
} record_t;

typedef struct {
  int64_t ranks, rank; /* 0 ranks: NCCL did not say */
} known_t;

typedef struct { /* the page; counts.py has the same */
  uint64_t magic;
  int64_t pid, comms, records, lost;
  char name[NAME];
  known_t comm[COMMS];
  record_t record[RECORDS];
} page_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static page_t *page;
static pid_t owner;
static comm_t handle[COMMS]; /* by number; NULL once it is destroyed */
static __thread int depth, in_group;
static __thread record_t *first_of_group;

/* ---- the page */

static void *map_page(void) {
  const char *const folder = getenv("BLINKMPI_NCCL_COUNTS");
  char path[4096];
  int file = -1;
  if (folder && *folder) {
    static int number;
    do snprintf(path, sizeof path, "%s/%d-%d.counts", folder, (int)getpid(), number);
    while ((file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) < 0 && errno == EEXIST && ++number < 1000);
  } else {
    file = memfd_create("blinkmpi-nccl-counts", MFD_CLOEXEC); /* found below /proc/PID/fd, and open as long as the process lives */
  }
  void *at = MAP_FAILED;
  if (file >= 0 && !ftruncate(file, sizeof(page_t))) at = mmap(NULL, sizeof(page_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) fprintf(stderr, "blinkmpi: NCCL's calls are not counted here: %s\n", strerror(errno));
  if (file >= 0 && (folder && *folder)) close(file);
  return at == MAP_FAILED ? NULL : at;
}

/* The page of this process, made at its first call; NULL if there is none. The lock is held. */
static page_t *own_page(void) {
  if (owner == getpid()) return page;
  owner = getpid();
  memset(handle, 0, sizeof handle); /* after a fork: they are of no use in the child */
  depth = in_group = 0;
  if (!(page = map_page())) return NULL;
  page->pid = owner;
  snprintf(page->name, NAME, "%s", program_invocation_short_name);
  __atomic_store_n(&page->magic, MAGIC, __ATOMIC_RELEASE);
  return page;
}

static void unlock_page(void) { pthread_mutex_unlock(&lock); }

static void lock_across_fork(void) { pthread_mutex_lock(&lock); }

static void watch_forks(void) { pthread_atfork(lock_across_fork, unlock_page, unlock_page); }

static void lock_page(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&lock);
}

/* The number of a communicator, a new one if need be; -1 if it has none yet. */
static int64_t number_of(comm_t comm) {
  const int64_t known = page->comms;
  for (int64_t i = known - 1; i >= 0; i--)
    if (handle[i] == comm) return i;
  return -1;
}

static int64_t add_comm(comm_t comm, int ranks, int rank) {
  if (page->comms == COMMS) return -1;
  handle[page->comms] = comm;
  page->comm[page->comms] = (known_t){ranks, rank};
  return page->comms++;
}

static record_t *record_of(int64_t comm, int function, int type, int op, int size_class) {
  for (int64_t i = 0; i < page->records; i++) {
    record_t *const r = page->record + i;
    if (r->comm == comm && r->function == function && r->type == type && r->op == op && r->size_class == size_class) return r;
  }
  if (page->records == RECORDS) return NULL;
  record_t *const made = page->record + page->records;
  *made = (record_t){comm, function, type, op, size_class, 0, 0, 0, 0};
  __atomic_store_n(&page->records, page->records + 1, __ATOMIC_RELEASE);
  return made;
}

/* ---- counting */

static int64_t bytes_of(int type) { /* ncclDataType_t, in its order */
  static const int8_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 0;
}

/* Whether a call on this stream was put into a CUDA graph. */
static int is_captured(stream_t stream) {
  static int (*asks)(stream_t, int *);
  static int looked;
  if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
    void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    asks = (int (*)(stream_t, int *))(driver ? dlsym(driver, "cuStreamIsCapturing") : NULL);
    __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
  }
  int status = 0;
  return asks && !asks(stream, &status) && status == 1;
}

/* Ask NCCL who a communicator is that was not met before; the lock is not held, for NCCL may wait for another thread. */
static void meet(comm_t comm, int *ranks, int *rank) {
  static void *count, *user_rank;
  *ranks = *rank = 0;
  result_t (*const ask)(comm_t, int *) = (result_t (*)(comm_t, int *))nccl(&count, "pncclCommCount");
  result_t (*const ask_rank)(comm_t, int *) = (result_t (*)(comm_t, int *))nccl(&user_rank, "pncclCommUserRank");
  inside++;
  if (!ask || ask(comm, ranks)) *ranks = 0;
  if (!ask_rank || ask_rank(comm, rank)) *rank = 0;
  inside--;
}

/* Count a call that NCCL took; `count` is of elements, of a block where the collective has one for each rank. */
static result_t count_call(result_t result, int function, size_t count, int type, int op, comm_t comm, stream_t stream) {
  if (inside || (result != SUCCESS && result != IN_PROGRESS)) return result;
  const int captured = is_captured(stream);
  int ranks = 0, rank = 0;
  lock_page();
  int64_t which = own_page() ? number_of(comm) : -1;
  unlock_page();
  if (!page) return result;
  if (which < 0) meet(comm, &ranks, &rank);
  lock_page();
  if (which < 0) which = number_of(comm); /* another thread may have met it meanwhile */
  if (which < 0) which = add_comm(comm, ranks, rank);
  const int blocks = function == ALL_GATHER || function == REDUCE_SCATTER || (function >= ALL_TO_ALL && function <= SCATTER);
  const int64_t bytes = (int64_t)count * bytes_of(type) * (which >= 0 && blocks ? page->comm[which].ranks : 1);
  const int size_class = bytes ? 64 - __builtin_clzll((uint64_t)bytes) - !(bytes & (bytes - 1)) : -1; /* at most 2 to this power */
  record_t *const r = which < 0 ? NULL : record_of(which, function, type, op > CUSTOM_OP ? CUSTOM_OP : op, size_class);
  if (r) {
    r->calls++, r->bytes += bytes, r->captured += captured;
    if (depth) {
      in_group++;
      if (in_group == 1) first_of_group = r;
      if (in_group == 2 && first_of_group) first_of_group->grouped++;
      if (in_group >= 2) r->grouped++;
    }
  } else {
    page->lost++;
  }
  unlock_page();
  return result;
}

static void forget(comm_t comm) {
  lock_page();
  if (own_page())
    for (int64_t i = 0; i < page->comms; i++)
      if (handle[i] == comm) handle[i] = NULL; /* NCCL may give the address to another one */
  unlock_page();
}

/* ---- what the program calls */

EXPORT result_t ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, comm_t comm, stream_t stream) {
  CALL(AllReduce, (const void *, void *, size_t, int, int, comm_t, stream_t), send, recv, count, type, op, comm, stream)
  return count_call(result, ALL_REDUCE, count, type, op, comm, stream);
}

EXPORT result_t ncclAllGather(const void *send, void *recv, size_t count, int type, comm_t comm, stream_t stream) {
  CALL(AllGather, (const void *, void *, size_t, int, comm_t, stream_t), send, recv, count, type, comm, stream)
  return count_call(result, ALL_GATHER, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, comm_t comm, stream_t stream) {
  CALL(ReduceScatter, (const void *, void *, size_t, int, int, comm_t, stream_t), send, recv, count, type, op, comm, stream)
  return count_call(result, REDUCE_SCATTER, count, type, op, comm, stream);
}

EXPORT result_t ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, comm_t comm, stream_t stream) {
  CALL(Broadcast, (const void *, void *, size_t, int, int, comm_t, stream_t), send, recv, count, type, root, comm, stream)
  return count_call(result, BROADCAST, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclBcast(void *buffer, size_t count, int type, int root, comm_t comm, stream_t stream) {
  CALL(Bcast, (void *, size_t, int, int, comm_t, stream_t), buffer, count, type, root, comm, stream)
  return count_call(result, BROADCAST, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, comm_t comm, stream_t stream) {
  CALL(Reduce, (const void *, void *, size_t, int, int, int, comm_t, stream_t), send, recv, count, type, op, root, comm, stream)
  return count_call(result, REDUCE, count, type, op, comm, stream);
}

EXPORT result_t ncclAlltoAll(const void *send, void *recv, size_t count, int type, comm_t comm, stream_t stream) {
  CALL(AlltoAll, (const void *, void *, size_t, int, comm_t, stream_t), send, recv, count, type, comm, stream)
  return count_call(result, ALL_TO_ALL, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclGather(const void *send, void *recv, size_t count, int type, int root, comm_t comm, stream_t stream) {
  CALL(Gather, (const void *, void *, size_t, int, int, comm_t, stream_t), send, recv, count, type, root, comm, stream)
  return count_call(result, GATHER, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclScatter(const void *send, void *recv, size_t count, int type, int root, comm_t comm, stream_t stream) {
  CALL(Scatter, (const void *, void *, size_t, int, int, comm_t, stream_t), send, recv, count, type, root, comm, stream)
  return count_call(result, SCATTER, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclSend(const void *send, size_t count, int type, int peer, comm_t comm, stream_t stream) {
  CALL(Send, (const void *, size_t, int, int, comm_t, stream_t), send, count, type, peer, comm, stream)
  return count_call(result, SEND, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclRecv(void *recv, size_t count, int type, int peer, comm_t comm, stream_t stream) {
  CALL(Recv, (void *, size_t, int, int, comm_t, stream_t), recv, count, type, peer, comm, stream)
  return count_call(result, RECV, count, type, NO_OP, comm, stream);
}

EXPORT result_t ncclGroupStart(void) {
  CALL(GroupStart, (void))
  if (!inside && result == SUCCESS && !depth++) in_group = 0;
  return result;
}

EXPORT result_t ncclGroupEnd(void) {
  CALL(GroupEnd, (void))
  if (!inside && depth) depth--;
  return result;
}

EXPORT result_t ncclCommDestroy(comm_t comm) {
  if (!inside && comm) forget(comm); /* before: another thread may be given its address as soon as it is free */
  CALL(CommDestroy, (comm_t), comm)
  return result;
}

EXPORT result_t ncclCommAbort(comm_t comm) {
  if (!inside && comm) forget(comm);
  CALL(CommAbort, (comm_t), comm)
  return result;
}
