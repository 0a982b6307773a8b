/* What the ranks of a communicator share: one page, in which each rank has a slot. Every word has one writer. */
#pragma once
#include <stdint.h>

enum { MOST_RANKS = 16, MOST_KINDS = 256 };
#define SIGNED_IN 0x31726f6f646c6e62u /* "bnldoor1": the format, and that the rank's facts are there */

typedef struct { /* of a rank */
  uint64_t signed_in;                               /* written behind the facts */
  uint64_t build, settings, ranks, pid, start, space, gpu[2], key; /* facts: see sign.h */
  uint64_t opened;                                  /* 0: not yet; 1: its GPUs are open; 2: they cannot be, and all calls stay NCCL's */
  uint64_t left;                                    /* the rank makes no more calls here, and answers nothing */
  uint64_t calls;                                   /* it has made so many */
  uint64_t answer, done;                            /* 2 x the proposal that it has answered, + 1 for yes; which it knows the end of */
  uint64_t ready[MOST_KINDS];                       /* of a kind: 0, or which it is, + 1 if the rank can make its calls */
} slot_t;

typedef struct {
  uint64_t number, kind, start; /* the newest proposal, of rank 0; the number is written behind the rest */
  slot_t slot[MOST_RANKS];
} page_t;

static inline uint64_t get(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static inline void set(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

static inline uint64_t mixed(uint64_t hash, uint64_t value) { /* FNV-1a, of words */
  return (hash ^ value) * 0x100000001b3u ^ hash >> 29;
}
