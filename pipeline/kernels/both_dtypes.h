/* Reads rows.h for bfloat16 and for float32; KIND, LANES and TARGET say for which processor. */

typedef float JOIN(lanes, KIND, f32) __attribute__((vector_size(4 * LANES)));
typedef int32_t JOIN(lanes, KIND, i32) __attribute__((vector_size(4 * LANES)));
typedef uint32_t JOIN(lanes, KIND, u32) __attribute__((vector_size(4 * LANES)));
typedef uint16_t JOIN(lanes, KIND, u16) __attribute__((vector_size(2 * LANES)));
#define F32 JOIN(lanes, KIND, f32)
#define I32 JOIN(lanes, KIND, i32)
#define U32 JOIN(lanes, KIND, u32)
#define U16 JOIN(lanes, KIND, u16)

#define DTYPE bfloat16
#define ELEMENT uint16_t
#define WIDE(x) widened(x)
#define NARROW(x) narrowed(x)
#define IS_HALF 1
#include "rows.h"
#undef DTYPE
#undef ELEMENT
#undef WIDE
#undef NARROW
#undef IS_HALF

#define DTYPE float32
#define ELEMENT float
#define WIDE(x) (x)
#define NARROW(x) (x)
#define IS_HALF 0
#include "rows.h"
#undef DTYPE
#undef ELEMENT
#undef WIDE
#undef NARROW
#undef IS_HALF

#undef F32
#undef I32
#undef U32
#undef U16
