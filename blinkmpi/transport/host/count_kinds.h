/* Make calls whose like was made before with another count. Each word of such a call that depends on the count is a sum of
 * a few values, which follow from the count as program/by_count.py says; count_kind.py finds the sums.
 *
 * An entry of a kind is found by all that its calls are found by but the counts and the lengths of their buffers. There may be
 * several of the same: for other counts, and for calls that are under way at the same time. */
#pragma once
#include "block_kinds.h"

enum { LINE_BYTES = LINE_WORDS * sizeof(int64_t), CHUNK_STEP = 64 }; /* chunks are multiples of so many elements */
enum { OF_COUNT, OF_SLOT, FIRST_BORDER }; /* values */
enum { NUMERATOR, DENOMINATOR, SHARED_BY, BORDER_WORDS };
enum { SPAN_FIRST, SPAN_END, SPAN_WORDS };
enum { TARGET, CONSTANT, TERMS, SUM_WORDS }; /* of a sum, before its (value, times) */

typedef struct count_kind { /* made by Python (count_kind.py) */
  int64_t item, width;      /* bytes of an element of a buffer, and of one in a slot */
  int64_t buffers;          /* arguments that are buffers: the first one or two */
  int64_t least, most;      /* counts */
  int64_t align, chunk;     /* elements between the places where spans may begin; of the largest chunk */
  int64_t borders, *border, lengths, *length;
  int64_t words, *word;
  int64_t *value;
  uint64_t form;            /* of the announcement without its count */
  int64_t count;            /* of the last call, or of the one that the kind was made of */
  int64_t each[2];          /* elements of each argument for each of the count; this is C's to find */
} count_kind_t;

/* The elements of both arguments; 0 if their forms are Python's to read. */
static int elements_of_sides(const count_kind_t *k, const call_t *call, const arguments_t *r, const types_t *types, int64_t *elements) {
  int64_t buffer = 0;
  const argument_t *a = r->key.arguments;
  elements[1] = 0;
  for (int64_t i = 0; i < k->buffers; i++, a = behind(a)) {
    side_t s;
    if (a == r->key.arguments + r->key.count || !read_side(r->buffers, r->buffered, types, a, &buffer, call->n, &s) || s.how == EACH_A_BLOCK) return 0;
    elements[i] = 0;
    if (s.how == NO_BLOCK) continue;
    const int64_t whole = s.nbytes / k->item;
    if (s.displs && s.displs->elements) return 0;
    if (!s.counts && whole * k->item != s.nbytes) return 0;
    elements[i] = s.counts ? s.counts->elements : whole;
    if (elements[i] <= 0 || elements[i] > whole) return 0;
  }
  return buffer == r->buffered && all_apart(&r->key);
}

/* The values that follow from a count; see spans.border and ir.chunk_of. */
static void find_values(const count_kind_t *k, int64_t count) {
  int64_t *const v = k->value, *const chunk = v + FIRST_BORDER + k->borders;
  int64_t longest = 1;
  v[OF_COUNT] = count;
  v[OF_SLOT] = (count * k->width + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  for (int64_t i = 0; i < k->borders; i++) {
    const int64_t *const b = k->border + BORDER_WORDS * i, unit = count >= k->align * b[SHARED_BY] ? k->align : 1;
    v[FIRST_BORDER + i] = (int64_t)((__int128)count * b[NUMERATOR] / b[DENOMINATOR]) / unit * unit;
  }
  for (int64_t i = 0; i < k->lengths; i++) {
    const int64_t *const span = k->length + SPAN_WORDS * i;
    chunk[i] = v[span[SPAN_END]] - (span[SPAN_FIRST] < 0 ? 0 : v[span[SPAN_FIRST]]);
    if (chunk[i] > longest) longest = chunk[i];
  }
  const int64_t steps = (longest + k->chunk - 1) / k->chunk;
  for (int64_t i = 0; i < k->lengths; i++) {
    const int64_t share = (chunk[i] + steps - 1) / steps, whole = ((share > 1 ? share : 1) + CHUNK_STEP - 1) / CHUNK_STEP * CHUNK_STEP;
    chunk[i] = whole < k->chunk ? whole : k->chunk;
  }
}

/* Write all words of a call of this count; or, with `compare`, find whether they are written so. */
static int write_words(count_kind_t *k, int64_t count, int compare) {
  find_values(k, count);
  for (const int64_t *w = k->word, *const end = w + k->words; w < end; w += SUM_WORDS + 2 * w[TERMS]) {
    int64_t sum = w[CONSTANT];
    for (const int64_t *term = w + SUM_WORDS; term < w + SUM_WORDS + 2 * w[TERMS]; term += 2) sum += k->value[term[0]] * term[1];
    if (!compare) *(int64_t *)w[TARGET] = sum;
    else if (*(int64_t *)w[TARGET] != sum) return 0;
  }
  return 1;
}

/* Make the call of these arguments of one; 0 if they are Python's to check. */
static int fill_counts(count_kind_t *k, call_t *call, const arguments_t *r, const types_t *types) {
  int64_t elements[2], count = 0;
  if (!elements_of_sides(k, call, r, types, elements)) return 0;
  for (int i = 0; i < 2; i++)
    if (k->each[i]) count = elements[i] / k->each[i];
  if (count < k->least || count > k->most) return 0;
  for (int i = 0; i < 2; i++)
    if (elements[i] != count * k->each[i]) return 0;
  if (count == k->count) return 1;
  write_words(k, count, 0);
  if (count > k->count) call->readable = 0; /* readability was tried on fewer bytes */
  call->fingerprint = with_count(k->form, count);
  write_count(call->body, call->body_bytes, count);
  k->count = count;
  return 1;
}

/* Find how many elements the arguments have for each of the count, which is that of the call that they are of. */
static int learn_counts(count_kind_t *k, const call_t *call, const arguments_t *r, const types_t *types) {
  int64_t elements[2];
  if (k->count < k->least || k->count > k->most || !elements_of_sides(k, call, r, types, elements)) return 0;
  for (int i = 0; i < 2; i++) {
    if (elements[i] % k->count) return 0;
    k->each[i] = elements[i] / k->count;
  }
  return (k->each[0] || k->each[1]) && call->fingerprint == with_count(k->form, k->count) && write_words(k, k->count, 1);
}
