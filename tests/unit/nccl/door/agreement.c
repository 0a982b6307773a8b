/* The agreement of several ranks in one process, whose turns are the test's. */
#include "agree.h"
#include <stdlib.h>

typedef struct {
  page_t page;
  agreement_t of[MOST_RANKS];
  int gone[MOST_RANKS], n;
} world_t;

static world_t *world; /* whose turn it is */

static int is_dead(const slot_t *slot) { return world->gone[slot - world->page.slot]; }

world_t *new_world(int n) {
  int place[MOST_RANKS];
  world_t *const w = calloc(1, sizeof *w);
  w->n = n;
  for (int r = 0; r < n; r++) place[r] = n - 1 - r; /* slots need not be in the order of the ranks */
  for (int r = 0; r < n; r++) begin_agreement(w->of + r, &w->page, n, r, place);
  return w;
}

void free_world(world_t *w) {
  for (int r = 0; r < w->n; r++) end_agreement(w->of + r);
  free(w);
}

static kind_t kind_by(int number) { return (kind_t){number % 3, 7, 0, -1, number}; }

/* 1: ours; 0: NCCL's; -1: this rank takes no part any more. kind -1: calls that are never ours. */
int take_call(world_t *w, int rank, int kind, int alone) {
  const kind_t made = kind_by(kind);
  uint64_t number;
  int added, which;
  void *const record = take(w->of + rank, kind < 0 ? NULL : &made, alone, &number, &added, &which);
  return number ? record != NULL : -1;
}

void make_calls(world_t *w, int rank, int calls) {
  for (int i = 0; i < calls; i++) take_call(w, rank, -1, 1);
}

int would_wait(world_t *w, int rank, int kind) {
  const kind_t made = kind_by(kind);
  agreement_t *const a = w->of + rank;
  for (int k = 0; k < a->kinds; k++)
    if (!memcmp(&a->known[k].kind, &made, sizeof made)) return a->known[k].state == PENDING && a->calls + 1 >= a->known[k].start;
  return 0;
}

/* Bind the next kind that waits for it; `able`, of each kind, whether this rank can. Returns the kind's class, or -1. */
int bind_next(world_t *w, int rank, const int *able) {
  kind_t kind;
  const int k = asked(w->of + rank, &kind);
  if (k >= 0) bound(w->of + rank, k, able[kind.size_class] ? w : NULL);
  return k < 0 ? -1 : (int)kind.size_class;
}

int step_rank(world_t *w, int rank) {
  world = w;
  return step(w->of + rank, is_dead);
}

void refuse_call(world_t *w, int rank) { give_back(w->of + rank); }

void register_window(world_t *w, int rank, int before) { pass_after(w->of + rank, (uint64_t)before); }

void leave_world(world_t *w, int rank) { leave(w->of + rank); }

void die(world_t *w, int rank) { w->gone[w->n - 1 - rank] = 1; }

int state_of(world_t *w, int rank, int kind) {
  const kind_t made = kind_by(kind);
  for (int k = 0; k < w->of[rank].kinds; k++)
    if (!memcmp(&w->of[rank].known[k].kind, &made, sizeof made)) return w->of[rank].known[k].state;
  return -1;
}

int proposals(const world_t *w) { return (int)w->page.number; }
