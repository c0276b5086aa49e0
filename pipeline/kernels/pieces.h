/* How threads share a job: each takes the next piece until none is left. */

#include <stdint.h>

typedef void part(void *); /* works at a job, in each of the threads that share it */

static inline int64_t take(int64_t *counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
