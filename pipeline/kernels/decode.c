/* The decode step's small work in one pass each: attention over the KV cache, RMSNorm, the choice
 * of a token. What they compute is told beside their Python callers, in `decode.py`.
 *
 * The bodies are in rows.h, which is read once for each kind of processor and each dtype; which of
 * them run is decided when the library is loaded. Work is shared by the threads of torch's own
 * pool: Python hands one of the `*_part` functions to it, and each thread that runs it takes pieces
 * until none is left. A second pool would fight with torch's for the cores.
 *
 * No Python.h: the library is loaded by ctypes, and needs nothing but a C compiler.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "pieces.h"

enum { BFLOAT16 = 0, FLOAT32 = 1, NUM_DTYPES = 2 };

/* One decode step of one layer: B rows of one token, H query heads, K key-value heads. */
struct attention {
    int64_t next;           /* the next piece that no thread has taken */
    int64_t num_rows;       /* B */
    int64_t parts_of_row;   /* 1, or K: pieces that a row is cut into */
    int64_t num_heads;      /* H */
    int64_t num_kv_heads;   /* K */
    int64_t head_dim;       /* D */
    int64_t num_columns;    /* S of the cache */
    const void *heads;      /* [B, H + 2 K, D]: queries, keys, values of the new tokens */
    const float *cos, *sin; /* [B, D]; sines are negative in the first half */
    void *keys, *values;    /* [N, S, K, D]: this layer's slots; the new token goes in */
    const int64_t *lengths; /* [B]: tokens that a slot holds before */
    void *mixed;            /* [B, H, D]: the result */
    float *room;            /* threads x room_of_thread floats to work in */
    int64_t room_of_thread;
    int64_t next_thread;
};

struct norm {
    int64_t next;
    int64_t num_rows, width; /* [B, C] */
    int64_t rows_of_piece;
    double eps;
    const void *x, *weight;
    void *normed;
};

struct choice {
    int64_t next;
    int64_t num_rows, vocab_size; /* [B, V] */
    const void *logits;
    int64_t *ids;     /* [B]: the first of the largest */
    double *logprobs; /* [B]: their natural log probabilities */
};

static inline float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest, ties to even, as torch rounds; NaN stays NaN. */
static inline uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (uint16_t)rounded;
}

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(function) JOIN(function, KIND, DTYPE)

#if defined(__x86_64__)
#define KIND avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#include "both_dtypes.h"
#undef KIND
#undef LANES
#undef TARGET

#define KIND avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "both_dtypes.h"
#undef KIND
#undef LANES
#undef TARGET
#endif

#define KIND any
#define LANES 4
#define TARGET
#include "both_dtypes.h"

struct functions {
    const char *kind;
    int64_t lanes;
    part *attention[NUM_DTYPES], *norm[NUM_DTYPES], *choice[NUM_DTYPES];
};

#define FUNCTIONS(kind, lanes)                                        \
    {#kind, lanes,                                                    \
     {attention_##kind##_bfloat16, attention_##kind##_float32},       \
     {norm_##kind##_bfloat16, norm_##kind##_float32},                 \
     {choice_##kind##_bfloat16, choice_##kind##_float32}}

static const struct functions all[] = {
#if defined(__x86_64__)
    FUNCTIONS(avx512, 16),
    FUNCTIONS(avx2, 8),
#endif
    FUNCTIONS(any, 4),
};

/* The best that this processor can run, or the kind of that place in the list; NULL behind it. */
const struct functions *captionjob_functions_3(int64_t kind) {
    const int64_t num_kinds = sizeof all / sizeof *all;
    if (kind >= 0) {
        return kind < num_kinds ? &all[kind] : NULL;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        return &all[0];
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return &all[1];
    }
#endif
    return &all[num_kinds - 1];
}
