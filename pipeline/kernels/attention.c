/* Attention of whole sequences in bfloat16 on matrix tiles (AMX), where every token looks at every
 * token that may be seen: the vision tower's. What it computes is told beside its Python caller, in
 * `attention.py`; tiles in tiles.h.
 *
 * Everything is turned on its side: a tile of scores has 16 keys by 16 queries, so that a vector
 * holds one key's scores of 16 queries. Largest scores, weights and sums of 16 queries then come
 * from plain vector operations, none of them across a vector; and keys are tiles as they lie in
 * memory, each token a row.
 *
 *     scores [keys, 16] = keys [keys, D] x queries^T [D, 16]
 *     sums   [D + 1, 16] = values^T [D + 1, keys] x weights [keys, 16]
 *
 * The row behind the values is all ones: its sums are the weights' own, as they were rounded.
 *
 * A piece of work is some queries of one head of one image. The thread that takes it packs the
 * head's keys and values into tiles, which stay in its cache while all of the queries pass. */

#include "pieces.h"
#include "tiles.h"

#if HAS_TILES
#include <math.h>

#include "vectors.h"

enum {
    QUERIES = 16,               /* that are worked on together: the columns of a tile */
    GROUP = 32,                 /* keys whose weights fill one tile: pairs of them in 16 rows */
    TILE = TILE_BYTES / 2,      /* bfloat16 numbers in a tile */
    SCORES = GROUP * QUERIES,   /* scores of a group */
    WIDTH_OF_TILE = 32,         /* elements of a head in a row of a tile of keys */
    VALUE_TILES = 5,            /* rows of sums: 80, the head and the ones behind it */
    MAX_HEAD_DIM = VALUE_TILES * TILE_ROWS - 1,
};

/* I images of P tokens, H heads of width D. */
struct whole_attention {
    int64_t next;          /* the next piece that no thread has taken */
    int64_t num_images, num_tokens, num_heads, head_dim;
    int64_t parts_of_head; /* pieces that a head's queries are cut into */
    const uint16_t *queries, *keys, *values; /* [I, P, H, D], with these steps in elements: */
    int64_t image_step, token_step, head_step;
    const uint8_t *mask;   /* [I, P]: the tokens that may be seen; NULL: all */
    uint16_t *mixed;       /* [I, P, H, D]: the result */
    char *room;            /* threads x room_of_thread bytes to work in, at multiples of 64 */
    int64_t room_of_thread;
    int64_t next_thread;
};

/* What a thread works in; the order and sizes are known to attention.py, too. */
struct room {
    uint16_t *keys;    /* [groups, 2, key_tiles] tiles: 16 keys by 32 elements */
    uint16_t *values;  /* [groups, VALUE_TILES] tiles: 16 elements by 32 tokens */
    float *scores;     /* [groups x 32, 16] */
    uint16_t *queries; /* [3] tiles: 32 elements by 16 queries */
    uint16_t *weights; /* [2] tiles: 32 keys by 16 queries */
    float *sums;       /* [VALUE_TILES x 16, 16] */
};

/* A mask for the elements of a head from `start` on, up to 32 of them. */
INLINE uint32_t elements_from(int64_t start, int64_t head_dim) {
    const int64_t left = head_dim - start;
    return left >= 32 ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
}

