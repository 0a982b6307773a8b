/* Blocks of a memory pool, for allocators that call C: torch's pluggable one, and CuPy's through ctypes.

A pool has chunks of GPU memory that all ranks of the node have mapped before a block is cut from them. So nothing here
talks to a peer, maps anything, or takes Python's lock: malloc is called at any time, by any thread, with torch's locks
held. The shortest free block that is long enough is cut; free neighbours of a chunk are one block. torch and CuPy keep
what they free for themselves, so blocks are few and the list is searched from its beginning.

As after cudaFree, a freed block is not used again before all work of the GPU that was there by then is through: the
wait is made by the malloc that wants the block, and not while its stream is captured. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

#define POOLS 64
#define LINE 512 /* bytes: where blocks begin, as torch and CuPy round */
#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED */

enum { FREE, FREED, USED }; /* of a block; FREED: not waited for */

typedef unsigned long long u64;

typedef struct Block {
    u64 begin, nbytes;
    int chunk, state;
    struct Block *before, *after; /* blocks of a chunk follow one another by address */
} Block;

typedef struct { /* of libcuda */
    int (*push)(void *);
    int (*pop)(void **);
    int (*synchronize)(void);
    int (*capturing)(void *, int *);
    int (*mode)(int *);
    int (*release)(u64);
} Driver;

typedef struct {
    pthread_mutex_t lock;
    Driver driver;
    void *context;
    int device, chunks;
    int sealed, left; /* malloc gives nothing; the last free gives all memory back */
    u64 size, used, live, failures, asked; /* asked: bytes of the malloc that failed last */
    Block *blocks;
} Pool;

static Pool pools[POOLS]; /* never used twice: torch may call the functions of one for as long as the process lives */
static int made;
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;

/* ---- blocks */

static Block *cut(Block *block, u64 nbytes) { /* give a block this length, and the rest of it a block of its own */
    Block *rest;
    if (block->nbytes == nbytes) return block;
    rest = malloc(sizeof *rest);
    if (!rest) return NULL;
    *rest = (Block){block->begin + nbytes, block->nbytes - nbytes, block->chunk, block->state, block, block->after};
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->nbytes = nbytes;
    return block;
}

static void join(Block *block) { /* with what is behind it, as long as that is of its state and chunk */
    Block *other;
    while ((other = block->after) && other->state == block->state && other->chunk == block->chunk) {
        block->nbytes += other->nbytes;
        block->after = other->after;
        if (block->after) block->after->before = block;
        free(other);
    }
}

static void join_both(Block *block) {
    Block *before = block->before;
    join(block);
    if (before && before->state == block->state) join(before);
}

static Block *shortest(Pool *pool, u64 nbytes) { /* free block that is long enough */
    Block *found = NULL, *block;
    for (block = pool->blocks; block; block = block->after)
        if (block->state == FREE && block->nbytes >= nbytes && (!found || block->nbytes < found->nbytes)) found = block;
    return found;
}

static void waited(Pool *pool) { /* all freed blocks may be used again */
    Block *block;
    for (block = pool->blocks; block; block = block->after)
        if (block->state == FREED) block->state = FREE;
    for (block = pool->blocks; block; block = block->after)
        if (block->state == FREE) join(block);
}

static int has_freed(const Pool *pool) {
    const Block *block;
    for (block = pool->blocks; block; block = block->after)
        if (block->state == FREED) return 1;
    return 0;
}

static int is_captured(Pool *pool, void *stream) {
    int status = 0;
    return pool->driver.capturing(stream, &status) != 0 || status != 0;
}

static int wait_for_gpu(Pool *pool) { /* CUDA's error, or 0 */
    void *popped;
    int mode = RELAXED, code = pool->driver.push(pool->context);
    if (code) return code;
    pool->driver.mode(&mode); /* another thread may capture a stream */
    code = pool->driver.synchronize();
    pool->driver.mode(&mode);
    pool->driver.pop(&popped);
    if (!code) waited(pool);
    return code;
}

/* ---- malloc and free */

static void *take(Pool *pool, ssize_t size, int device, void *stream) {
    const u64 wanted = size > 0 ? (u64)size : 1, nbytes = (wanted + LINE - 1) / LINE * LINE;
    u64 at = 0;
    Block *block = NULL;
    pthread_mutex_lock(&pool->lock);
    if (!pool->sealed && device == pool->device) {
        block = shortest(pool, nbytes);
        if (!block && has_freed(pool) && !is_captured(pool, stream) && !wait_for_gpu(pool)) block = shortest(pool, nbytes);
    }
    if (block && cut(block, nbytes)) {
        block->state = USED;
        pool->used += nbytes;
        pool->live++;
        at = block->begin;
    } else {
        pool->failures++;
        pool->asked = wanted;
    }
    pthread_mutex_unlock(&pool->lock);
    return (void *)(uintptr_t)at;
}

