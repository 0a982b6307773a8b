/* A rank of a program that is linked with NCCL: client ID RANKS RANK WHAT [SEED]. It prints who made its calls, in their order.
 *
 * Where the door is loaded it gives it a binder that launches nothing and writes down what it was to launch. */
#define _GNU_SOURCE
#include "stub.h"
#include "binder.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FLOAT = 7, BFLOAT = 9, SUM = 0, MIN = 3, AVG = 4, OWN = 9, DECIDES = 3 };

/* ---- the binder */

static unsigned pace; /* this rank's own */

static int gpu(uint64_t *words) { return words[0] = getenv("SAME_GPU") ? 1 : (uint64_t)getpid(), words[1] = 0, getenv("NO_GPU") != NULL; }

static void *open_group(const door_group_t *group, char *reason, size_t bytes) {
  if (getenv("CLOSED") || group->pid[group->rank] != getpid()) return snprintf(reason, bytes, "a test wants it so"), NULL;
  int *const context = calloc(1, sizeof *context);
  return *context = getenv("REPORTS") ? atoi(getenv("REPORTS")) : 0, context;
}

static void *bind(void *context, const door_kind_t *kind, char *reason, size_t bytes) {
  (void)context;
  usleep((useconds_t)(rand_r(&pace) % 3000));
  if (getenv("CANNOT") && atoi(getenv("CANNOT")) == kind->collective) return snprintf(reason, bytes, "a test wants it so"), NULL;
  door_kind_t *const record = malloc(sizeof *record);
  return *record = *kind, record;
}

static int launch(void *record, const door_call_t *call) {
  if (getenv("LAUNCH_FAILS")) return 1;
  stub_write('O', (int)((door_kind_t *)record)->collective, call->count, call->number);
  return 0;
}

static int wrong(void *context) { return *(int *)context; }

static void on_abort(void *context) { (void)context, stub_write('A', 0, 0, 0); }

static void on_close(void *context) { free(context); }

static const door_binder_t own = {gpu, open_group, bind, launch, on_abort, wrong, on_close};

/* ---- the program */

static comm_t comm;
static int n, rank;

/* A kind of call by number; the kinds from DECIDES on are never ours. */
static int call(int kind, comm_t c) {
  switch (kind) {
  case 0: return ncclAllReduce(0, 0, 1000, FLOAT, SUM, c, 0);
  case 1: return ncclAllGather(0, 0, 16, BFLOAT, c, 0);
  case 2: return ncclBcast(0, 5, FLOAT, n - 1, c, 0);
  case 3: return ncclAllReduce(0, 0, 1000, FLOAT, MIN, c, 0);
  default: return ncclReduceScatter(0, 0, 8, FLOAT, OWN, c, 0);
  }
}

/* Call until the door makes the calls: the same on all ranks, as each is decided alike. */
static void settle(int kind, comm_t c) {
  do {
    call(kind, c);
    usleep(100);
  } while (stub_last() != 'O');
}

static void paces(unsigned seed) {
  for (int i = 0; i < 3000; i++) {
    const int kind = rand_r(&seed) % 5, way = rand_r(&seed) % 10;
    if (rand_r(&pace) % 40 == 0) usleep((useconds_t)(rand_r(&pace) % 2000));
    if (way < 2) ncclGroupStart();
    call(kind, comm);
    if (way == 1) call((kind + 1) % 5, comm);
    if (way < 2) ncclGroupEnd();
  }
  for (int kind = 0; kind < DECIDES; kind++) settle(kind, comm);
}

static void cannot(void) {
  for (int i = 0; i < 20; i++) call(0, comm);
  settle(1, comm);
  for (int i = 0; i < 20; i++) call(0, comm);
}

static void plain(void) {
  for (int i = 0; i < 100; i++) {
    call(0, comm), stub_barrier(comm);
    if (i % 10 == 0) usleep(1000);
  }
}

