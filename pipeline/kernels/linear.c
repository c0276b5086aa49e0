/* Products of bfloat16 rows with a packed weight, and what follows them, rounded once. What is
 * computed, and how a weight is packed, is told beside the Python caller, in `linear.py`.
 *
 * At the few rows of a decode step, reading the weight takes longer than multiplying it. So it is
 * read once, in the order in which it lies, and asked for ahead of its use; and what follows a
 * product is done between the tiles of the next one, so that reading never waits for it. At many
 * rows, a block of them that stays in the cache meets a panel of the weight after the other.
 *
 * A row's sums are taken over its inputs in one order, whatever its neighbours, the number of rows
 * and of threads.
 */

#include "pieces.h"
#include "tiles.h"

#if HAS_TILES
#include "vectors.h"

enum { PLAIN = 0, ADDED = 1, GATED = 2 };
enum { PANEL = 32 }; /* rows of the weight that are multiplied together: two tiles beside another */

/* result[m] = W x[m] + bias, or other[m] + that, or silu(gate x[m]) * (up x[m]). */
struct product {
    int64_t next;            /* the next piece that no thread has taken */
    int64_t num_rows;        /* M */
    int64_t num_steps;       /* of 32 inputs */
    int64_t num_outputs;     /* N */
    int64_t num_panels;
    int64_t panels_of_piece;
    int64_t rows_of_piece;   /* a multiple of 32 */
    int64_t ending;
    const char *x;           /* [M, steps, 32] */
    const char *weight;      /* [panels, steps, 2, 16, 16, 2] */
    const uint16_t *bias;    /* [N], or NULL */
    const uint16_t *other;   /* [M, N] */
    uint16_t *result;        /* [M, N] */
};

/* Sums that wait to be finished: of one or two blocks of 16 rows, with one panel. */
struct block {
    float sums[2 * TILE_ROWS][PANEL] __attribute__((aligned(64)));
    int64_t panel;
    int64_t first, second; /* the rows where the two begin */
    int64_t num_rows, num_finished;
};

