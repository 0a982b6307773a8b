// A small NVML of two GPUs, for tests/unit/topology/test_probe.py.
#include <string.h>
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == 3 ? "Not Supported" : e == 2 ? "Invalid Argument" : "error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(char *b, void **h) { *h = (void *)2; return strcmp(b + 5, "3d:00.0") ? 6 : 0; }
int nvmlDeviceGetIndex(void *h, unsigned *i) { *i = (long)h - 1; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { strncpy(s, "Stub GPU", n); return 0; }
int nvmlDeviceGetNvLinkState(void *h, unsigned l, unsigned *a) { *a = l != 1; return l < 3 ? 0 : 2; }
int nvmlDeviceGetNvLinkVersion(void *h, unsigned l, unsigned *v) { *v = 6; return 0; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *s) { *s = i == 2 ? 5 : 0; return i == 0 || i == 2 ? 0 : 2; }
int nvmlDeviceGetPciInfo_v3(void *h, char *info) { strcpy(info + 36, (long)h == 1 ? "00000000:1A:00.0" : "00000000:3D:00.0"); return 0; }
// The first GPU does not say who computes on it; on the second one are two processes.
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *all) {
  if ((long)h == 1) return 3;
  if (*n < 2) { *n = 2; return 7; }
  *n = 2;
  return 0;
}
