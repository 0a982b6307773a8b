/* The door: makes calls of NCCL's that all ranks can make by this library's own means, and passes on all others.
 *
 * A program meets these functions before NCCL's, as those of ../count.c. The handles that it holds are NCCL's own; what is known
 * of a communicator lies in a table by handle. A communicator that is not in the table is NCCL's, and so is every call of it,
 * whatever is unclear, and everything in a forked child. No caller waits for Python, for a binder, or for a peer's program.
 *
 * Who makes a call follows from what is equal on all ranks by NCCL's own rules: its number, collective, type, operation, root and
 * count. Never from addresses, streams, captures, or who was faster. rules.h says which calls may be ours, agree.h from which
 * number on they are, sign.h how the ranks of a communicator find each other.
 *
 * What makes the calls is a binder, which somebody in the process gives by blinkmpi_door_serve. Where nobody has, the door asks
 * the Python in the process for one, by a thread of its own, when it has to open the first communicator. Without Python it signs
 * in nowhere. */
#define _GNU_SOURCE
#include "../own.h"
#include "binder.h"
#include "python.h"
#include "record.h"
#include "rules.h"
#include "sign.h"
#include "status.h"
#include <signal.h>
#include <time.h>

enum { INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { LEAVE_MS = 10000 };          /* that Python's end waits for a thread which asks Python */
enum { RELAXED = 2 };               /* CU_STREAM_CAPTURE_MODE_RELAXED */
enum { SHORTEST_NS = 20000 };       /* between two looks at what peers have said */
enum { MISMATCH = 3, OVERLAP = 4 }; /* of a kernel's report */
enum { COMMS = 256, REASON = 256, BCAST = COLLECTIVES, NO_COLOR = -1 };

typedef struct { char internal[128]; } unique_id_t; /* ncclUniqueId, which is passed by value */

typedef struct { /* the beginning of ncclConfig_t */
  size_t size;
  unsigned magic, version;
  int blocking;
} config_t;

typedef struct member {
  comm_t handle;
  agreement_t agreement;
  page_t *page;
  uint64_t name[2], splits;
  int failed; /* what its launches have said, from the first that failed on */
  int users;  /* under the table's lock: the table, and whoever is at it */
  told_comm_t *told; /* what it says of itself, or NULL */
  int opened; /* whether the binder was asked */
  void *context; /* NULL before, and if it cannot */
  struct member *next; /* of those that wait to be closed */
} member_t;

typedef struct {
  int function; /* a collective, or BCAST */
  const void *send;
  void *recv;
  size_t count;
  int type, op, root;
  comm_t comm;
  stream_t stream;
} call_t;

typedef struct { /* of a group: a call that waits for its end, or has been passed on at once */
  call_t call;
  member_t *member;
  int passed;
} note_t;

typedef struct { /* a communicator that is made in a group: it is looked at behind it */
  signed_t signed_in;
  comm_t *made;
  uint64_t name[2];
} entry_t;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER; /* for the threads of the door */
static int work_to_agree, work_to_bind;
static member_t *table[COMMS], *closing; /* the table is in the order in which they were made */
static int members;
static const char *last_words; /* of the newest error that was ours */
static const door_binder_t *binder;
static rules_t rules;
static int forked, retired; /* retired: Python ends, so nothing is opened, prepared or closed any more */
static int asking;          /* a thread of the door is at who opens and binds, perhaps in Python */
static told_t *status;

static __thread int depth;
static __thread note_t *notes;
static __thread size_t noted, room_for_notes;
static __thread entry_t *entries;
static __thread size_t entered, room_for_entries;

static void say(const char *what, const char *why) { fprintf(stderr, "blinkmpi: %s: %s\n", what, why); }

/* Whether the user wants to read of every kind. */
static int says_all(void) {
  const char *const level = getenv("BLINKMPI_DEBUG");
  return level && (!strcasecmp(level, "INFO") || !strcasecmp(level, "TRACE"));
}

/* Begin to ask who opens and binds; 0 if nobody may be asked any more. */
static int begin_asking(void) {
  __atomic_store_n(&asking, 1, __ATOMIC_SEQ_CST);
  if (!__atomic_load_n(&retired, __ATOMIC_SEQ_CST) && !forked) return 1;
  __atomic_store_n(&asking, 0, __ATOMIC_SEQ_CST);
  return 0;
}

static void end_asking(void) { __atomic_store_n(&asking, 0, __ATOMIC_SEQ_CST); }

/* ---- the table */

/* A communicator of the table, which stays until it is released; NULL if its calls are NCCL's. */
static member_t *hold(comm_t handle) {
  member_t *found = NULL;
  if (forked) return NULL;
  pthread_mutex_lock(&table_lock);
  for (int i = 0; i < members && !found; i++)
    if (table[i]->handle == handle) found = table[i];
  if (found) found->users++;
  pthread_mutex_unlock(&table_lock);
  return found;
}

/* Let go of a communicator. Who is the last has a thread of the door's own close it: a caller may have come here from wherever a
 * destructor runs. */
static void release(member_t *m) {
  pthread_mutex_lock(&table_lock);
  if (!--m->users) {
    m->next = closing, closing = m, work_to_bind = 1;
    pthread_cond_broadcast(&work);
  }
  pthread_mutex_unlock(&table_lock);
}

static void close_all(member_t *m) {
  for (member_t *next; m; m = next) {
    next = m->next;
    if (m->told) m->told->state = ENDED;
    if (m->context && begin_asking()) binder->close(m->context), end_asking();
    end_agreement(&m->agreement);
    munmap(m->page, sizeof *m->page);
    free(m);
  }
}

/* Take a communicator out of the table, if it is there; who waits in a call of it goes on, and peers do not wait for it. */
static void forget(comm_t handle, int aborts) {
  member_t *found = NULL;
  if (forked || inside || !handle) return;
  pthread_mutex_lock(&table_lock);
  for (int i = 0; i < members; i++) {
    if (table[i]->handle == handle) found = table[i];
    else if (found) table[i - 1] = table[i];
  }
  members -= !!found;
  pthread_mutex_unlock(&table_lock);
  if (!found) return;
  leave(&found->agreement);
  void *const context = __atomic_load_n(&found->context, __ATOMIC_ACQUIRE);
  if (aborts && context) binder->abort(context);
  release(found);
}

/* Put a communicator into the table; 0 if there is no room. */
static int enter(member_t *m) {
  forget(m->handle, 0); /* of an earlier one, which NCCL has freed without our seeing it */
  pthread_mutex_lock(&table_lock);
  const int room = members < COMMS;
  if (room) table[members++] = m, work_to_bind = 1;
  pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&table_lock);
  return room;
}

