/* Calls that differ from kept ones in lengths alone: of blocks (block_kinds.h), and of other counts (count_kinds.h). */
#pragma once
#include "block_kinds.h"
#include "block_launches.h"
#include "count_kinds.h"
#include "kept_calls.h"

/* The entry of a kind, filled from the arguments of one of its calls; NULL if there is none, if one of its calls is under way, if
 * these are Python's to read, or if that raises. */
static entry_t *kind_of(repeated_t *t, const arguments_t *r, int pending) {
  call_key_t key;
  if (!t->kinds || !key_of_kind(&r->key, &key, pending)) return NULL;
  const uint64_t hash = hash_of(&key);
  for (entry_t *e = *place_of(t, hash); e; e = e->next) {
    if (e->hash != hash || e->users > 1 || !same_call(&e->key, &key)) continue;
    if (e->launch) {
      e->users++; /* keeps the entry: the code below may change the table */
      const int fits = e->launch->blocks ? fit_blocks(e->launch, r, &t->types) : fit_launch(e->launch, e->bound, r->arrays, (int)key.arrays);
      const int gone = e->users == 1;
      no_longer_used(e);
      if (gone || PyErr_Occurred()) return NULL;
      if (!fits) continue;
    } else if (!(e->kind ? fill_kind(e->kind, e->call, r, &t->types) : fill_counts(e->counts, e->call, r, &t->types))) {
      continue;
    }
    used(t, e);
    return e;
  }
  return NULL;
}
