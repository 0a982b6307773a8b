/* Fingerprints of announcements, the same as those of announcement.py. */
#pragma once
#include <stdint.h>

static uint64_t mix(uint64_t x) { /* the end of splitmix64 */
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/* The fingerprint of an announcement, from that of all but its count, and the count. */
static inline uint64_t with_count(uint64_t form, int64_t count) { return mix(form + ((uint64_t)count + 1) * 0x9e3779b97f4a7c15u); }

/* Write a count where it ends an announcement: msgpack's eight bytes. */
static inline void write_count(char *body, int64_t bytes, int64_t count) {
  for (int i = 0; i < 8; i++) body[bytes - 1 - i] = (char)((uint64_t)count >> 8 * i);
}
