/* How the ranks of a communicator find each other: each signs in on a page in /dev/shm before NCCL's init and looks behind it.
 *
 * NCCL's init returns when every rank has come to it. So a rank that has not signed by then never will, and one look is enough:
 * nobody waits, and all see the same. The page's file is found by a name that all ranks know, and its name goes with the first
 * look. A process that ends before leaves it; the next one that signs in removes it. */
#pragma once
#include "page.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHM "/dev/shm"
enum { PATH_BYTES = 96, TRIES = 1000 };

typedef struct { /* of this process, and of the communicator that it is about to enter; the same words as in a slot */
  uint64_t build, settings, ranks, gpu[2];
  uint64_t key; /* by which ranks are ordered, where their numbers are not known before */
} facts_t;

typedef struct {
  page_t *page; /* NULL: not signed in */
  int file, slot;
  char path[PATH_BYTES];
} signed_t;

/* When a process started, in ticks since boot, and its state's letter; 0 if there is no such process. */
static uint64_t start_of(uint64_t pid, char *state) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t bytes = read(file, text, sizeof text - 1);
  close(file);
  if (bytes <= 0) return 0;
  text[bytes] = 0;
  unsigned long long start = 0;
  const char *const rest = strrchr(text, ')'); /* the name may have blanks and brackets */
  const char *const form = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
  return rest && sscanf(rest, form, state, &start) == 2 ? start : 0;
}

/* Whether the process of a rank has ended. */
static int is_gone(const slot_t *slot) {
  char state = 0;
  return start_of(get(&slot->pid), &state) != get(&slot->start) || state == 'Z' || state == 'X';
}

/* Remove pages that no process has open: those of processes that ended before they had looked. */
static void sweep(void) {
  char prefix[PATH_BYTES], path[sizeof SHM + 256];
  DIR *const folder = opendir(SHM);
  snprintf(prefix, sizeof prefix, "blinkmpi-nccl-%u-", (unsigned)getuid());
  for (const struct dirent *e = folder ? readdir(folder) : NULL; e; e = readdir(folder)) {
    if (strncmp(e->d_name, prefix, strlen(prefix))) continue;
    snprintf(path, sizeof path, SHM "/%s", e->d_name);
    const int file = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) continue;
    if (!flock(file, LOCK_EX | LOCK_NB)) unlink(path); /* who opens it now sees that it has no name, and makes another one */
    close(file);
  }
  if (folder) closedir(folder);
}

/* Open the page's file, locked, and make it if need be; -1 and errno if that fails. */
static int open_page(const char *path) {
  for (int i = 0; i < TRIES; i++) {
    const int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    struct stat found;
    if (file < 0) return -1;
    if (!flock(file, LOCK_SH | LOCK_NB) && !fstat(file, &found) && found.st_nlink) {
      if (found.st_uid == geteuid() && S_ISREG(found.st_mode) && !(found.st_mode & 077)) return file;
      close(file), errno = EPERM; /* somebody else has made it */
      return -1;
    }
    close(file);
    usleep(100); /* somebody sweeps */
  }
  return errno = EAGAIN, -1;
}

/* Take a slot; 0 if somebody has it, who signs in by the same name. */
static int fill_slot(slot_t *slot, const facts_t *facts) {
  struct stat space = {0};
  char state;
  uint64_t nobody = 0, own = (uint64_t)getpid();
  if (!__atomic_compare_exchange_n(&slot->pid, &nobody, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 0;
  stat("/proc/self/ns/pid", &space); /* in another one our number means another process */
  slot->build = facts->build, slot->settings = facts->settings, slot->ranks = facts->ranks, slot->key = facts->key;
  slot->start = start_of(own, &state), slot->space = (uint64_t)space.st_ino;
  memcpy(slot->gpu, facts->gpu, sizeof slot->gpu);
  set(&slot->signed_in, SIGNED_IN);
  return 1;
}

/* Let nobody come to a page by its name any more. */
static void close_name(const signed_t *s) {
  unlink(s->path);
  close(s->file);
}

/* Leave a page: this rank makes no calls of the communicator, and its peers do not wait for it. */
static void sign_off(signed_t *s) {
  if (!s->page) return;
  set(&s->page->slot[s->slot].left, 1);
  close_name(s);
  munmap(s->page, sizeof *s->page);
  s->page = NULL;
}

/* Sign in by a name of two words, in a slot that no other rank takes. Returns why that cannot be, or NULL. */
static const char *sign_in(signed_t *s, const uint64_t *name, int slot, const facts_t *facts) {
  s->page = NULL, s->slot = slot;
  snprintf(s->path, sizeof s->path, SHM "/blinkmpi-nccl-%u-%016llx%016llx", (unsigned)getuid(), (unsigned long long)name[0],
           (unsigned long long)name[1]);
  if ((s->file = open_page(s->path)) < 0) return strerror(errno);
  int error = posix_fallocate(s->file, 0, sizeof *s->page); /* so that no store meets a full file system */
  void *at = MAP_FAILED;
  if (!error && (at = mmap(NULL, sizeof *s->page, PROT_READ | PROT_WRITE, MAP_SHARED, s->file, 0)) == MAP_FAILED) error = errno;
  if (error) return unlink(s->path), close(s->file), strerror(error);
  s->page = at;
  if (fill_slot(s->page->slot + slot, facts)) return NULL;
  munmap(at, sizeof *s->page), close(s->file);
  s->page = NULL;
  return "another communicator has its name";
}

/* The slots of those who signed in, in the order of their keys and then of the slots. Returns how many there are. */
static int ranks_of(const page_t *page, int *place) {
  int n = 0;
  for (int i = 0; i < MOST_RANKS; i++) {
    if (get(&page->slot[i].signed_in) != SIGNED_IN) continue;
    int at = n++;
    for (; at && (int64_t)page->slot[place[at - 1]].key > (int64_t)page->slot[i].key; at--) place[at] = place[at - 1];
    place[at] = i;
  }
  return n;
}

/* Why ranks that signed in cannot make calls of a communicator of `n`, or NULL if they can: the same on all of them. */
static const char *why_not(const page_t *page, int n, const int *place, int signed_in) {
  if (n < 2) return "it has one rank";
  if (signed_in != n) return "not every rank is a process of this machine that meets this library and lets it make calls";
  const slot_t *const first = page->slot + place[0];
  for (int i = 0; i < n; i++) {
    const slot_t *const one = page->slot + place[i];
    if (one->build != first->build) return "the ranks have different builds of this library";
    if (one->settings != first->settings) return "BLINKMPI_NCCL is not the same on all ranks";
    if (one->ranks != first->ranks) return "the ranks mean different numbers of ranks";
    if (one->space != first->space || !one->start) return "the ranks cannot see each other's processes";
    for (int j = 0; j < i; j++) {
      const slot_t *const other = page->slot + place[j];
      if (other->pid == one->pid) return "two of its ranks are one process";
      if (!memcmp(other->gpu, one->gpu, sizeof one->gpu)) return "two of its ranks are on one GPU";
    }
  }
  return NULL;
}