/* All communicators, each held. */
static int hold_all(member_t **found) {
  for (int i = 0; i < members; i++) found[i] = table[i], table[i]->users++;
  return members;
}

/* ---- the door's own threads */

static void wake(int *what) {
  pthread_mutex_lock(&table_lock);
  *what = 1;
  pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&table_lock);
}

/* Sleep longer, the longer nothing has happened: up to 1 ms where callers may wait for an outcome, else up to 10 ms. */
static void rest(int left, long *pause_ns) {
  const long most = left == OPEN ? 1000000 : 10000000;
  if (*pause_ns > most) *pause_ns = most;
  nanosleep(&(struct timespec){0, *pause_ns}, NULL);
  *pause_ns += *pause_ns / 8;
}

static void *agree_always(void *unused) {
  member_t *held[COMMS];
  int before = IDLE;
  for (long pause_ns = SHORTEST_NS;;) {
    pthread_mutex_lock(&table_lock);
    if (work_to_agree) pause_ns = SHORTEST_NS;
    work_to_agree = 0;
    const int n = hold_all(held);
    pthread_mutex_unlock(&table_lock);
    int left = IDLE;
    for (int i = 0; i < n; i++) {
      const int found = step(&held[i]->agreement, is_gone);
      if (found > left) left = found;
      release(held[i]);
    }
    if (left != before) pause_ns = SHORTEST_NS;
    before = left;
    if (left != IDLE) {
      rest(left, &pause_ns);
      continue;
    }
    pthread_mutex_lock(&table_lock);
    while (!work_to_agree) pthread_cond_wait(&work, &table_lock);
    pthread_mutex_unlock(&table_lock);
  }
  return unused;
}

static const char *own_path(void) {
  static Dl_info own;
  dladdr(&retired, &own);
  return own.dli_fname ? own.dli_fname : "";
}

/* Let this thread allocate and load code while others capture streams into graphs, which are none of its. */
static void allow_all(void) {
  void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  int (*const exchange)(int *) = (int (*)(int *))(driver ? dlsym(driver, "cuThreadExchangeStreamCaptureMode") : NULL);
  int mode = RELAXED;
  if (exchange) exchange(&mode);
}

