/* What a launch takes that nothing surrounds: of a kernel that does nothing, with as many words of arguments. */
#include <stdint.h>
#include <time.h>

enum { MOST_WORDS = 64 };
typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

/* Nanoseconds of each of so many launches, one behind another; below 0: the driver's error. */
double bare_launch_ns(launch_t launch, void *function, void *stream, int64_t threads, int64_t launches) {
  uint64_t words[MOST_WORDS] = {0};
  void *parameters[] = {words};
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (int64_t i = 0; i < launches; i++) {
    const int error = launch(function, 1, 1, 1, (unsigned)threads, 1, 1, 0, stream, parameters, NULL);
    if (error) return -error;
  }
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return (1e9 * (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec)) / (double)launches;
}
