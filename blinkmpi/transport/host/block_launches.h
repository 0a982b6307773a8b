/* Calls of blocks on GPU memory that were made before with other lengths: lengths and places are numbers among the arguments,
 * and C makes the kernel's arguments of them (transport/cuda/blocks.py), and checks what Python would have checked. */
#pragma once
#include "block_kinds.h"
#include "launches.h"

enum { END_WORDS = 4, END_PEER = 0, END_SENDS = 1, END_AT = 2, END_BYTES = 3 }; /* of BlockEnd in blocks.cu */

typedef struct block_launch { /* what Python says of such calls (runtime/cuda/repeating.py) */
  int64_t n, rank, item, root, send_has, recv_has; /* as in kind_t */
  int64_t own_at, ends_at, ends; /* the words of what the rank keeps, and of its ends; how many these are */
  int64_t lanes, lane_bytes;     /* of a block at most, and from how many bytes on it has another one */
} block_launch_t;

/* Fit the kernel to lengths and places; 0 if they are Python's to check. */
static int fit_blocks(launch_t *l, const arguments_t *r, const types_t *types) {
  const block_launch_t *const b = l->blocks;
  const kind_t kind = {.item = b->item, .root = b->root};
  const argument_t *const first = r->key.arguments;
  buffer_t buffers[MOST_BUFFERS];
  int64_t place[2][MOST_RANKS], bytes[2][MOST_RANKS], sum[2] = {0, 0}, free[2] = {0, 0}, buffer = 0;
  side_t send, recv;
  for (int64_t i = 0; i < r->key.arrays; i++) buffers[i] = (buffer_t){(char *)r->arrays[i]->at, r->arrays[i]->elements, NULL};
  if (r->key.count < 2 || !all_apart(&r->key) || b->n > MOST_RANKS) return 0;
  if (!read_side(buffers, r->key.arrays, types, first, &buffer, b->n, &send)) return 0;
  if (!read_side(buffers, r->key.arrays, types, behind(first), &buffer, b->n, &recv)) return 0;
  if (send.how != b->send_has || recv.how != b->recv_has || buffer != r->key.arrays) return 0;
  for (int64_t p = 0; p < b->n; p++) {
    if (!block_in(&send, &kind, p, 0, &free[0], &place[0][p], &bytes[0][p])) return 0;
    if (!block_in(&recv, &kind, p, 0, &free[1], &place[1][p], &bytes[1][p])) return 0;
    sum[0] += bytes[0][p], sum[1] += bytes[1][p];
  }
  if (bytes[0][b->rank] != bytes[1][b->rank]) return 0;
  uint64_t *const words = l->words[l->first];
  int64_t longest = bytes[0][b->rank];
  words[b->own_at] = (uint64_t)place[0][b->rank], words[b->own_at + 1] = (uint64_t)place[1][b->rank], words[b->own_at + 2] = (uint64_t)longest;
  for (uint64_t *end = words + b->ends_at; end < words + b->ends_at + END_WORDS * b->ends; end += END_WORDS) {
    const int side = !end[END_SENDS];
    const int64_t nbytes = bytes[side][end[END_PEER]];
    end[END_AT] = (uint64_t)place[side][end[END_PEER]], end[END_BYTES] = (uint64_t)nbytes;
    if (nbytes > longest) longest = nbytes;
  }
  const int64_t lanes = longest ? (longest + b->lane_bytes - 1) / b->lane_bytes : 1;
  l->grid[l->first] = (b->ends + 1) * (lanes < b->lanes ? lanes : b->lanes);
  l->nbytes = sum[0] > sum[1] ? sum[0] : sum[1];
  return 1;
}

/* Whether a kernel is fit to arguments as Python has fit it. */
static int fits_as_python(launch_t *l, const arguments_t *r, const types_t *types) {
  uint64_t words[MOST_WORDS];
  const size_t size = 8 * (size_t)l->count[l->first];
  const int64_t grid = l->grid[l->first], nbytes = l->nbytes;
  memcpy(words, l->words[l->first], size);
  return fit_blocks(l, r, types) && !memcmp(words, l->words[l->first], size) && grid == l->grid[l->first] && nbytes == l->nbytes;
}
