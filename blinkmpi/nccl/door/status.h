/* What a process of the door says of itself to those who look: a page that status.py reads while the process lives.
 *
 * It is found below /proc/PID/fd, so nothing is left behind. Each word has one writer at a time; counts are added to. */
#pragma once
#include "page.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { TOLD_COMMS = 64, WHY_WORDS = 32 };
enum { NOT_OPENED, OPENED, CANNOT_OPEN, ENDED }; /* of a communicator; the first three also in a slot */
#define STATUS_MAGIC 0x31747474736c6e62u         /* "bnlsttt1" */

typedef struct {
  int64_t collective, type, op, root, size_class;
  int64_t bound; /* 0: not yet; 1: this rank can make its calls; 2: it cannot */
  int64_t ours, nccls; /* calls */
  char why[8 * WHY_WORDS];
} told_kind_t;

typedef struct {
  uint64_t name[2];
  int64_t n, rank, state, kinds;
  int64_t ours, nccls; /* calls: NCCL's, too, are those of no kind */
  char why[8 * WHY_WORDS]; /* NCCL makes them all, if it is not empty */
  told_kind_t kind[MOST_KINDS];
} told_comm_t;

typedef struct {
  uint64_t magic;
  int64_t pid, comms;
  char why[8 * WHY_WORDS]; /* why this process makes no calls at all */
  told_comm_t comm[TOLD_COMMS];
} told_t;

static void count_up(int64_t *word) { __atomic_add_fetch(word, 1, __ATOMIC_RELAXED); }

/* The page of this process; NULL if there is none. */
static told_t *new_status(void) {
  const int file = memfd_create("blinkmpi-nccl-door", MFD_CLOEXEC);
  void *at = MAP_FAILED;
  if (file >= 0 && !ftruncate(file, sizeof(told_t))) at = mmap(NULL, sizeof(told_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    if (file >= 0) close(file);
    return NULL;
  }
  told_t *const page = at;
  page->pid = getpid();
  __atomic_store_n(&page->magic, STATUS_MAGIC, __ATOMIC_RELEASE);
  return page;
}

/* A place for a communicator: a new one, or that of one that has ended; NULL if there is none. Who calls this holds a lock. */
static told_comm_t *new_told(told_t *page, const uint64_t *name, int n, int rank, const char *why) {
  told_comm_t *found = NULL;
  if (!page) return NULL;
  if (page->comms < TOLD_COMMS) found = page->comm + page->comms;
  for (int64_t i = 0; i < page->comms && !found; i++)
    if (page->comm[i].state == ENDED) found = page->comm + i;
  if (!found) return NULL;
  memset(found, 0, sizeof *found);
  if (name) memcpy(found->name, name, sizeof found->name);
  found->n = n, found->rank = rank;
  if (why) found->state = CANNOT_OPEN, snprintf(found->why, sizeof found->why, "%s", why);
  if (found == page->comm + page->comms) __atomic_store_n(&page->comms, page->comms + 1, __ATOMIC_RELEASE);
  return found;
}
