/* How the ranks of a communicator agree on the first call of a kind that is ours, not NCCL's: no I/O, no thread of its own.
 *
 * Each rank numbers the calls of a communicator, and its kinds by first appearance; by NCCL's rules both are alike on all ranks.
 * A call of a new kind is NCCL's. When every rank has said that it can make calls of the kind, rank 0 proposes a start, after
 * the last call of every rank. A rank says yes if it has not come so far, and no else. All yes: from that number on the kind is
 * ours. One no: nothing has changed, and a later proposal lies further ahead.
 *
 * Who has said yes must not decide about a call at or after the start before all have answered: the caller waits, for the
 * peers' threads alone and never for their programs. A peer that is gone or has left without an answer counts as a no; it can
 * answer no more, so all who are there see the same. */
#pragma once
#include "page.h"
#include <pthread.h>
#include <string.h>

enum { FIRST_DISTANCE = 8, MOST_DISTANCE = 1 << 20 }; /* of a start from the calls that were made */
enum { IDLE, UNSETTLED, OPEN };                       /* what step() has left */

typedef struct { /* calls that one record makes: of sizes of one power of two */
  int64_t collective, type, op, root, size_class;
} kind_t;

typedef enum { NCCLS, ASKED, READY, PENDING, OURS } state_t;

typedef struct {
  kind_t kind;
  state_t state;
  uint64_t start; /* the first call that is ours, or would be if all agree */
  void *record;   /* what makes its calls here */
} known_t;

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t told; /* a proposal has ended, or this rank takes no part any more */
  page_t *page;
  int n, rank, place[MOST_RANKS]; /* which slot is whose */
  uint64_t calls;
  uint64_t end;      /* calls from this number on are NCCL's: a call that all ranks make has ended what is ours */
  uint64_t answered; /* the newest proposal that this rank has answered */
  uint64_t distance; /* of rank 0's next proposal */
  int open, left, kinds;
  known_t known[MOST_KINDS];
} agreement_t;

static slot_t *slot_of(const agreement_t *a, int rank) { return a->page->slot + a->place[rank]; }

static void begin_agreement(agreement_t *a, page_t *page, int n, int rank, const int *place) {
  memset(a, 0, sizeof *a);
  pthread_mutex_init(&a->lock, NULL);
  pthread_cond_init(&a->told, NULL);
  a->page = page, a->n = n, a->rank = rank, a->end = UINT64_MAX, a->distance = FIRST_DISTANCE;
  memcpy(a->place, place, sizeof a->place);
}

static void end_agreement(agreement_t *a) {
  pthread_mutex_destroy(&a->lock);
  pthread_cond_destroy(&a->told);
}

/* ---- callers */

static int find_kind(agreement_t *a, const kind_t *kind, int *added) {
  for (int i = 0; i < a->kinds; i++)
    if (!memcmp(&a->known[i].kind, kind, sizeof *kind)) return i;
  if (a->kinds == MOST_KINDS) return -1;
  a->known[a->kinds] = (known_t){*kind, ASKED, 0, NULL};
  *added = 1;
  return a->kinds++;
}

/* Number a call and say who makes it: a record if it is this library's, NULL if it is NCCL's.
 *
 * kind: NULL for calls that are never ours. alone: whether no other call of this communicator is in its group.
 * number: of the call; 0 if this rank takes no part any more, and nobody is to make it. added: whether the kind is new.
 * Returns the kind's number by `which`; -1: it has none. */
static void *take(agreement_t *a, const kind_t *kind, int alone, uint64_t *number, int *added, int *which) {
  void *record = NULL;
  *number = *added = 0, *which = -1;
  pthread_mutex_lock(&a->lock);
  if (!a->left) {
    const uint64_t call = ++a->calls;
    set(&slot_of(a, a->rank)->calls, call);
    const int k = *which = kind && call < a->end ? find_kind(a, kind, added) : -1;
    known_t *const known = k < 0 ? NULL : a->known + k;
    while (alone && known && known->state == PENDING && call >= known->start && !a->left) pthread_cond_wait(&a->told, &a->lock);
    if (alone && known && known->state == OURS && call >= known->start) record = known->record;
    *number = a->left ? 0 : call;
  }
  pthread_mutex_unlock(&a->lock);
  return record;
}

/* Take a number back: NCCL has refused the call, so it was none. This rank's yes stays true: it has made fewer calls. */
static void give_back(agreement_t *a) {
  pthread_mutex_lock(&a->lock);
  set(&slot_of(a, a->rank)->calls, --a->calls);
  pthread_mutex_unlock(&a->lock);
}

/* The next `more` calls go on as before, all later ones are NCCL's. Every rank asks for it between the same two calls. */
static void pass_after(agreement_t *a, uint64_t more) {
  pthread_mutex_lock(&a->lock);
  if (a->end > a->calls + more + 1) a->end = a->calls + more + 1;
  pthread_mutex_unlock(&a->lock);
}

/* This rank takes no part any more; who waits goes on. */
static void leave(agreement_t *a) {
  pthread_mutex_lock(&a->lock);
  a->left = 1;
  set(&slot_of(a, a->rank)->left, 1);
  pthread_cond_broadcast(&a->told);
  pthread_mutex_unlock(&a->lock);
}

/* ---- who binds */

/* A kind that waits to be bound; -1 if there is none. */
static int asked(agreement_t *a, kind_t *kind) {
  int found = -1;
  pthread_mutex_lock(&a->lock);
  for (int i = 0; i < a->kinds && found < 0 && !a->left; i++)
    if (a->known[i].state == ASKED) found = i, *kind = a->known[i].kind;
  pthread_mutex_unlock(&a->lock);
  return found;
}

