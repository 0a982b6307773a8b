/* What blinkmpi's memory pools, and its sharing of others' memory, use of libcuda, on host memory. An allocation of
   cuMemCreate is a file in memory, so who imports it shares its bytes, as with GPUs. Built by tests/unit/memory/stub.py.

   The variables stub_* are the tests' to read and to set. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ABSENT 801 /* CUDA_ERROR_NOT_SUPPORTED */
typedef unsigned long long u64;

int64_t stub_total = 1 << 30; /* bytes of memory of the device */
int64_t stub_allocated = 0;     /* bytes of cudaMalloc */
int64_t stub_mapped = 0;        /* bytes mapped, of cuMemCreate */
int64_t stub_reserved = 0;
int64_t stub_waits = 0;         /* calls of cuCtxSynchronize */
int64_t stub_capturing = 0;     /* whether streams are captured */
char stub_fails[64] = "";       /* the function that fails, with ABSENT */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int depth; /* of contexts */
static struct { u64 at; size_t n; int file; } mappings[256];
#define FAILS() (strcmp(stub_fails, __func__) == 0)
#define ADD(variable, n) (pthread_mutex_lock(&lock), variable += (n), pthread_mutex_unlock(&lock))

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == ABSENT ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? 0 : 1;
}

/* ---- cudaMalloc */

static int allocation_at(u64 at) {
    for (int i = 0; i < 256; i++)
        if (mappings[i].n && mappings[i].file < 0 && mappings[i].at == at) return i;
    return -1;
}
int stub_is_allocated(u64 at) { return allocation_at(at) >= 0; }
int cuMemAlloc_v2(u64 *at, size_t n) {
    void *found = MAP_FAILED;
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < 256 && mappings[i].n) i++;
    if (i < 256 && stub_allocated + (int64_t)n <= stub_total)
        found = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found != MAP_FAILED) {
        *at = mappings[i].at = (u64)(uintptr_t)found, mappings[i].n = n, mappings[i].file = -1;
        stub_allocated += n;
    }
    pthread_mutex_unlock(&lock);
    return found == MAP_FAILED ? 2 : 0;
}
int cuMemFree_v2(u64 at) {
    int i;
    pthread_mutex_lock(&lock);
    i = allocation_at(at);
    if (i >= 0) {
        munmap((void *)(uintptr_t)at, mappings[i].n);
        stub_allocated -= mappings[i].n;
        mappings[i].n = 0;
    }
    pthread_mutex_unlock(&lock);
    return i < 0 ? 1 : 0;
}

/* ---- virtual memory */

int cuMemAddressReserve(u64 *at, size_t n, size_t align, u64 hint, u64 flags) {
    void *found = FAILS() ? MAP_FAILED : mmap(NULL, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    (void)hint, (void)flags;
    if (found == MAP_FAILED) return ABSENT;
    *at = ((u64)(uintptr_t)found + (align ? align - 1 : 0)) / (align ? align : 1) * (align ? align : 1);
    ADD(stub_reserved, n);
    return 0;
}
int cuMemAddressFree(u64 at, size_t n) { return ADD(stub_reserved, -(int64_t)n), munmap((void *)(uintptr_t)at, n); }

int cuMemCreate(u64 *handle, size_t n, const void *properties, u64 flags) {
    int file;
    (void)properties, (void)flags;
    if (FAILS()) return ABSENT;
    file = memfd_create("stub", 0);
    if (file < 0 || ftruncate(file, n)) return 2;
    return *handle = file, 0;
}
int cuMemRelease(u64 handle) { return close(handle); }
int cuMemMap(u64 at, size_t n, size_t offset, u64 handle, u64 flags) {
    (void)flags;
    if (FAILS()) return ABSENT;
    if (mmap((void *)(uintptr_t)at, n, PROT_NONE, MAP_SHARED | MAP_FIXED, handle, offset) == MAP_FAILED) return 1;
    ADD(stub_mapped, n);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++)
        if (!mappings[i].n) {
            mappings[i].at = at, mappings[i].n = n, mappings[i].file = dup(handle);
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
int cuMemGetAddressRange_v2(u64 *begin, size_t *n, u64 at) {
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++)
        if (mappings[i].at <= at && at < mappings[i].at + mappings[i].n) found = i;
    if (found >= 0) *begin = mappings[found].at, *n = mappings[found].n;
    pthread_mutex_unlock(&lock);
    return found < 0;
}
int cuMemRetainAllocationHandle(u64 *handle, void *place) {
    u64 at = (u64)(uintptr_t)place;
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256 && !FAILS(); i++)
        if (mappings[i].file >= 0 && mappings[i].at <= at && at < mappings[i].at + mappings[i].n) found = dup(mappings[i].file);
    pthread_mutex_unlock(&lock);
    return *handle = found, found < 0;
}
int cuMemSetAccess(u64 at, size_t n, const void *access, size_t count) {
    (void)access, (void)count;
    return FAILS() ? ABSENT : mprotect((void *)(uintptr_t)at, n, PROT_READ | PROT_WRITE);
}
int cuMemUnmap(u64 at, size_t n) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++)
        if (mappings[i].at == at && mappings[i].n == n) close(mappings[i].file), mappings[i].n = 0;
    pthread_mutex_unlock(&lock);
    ADD(stub_mapped, -(int64_t)n);
    return mmap((void *)(uintptr_t)at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED;
}
int cuMemExportToShareableHandle(int *out, u64 handle, int type, u64 flags) {
    (void)type, (void)flags;
    return FAILS() || (*out = dup(handle)) < 0 ? ABSENT : 0;
}
int cuMemImportFromShareableHandle(u64 *handle, void *file, int type) {
    int found = FAILS() ? -1 : dup((int)(intptr_t)file);
    (void)type;
    return *handle = found, found < 0 ? ABSENT : 0;
}

/* ---- contexts and streams */

int cuCtxPushCurrent_v2(void *context) { return (void)context, depth++, 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = NULL, depth--, 0; }
int cuCtxSynchronize(void) { return FAILS() ? ABSENT : depth ? (ADD(stub_waits, 1), 0) : 201; }
int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = stub_capturing != 0, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, 0; }
