/* CUDA's runtime as far as nccl-tests calls it, on a GPU that is none: memory is the host's, and kernels are launched by nobody.
 *
 * With -DDRIVER it is what the door asks of the driver: which GPU is the current one. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef DRIVER
int fake_current;
int cuCtxGetDevice(int *device) { return *device = fake_current, 0; }
int cuDeviceGetUuid_v2(uint64_t *words, int device) { return words[0] = 77, words[1] = (uint64_t)device + 1, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, 0; }
#else
enum { GIB = 1 << 30, MEMORY_AT = 288, DEVICES = 4, MAJOR = 75 }; /* of cudaDeviceProp; cudaDevAttrComputeCapabilityMajor */
#define NOTHING(name) int name(void) { return 0; }

extern int fake_current;
int cudaSetDevice(int device) { return fake_current = device, 0; }
int cudaGetDeviceCount(int *n) { return *n = DEVICES, 0; }
int cudaDeviceGetAttribute(int *value, int which, int device) { return (void)device, *value = which == MAJOR ? 9 : 0, 0; }
int cudaMemGetInfo(size_t *left, size_t *all) { return *left = *all = 64ul * GIB, 0; }
int cudaMemset(void *at, int value, size_t n) { return memset(at, value, n), 0; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { return (void)kind, memmove(to, from, n), 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) { return (void)s, cudaMemcpy(to, from, n, kind); }
int cudaHostAlloc(void **at, size_t n, unsigned flags) { return (void)flags, *at = calloc(1, n), 0; }
int cudaFreeHost(void *at) { return free(at), 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return (void)flags, *stream = malloc(1), 0; }
int cudaStreamEndCapture(void *stream, void **graph) { return (void)stream, *graph = NULL, 0; }
int cudaEventElapsedTime(float *ms, void *a, void *b) { return (void)a, (void)b, *ms = 1, 0; }
const char *cudaGetErrorString(int code) { return (void)code, "an error of the fake runtime"; }
int cudaGetDeviceProperties(char *of, int device) {
  const uint64_t bytes = 64ul * GIB;
  (void)device;
  strcpy(of, "no GPU");
  memcpy(of + MEMORY_AT, &bytes, sizeof bytes);
  return 0;
}
void **__cudaRegisterFatBinary(void *code) { return (void)code, malloc(8); }
NOTHING(__cudaRegisterFatBinaryEnd) NOTHING(__cudaUnregisterFatBinary) NOTHING(__cudaRegisterFunction)
NOTHING(__cudaPopCallConfiguration) NOTHING(__cudaLaunchKernel) NOTHING(__cudaGetKernel) NOTHING(cudaLaunchKernel)
int __cudaPushCallConfiguration(void) { return 1; } /* the launch is left out */
NOTHING(cudaStreamQuery) NOTHING(cudaStreamBeginCapture) NOTHING(cudaGraphLaunch) NOTHING(cudaGraphInstantiate)
NOTHING(cudaGraphExecDestroy) NOTHING(cudaGraphDestroy) NOTHING(cudaEventRecord) NOTHING(cudaEventDestroy) NOTHING(cudaEventCreate)
NOTHING(cudaDeviceSynchronize) NOTHING(cudaDeviceReset)
#endif