INLINE void transpose(__m512i rows[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

INLINE void store_rows(const __m512i rows[16], uint16_t *tile) {
    for (int i = 0; i < 16; i++) {
        _mm512_store_si512(tile + i * 32, rows[i]);
    }
}

/* 16 keys, `tokens[count]` and zeros behind them, as `key_tiles` tiles. */
INLINE void pack_keys(const uint16_t *keys, int64_t step, const int64_t *tokens, int64_t count,
                      int64_t head_dim, int key_tiles, uint16_t *tiles) {
    for (int64_t token = 0; token < 16; token++) {
        for (int tile = 0; tile < key_tiles; tile++) {
            const int64_t start = tile * WIDTH_OF_TILE;
            const uint32_t known = token < count ? elements_from(start, head_dim) : 0;
            const uint16_t *at = known ? keys + tokens[token] * step + start : keys;
            _mm512_store_si512(tiles + tile * TILE + token * 32, _mm512_maskz_loadu_epi16(known, at));
        }
    }
}

/* 32 values, `tokens[count]` and zeros behind them, as VALUE_TILES tiles with a row of ones. */
INLINE void pack_values(const uint16_t *values, int64_t step, const int64_t *tokens, int64_t count,
                        int64_t head_dim, uint16_t *tiles) {
    const __m512i in_turn = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t tile = 0; tile < VALUE_TILES; tile++, tiles += TILE) {
        const int64_t start = tile * TILE_ROWS;
        const uint16_t known = elements_from(start, head_dim);
        __m512i rows[16]; /* the same elements of two tokens, in turn: a pair moves as one number */
        for (int64_t pair = 0; pair < 16; pair++) {
            __m256i token[2];
            for (int64_t i = 0; i < 2; i++) {
                const int64_t place = 2 * pair + i;
                const int is_known = known && place < count;
                const uint16_t *at = is_known ? values + tokens[place] * step + start : values;
                token[i] = _mm256_maskz_loadu_epi16(is_known ? known : 0, at);
            }
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(token[0]), token[1], 1);
            rows[pair] = _mm512_permutexvar_epi16(in_turn, both);
        }
        transpose(rows);
        store_rows(rows, tiles);
        if (start <= head_dim && head_dim < start + TILE_ROWS) {
            _mm512_store_si512(tiles + (head_dim - start) * 32, _mm512_set1_epi16(0x3f80));
        }
    }
}

/* Packs the keys and values that may be seen; returns their number. */
INLINE int64_t pack_head(const struct whole_attention *job, int64_t image, int64_t head,
                         int64_t head_dim, int key_tiles, const struct room *room) {
    const int64_t start = image * job->image_step + head * job->head_step, step = job->token_step;
    const uint16_t *keys = job->keys + start, *values = job->values + start;
    const uint8_t *mask = job->mask ? job->mask + image * job->num_tokens : 0;
    int64_t num_seen = 0;
    for (int64_t token = 0; token < job->num_tokens;) {
        int64_t tokens[GROUP], count = 0;
        for (; token < job->num_tokens && count < GROUP; token++) {
            tokens[count] = token;
            count += !mask || mask[token];
        }
        uint16_t *tiles = room->keys + num_seen * key_tiles * 32;
        pack_keys(keys, step, tokens, count, head_dim, key_tiles, tiles);
        pack_keys(keys, step, tokens + 16, count - 16, head_dim, key_tiles, tiles + key_tiles * TILE);
        pack_values(values, step, tokens, count, head_dim,
                    room->values + num_seen / GROUP * VALUE_TILES * TILE);
        num_seen += count;
    }
    return num_seen;
}

INLINE void pack_queries(const uint16_t *queries, int64_t step, int64_t count, int64_t head_dim,
                         int key_tiles, uint16_t *tiles) {
    for (int tile = 0; tile < key_tiles; tile++) {
        const int64_t start = tile * WIDTH_OF_TILE;
        __m512i rows[16];
        for (int64_t i = 0; i < 16; i++) {
            const uint32_t known = i < count ? elements_from(start, head_dim) : 0;
            rows[i] = _mm512_maskz_loadu_epi16(known, known ? queries + i * step + start : queries);
        }
        transpose(rows);
        store_rows(rows, tiles + tile * TILE);
    }
}

/* The scores of 32 keys; `keys` has two rows of tiles. For heads of up to 64 the queries are in
 * tiles 6 and 7 already. */
INLINE void score_group(const uint16_t *keys, const uint16_t *queries, int key_tiles, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    if (key_tiles == 2) {
        _tile_loadd(2, keys, 64);
        _tile_dpbf16ps(0, 2, 6);
        _tile_loadd(3, keys + 2 * TILE, 64);
        _tile_dpbf16ps(1, 3, 6);
        _tile_loadd(4, keys + TILE, 64);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, keys + 3 * TILE, 64);
        _tile_dpbf16ps(1, 5, 7);
    } else {
        for (int tile = 0; tile < key_tiles; tile++, keys += TILE) {
            _tile_loadd(6, queries + tile * TILE, 64);
            _tile_loadd(2, keys, 64);
            _tile_dpbf16ps(0, 2, 6);
            _tile_loadd(3, keys + key_tiles * TILE, 64);
            _tile_dpbf16ps(1, 3, 6);
        }
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + SCORES / 2, 64);
}

