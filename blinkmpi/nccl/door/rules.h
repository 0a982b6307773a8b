/* Which calls may be ours at all: by what is equal on all ranks alone, and by BLINKMPI_NCCL. Nothing else is looked at here. */
#pragma once
#include "agree.h"
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, COLLECTIVES };
enum { SUM = 0, PROD = 1, AVG = 4 };             /* ncclRedOp_t; max and min are NCCL's until both are known to treat NaN alike */
enum { FLOAT16 = 6, BFLOAT16 = 9, FLOAT8 = 10 }; /* ncclDataType_t: from the first to the second floats, then those of 8 bits */

typedef struct { /* bytes from which and to which a collective may be ours */
  uint64_t least[COLLECTIVES], most[COLLECTIVES];
} rules_t;

static uint64_t bytes_of(int type) { /* ncclDataType_t, in its order; 0 for those that came later */
  static const uint8_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 0;
}

static int is_reduction(int collective) { return collective == ALL_REDUCE || collective == REDUCE_SCATTER || collective == REDUCE; }

/* The kind of a call that may be ours; 0 if it is always NCCL's. root: -1 where there is none. */
static int kind_of(const rules_t *rules, int n, int collective, size_t count, int type, int op, int root, kind_t *kind) {
  const int blocks = collective == ALL_GATHER || collective == REDUCE_SCATTER || collective == ALL_TO_ALL;
  const uint64_t each = bytes_of(type) * (blocks ? (uint64_t)n : 1);
  if (!each || !count || count > (UINT64_MAX >> 1) / each || root >= n) return 0;
  if ((collective == BROADCAST || collective == REDUCE) && root < 0) return 0;
  if (is_reduction(collective)) {
    const int is_float = type >= FLOAT16 && type <= BFLOAT16;
    if (type >= FLOAT8 || (op != SUM && op != PROD && !(op == AVG && is_float))) return 0;
  }
  const uint64_t bytes = each * count;
  if (bytes < rules->least[collective] || bytes > rules->most[collective]) return 0;
  const int class = 64 - __builtin_clzll(bytes) - !(bytes & (bytes - 1)); /* at most 2 to this power */
  *kind = (kind_t){collective, type, is_reduction(collective) ? op : -1, root, class};
  return 1;
}

/* ---- BLINKMPI_NCCL: "off", "all", or collectives with sizes, "allreduce:..4M,allgather:64K..,reduce" */

/* A number with K, M or G behind it, and what follows; 0 if there is none, or too large a one. */
static int read_bytes(const char **at, uint64_t *found) {
  static const char units[] = "KMG";
  char *end;
  if (**at < '0' || **at > '9') return 0;
  errno = 0;
  *found = strtoull(*at, &end, 10);
  const char *const unit = *end ? strchr(units, *end) : NULL;
  const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
  *at = end + !!unit;
  if (errno || *found > UINT64_MAX >> shift) return 0;
  *found <<= shift;
  return 1;
}

/* One collective and its sizes; 0 if it is none. Moves on to what is behind it. */
static int read_rule(const char **at, rules_t *rules) {
  static const char *const names[] = {"allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall"};
  const size_t length = strcspn(*at, ":,");
  int c = 0;
  while (c < COLLECTIVES && (strlen(names[c]) != length || strncmp(*at, names[c], length))) c++;
  if (c == COLLECTIVES) return 0;
  *at += length;
  rules->least[c] = 0, rules->most[c] = UINT64_MAX;
  if (**at != ':') return 1;
  ++*at;
  const char *const begin = *at;
  if (**at != '.' && !read_bytes(at, rules->least + c)) return 0;
  if (strncmp(*at, "..", 2)) return 0;
  *at += 2;
  return (!**at || **at == ',') ? *at - begin > 2 : read_bytes(at, rules->most + c);
}

/* Read the rules; 0 if the text says none. NULL or an empty text: as "all". */
static int read_rules(const char *text, rules_t *rules) {
  const int all = !text || !*text || !strcmp(text, "all");
  for (int c = 0; c < COLLECTIVES; c++) rules->least[c] = !all, rules->most[c] = all ? UINT64_MAX : 0;
  if (all || !strcmp(text, "off")) return 1;
  for (; read_rule(&text, rules); text++) {
    if (!*text) return 1;
    if (*text != ',') return 0;
  }
  return 0;
}

static int is_off(const rules_t *rules) {
  for (int c = 0; c < COLLECTIVES; c++)
    if (rules->least[c] <= rules->most[c]) return 0;
  return 1;
}

static uint64_t hash_of(const rules_t *rules) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int c = 0; c < COLLECTIVES; c++) hash = mixed(mixed(hash, rules->least[c]), rules->most[c]);
  return hash;
}
