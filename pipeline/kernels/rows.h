/* The bodies of decode.c, for one dtype and one kind of processor: vectors of LANES floats. */

static inline TARGET F32 NAME(load)(const ELEMENT *at) {
#if IS_HALF
    U16 narrow;
    memcpy(&narrow, at, sizeof narrow);
    U32 bits = __builtin_convertvector(narrow, U32) << 16;
    F32 wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
#else
    F32 wide;
    memcpy(&wide, at, sizeof wide);
    return wide;
#endif
}

static inline TARGET F32 NAME(spread)(float x) { return x - (F32){0}; }

/* The larger of each pair; the second where either is NaN. */
static inline TARGET F32 NAME(larger)(F32 x, F32 y) {
    const I32 is_first = x > y;
    return (F32)(((I32)x & is_first) | ((I32)y & ~is_first));
}

/* Halves are added until four numbers are left: a chain of LANES additions would take far longer. */
static inline TARGET float NAME(total)(F32 x) {
#if LANES == 16
    typedef float half_t __attribute__((vector_size(32)));
    half_t low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    low += high;
    typedef float quarter_t __attribute__((vector_size(16)));
    quarter_t first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (const char *)&low + sizeof first, sizeof second);
    first += second;
#elif LANES == 8
    typedef float quarter_t __attribute__((vector_size(16)));
    quarter_t first, second;
    memcpy(&first, &x, sizeof first);
    memcpy(&second, (const char *)&x + sizeof first, sizeof second);
    first += second;
#else
    F32 first = x;
#endif
    return (first[0] + first[1]) + (first[2] + first[3]);
}

/* exp(x) for x <= 0, to about 1e-7 of it: 2^n times a polynomial (Taylor's) on [-1/2, 1/2]. */
static inline TARGET F32 NAME(exponential)(F32 x) {
    F32 y = NAME(larger)(NAME(spread)(-126.0f), x * 1.44269504088896341f); /* NaN stays NaN */
    I32 n = __builtin_convertvector(y - 0.5f, I32);
    F32 f = y - __builtin_convertvector(n, F32);
    F32 p = f * 1.5403530393381609e-4f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910072e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
    I32 bits = (n + 127) << 23;
    F32 power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* Rotates one head in half-split form: element i is paired with i + D / 2. */
static inline TARGET void NAME(rotate)(
    const ELEMENT *head, const float *cos, const float *sin, int64_t head_dim, ELEMENT *turned) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = WIDE(head[i]), second = WIDE(head[i + half]);
        turned[i] = NARROW(first * cos[i] + second * sin[i]);
        turned[i + half] = NARROW(second * cos[i + half] + first * sin[i + half]);
    }
}

/* Turns scores `[n]` into weights that add up to 1, with at least `behind` zeros behind them. */
static inline TARGET void NAME(softmax)(float *scores, int64_t n, int64_t behind) {
    const int64_t padded = (n + LANES - 1) / LANES * LANES;
    for (int64_t s = n; s < padded; s++) {
        scores[s] = -INFINITY;
    }
    F32 most = NAME(spread)(-INFINITY), x;
    for (int64_t s = 0; s < padded; s += LANES) {
        memcpy(&x, scores + s, sizeof x);
        most = NAME(larger)(x, most);
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) {
        largest = most[lane] > largest ? most[lane] : largest;
    }
    F32 sum = {0};
    for (int64_t s = 0; s < padded; s += LANES) {
        memcpy(&x, scores + s, sizeof x);
        x = NAME(exponential)(x - largest);
        memcpy(scores + s, &x, sizeof x);
        sum += x;
    }
    const F32 scale = NAME(spread)(1.0f / NAME(total)(sum));
    for (int64_t s = 0; s < padded; s += LANES) {
        memcpy(&x, scores + s, sizeof x);
        x *= scale;
        memcpy(scores + s, &x, sizeof x);
    }
    for (int64_t s = n; s < n + behind; s++) {
        scores[s] = 0;
    }
}

#define MAX_HEAD_DIM 256
#define AHEAD 4 /* tokens that are fetched before they are read */

static inline TARGET void NAME(fetch)(const ELEMENT *at, int64_t num_elements) {
    for (int64_t i = 0; i < num_elements; i += 64 / (int64_t)sizeof(ELEMENT)) {
        __builtin_prefetch(at + i);
    }
}

