/* What makes a communicator's calls in NCCL's place. All numbers are NCCL's own; 0 is success. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct { /* a communicator: who its ranks are, and their name */
  int64_t n, rank;
  uint64_t name[2]; /* the same on all ranks, and no other communicator's */
  uint64_t gpu[2];  /* this rank's, as `gpu` has told it */
  int64_t pid[16];  /* of each rank; they live in one PID namespace */
  const void *peers; /* for blinkmpi_door_lost: which of them will not open it any more */
} door_group_t;

typedef struct { /* calls that one record makes */
  int64_t collective, type, op, root; /* op -1: none; root -1: none */
  int64_t size_class;                 /* bytes of the longer buffer: at most 2 to this power, and more than half of that */
} door_kind_t;

typedef struct { /* one of these calls */
  const void *send;
  void *recv;
  uint64_t count, number; /* elements, as NCCL has them; of the communicator's calls, from 1 on */
  void *stream;
} door_call_t;

typedef struct {
  /* The current GPU of this thread, in two words that no other GPU of the machine has; not 0: there is none. By a caller, so
   * without Python. */
  int (*gpu)(uint64_t *words);
  /* Open a communicator together with the binders of its other ranks; may take long. Its context, or NULL and a reason of at most
   * `bytes` bytes: then this rank makes none of its calls. By a thread of the door, which opens a process's communicators one
   * after another in the order in which they were made. NCCL makes them in no order in which two processes wait for each other,
   * so these do not either. */
  void *(*open)(const door_group_t *group, char *reason, size_t bytes);
  /* Prepare a kind of call, for as long as the context is there, without any other rank; may take long. NULL and a reason: this
   * rank cannot make these calls. By the same thread. */
  void *(*bind)(void *context, const door_kind_t *kind, char *reason, size_t bytes);
  /* Put a call on its stream. By a caller, in the order of the numbers; neither waits for a peer nor asks Python. */
  int (*launch)(void *record, const door_call_t *call);
  /* The communicator is aborted: what waits on the GPU ends. By a caller, perhaps while another one launches; without Python. */
  void (*abort)(void *context);
  /* What kernels have reported of a context: 0, or an error of NCCL's, which stays. By callers and by threads of NCCL's own, also
   * when Python has ended; it takes no lock. */
  int (*wrong)(void *context);
  /* Nobody uses the communicator's context any more. By the thread that binds. */
  void (*close)(void *context);
} door_binder_t;