/* Whether the program gives a communicator back, or ends, here or elsewhere, before its GPUs were open. */
static int anybody_leaves(const agreement_t *a) {
  for (int r = 0; r < a->n; r++)
    if (get(&slot_of(a, r)->left) && get(&slot_of(a, r)->opened) != CANNOT_OPEN) return 1;
  return __atomic_load_n(&retired, __ATOMIC_SEQ_CST);
}

/* Let the binder open a communicator; the lock is not held, and nobody else does so. */
static void open_member(member_t *m) {
  char reason[REASON] = "";
  const slot_t *const own = slot_of(&m->agreement, m->agreement.rank);
  door_group_t group = {m->agreement.n, m->agreement.rank, {m->name[0], m->name[1]}, {own->gpu[0], own->gpu[1]}, {0}, &m->agreement};
  for (int r = 0; r < m->agreement.n; r++) group.pid[r] = (int64_t)slot_of(&m->agreement, r)->pid;
  if (!begin_asking()) return;
  if (!__atomic_load_n(&binder, __ATOMIC_ACQUIRE)) ask_python(own_path(), reason, sizeof reason);
  if (!binder && !reason[0]) snprintf(reason, sizeof reason, "Python has given no binder");
  void *const context = binder ? binder->open(&group, reason, sizeof reason) : NULL;
  end_asking();
  static char said[REASON]; /* by this thread alone */
  if (!context && !anybody_leaves(&m->agreement) && strcmp(reason, said)) say("a communicator's calls stay NCCL's", reason);
  if (!context) memcpy(said, reason, sizeof said);
  m->opened = 1;
  slot_t *const slot = slot_of(&m->agreement, m->agreement.rank);
  if (context || !get(&slot->left)) set(&slot->opened, context ? OPENED : CANNOT_OPEN); /* who leaves says that alone */
  if (m->told && !context) snprintf(m->told->why, sizeof m->told->why, "%s", reason);
  if (m->told) m->told->state = context ? OPENED : CANNOT_OPEN;
  __atomic_store_n(&m->context, context, __ATOMIC_RELEASE);
}

/* Let the binder prepare a kind, and say so to the other ranks. */
static void bind_kind(member_t *m, int number, const kind_t *kind) {
  char reason[REASON] = "";
  const door_kind_t wanted = {kind->collective, kind->type, kind->op, kind->root, kind->size_class};
  const int asks = m->context && begin_asking();
  void *const record = asks ? binder->bind(m->context, &wanted, reason, sizeof reason) : NULL;
  if (asks) end_asking();
  if (!record && m->context && says_all()) say("calls of a kind stay NCCL's", reason);
  if (m->told) {
    told_kind_t *const told = m->told->kind + number;
    if (!record) snprintf(told->why, sizeof told->why, "%s", m->context ? reason : m->told->why);
    __atomic_store_n(&told->bound, record ? 1 : 2, __ATOMIC_RELEASE);
  }
  bound(&m->agreement, number, record);
}

static void *bind_always(void *unused) {
  member_t *held[COMMS];
  allow_all();
  for (;;) {
    pthread_mutex_lock(&table_lock);
    while (!work_to_bind) pthread_cond_wait(&work, &table_lock);
    work_to_bind = 0;
    const int n = hold_all(held);
    member_t *const ended = closing;
    closing = NULL;
    pthread_mutex_unlock(&table_lock);
    close_all(ended);
    int more = 0;
    for (int i = 0; i < n; i++)
      if (!held[i]->opened) open_member(held[i]);
    for (int i = 0; i < n; i++) { /* one kind, for to compile takes long, and peers may wait to open another communicator */
      kind_t kind;
      const int k = more ? -1 : asked(&held[i]->agreement, &kind);
      if (k >= 0) bind_kind(held[i], k, &kind), more = 1;
      release(held[i]);
    }
    wake(&work_to_agree);
    if (more) wake(&work_to_bind);
  }
  return unused;
}

static int start_thread(void *(*run)(void *)) {
  sigset_t all, before; /* the program's signals are its own threads' */
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread, NULL, run, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!error) pthread_detach(thread);
  return !error;
}

static int threads_run;

static void start_threads(void) { threads_run = start_thread(agree_always) && start_thread(bind_always); }

/* ---- a communicator is made */

static void before_fork(void) { pthread_mutex_lock(&table_lock); }

static void behind_fork(void) { pthread_mutex_unlock(&table_lock); }