/* Scores `[heads, G, room]` of queries `[heads, G, D]` against n keys `[n, heads, D]`. */
static inline TARGET __attribute__((always_inline)) void NAME(score)(
    const float *queries, int64_t num_kv_heads, int64_t num_groups, int64_t head_dim,
    const ELEMENT *keys, int64_t stride, int64_t n, float *scores, int64_t room) {
    for (int64_t s = 0; s < n; s++, keys += stride) {
        NAME(fetch)(keys + AHEAD * stride, num_kv_heads * head_dim);
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            F32 key[MAX_HEAD_DIM / LANES], query;
            for (int64_t i = 0; i < head_dim / LANES; i++) {
                key[i] = NAME(load)(keys + kv * head_dim + i * LANES);
            }
            for (int64_t head = kv * num_groups; head < (kv + 1) * num_groups; head++) {
                F32 sum = {0};
                for (int64_t i = 0; i < head_dim / LANES; i++) {
                    memcpy(&query, queries + head * head_dim + i * LANES, sizeof query);
                    sum += query * key[i];
                }
                scores[head * room + s] = NAME(total)(sum);
            }
        }
    }
}

#define TOGETHER 4 /* tokens whose values are added in one pass over the sums */

/* Adds n weighted values `[n, heads, D]` up in sums `[heads, G, D]`. */
static inline TARGET __attribute__((always_inline)) void NAME(mix)(
    const float *weights, int64_t room, int64_t num_kv_heads, int64_t num_groups, int64_t head_dim,
    const ELEMENT *values, int64_t stride, int64_t n, float *sums) {
    memset(sums, 0, num_kv_heads * num_groups * head_dim * sizeof *sums);
    for (int64_t s = 0; s < n; s += TOGETHER, values += TOGETHER * stride) {
        const int64_t count = n - s < TOGETHER ? n - s : TOGETHER;
        for (int64_t t = 0; t < TOGETHER; t++) {
            NAME(fetch)(values + (AHEAD + t) * stride, num_kv_heads * head_dim);
        }
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            for (int64_t i = kv * head_dim; i < (kv + 1) * head_dim; i += LANES) {
                F32 value[TOGETHER], sum;
                for (int64_t t = 0; t < TOGETHER; t++) {
                    /* The last tokens again in the places behind them, with a weight of 0. */
                    value[t] = NAME(load)(values + (t < count ? t : count - 1) * stride + i);
                }
                for (int64_t head = kv * num_groups; head < (kv + 1) * num_groups; head++) {
                    const float *weight = weights + head * room + s;
                    float *at = sums + head * head_dim + i - kv * head_dim;
                    memcpy(&sum, at, sizeof sum);
                    for (int64_t t = 0; t < TOGETHER; t++) {
                        sum += weight[t] * value[t];
                    }
                    memcpy(at, &sum, sizeof sum);
                }
            }
        }
    }
}