/* Scores against all keys, -inf where a group has no key; returns each query's largest. */
INLINE __m512 score(const struct room *room, int64_t num_keys, int key_tiles) {
    const int64_t num_groups = (num_keys + GROUP - 1) / GROUP;
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 most[4] = {nothing, nothing, nothing, nothing};
    if (key_tiles == 2) {
        _tile_loadd(6, room->queries, 64);
        _tile_loadd(7, room->queries + TILE, 64);
    }
    for (int64_t group = 0; group < num_groups; group++) {
        float *scores = room->scores + group * SCORES;
        score_group(room->keys + group * 2 * key_tiles * TILE, room->queries, key_tiles, scores);
        for (int64_t key = num_keys - group * GROUP; key < GROUP; key++) {
            _mm512_store_ps(scores + key * QUERIES, nothing);
        }
        for (int key = 0; key < GROUP; key += 4) {
            for (int i = 0; i < 4; i++) {
                most[i] = _mm512_max_ps(_mm512_load_ps(scores + (key + i) * QUERIES), most[i]);
            }
        }
    }
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

/* The weights of `num_pairs` pairs of keys, rounded to bfloat16 (ties away from 0), as rows of a
 * tile. `scale` and `most` are in powers of two. */
INLINE void weigh(const float *scores, int num_pairs, __m512 scale, __m512 most, uint16_t *rows) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(0xffff0000);
    for (int pair = 0; pair < num_pairs; pair++, scores += 2 * QUERIES) {
        __m512i bits[2];
        for (int i = 0; i < 2; i++) {
            const __m512 score = _mm512_load_ps(scores + i * QUERIES);
            const __m512 weight = power_of_two(_mm512_fmsub_ps(score, scale, most));
            bits[i] = _mm512_add_epi32(_mm512_castps_si512(weight), half);
        }
        /* The first's upper half below the second's: first >> 16 | (second & upper). */
        const __m512i first = _mm512_srli_epi32(bits[0], 16);
        _mm512_store_si512(rows + pair * 32, _mm512_ternarylogic_epi32(first, bits[1], upper, 0xf8));
    }
}

/* Adds 32 weighted values to the sums in tiles 0 to 4. */
INLINE void mix_group(const uint16_t *values, const uint16_t *weights) {
    _tile_loadd(5, weights, 64);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 6, 5);
    _tile_loadd(7, values + TILE, 64);
    _tile_dpbf16ps(1, 7, 5);
    _tile_loadd(6, values + 2 * TILE, 64);
    _tile_dpbf16ps(2, 6, 5);
    _tile_loadd(7, values + 3 * TILE, 64);
    _tile_dpbf16ps(3, 7, 5);
    _tile_loadd(6, values + 4 * TILE, 64);
    _tile_dpbf16ps(4, 6, 5);
}

/* Sums `[80, 16]` of the values, weighted by their scores. A group's tiles are multiplied while the
 * next group's weights are computed. */
INLINE void mix(const struct room *room, int64_t num_keys, __m512 scale, __m512 most) {
    const int64_t num_groups = (num_keys + GROUP - 1) / GROUP;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    for (int64_t group = 0; group <= num_groups; group++) {
        const float *scores = room->scores + group * SCORES;
        uint16_t *weights = room->weights + group % 2 * TILE;
        if (group < num_groups) {
            weigh(scores, 8, scale, most, weights);
        }
        if (group > 0) {
            WRITTEN();
            mix_group(room->values + (group - 1) * VALUE_TILES * TILE,
                      room->weights + (group - 1) % 2 * TILE);
        }
        if (group < num_groups) {
            weigh(scores + SCORES / 2, 8, scale, most, weights + TILE / 2);
        }
    }
    _tile_stored(0, room->sums, 64);
    _tile_stored(1, room->sums + 1 * TILE_ROWS * QUERIES, 64);
    _tile_stored(2, room->sums + 2 * TILE_ROWS * QUERIES, 64);
    _tile_stored(3, room->sums + 3 * TILE_ROWS * QUERIES, 64);
    _tile_stored(4, room->sums + 4 * TILE_ROWS * QUERIES, 64);
}

