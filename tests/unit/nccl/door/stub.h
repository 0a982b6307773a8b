/* NCCL's functions that the tests' programs call, and what the stub has besides. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct comm *comm_t;
typedef struct { char internal[128]; } unique_id_t;

int ncclCommInitRank(comm_t *, int, unique_id_t, int), ncclCommInitRankConfig(comm_t *, int, unique_id_t, int, void *);
int ncclCommInitRankScalable(comm_t *, int, int, int, unique_id_t *, void *);
int ncclCommSplit(comm_t, int, int, comm_t *, void *), ncclCommCount(comm_t, int *);
int ncclCommDestroy(comm_t), ncclCommAbort(comm_t), ncclCommFinalize(comm_t), ncclCommRevoke(comm_t, int);
int ncclCommGetAsyncError(comm_t, int *);
const char *ncclGetLastError(comm_t);
int ncclCommWindowRegister(comm_t, void *, size_t, void *, int);
int ncclGroupStart(void), ncclGroupEnd(void), ncclGroupSimulateEnd(void *);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, void *);
int ncclAllGather(const void *, void *, size_t, int, comm_t, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, comm_t, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, comm_t, void *), ncclBcast(void *, size_t, int, int, comm_t, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, comm_t, void *);
int ncclAlltoAll(const void *, void *, size_t, int, comm_t, void *);

void stub_write(char who, int function, size_t count, uint64_t number); /* 'N': a call that NCCL has made */
char stub_last(void);                                                  /* who wrote last */
void stub_print(void);                                                 /* and begin anew */
void stub_barrier(comm_t);