static void groups(void) {
  settle(0, comm), settle(1, comm), stub_barrier(comm), stub_print(), puts("-");
  ncclGroupStart(), call(0, comm), puts(stub_last() ? "early" : "kept"), ncclGroupEnd();                      /* ours */
  ncclGroupStart(), ncclGroupStart(), call(0, comm), ncclGroupEnd(), call(3, comm), ncclGroupEnd(); /* NCCL's, both */
  ncclGroupStart(), ncclGroupStart(), ncclGroupEnd(), call(1, comm), ncclGroupEnd();                /* ours */
  ncclGroupStart(), call(4, comm), call(0, comm), ncclGroupEnd();                                   /* NCCL's, both */
  ncclGroupStart(), call(0, comm), ncclGroupSimulateEnd(0);                                         /* NCCL's, and no call */
  if (rank) printf("refused: %d\n", ncclAllReduce(0, 0, 13, FLOAT, MIN, comm, 0));                  /* no call */
  else puts("refused: 4");
  ncclAllReduce(0, 0, 0, FLOAT, SUM, comm, 0); /* NCCL's, and no call */
  call(0, comm);                               /* ours */
  ncclGroupStart(), call(0, comm), ncclCommWindowRegister(comm, 0, 0, 0, 0), ncclGroupEnd(); /* ours, the last one */
  call(0, comm);
}

static void split(void) {
  comm_t half, turned, none = comm;
  settle(0, comm);
  ncclGroupStart(), ncclCommSplit(comm, rank % 2, -rank, &half, 0), ncclGroupEnd();
  ncclCommSplit(comm, 0, -rank, &turned, 0);
  ncclCommSplit(comm, rank ? -1 : 7, 0, &none, 0);
  stub_print(), puts("-");
  settle(0, half), settle(0, turned);
  if (none) call(0, none); /* of one rank */
  ncclCommDestroy(half), ncclCommDestroy(turned);
}

static void *exit_of_a_thread(void *unused) { return settle(0, comm), unused; }

int main(int words, char **word) {
  const char *const what = word[4];
  const unsigned seed = words > 5 ? (unsigned)atoi(word[5]) : 0;
  unique_id_t id = {{0}};
  strcpy(id.internal, word[1]);
  n = atoi(word[2]), rank = atoi(word[3]), pace = seed * 31 + (unsigned)rank;
  int (*const serve)(const door_binder_t *) = (int (*)(const door_binder_t *))dlsym(RTLD_DEFAULT, "blinkmpi_door_serve");
  if (serve && !getenv("NO_BINDER")) serve(&own);
  if (!strcmp(what, "groups")) ncclGroupStart();
  const int refused = strcmp(what, "scalable") ? ncclCommInitRank(&comm, n, id, rank) : ncclCommInitRankScalable(&comm, n, rank, 1, &id, 0);
  if (!strcmp(what, "groups")) ncclGroupEnd();
  if (refused) return refused;

  if (!strcmp(what, "paces")) paces(seed);
  if (!strcmp(what, "cannot")) cannot();
  if (!strcmp(what, "plain")) plain();
  if (!strcmp(what, "groups")) groups();
  if (!strcmp(what, "split")) split();
  if (!strcmp(what, "scalable")) settle(2, comm);
  if (!strcmp(what, "killed"))
    for (unsigned i = 0; i < 4000; i++) {
      if (rank == n - 1 && i == seed * 17) raise(SIGKILL);
      ncclAllReduce(0, 0, 1ul << i % 20, FLOAT, SUM, comm, 0);
      if (i % 50 == 0) usleep(1000);
    }
  if (!strcmp(what, "failing"))
    for (int failed = 0, others = 0; others < 3;) {
      failed |= call(0, comm);
      if (failed) printf("%d ", call(others++ + 1, comm));
      usleep(100);
    }
  if (!strcmp(what, "reports")) {
    int error = 0, said;
    const char *const before = ncclGetLastError(comm);
    while (!error) call(0, comm), usleep(100), said = ncclCommGetAsyncError(comm, &error);
    stub_print(), printf("%s\n%d %d %d\n%s\n", before, said, error, call(1, comm), ncclGetLastError(comm));
  }
  if (!strcmp(what, "fork")) {
    settle(0, comm), stub_print(), puts("-"), fflush(stdout);
    const pid_t child = fork();
    if (!child) call(0, comm), call(1, comm), stub_print(), exit(0);
    waitpid(child, 0, 0);
    puts("-"), call(0, comm);
  }
  if (!strcmp(what, "aborts")) settle(0, comm), stub_print(), puts("-"), ncclCommAbort(comm), comm = NULL;
  if (!strcmp(what, "exits")) {
    pthread_t other;
    pthread_create(&other, 0, exit_of_a_thread, 0);
    pthread_join(other, 0);
    call(1, comm), stub_print(), exit(3);
  }
  if (comm) ncclCommFinalize(comm), ncclCommDestroy(comm);
  stub_print();
  return 0;
}