INLINE __m512 silu(__m512 x) {
    const __m512 power = power_of_two(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896341f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

INLINE void add(__m512 *low, __m512 *high, const uint16_t *numbers, __mmask32 some) {
    const __m512i both = _mm512_maskz_loadu_epi16(some, numbers);
    *low = _mm512_add_ps(*low, widened(_mm512_castsi512_si256(both)));
    *high = _mm512_add_ps(*high, widened(_mm512_extracti64x4_epi64(both, 1)));
}

/* What follows a product, for one row's sums with a panel. */
INLINE void finish_row(
    const struct product *job, int ending, const float *sums, int64_t row, int64_t panel) {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + PANEL / 2);
    const int64_t width = ending == GATED ? PANEL / 2 : PANEL, output = panel * width;
    const int64_t num_outputs = smaller(job->num_outputs - output, width);
    const __mmask32 some = 0xffffffffu >> (32 - num_outputs);
    const int64_t at = row * job->num_outputs + output;
    if (ending == GATED) {
        const __m512 gated = _mm512_mul_ps(silu(low), high);
        _mm256_mask_storeu_epi16(
            job->result + at, (__mmask16)some, (__m256i)_mm512_cvtneps_pbh(gated));
        return;
    }
    if (job->bias) {
        add(&low, &high, job->bias + output, some);
    }
    if (ending == ADDED) {
        add(&low, &high, job->other + at, some);
    }
    _mm512_mask_storeu_epi16(job->result + at, some, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* Up to `count` more rows of a block. */
INLINE void finish(const struct product *job, int ending, struct block *block, int64_t count) {
    const int64_t end = smaller(block->num_finished + count, block->num_rows);
    for (int64_t i = block->num_finished; i < end; i++) {
        const int64_t row = i < TILE_ROWS ? block->first + i : block->second + i - TILE_ROWS;
        finish_row(job, ending, block->sums[i], row, block->panel);
    }
    block->num_finished = end;
}

enum {
    AHEAD = 4096, /* bytes of the weight that are asked for before they are needed */
    LINE = 64,
    LINES_OF_STEP = 2 * TILE_BYTES / LINE,
};

/* Takes the sums of one or two blocks of 16 rows, and finishes those of the block before. */
INLINE void multiply(
    const struct product *job, int ending, struct block *block, struct block *before, int is_two,
    const char *ahead, int64_t lines_of_step) {
    const int64_t row_bytes = job->num_steps * TILE_ROW_BYTES;
    const char *first = job->x + block->first * row_bytes;
    const char *second = job->x + block->second * row_bytes;
    const char *weight = job->weight + block->panel * job->num_steps * 2 * TILE_BYTES;
    const int64_t rows_of_step = (2 * TILE_ROWS + job->num_steps - 1) / job->num_steps;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < job->num_steps; step++) {
        for (int64_t line = 0; line < lines_of_step; line++, ahead += LINE) {
            _mm_prefetch(ahead, _MM_HINT_T0);
        }
        _tile_loadd(6, weight, TILE_ROW_BYTES);
        _tile_loadd(4, first, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + TILE_BYTES, TILE_ROW_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (is_two) {
            _tile_loadd(5, second, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        first += TILE_ROW_BYTES;
        second += TILE_ROW_BYTES;
        weight += 2 * TILE_BYTES;
        finish(job, ending, before, rows_of_step);
    }
    _tile_stored(0, block->sums[0], sizeof *block->sums);
    _tile_stored(1, block->sums[0] + PANEL / 2, sizeof *block->sums);
    if (is_two) {
        _tile_stored(2, block->sums[TILE_ROWS], sizeof *block->sums);
        _tile_stored(3, block->sums[TILE_ROWS] + PANEL / 2, sizeof *block->sums);
    }
    block->num_finished = 0;
}

/* Multiplies rows from start to end with one panel; returns which block is left to finish. */
INLINE int multiply_panel(
    const struct product *job, int ending, int64_t panel, int64_t start, int64_t end,
    struct block blocks[2], int last) {
    /* Sixteen rows that would reach beyond the last begin earlier, and do some rows again. */
    const int64_t latest = job->num_rows < TILE_ROWS ? 0 : job->num_rows - TILE_ROWS;
    /* Rows share the asking for the panel after this one. */
    const int64_t num_passes = (end - start + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    const int64_t lines_of_step = (LINES_OF_STEP + num_passes - 1) / num_passes;
    const char *ahead = job->weight + panel * job->num_steps * 2 * TILE_BYTES + AHEAD;
    for (int64_t row = start; row < end; row += 2 * TILE_ROWS) {
        struct block *block = &blocks[!last];
        block->panel = panel;
        block->first = smaller(row, latest);
        block->second = smaller(row + TILE_ROWS, latest);
        if (end - row > TILE_ROWS) {
            block->num_rows = 2 * TILE_ROWS;
            multiply(job, ending, block, &blocks[last], 1, ahead, lines_of_step);
        } else {
            block->num_rows = smaller(job->num_rows, TILE_ROWS);
            multiply(job, ending, block, &blocks[last], 0, ahead, lines_of_step);
        }
        ahead += lines_of_step * LINE * job->num_steps;
        last = !last;
    }
    return last;
}

INLINE void take_pieces(struct product *job, int ending) {
    const int64_t pieces_of_rows =
        (job->num_panels + job->panels_of_piece - 1) / job->panels_of_piece;
    struct block blocks[2];
    int last = 0;
    blocks[last].num_rows = blocks[last].num_finished = 0;
    for (;;) {
        const int64_t piece = take(&job->next);
        const int64_t row = piece / pieces_of_rows * job->rows_of_piece;
        if (row >= job->num_rows) {
            break;
        }
        const int64_t end = smaller(row + job->rows_of_piece, job->num_rows);
        int64_t panel = piece % pieces_of_rows * job->panels_of_piece;
        const int64_t behind = smaller(panel + job->panels_of_piece, job->num_panels);
        for (; panel < behind; panel++) {
            last = multiply_panel(job, ending, panel, row, end, blocks, last);
        }
    }
    finish(job, ending, &blocks[last], 2 * TILE_ROWS);
}

static WITH_TILES void product(void *given) {
    struct product *job = given;
    /* Fewer than 16 rows are never read beyond the last: results and rows get smaller tiles. */
    const uint8_t rows = (uint8_t)smaller(job->num_rows, TILE_ROWS);
    const struct tile_config config =
        tile_config((const uint8_t[]){rows, rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS});
    WRITTEN();
    _tile_loadconfig(&config);
    switch (job->ending) {
        case PLAIN: take_pieces(job, PLAIN); break;
        case ADDED: take_pieces(job, ADDED); break;
        case GATED: take_pieces(job, GATED); break;
    }
    _tile_release();
}

#endif

/* NULL where the processor, the system or the compiler has no tiles. */
part *captionjob_product_1(void) {
#if HAS_TILES
    if (can_use_tiles()) {
        return product;
    }
#endif
    return 0;
}