static void in_child(void) {
  forked = 1; /* its GPU, its peers and the door's threads are the parent's */
  pthread_mutex_unlock(&table_lock);
}

/* The current GPU's UUID, of the driver that the program uses. */
EXPORT int blinkmpi_door_gpu(uint64_t *words) {
  void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  int (*const current)(int *) = (int (*)(int *))(driver ? dlsym(driver, "cuCtxGetDevice") : NULL);
  int (*const uuid)(uint64_t *, int) = (int (*)(uint64_t *, int))(driver ? dlsym(driver, "cuDeviceGetUuid_v2") : NULL);
  int device = 0;
  return !current || !uuid || current(&device) || uuid(words, device);
}

static uint64_t build;
static const char *unwilling; /* why this process makes no calls */

/* What the environment says, once. */
static void learn(void) {
  static const char *const choices[] = {"NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_PROTO"};
  const char *const text = getenv("BLINKMPI_NCCL"), *const slash = strrchr(own_path(), '/');
  for (const char *c = slash ? slash : ""; *c; c++) build = mixed(build, (uint64_t)*c); /* its name has a digest of its source */
  pthread_atfork(before_fork, behind_fork, in_child);
  sweep();
  status = new_status();
  if (!read_rules(text, &rules)) {
    unwilling = "BLINKMPI_NCCL must be off, all, or collectives with sizes as in allreduce:..4M,allgather:64K..,reduce";
    say("all calls are NCCL's", unwilling);
  } else if (is_off(&rules)) {
    unwilling = "BLINKMPI_NCCL=off";
  }
  for (size_t i = 0; !unwilling && i < sizeof choices / sizeof *choices; i++) {
    if (!getenv(choices[i])) continue;
    unwilling = "NCCL_P2P_DISABLE, NCCL_ALGO or NCCL_PROTO is set";
    say("all calls are NCCL's", unwilling);
  }
  if (status && unwilling) snprintf(status->why, sizeof status->why, "%s", unwilling);
}

/* The page's place for a communicator. */
static told_comm_t *told_of(const uint64_t *name, int n, int rank, const char *why) {
  pthread_mutex_lock(&table_lock);
  told_comm_t *const found = new_told(status, name, n, rank, why);
  pthread_mutex_unlock(&table_lock);
  return found;
}

/* Sign in before NCCL makes a communicator, if this process may make its calls. `ranks`: 0 if they are not known yet. */
static void prepare(entry_t *e, comm_t *made, const uint64_t *name, int slot, int ranks, int key, const config_t *config) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  facts_t facts = {0};
  e->signed_in.page = NULL, e->made = made;
  if (inside || forked) return;
  const door_binder_t *const served = __atomic_load_n(&binder, __ATOMIC_ACQUIRE);
  if (!served && (__atomic_load_n(&retired, __ATOMIC_SEQ_CST) || !python_runs())) return;
  pthread_once(&once, learn);
  const int blocks = !config || config->size < sizeof *config || config->blocking; /* INT_MIN: it says nothing */
  if (unwilling || !blocks || slot < 0 || slot >= MOST_RANKS || ranks == 1 || ranks > MOST_RANKS) return;
  if ((served ? served->gpu : blinkmpi_door_gpu)(facts.gpu)) return;
  memcpy(e->name, name, sizeof e->name);
  facts.build = build, facts.settings = hash_of(&rules), facts.ranks = (uint64_t)ranks, facts.key = (uint64_t)(int64_t)key;
  const char *const why = sign_in(&e->signed_in, name, slot, &facts);
  if (why) say("a communicator stays NCCL's", why);
}

/* How many ranks a communicator has, and which this one is; 0 if NCCL does not say. */
static int ask_nccl(comm_t comm, int *n, int *rank) {
  static void *count, *user_rank;
  result_t (*const ask)(comm_t, int *) = (result_t (*)(comm_t, int *))nccl(&count, "pncclCommCount");
  result_t (*const ask_rank)(comm_t, int *) = (result_t (*)(comm_t, int *))nccl(&user_rank, "pncclCommUserRank");
  inside++;
  const int known = ask && ask_rank && !ask(comm, n) && !ask_rank(comm, rank);
  inside--;
  return known;
}

