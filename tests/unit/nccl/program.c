/* A program that is linked with NCCL. Its exit code is 3. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void *comm_t;
enum { FLOAT = 7, BFLOAT = 9, SUM = 0, AVG = 4, OWN = 9, THREADS = 8, EACH = 5000 };

int stub_comm(comm_t *, int, int), stub_calls(void), ncclGetVersion(int *), ncclCommDestroy(comm_t), ncclCommAbort(comm_t);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, void *);
int ncclAllGather(const void *, void *, size_t, int, comm_t, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, comm_t, void *);
int ncclBcast(void *, size_t, int, int, comm_t, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, comm_t, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, comm_t, void *);
int ncclAlltoAll(const void *, void *, size_t, int, comm_t, void *);
int ncclGather(const void *, void *, size_t, int, int, comm_t, void *);
int ncclScatter(const void *, void *, size_t, int, int, comm_t, void *);
int ncclSend(const void *, size_t, int, int, comm_t, void *), ncclRecv(void *, size_t, int, int, comm_t, void *);
int ncclGroupStart(void), ncclGroupEnd(void), cuStreamIsCapturing(void *, int *);

static comm_t shared;
static void *many(void *unused) {
  for (int i = 0; i < EACH; i++) ncclAllReduce(0, 0, 1000, FLOAT, SUM, shared, 0);
  return unused;
}

static void kinds(void) {
  comm_t c, again;
  int captured, version;
  cuStreamIsCapturing(0, &captured), ncclGetVersion(&version);
  stub_comm(&c, 4, 1);
  for (int i = 0; i < 3; i++) ncclAllReduce(0, 0, 1024, FLOAT, SUM, c, 0); /* 4 KiB */
  ncclAllReduce(0, 0, 1025, FLOAT, SUM, c, 0);                             /* at most 8 KiB */
  ncclAllReduce(0, 0, 513, FLOAT, SUM, c, (void *)7);                      /* at most 4 KiB, in a graph */
  ncclAllReduce(0, 0, 8, BFLOAT, OWN, c, 0);
  ncclAllGather(0, 0, 16, BFLOAT, c, 0); /* 128 bytes */
  ncclReduceScatter(0, 0, 16, FLOAT, AVG, c, 0);
  ncclBcast(0, 5, FLOAT, 0, c, 0), ncclBroadcast(0, 0, 5, FLOAT, 0, c, 0);
  ncclReduce(0, 0, 0, FLOAT, SUM, 0, c, 0);
  ncclAlltoAll(0, 0, 2, FLOAT, c, 0), ncclGather(0, 0, 2, FLOAT, 0, c, 0), ncclScatter(0, 0, 2, FLOAT, 0, c, 0);
  ncclGroupStart(), ncclGroupStart();
  ncclSend(0, 9, 1, 2, c, 0), ncclRecv(0, 9, 1, 2, c, 0);
  ncclGroupEnd(), ncclRecv(0, 9, 1, 2, c, 0), ncclGroupEnd();
  ncclGroupStart(), ncclSend(0, 9, 1, 2, c, 0), ncclGroupEnd(); /* alone in its group */
  printf("refused: %d\n", ncclAllReduce(0, 0, 13, FLOAT, SUM, c, 0));
  ncclCommDestroy(c);
  stub_comm(&again, 2, 0); /* malloc gives it the same address */
  printf("again: %d\n", again == c);
  ncclAllReduce(0, 0, 1024, FLOAT, SUM, again, 0);
  ncclCommAbort(again);
}

int main(int n, char **words) {
  const char *what = n > 1 ? words[1] : "kinds";
  if (!strcmp(what, "kinds")) kinds();
  if (!strcmp(what, "threads")) {
    pthread_t t[THREADS];
    stub_comm(&shared, 2, 0);
    for (int i = 0; i < THREADS; i++) pthread_create(t + i, 0, many, 0);
    for (int i = 0; i < THREADS; i++) pthread_join(t[i], 0);
  }
  if (!strcmp(what, "fork")) {
    stub_comm(&shared, 2, 0);
    ncclAllReduce(0, 0, 1, FLOAT, SUM, shared, 0);
    const pid_t child = fork();
    for (int i = 0; i < (child ? 1 : 5); i++) ncclAllReduce(0, 0, 1, FLOAT, SUM, shared, 0);
    if (!child) return 0;
    waitpid(child, 0, 0);
  }
  if (!strcmp(what, "full"))
    for (int i = 0; i < 300; i++) stub_comm(&shared, 2, 0), ncclAllReduce(0, 0, 1, FLOAT, SUM, shared, 0);
  if (!strcmp(what, "killed")) {
    stub_comm(&shared, 2, 0), ncclAllReduce(0, 0, 1, FLOAT, SUM, shared, 0);
    raise(SIGKILL);
  }
  if (!strcmp(what, "wait")) {
    stub_comm(&shared, 2, 0), ncclAllReduce(0, 0, 1, FLOAT, SUM, shared, 0);
    puts("ready"), fflush(stdout), getchar();
  }
  printf("calls: %d\n", stub_calls());
  return 3;
}
