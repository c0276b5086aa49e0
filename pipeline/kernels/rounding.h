/* Rows around a product of 8-bit numbers, for one dtype and one kind of processor: each row is
 * rounded by its own largest number, and what comes out is multiplied by that row's step. */

/* values = 128 + x / step, rounded; step = the row's largest |x| / 127. */
static TARGET void NAME(round_rows)(void *given) {
    struct rounding *job = given;
    const int64_t width = job->width, whole = width / LANES * LANES;
    for (int64_t piece; (piece = take(&job->next)) * job->rows_of_piece < job->num_rows;) {
        const int64_t first = piece * job->rows_of_piece;
        for (int64_t row = first; row < first + job->rows_of_piece && row < job->num_rows; row++) {
            const ELEMENT *x = (const ELEMENT *)job->x + row * width;
            uint8_t *values = job->values + row * width;
            /* As whole numbers, so that NaN is the largest of all and does not get lost. */
            I32 most = {0};
            for (int64_t i = 0; i < whole; i += LANES) {
                const F32 wide = NAME(load)(x + i);
                I32 bits;
                memcpy(&bits, &wide, sizeof bits);
                bits &= 0x7fffffff;
                const I32 is_larger = bits > most;
                most = (bits & is_larger) | (most & ~is_larger);
            }
            int32_t bits = 0;
            for (int lane = 0; lane < LANES; lane++) {
                bits = most[lane] > bits ? most[lane] : bits;
            }
            float largest;
            memcpy(&largest, &bits, sizeof largest);
            for (int64_t i = whole; i < width; i++) {
                const float size = fabsf(WIDE(x[i]));
                largest = size > largest || size != size ? size : largest; /* NaN stays */
            }
            const float inverse = largest == 0 ? 0 : 127.0f / largest;
            job->steps[row] = largest / 127.0f;
            for (int64_t i = 0; i < width; i++) {
                /* From 1.5 x 2^23 on floats are whole numbers; 128 more is in the last byte. */
                const float shifted = WIDE(x[i]) * inverse + 12583040.0f;
                uint32_t rounded;
                memcpy(&rounded, &shifted, sizeof rounded);
                values[i] = (uint8_t)rounded;
            }
        }
    }
}

/* y = y * step, and with another tensor y = y * step + other. */
static TARGET void NAME(scale_rows)(void *given) {
    struct scaling *job = given;
    const int64_t width = job->width;
    for (int64_t piece; (piece = take(&job->next)) * job->rows_of_piece < job->num_rows;) {
        const int64_t first = piece * job->rows_of_piece;
        for (int64_t row = first; row < first + job->rows_of_piece && row < job->num_rows; row++) {
            ELEMENT *restrict y = (ELEMENT *)job->y + row * width;
            const float step = job->steps[row];
            if (job->other == NULL) {
                for (int64_t i = 0; i < width; i++) {
                    y[i] = NARROW(WIDE(y[i]) * step);
                }
                continue;
            }
            const ELEMENT *restrict other = (const ELEMENT *)job->other + row * width;
            for (int64_t i = 0; i < width; i++) {
                y[i] = NARROW(WIDE(y[i]) * step + WIDE(other[i]));
            }
        }
    }
}

#define ROOM 256

/* gated = silu(gate * step) * (up * step) of rows `[gate, up]`. */
static TARGET void NAME(gate_rows)(void *given) {
    struct gating *job = given;
    const int64_t width = job->width;
    for (int64_t piece; (piece = take(&job->next)) * job->rows_of_piece < job->num_rows;) {
        const int64_t first = piece * job->rows_of_piece;
        for (int64_t row = first; row < first + job->rows_of_piece && row < job->num_rows; row++) {
            const ELEMENT *restrict gates = (const ELEMENT *)job->both + row * 2 * width;
            const ELEMENT *restrict ups = gates + width;
            ELEMENT *restrict gated = (ELEMENT *)job->gated + row * width;
            const float step = job->steps[row];
            /* Vectors by hand, since the compiler has no exponential of its own for them. */
            for (int64_t start = 0, part; start < width; start += part) {
                part = width - start < ROOM + LANES ? width - start : ROOM;
                float room[ROOM + LANES];
                for (int64_t i = 0; i < part; i += LANES) {
                    /* The last vector may reach back over numbers that are done. */
                    const int64_t back = i + LANES <= part ? i : part - LANES;
                    const F32 gate = NAME(load)(gates + start + back) * step;
                    const F32 up = NAME(load)(ups + start + back) * step;
                    const I32 is_negative = gate < 0;
                    const F32 power = NAME(exponential)(-(F32)((I32)gate & 0x7fffffff));
                    const F32 one = NAME(spread)(1.0f);
                    const F32 top = (F32)(((I32)power & is_negative) | ((I32)one & ~is_negative));
                    const F32 result = gate * top / (one + power) * up;
                    memcpy(room + back, &result, sizeof result);
                }
                for (int64_t i = 0; i < part; i++) {
                    gated[start + i] = NARROW(room[i]);
                }
            }
        }
    }
}