/* Some key-value heads of one row: their new tokens go into the cache, their queries look at all. */
static inline TARGET __attribute__((always_inline)) void NAME(attend)(
    const struct attention *job, int64_t row, int64_t first_kv, int64_t num_kv_heads,
    int64_t num_groups, int64_t head_dim, float *room) {
    const int64_t stride = job->num_kv_heads * head_dim, length = job->lengths[row];
    const int64_t first_head = first_kv * num_groups, num_heads = num_kv_heads * num_groups;
    const ELEMENT *heads = job->heads;
    heads += row * (job->num_heads + 2 * job->num_kv_heads) * head_dim;
    const ELEMENT *new_keys = heads + (job->num_heads + first_kv) * head_dim;
    const ELEMENT *new_values = new_keys + job->num_kv_heads * head_dim;
    const float *cos = job->cos + row * head_dim, *sin = job->sin + row * head_dim;
    const int64_t slot = row * job->num_columns * stride + first_kv * head_dim;
    ELEMENT *keys = (ELEMENT *)job->keys + slot, *values = (ELEMENT *)job->values + slot;
    ELEMENT *mixed = (ELEMENT *)job->mixed + (row * job->num_heads + first_head) * head_dim;
    float *queries = room, *sums = queries + num_heads * head_dim;
    float *scores = sums + num_heads * head_dim;
    const int64_t room_of_scores = (job->num_columns + TOGETHER + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / sqrtf((float)head_dim);

    for (int64_t kv = 0; kv < num_kv_heads; kv++) {
        ELEMENT *key = keys + length * stride + kv * head_dim;
        NAME(rotate)(new_keys + kv * head_dim, cos, sin, head_dim, key);
    }
    memcpy(values + length * stride, new_values, num_kv_heads * head_dim * sizeof *values);
    for (int64_t head = 0; head < num_heads; head++) {
        /* Rounded to the dtype once turned, as the keys are. */
        NAME(rotate)(heads + (first_head + head) * head_dim, cos, sin, head_dim, mixed);
        for (int64_t i = 0; i < head_dim; i++) {
            queries[head * head_dim + i] = WIDE(mixed[i]) * scale;
        }
    }
    NAME(score)(queries, num_kv_heads, num_groups, head_dim, keys, stride, length + 1, scores,
                room_of_scores);
    for (int64_t head = 0; head < num_heads; head++) {
        NAME(softmax)(scores + head * room_of_scores, length + 1, TOGETHER);
    }
    NAME(mix)(scores, room_of_scores, num_kv_heads, num_groups, head_dim, values, stride,
              length + 1, sums);
    for (int64_t i = 0; i < num_heads * head_dim; i++) {
        mixed[i] = NARROW(sums[i]);
    }
}

static TARGET void NAME(attention)(void *given) {
    struct attention *job = given;
    float *room = job->room + take(&job->next_thread) * job->room_of_thread;
    const int64_t num_kv_heads = job->num_kv_heads / job->parts_of_row;
    const int64_t num_groups = job->num_heads / job->num_kv_heads;
    for (int64_t piece; (piece = take(&job->next)) < job->num_rows * job->parts_of_row;) {
        const int64_t row = piece / job->parts_of_row;
        const int64_t first_kv = piece % job->parts_of_row * num_kv_heads;
        /* The usual sizes are told to the compiler, which then keeps a whole head in registers. */
        if (job->head_dim == 64 && num_groups == 3) {
            NAME(attend)(job, row, first_kv, num_kv_heads, 3, 64, room);
        } else if (job->head_dim == 64) {
            NAME(attend)(job, row, first_kv, num_kv_heads, num_groups, 64, room);
        } else {
            NAME(attend)(job, row, first_kv, num_kv_heads, num_groups, job->head_dim, room);
        }
    }
}

static TARGET void NAME(norm)(void *given) {
    struct norm *job = given;
    const int64_t width = job->width, whole = width / LANES * LANES;
    const ELEMENT *weight = job->weight;
    for (int64_t piece; (piece = take(&job->next)) * job->rows_of_piece < job->num_rows;) {
        const int64_t first = piece * job->rows_of_piece;
        for (int64_t row = first; row < first + job->rows_of_piece && row < job->num_rows; row++) {
            const ELEMENT *x = (const ELEMENT *)job->x + row * width;
            ELEMENT *normed = (ELEMENT *)job->normed + row * width;
            F32 sums = {0};
            for (int64_t i = 0; i < whole; i += LANES) {
                const F32 wide = NAME(load)(x + i);
                sums += wide * wide;
            }
            float sum = NAME(total)(sums);
            for (int64_t i = whole; i < width; i++) {
                sum += WIDE(x[i]) * WIDE(x[i]);
            }
            const float scale = 1.0f / sqrtf(sum / (float)width + (float)job->eps);
            for (int64_t i = 0; i < width; i++) {
                normed[i] = NARROW(WIDE(x[i]) * scale * WIDE(weight[i]));
            }
        }
    }
}

/* Logits of a row are gone through in blocks of so many vectors. */
#define BLOCK (32 * LANES)

/* The largest of n logits, -infinity where none is a number. */
static inline TARGET float NAME(largest)(const ELEMENT *logits, int64_t n) {
    F32 most = NAME(spread)(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        most = NAME(larger)(NAME(load)(logits + i), most);
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) {
        largest = most[lane] > largest ? most[lane] : largest;
    }
    for (; i < n; i++) {
        largest = WIDE(logits[i]) > largest ? WIDE(logits[i]) : largest;
    }
    return largest;
}

/* The sum of exp(x - largest) over n logits. */
static inline TARGET double NAME(sum_of_powers)(const ELEMENT *logits, int64_t n, float largest) {
    F32 sums = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        sums += NAME(exponential)(NAME(load)(logits + i) - largest);
    }
    double sum = NAME(total)(sums);
    for (; i < n; i++) {
        sum += exp(WIDE(logits[i]) - largest);
    }
    return sum;
}

static TARGET void NAME(choice)(void *given) {
    struct choice *job = given;
    const int64_t size = job->vocab_size;
    for (int64_t row; (row = take(&job->next)) < job->num_rows;) {
        const ELEMENT *logits = (const ELEMENT *)job->logits + row * size;
        float largest = -INFINITY;
        int64_t id = 0; /* only the block that holds the first of the largest is searched */
        for (int64_t start = 0; start < size; start += BLOCK) {
            const float of_block = NAME(largest)(logits + start, smaller(BLOCK, size - start));
            if (of_block > largest) {
                largest = of_block;
                id = start;
            }
        }
        while (id < size - 1 && WIDE(logits[id]) != largest) {
            id++;
        }
        double sum = 0; /* of blocks in float64: thousands of additions would round too much */
        for (int64_t start = 0; start < size; start += BLOCK) {
            sum += NAME(sum_of_powers)(logits + start, smaller(BLOCK, size - start), largest);
        }
        job->ids[row] = id;
        job->logprobs[row] = -log(sum); /* NaN where a logit is NaN or infinite */
    }
}