/* Divides the sums by the weights' own, turns them upright, and rounds them. */
INLINE void finish(const float *sums, int64_t count, int64_t head_dim, uint16_t *mixed, int64_t step) {
    const __m512 weight = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(sums + head_dim * QUERIES));
    for (int64_t start = 0; start < head_dim; start += 16) {
        __m512i rows[16];
        for (int64_t i = 0; i < 16; i++) {
            const __m512 sum = _mm512_load_ps(sums + (start + i) * QUERIES);
            rows[i] = _mm512_castps_si512(_mm512_mul_ps(sum, weight));
        }
        transpose(rows);
        const uint16_t known = elements_from(start, head_dim);
        for (int64_t i = 0; i < count; i++) {
            const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_castsi512_ps(rows[i]));
            _mm256_mask_storeu_epi16(mixed + i * step + start, known, (__m256i)narrow);
        }
    }
}

/* Some queries of one head of one image. */
INLINE void attend(const struct whole_attention *job, int64_t piece, const struct room *room,
                   int64_t head_dim, int key_tiles) {
    const int64_t part = piece % job->parts_of_head, head = piece / job->parts_of_head % job->num_heads;
    const int64_t image = piece / job->parts_of_head / job->num_heads;
    const int64_t step = job->num_heads * head_dim;
    const uint16_t *queries = job->queries + image * job->image_step + head * job->head_step;
    uint16_t *mixed = job->mixed + image * job->num_tokens * step + head * head_dim;
    const __m512 scale = _mm512_set1_ps(1.44269504088896341f / sqrtf((float)head_dim));
    const int64_t num_keys = pack_head(job, image, head, head_dim, key_tiles, room);
    const int64_t num_blocks = (job->num_tokens + QUERIES - 1) / QUERIES;
    const int64_t last = num_blocks * (part + 1) / job->parts_of_head;
    for (int64_t block = num_blocks * part / job->parts_of_head; block < last; block++) {
        const int64_t first = block * QUERIES, left = job->num_tokens - first;
        const int64_t count = left < QUERIES ? left : QUERIES;
        pack_queries(queries + first * job->token_step, job->token_step, count, head_dim, key_tiles,
                     room->queries);
        WRITTEN();
        const __m512 most = score(room, num_keys, key_tiles);
        mix(room, num_keys, scale, _mm512_mul_ps(most, scale));
        finish(room->sums, count, head_dim, mixed + first * step, step);
    }
}

static WITH_TILES void whole_attention(void *given) {
    struct whole_attention *job = given;
    const int64_t num_groups = (job->num_tokens + GROUP - 1) / GROUP;
    const int key_tiles = job->head_dim <= 2 * WIDTH_OF_TILE ? 2 : 3;
    struct room room;
    room.keys = (uint16_t *)(job->room + take(&job->next_thread) * job->room_of_thread);
    room.values = room.keys + num_groups * 2 * key_tiles * TILE;
    room.scores = (float *)(room.values + num_groups * VALUE_TILES * TILE);
    room.queries = (uint16_t *)(room.scores + num_groups * SCORES);
    room.weights = room.queries + 3 * TILE;
    room.sums = (float *)(room.weights + 2 * TILE);

    const uint8_t rows[NUM_TILES] = {16, 16, 16, 16, 16, 16, 16, 16};
    const struct tile_config config = tile_config(rows);
    _tile_loadconfig(&config);
    /* Weights too small for normal numbers would take a hundred times as long; they become 0. */
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | _MM_FLUSH_ZERO_ON);
    const int64_t num_pieces = job->num_images * job->num_heads * job->parts_of_head;
    for (int64_t piece; (piece = take(&job->next)) < num_pieces;) {
        /* The usual width is told to the compiler. */
        if (job->head_dim == 64) {
            attend(job, piece, &room, 64, 2);
        } else if (key_tiles == 2) {
            attend(job, piece, &room, job->head_dim, 2);
        } else {
            attend(job, piece, &room, job->head_dim, 3);
        }
    }
    _mm_setcsr(modes);
    _tile_release();
}
#endif

/* NULL where the processor, the system or the compiler has no tiles. */
part *captionjob_whole_attention_1(void) {
#if HAS_TILES
    if (can_use_tiles()) {
        return whole_attention;
    }
#endif
    return 0;
}