/* Look who has signed in, now that NCCL has made a communicator, and take it into the table if all have. */
static void look(entry_t *e, comm_t handle) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static int told;
  signed_t *const s = &e->signed_in;
  int place[MOST_RANKS], n = 0, rank = 0;
  const char *why = handle && ask_nccl(handle, &n, &rank) ? NULL : "NCCL does not say how many ranks it has";
  if (!why) why = why_not(s->page, n, place, ranks_of(s->page, place));
  if (!why && place[rank] != s->slot) why = "NCCL numbers its ranks in another way";
  if (!why) pthread_once(&once, start_threads);
  if (!why && !threads_run) why = "no threads could be started";
  member_t *const m = why ? NULL : calloc(1, sizeof *m);
  if (m) {
    m->handle = handle, m->page = s->page, m->users = 1;
    memcpy(m->name, e->name, sizeof m->name);
    m->told = told_of(e->name, n, rank, NULL);
    begin_agreement(&m->agreement, m->page, n, rank, place);
    if (enter(m)) return close_name(s);
    if (m->told) m->told->state = ENDED;
    end_agreement(&m->agreement);
    free(m);
  }
  if (n > 1) told_of(e->name, n, rank, why ? why : "there is no room for one more");
  if (n > 1 && !__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED))
    say("a communicator stays NCCL's (others may, too)", why ? why : "there is no room for one more");
  sign_off(s);
}

/* NCCL has made a communicator, or not, or will at the end of a group. */
static result_t made(entry_t *e, result_t result) {
  if (!e->signed_in.page) return result;
  if (result != SUCCESS) {
    sign_off(&e->signed_in);
  } else if (!depth) {
    look(e, *e->made);
  } else {
    if (entered == room_for_entries) {
      const size_t room = 2 * room_for_entries + 4;
      entry_t *const more = realloc(entries, room * sizeof *more);
      if (!more) return sign_off(&e->signed_in), result;
      entries = more, room_for_entries = room;
    }
    entries[entered++] = *e;
  }
  return result;
}

static void name_of_ids(const unique_id_t *ids, int n, uint64_t *name) {
  name[0] = 0xcbf29ce484222325u, name[1] = 0x9ae16a3b2f90404fu;
  for (const char *c = (const char *)ids, *end = c + (size_t)n * sizeof *ids; c < end; c += 8) {
    uint64_t word;
    memcpy(&word, c, 8);
    name[0] = mixed(name[0], word), name[1] = mixed(name[1], word + 0x9e3779b97f4a7c15u);
  }
}

/* ---- calls */