/* A hash of a kind. Its lowest bit is 0, and free for whether the kind can be made; it is never 0, which means not said. */
static uint64_t name_of(const kind_t *k) {
  const uint64_t words[] = {(uint64_t)k->collective, (uint64_t)k->type, (uint64_t)k->op, (uint64_t)k->root, (uint64_t)k->size_class};
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = mixed(hash, words[i]);
  return (hash << 1) | 1ull << 63;
}

/* A kind was bound, or, without a record, this rank cannot make its calls. */
static void bound(agreement_t *a, int kind, void *record) {
  pthread_mutex_lock(&a->lock);
  known_t *const known = a->known + kind;
  known->record = record, known->state = record ? READY : NCCLS;
  set(slot_of(a, a->rank)->ready + kind, name_of(&known->kind) | (record ? 1 : 0));
  pthread_mutex_unlock(&a->lock);
}

/* ---- who agrees */

typedef int gone_t(const slot_t *); /* whether the process of a rank has ended */

/* Whether a rank can answer no more. */
static int is_away(const slot_t *slot, gone_t *gone) { return get(&slot->left) || gone(slot); }

static void answer(agreement_t *a, uint64_t number) {
  const uint64_t kind = get(&a->page->kind), start = get(&a->page->start);
  known_t *const known = kind < (uint64_t)a->kinds ? a->known + kind : NULL;
  const int yes = known && known->state == READY && a->calls < start;
  if (yes) known->state = PENDING, known->start = start;
  a->answered = number, a->open = 1;
  set(&slot_of(a, a->rank)->answer, 2 * number + (uint64_t)yes);
}

/* How the open proposal has ended: 1 all yes, 0 not, -1 it has not. */
static int outcome(const agreement_t *a, gone_t *gone) {
  int found = 1;
  for (int r = 0; r < a->n; r++) {
    const slot_t *const slot = slot_of(a, r);
    uint64_t said = get(&slot->answer);
    if (said / 2 != a->answered && is_away(slot, gone)) {
      said = get(&slot->answer); /* its last word */
      if (said / 2 != a->answered) return 0;
    }
    if (said / 2 != a->answered) found = -1;
    else if (!(said & 1)) return 0;
  }
  return found;
}

static void conclude(agreement_t *a, int ours) {
  for (int i = 0; i < a->kinds; i++)
    if (a->known[i].state == PENDING) a->known[i].state = ours ? OURS : READY;
  a->open = 0;
  if (!ours && a->distance < MOST_DISTANCE) a->distance *= 2;
  set(&slot_of(a, a->rank)->done, a->answered);
  pthread_cond_broadcast(&a->told);
}

/* How many ranks are ready for a kind; -1 if one cannot, or means another kind by this number. */
static int ready_for(const agreement_t *a, int kind) {
  const uint64_t wanted = name_of(&a->known[kind].kind) | 1;
  int found = 0;
  for (int r = 0; r < a->n; r++) {
    const uint64_t said = get(slot_of(a, r)->ready + kind);
    if (said && said != wanted) return -1;
    found += said == wanted;
  }
  return found;
}

static void propose(agreement_t *a, int kind) {
  uint64_t most = 0;
  for (int r = 0; r < a->n; r++) {
    const uint64_t calls = get(&slot_of(a, r)->calls);
    if (calls > most) most = calls;
  }
  set(&a->page->kind, (uint64_t)kind);
  set(&a->page->start, most + a->distance);
  set(&a->page->number, a->answered + 1);
}

/* Whether all know how the last proposal has ended, so that its words may be written over. */
static int all_done(const agreement_t *a) {
  for (int r = 0; r < a->n; r++)
    if (get(&slot_of(a, r)->done) != a->answered) return 0;
  return 1;
}

static int anybody_away(const agreement_t *a, gone_t *gone) {
  for (int r = 0; r < a->n; r++)
    if (r != a->rank && is_away(slot_of(a, r), gone)) return 1;
  return 0;
}

/* Do what can be done now: answer, see how a proposal has ended, propose. Called again until it leaves nothing, and whenever
 * there is a new kind. */
static int step(agreement_t *a, gone_t *gone) {
  pthread_mutex_lock(&a->lock);
  int unsettled = 0;
  if (!a->left) {
    const uint64_t number = get(&a->page->number);
    if (!a->open && number > a->answered) answer(a, number);
    const int end = a->open ? outcome(a, gone) : -1;
    if (end >= 0) conclude(a, end);
    int ready = -1;
    for (int k = 0; k < a->kinds; k++) {
      known_t *const known = a->known + k;
      const int ranks = known->state == ASKED || known->state == READY ? ready_for(a, k) : 0;
      if (ranks < 0 && known->state == READY) known->state = NCCLS;
      if (known->state == ASKED || known->state == READY) unsettled = 1;
      if (known->state == READY && ranks == a->n && ready < 0) ready = k;
    }
    if (unsettled && !a->open && anybody_away(a, gone)) unsettled = 0; /* nothing will be settled here any more */
    else if (ready >= 0 && !a->rank && !a->open && all_done(a)) propose(a, ready);
  }
  const int left = a->left ? IDLE : a->open ? OPEN : unsettled ? UNSETTLED : IDLE;
  pthread_mutex_unlock(&a->lock);
  return left;
}