static void give_memory_back(Pool *pool) { /* of a pool in which nothing lies */
    Block *block;
    void *popped;
    if (wait_for_gpu(pool)) waited(pool); /* at the end of a process the GPU is gone, and all its work with it */
    pool->driver.push(pool->context);
    while ((block = pool->blocks)) { /* each is a whole chunk */
        pool->blocks = block->after;
        pool->driver.release(block->begin);
        free(block);
    }
    pool->driver.pop(&popped);
    pool->size = 0;
}

static int give(Pool *pool, void *at) {
    Block *block;
    pthread_mutex_lock(&pool->lock);
    for (block = pool->blocks; block; block = block->after)
        if (block->begin == (u64)(uintptr_t)at && block->state == USED) break;
    if (block) {
        block->state = FREED;
        pool->used -= block->nbytes;
        pool->live--;
        join_both(block);
        if (pool->left && !pool->live) give_memory_back(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return block ? 0 : -1;
}

/* torch's functions of a pool, by its number in octal: blink_malloc_00, ..., blink_malloc_077. */
#define TORCH(i)                                                                                            \
    void *blink_malloc_##i(ssize_t size, int device, void *stream) { return take(&pools[i], size, device, stream); } \
    void blink_free_##i(void *at, ssize_t size, int device, void *stream) {                                 \
        (void)size, (void)device, (void)stream;                                                             \
        give(&pools[i], at);                                                                                \
    }
#define EIGHT(d) TORCH(d##0) TORCH(d##1) TORCH(d##2) TORCH(d##3) TORCH(d##4) TORCH(d##5) TORCH(d##6) TORCH(d##7)
EIGHT(0) EIGHT(01) EIGHT(02) EIGHT(03) EIGHT(04) EIGHT(05) EIGHT(06) EIGHT(07)

/* ---- what Python calls */

/* A pool without memory: its number, or -1 if there are POOLS already. */
int blink_memory_open(const Driver *driver, void *context, int device) {
    Pool *pool;
    int number;
    pthread_mutex_lock(&table);
    number = made < POOLS ? made++ : -1;
    pthread_mutex_unlock(&table);
    if (number < 0) return number;
    pool = &pools[number];
    pthread_mutex_init(&pool->lock, NULL);
    pool->driver = *driver;
    pool->context = context;
    pool->device = device;
    return number;
}

/* Add a chunk of cudaMalloc, which is the pool's from now on; 0, or -1 if the host has no memory. */
int blink_memory_add(int number, u64 begin, u64 nbytes) {
    Pool *pool = &pools[number];
    Block *block = malloc(sizeof *block), **last;
    if (!block) return -1;
    pthread_mutex_lock(&pool->lock);
    *block = (Block){begin, nbytes, pool->chunks++, FREE, NULL, NULL};
    for (last = &pool->blocks; *last; last = &(*last)->after) block->before = *last;
    *last = block;
    pool->size += nbytes;
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

void *blink_memory_malloc(int number, ssize_t size, void *stream) {
    return take(&pools[number], size, pools[number].device, stream);
}

int blink_memory_free(int number, void *at) { return give(&pools[number], at); }

/* (bytes; bytes in use; blocks in use; the longest that is free; how many mallocs have failed; bytes that the last of them
   asked for) */
void blink_memory_state(int number, int64_t *state) {
    Pool *pool = &pools[number];
    u64 longest = 0, stretch = 0;
    Block *block;
    pthread_mutex_lock(&pool->lock);
    for (block = pool->blocks; block; block = block->after) { /* freed and free ones will be one */
        const int on = block->before && block->before->chunk == block->chunk && block->state != USED;
        stretch = block->state == USED ? 0 : on ? stretch + block->nbytes : block->nbytes;
        if (stretch > longest) longest = stretch;
    }
    state[0] = (int64_t)pool->size;
    state[1] = (int64_t)pool->used;
    state[2] = (int64_t)pool->live;
    state[3] = (int64_t)longest;
    state[4] = (int64_t)pool->failures;
    state[5] = (int64_t)pool->asked;
    pthread_mutex_unlock(&pool->lock);
}

/* Give out no more blocks, if none is in use; 0, or -1 if some are. Undone by blink_memory_unseal. */
int blink_memory_seal(int number) {
    Pool *pool = &pools[number];
    int live;
    pthread_mutex_lock(&pool->lock);
    live = pool->live != 0;
    if (!live) pool->sealed = 1;
    pthread_mutex_unlock(&pool->lock);
    return -live;
}

void blink_memory_unseal(int number) {
    pthread_mutex_lock(&pools[number].lock);
    pools[number].sealed = 0;
    pthread_mutex_unlock(&pools[number].lock);
}

/* Give out no more blocks, and the memory back as soon as none is in use: now, or by the last free. */
void blink_memory_leave(int number) {
    Pool *pool = &pools[number];
    pthread_mutex_lock(&pool->lock);
    pool->sealed = pool->left = 1;
    if (!pool->live) give_memory_back(pool);
    pthread_mutex_unlock(&pool->lock);
}
