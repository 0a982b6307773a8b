/* NCCL's own functions, for libraries that lie between a program and NCCL and have functions of the same names. */
#pragma once
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

typedef void *comm_t, *stream_t;
typedef int result_t; /* of NCCL: 0 is success */

enum { SUCCESS = 0, INTERNAL_ERROR = 3, IN_PROGRESS = 7 };

static __thread int inside; /* how deep this thread is in calls of NCCL, which itself calls functions of these names */

static void *find(const char *name) {
  static void *opened;
  void *found = dlsym(RTLD_NEXT, name);
  if (!found && !opened) opened = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (!found && !opened && getenv("BLINKMPI_NCCL_LIBRARY")) opened = dlopen(getenv("BLINKMPI_NCCL_LIBRARY"), RTLD_LAZY);
  return found ? found : opened ? dlsym(opened, name) : NULL;
}

/* NCCL's function of a name: the strong one, pncclX, which is never ours. */
static void *nccl(void **kept, const char *name) {
  void *found = __atomic_load_n(kept, __ATOMIC_ACQUIRE);
  if (found) return found;
  if (!(found = find(name))) {
    static int told;
    if (!__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED))
      fprintf(stderr, "blinkmpi: NCCL has no %s that can be found; set BLINKMPI_NCCL_LIBRARY to its libnccl.so.2\n", name);
    return NULL;
  }
  __atomic_store_n(kept, found, __ATOMIC_RELEASE);
  return found;
}

/* Find NCCL's function of a name, which is `call` from here on, or end with an error. */
#define FIND(name, types)                                                        \
  static void *kept;                                                             \
  result_t(*const call) types = (result_t(*) types)nccl(&kept, "pnccl" #name);   \
  if (!call) return INTERNAL_ERROR;

/* Call it; what it says is `result` from here on. */
#define ASK(...)                              \
  inside++;                                   \
  const result_t result = call(__VA_ARGS__);  \
  inside--;

#define CALL(name, types, ...) FIND(name, types) ASK(__VA_ARGS__)