/* Let NCCL make a call. */
static result_t pass(const call_t *c) {
  switch (c->function) {
  case ALL_REDUCE: {
    CALL(AllReduce, (const void *, void *, size_t, int, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->op, c->comm, c->stream)
    return result;
  }
  case ALL_GATHER: {
    CALL(AllGather, (const void *, void *, size_t, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->comm, c->stream)
    return result;
  }
  case REDUCE_SCATTER: {
    CALL(ReduceScatter, (const void *, void *, size_t, int, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->op, c->comm, c->stream)
    return result;
  }
  case BROADCAST: {
    CALL(Broadcast, (const void *, void *, size_t, int, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->root, c->comm, c->stream)
    return result;
  }
  case BCAST: {
    CALL(Bcast, (void *, size_t, int, int, comm_t, stream_t), c->recv, c->count, c->type, c->root, c->comm, c->stream)
    return result;
  }
  case REDUCE: {
    CALL(Reduce, (const void *, void *, size_t, int, int, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->op, c->root, c->comm, c->stream)
    return result;
  }
  default: {
    CALL(AlltoAll, (const void *, void *, size_t, int, comm_t, stream_t), c->send, c->recv, c->count, c->type, c->comm, c->stream)
    return result;
  }
  }
}

/* What has gone wrong with a communicator in calls of ours: 0, or the error that all its calls give from then on. */
static int wrong_with(member_t *m) {
  void *const context = __atomic_load_n(&m->context, __ATOMIC_ACQUIRE);
  int error = __atomic_load_n(&m->failed, __ATOMIC_RELAXED);
  if (!error && context) error = binder->wrong(context);
  if (error)
    __atomic_store_n(&last_words,
                     error == INVALID_USAGE ? "blinkmpi: the ranks made different calls of a communicator, or two at once"
                     : error == REMOTE_ERROR ? "blinkmpi: another rank is gone, has aborted, or did not come in time"
                                             : "blinkmpi: CUDA refused to launch a call",
                     __ATOMIC_RELAXED);
  return error;
}

/* Say which a new kind is. */
static void tell_kind(told_comm_t *comm, told_kind_t *told, const kind_t *kind) {
  told->collective = kind->collective, told->type = kind->type, told->op = kind->op, told->root = kind->root;
  told->size_class = kind->size_class;
  const int64_t number = told - comm->kind + 1;
  if (number > comm->kinds) __atomic_store_n(&comm->kinds, number, __ATOMIC_RELEASE);
}

/* Number a call, and let whoever it falls to make it. alone: whether it is the only one of its communicator in its group. */
static result_t run(member_t *m, const call_t *c, int alone) {
  kind_t kind;
  uint64_t number;
  int added, which;
  const int wrong = wrong_with(m), collective = c->function == BCAST ? BROADCAST : c->function;
  if (wrong) return wrong;
  const int may = kind_of(&rules, m->agreement.n, collective, c->count, c->type, c->op, c->root, &kind);
  void *const record = take(&m->agreement, may ? &kind : NULL, alone, &number, &added, &which);
  told_kind_t *const told = m->told && which >= 0 ? m->told->kind + which : NULL;
  if (added && told) tell_kind(m->told, told, &kind);
  if (added) wake(&work_to_bind), wake(&work_to_agree);
  if (!number) return REMOTE_ERROR; /* another thread has aborted it meanwhile: its handle is NCCL's no more */
  if (!record) {
    const result_t result = pass(c);
    const int taken = result == SUCCESS || result == IN_PROGRESS;
    if (!taken) give_back(&m->agreement);
    if (taken && m->told) count_up(&m->told->nccls);
    if (taken && told) count_up(&told->nccls);
    return result;
  }
  if (m->told) count_up(&m->told->ours);
  if (told) count_up(&told->ours);
  const door_call_t ours = {c->send, c->recv, c->count, number, c->stream};
  const int error = binder->launch(record, &ours);
  if (error) __atomic_store_n(&m->failed, error, __ATOMIC_RELAXED), wrong_with(m);
  return error;
}

/* Keep a call until the end of its group, when it is known what else is in it. Operations of a program's own may be destroyed
 * before, so calls with such are NCCL's at once. */
static result_t note(member_t *m, const call_t *c) {
  if (noted == room_for_notes) {
    const size_t room = 2 * room_for_notes + 8;
    note_t *const more = realloc(notes, room * sizeof *more);
    if (!more) return release(m), INTERNAL_ERROR;
    notes = more, room_for_notes = room;
  }
  const int passed = is_reduction(c->function) && c->op > AVG;
  const result_t result = passed ? pass(c) : SUCCESS;
  if (result == SUCCESS || result == IN_PROGRESS) notes[noted++] = (note_t){*c, m, passed};
  else release(m);
  return result;
}

static result_t make(const call_t *c) {
  member_t *const m = inside || !c->count ? NULL : hold(c->comm); /* of no elements: NCCL makes no call of it */
  if (!m) return pass(c);
  if (depth) return note(m, c);
  const result_t result = run(m, c, 1);
  release(m);
  return result;
}

/* ---- groups */

static int is_alone(size_t i) {
  for (size_t j = 0; j < noted; j++)
    if (j != i && notes[j].member == notes[i].member) return 0;
  return 1;
}

/* Make the calls of a group, or let NCCL make them all. Returns the first error. */
static result_t end_notes(int all_nccls) {
  result_t first = SUCCESS;
  for (size_t i = 0; i < noted; i++) {
    note_t *const one = notes + i;
    uint64_t number;
    int added, which;
    result_t result = SUCCESS;
    if (all_nccls || forked) result = one->passed ? SUCCESS : pass(&one->call);
    else if (one->passed) take(&one->member->agreement, NULL, 0, &number, &added, &which);
    else result = run(one->member, &one->call, is_alone(i));
    if (first == SUCCESS) first = result;
  }
  for (size_t i = 0; i < noted && !forked; i++) release(notes[i].member);
  free(notes);
  notes = NULL, noted = room_for_notes = 0;
  return first;
}

static void end_entries(result_t result) {
  for (size_t i = 0; i < entered; i++) {
    if (result == SUCCESS && !forked) look(entries + i, *entries[i].made);
    else if (!forked) sign_off(&entries[i].signed_in);
  }
  free(entries);
  entries = NULL, entered = room_for_entries = 0;
}

/* ---- what the program calls */

EXPORT int blinkmpi_door_serve(const door_binder_t *given) {
  const door_binder_t *none = NULL;
  return __atomic_compare_exchange_n(&binder, &none, given, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? SUCCESS : INVALID_USAGE;
}

/* How a binder launches whose records are those of record.h. */
EXPORT int blinkmpi_door_launch(void *record, const door_call_t *call) { return launch_record(record, call); }

/* How it aborts, and learns of errors, whose contexts are reports of kernels (failure_report.py). */
EXPORT void blinkmpi_door_abort(void *context) { __atomic_store_n((int64_t *)context, 1, __ATOMIC_SEQ_CST); }

EXPORT int blinkmpi_door_wrong(void *context) {
  const int64_t code = __atomic_load_n((int64_t *)context + 1, __ATOMIC_RELAXED);
  return !code ? SUCCESS : code == MISMATCH || code == OVERLAP ? INVALID_USAGE : REMOTE_ERROR;
}

/* Python ends: it is asked nothing any more, and what it was asked has some seconds to end, for CPython ends threads in the
 * middle of what they do. What is ours stays so. By a thread that does not hold the GIL. */
EXPORT void blinkmpi_door_retire(void) {
  __atomic_store_n(&retired, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < LEAVE_MS && __atomic_load_n(&asking, __ATOMIC_SEQ_CST) && !forked; i++) usleep(1000);
}

/* While a communicator is being opened: 1 + the first of the other ranks that will not open it any more, -1 if this one must not
 * either, 0: go on. A rank that has died comes before one that cannot open, which may be for its death. */
EXPORT int blinkmpi_door_lost(const void *peers) {
  const agreement_t *const a = peers;
  if (__atomic_load_n(&retired, __ATOMIC_SEQ_CST) || get(&slot_of(a, a->rank)->left)) return -1;
  int lost = 0;
  for (int r = 0; r < a->n; r++) {
    const slot_t *const slot = slot_of(a, r);
    if (r != a->rank && is_away(slot, is_gone)) return r + 1;
    if (r != a->rank && !lost && get(&slot->opened) == CANNOT_OPEN) lost = r + 1;
  }
  return lost;
}

/* For a kernel's arguments as a record makes them, and its grid. */
EXPORT unsigned blinkmpi_door_fill(const record_t *record, const door_call_t *call, uint64_t *words) { return fill_words(record, call, words); }

EXPORT result_t ncclCommInitRank(comm_t *comm, int n, unique_id_t id, int rank) {
  FIND(CommInitRank, (comm_t *, int, unique_id_t, int))
  entry_t e;
  uint64_t name[2];
  name_of_ids(&id, 1, name);
  prepare(&e, comm, name, rank, n, rank, NULL);
  ASK(comm, n, id, rank)
  return made(&e, result);
}

EXPORT result_t ncclCommInitRankConfig(comm_t *comm, int n, unique_id_t id, int rank, config_t *config) {
  FIND(CommInitRankConfig, (comm_t *, int, unique_id_t, int, config_t *))
  entry_t e;
  uint64_t name[2];
  name_of_ids(&id, 1, name);
  prepare(&e, comm, name, rank, n, rank, config);
  ASK(comm, n, id, rank, config)
  return made(&e, result);
}

EXPORT result_t ncclCommInitRankScalable(comm_t *comm, int n, int rank, int n_ids, unique_id_t *ids, config_t *config) {
  FIND(CommInitRankScalable, (comm_t *, int, int, int, unique_id_t *, config_t *))
  entry_t e;
  uint64_t name[2];
  name_of_ids(ids, ids ? n_ids : 0, name);
  prepare(&e, comm, name, rank, n, rank, config);
  ASK(comm, n, rank, n_ids, ids, config)
  return made(&e, result);
}

EXPORT result_t ncclCommSplit(comm_t comm, int color, int key, comm_t *newcomm, config_t *config) {
  FIND(CommSplit, (comm_t, int, int, comm_t *, config_t *))
  entry_t e = {0};
  member_t *const parent = inside ? NULL : hold(comm);
  if (parent) {
    const uint64_t split = __atomic_add_fetch(&parent->splits, 1, __ATOMIC_SEQ_CST);
    uint64_t name[2];
    for (int i = 0; i < 2; i++) name[i] = mixed(mixed(parent->name[i], split), (uint64_t)(int64_t)color);
    if (color != NO_COLOR) prepare(&e, newcomm, name, parent->agreement.rank, 0, key, config);
    release(parent);
  }
  ASK(comm, color, key, newcomm, config)
  return made(&e, result);
}

EXPORT result_t ncclCommFinalize(comm_t comm) {
  forget(comm, 0);
  CALL(CommFinalize, (comm_t), comm)
  return result;
}

EXPORT result_t ncclCommDestroy(comm_t comm) {
  forget(comm, 0); /* before: another thread may be given its address as soon as it is free */
  CALL(CommDestroy, (comm_t), comm)
  return result;
}

EXPORT result_t ncclCommAbort(comm_t comm) {
  forget(comm, 1);
  CALL(CommAbort, (comm_t), comm)
  return result;
}

EXPORT result_t ncclCommRevoke(comm_t comm, int flags) {
  forget(comm, 1);
  CALL(CommRevoke, (comm_t, int), comm, flags)
  return result;
}

/* NCCL's first, which goes on with what it has begun by this. Its own threads come here, too. */
EXPORT result_t ncclCommGetAsyncError(comm_t comm, result_t *error) {
  CALL(CommGetAsyncError, (comm_t, result_t *), comm, error)
  member_t *const m = result == SUCCESS && *error == SUCCESS && !inside ? hold(comm) : NULL;
  if (m) {
    *error = wrong_with(m);
    release(m);
  }
  return result;
}

EXPORT const char *ncclGetLastError(comm_t comm) {
  static void *kept;
  const char *(*const call)(comm_t) = (const char *(*)(comm_t))nccl(&kept, "pncclGetLastError");
  const char *const ours = __atomic_load_n(&last_words, __ATOMIC_RELAXED);
  return ours ? ours : call ? call(comm) : NULL;
}

/* Kernels of NCCL's own for windows are fast, so a communicator that has one is NCCL's from here on; all ranks come here. */
EXPORT result_t ncclCommWindowRegister(comm_t comm, void *buffer, size_t size, void *window, int flags) {
  member_t *const m = inside ? NULL : hold(comm);
  if (m) {
    uint64_t before = 0; /* calls of this group, which are numbered at its end */
    for (size_t i = 0; i < noted; i++) before += notes[i].member == m;
    pass_after(&m->agreement, before);
    release(m);
  }
  CALL(CommWindowRegister, (comm_t, void *, size_t, void *, int), comm, buffer, size, window, flags)
  return result;
}

EXPORT result_t ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, comm_t comm, stream_t stream) {
  return make(&(call_t){ALL_REDUCE, send, recv, count, type, op, -1, comm, stream});
}

EXPORT result_t ncclAllGather(const void *send, void *recv, size_t count, int type, comm_t comm, stream_t stream) {
  return make(&(call_t){ALL_GATHER, send, recv, count, type, -1, -1, comm, stream});
}

EXPORT result_t ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, comm_t comm, stream_t stream) {
  return make(&(call_t){REDUCE_SCATTER, send, recv, count, type, op, -1, comm, stream});
}

EXPORT result_t ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, comm_t comm, stream_t stream) {
  return make(&(call_t){BROADCAST, send, recv, count, type, -1, root, comm, stream});
}

EXPORT result_t ncclBcast(void *buffer, size_t count, int type, int root, comm_t comm, stream_t stream) {
  return make(&(call_t){BCAST, buffer, buffer, count, type, -1, root, comm, stream});
}

EXPORT result_t ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, comm_t comm, stream_t stream) {
  return make(&(call_t){REDUCE, send, recv, count, type, op, root, comm, stream});
}

EXPORT result_t ncclAlltoAll(const void *send, void *recv, size_t count, int type, comm_t comm, stream_t stream) {
  return make(&(call_t){ALL_TO_ALL, send, recv, count, type, -1, -1, comm, stream});
}

EXPORT result_t ncclGroupStart(void) {
  CALL(GroupStart, (void))
  if (!inside && result == SUCCESS) depth++;
  return result;
}

/* End a group of NCCL's, behind the calls that were kept for its end. */
#define END_GROUP(name, types, all_nccls, ...)                                  \
  const int last = !inside && depth == 1;                                       \
  if (!inside && depth) depth--;                                                \
  const result_t first = last ? end_notes(all_nccls) : SUCCESS;                 \
  CALL(name, types, __VA_ARGS__)                                                \
  if (last) end_entries(result);                                                \
  return result == SUCCESS ? first : result;

EXPORT result_t ncclGroupEnd(void) { END_GROUP(GroupEnd, (void), 0) }

EXPORT result_t ncclGroupSimulateEnd(void *told) { END_GROUP(GroupSimulateEnd, (void *), 1, told) }
