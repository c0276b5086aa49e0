/* A vision tower's small work on bfloat16 rows in one pass each: activations and LayerNorm. What is
 * computed is told beside the Python caller, in `tower.py`. Built and run where there are tiles,
 * which is where torch's own take a sixth of the tower's time. */

#include "pieces.h"
#include "tiles.h"

#if HAS_TILES
#include "vectors.h"

enum { LANES = 16, CHAINS = 4, NUMBERS_OF_PIECE = 1 << 14 };

/* x / (1 + 2^(x (linear + cubic x^2))), in place. */
struct activation {
    int64_t next; /* the next piece that no thread has taken */
    int64_t num_numbers;
    double linear, cubic;
    uint16_t *x;
};

struct layer_norm {
    int64_t next;
    int64_t num_rows, width; /* [B, C], C a multiple of 64 */
    double eps;
    const uint16_t *x, *weight, *bias;
    uint16_t *normed;
};

INLINE __m512 load(const uint16_t *numbers) {
    return widened(_mm256_loadu_si256((const __m256i *)numbers));
}

static WITH_TILES void activation(void *given) {
    struct activation *job = given;
    const __m512 linear = _mm512_set1_ps((float)job->linear), one = _mm512_set1_ps(1);
    const __m512 cubic = _mm512_set1_ps((float)job->cubic);
    /* Powers too small for normal numbers would take a hundred times as long; they become 0. */
    const unsigned modes = _mm_getcsr();
    _mm_setcsr(modes | _MM_FLUSH_ZERO_ON);
    for (int64_t piece; (piece = take(&job->next)) * NUMBERS_OF_PIECE < job->num_numbers;) {
        const int64_t end = smaller((piece + 1) * NUMBERS_OF_PIECE, job->num_numbers);
        for (int64_t i = piece * NUMBERS_OF_PIECE; i < end; i += LANES) {
            const __mmask16 some = 0xffff >> (LANES - smaller(LANES, end - i));
            const __m512 x = widened(_mm256_maskz_loadu_epi16(some, job->x + i));
            /* Not cubic by a square that may be infinite: 0 times that is no number. */
            const __m512 slope = _mm512_fmadd_ps(_mm512_mul_ps(cubic, x), x, linear);
            const __m512 below = _mm512_add_ps(power_of_two(_mm512_mul_ps(x, slope)), one);
            /* The reciprocal is known to 6e-5 of it, as the power is: little beside the rounding. */
            const __m512 y = _mm512_mul_ps(x, _mm512_rcp14_ps(below));
            _mm256_mask_storeu_epi16(job->x + i, some, (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
    _mm_setcsr(modes);
}

/* Several sums side by side: an addition takes as long as four of them that don't wait. */
INLINE float total(const __m512 sums[CHAINS]) {
    return _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

INLINE float sum_of(const uint16_t *x, int64_t width) {
    __m512 sums[CHAINS] = {0};
    for (int64_t i = 0; i < width; i += CHAINS * LANES) {
        for (int64_t chain = 0; chain < CHAINS; chain++) {
            sums[chain] = _mm512_add_ps(sums[chain], load(x + i + chain * LANES));
        }
    }
    return total(sums);
}

INLINE float squares_of(const uint16_t *x, int64_t width, __m512 mean) {
    __m512 sums[CHAINS] = {0};
    for (int64_t i = 0; i < width; i += CHAINS * LANES) {
        for (int64_t chain = 0; chain < CHAINS; chain++) {
            const __m512 centred = _mm512_sub_ps(load(x + i + chain * LANES), mean);
            sums[chain] = _mm512_fmadd_ps(centred, centred, sums[chain]);
        }
    }
    return total(sums);
}

static WITH_TILES void layer_norm(void *given) {
    struct layer_norm *job = given;
    const int64_t width = job->width, rows_of_piece = 1 + NUMBERS_OF_PIECE / width;
    for (int64_t piece; (piece = take(&job->next)) * rows_of_piece < job->num_rows;) {
        const int64_t end = smaller((piece + 1) * rows_of_piece, job->num_rows);
        for (int64_t row = piece * rows_of_piece; row < end; row++) {
            const uint16_t *x = job->x + row * width;
            uint16_t *normed = job->normed + row * width;
            const __m512 mean = _mm512_set1_ps(sum_of(x, width) / (float)width);
            const float squares = squares_of(x, width, mean);
            const __m512 variance = _mm512_set1_ps(squares / (float)width);
            const __m512 padded = _mm512_add_ps(variance, _mm512_set1_ps((float)job->eps));
            const __m512 scale = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(padded));
            for (int64_t i = 0; i < width; i += LANES) {
                const __m512 y = _mm512_mul_ps(_mm512_sub_ps(load(x + i), mean), scale);
                const __m512 z = _mm512_fmadd_ps(y, load(job->weight + i), load(job->bias + i));
                _mm256_storeu_si256((__m256i *)(normed + i), (__m256i)_mm512_cvtneps_pbh(z));
            }
        }
    }
}
#endif

/* NULL where the processor, the system or the compiler has no tiles. */
part *captionjob_activation_1(void) {
#if HAS_TILES
    if (can_use_tiles()) {
        return activation;
    }
#endif
    return 0;
}

part *captionjob_layer_norm_1(void) {
#if HAS_TILES
    if (can_use_tiles()) {
        return layer_norm;
    }
#endif
    return 0;
}
