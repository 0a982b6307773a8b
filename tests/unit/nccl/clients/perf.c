/* A program with nccl-tests' output and none of its tests: two ranks make AllReduces and print a table each. */
#include "../door/stub.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern int cudaSetDevice(int);

int main(int argc, char **argv) {
  const char *const rank = getenv("OMPI_COMM_WORLD_RANK");
  unique_id_t id = {""};
  comm_t comm;
  int cycles = 1;
  snprintf(id.internal, sizeof id.internal, "perf-%d", (int)getppid()); /* mpirun's, of all ranks */
  for (int i = 1; i + 1 < argc; i++)
    if (!strcmp(argv[i], "-N")) cycles = atoi(argv[i + 1]);
  if (cudaSetDevice(atoi(rank)) || ncclCommInitRank(&comm, 2, id, atoi(rank))) return 1;
  if (*rank == '0') printf("#       size         count      type   redop    root     time   algbw   busbw  #wrong\n");
  for (int i = 0; i < cycles; i++)
    for (size_t count = 2; count <= 128; count *= 8) {
      if (ncclAllReduce(NULL, NULL, count, 7, 0, comm, NULL)) return 1;
      if (*rank != '0') continue;
      printf("%12zu  %12zu  %8s  %6s  %6i", 4 * count, count, "float", "sum", -1);
      printf("  %7s  %6s  %6s  %6s", "10.00", "0.03", "0.03", getenv("PERF_WRONG") ? "3" : "0");
      printf("  %7s  %6s  %6s  %6s\n", "20.0", "1e+04", "0.03", "N/A");
    }
  return ncclCommDestroy(comm);
}
