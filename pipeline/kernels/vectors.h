/* Vectors of 16 floats for kernels whose results are rounded to bfloat16; after tiles.h. */

#define INLINE static inline WITH_TILES __attribute__((always_inline))

INLINE __m512 widened(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

/* 2^x to 7e-5 of it, which is little beside the rounding that follows: the best cubic for what is
 * behind the point, times a power of two. */
INLINE __m512 power_of_two(__m512 x) {
    const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.07802452147006989f);
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.22606715559959412f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.6958335638046265f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.9999251961708069f));
    return _mm512_scalef_ps(p, x);
}
