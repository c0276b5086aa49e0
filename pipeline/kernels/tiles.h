/* Matrix tiles (AMX) for the kernels that multiply bfloat16: whether there are any, and their setup.
 *
 * A tile holds up to 16 rows of 64 bytes. `_tile_dpbf16ps(c, a, b)` adds to float32 `c[m][n]` the
 * products `a[m][k] * b[k][n]` of 32 k, in the order of k, each pair of them at once. b holds pairs:
 * its row j is b[2 j][0], b[2 j + 1][0], b[2 j][1], b[2 j + 1][1], and so on for 16 n.
 *
 * HAS_TILES is 0 where the compiler or the system knows no tiles; the rest is then left out.
 */

#if defined(__x86_64__) && defined(__linux__)
#if defined(__clang__)
#define HAS_TILES (__clang_major__ >= 12)
#else
#define HAS_TILES (__GNUC__ >= 11)
#endif
#else
#define HAS_TILES 0
#endif

#if HAS_TILES
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WITH_TILES \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = 1024, NUM_TILES = 8 };

/* GCC's tile loads do not tell the compiler that they read memory. This stands between writing
 * something and loading it as a tile. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* What `ldtilecfg` reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Eight tiles of 64 bytes a row; this many rows in each. */
static inline struct tile_config tile_config(const uint8_t rows[NUM_TILES]) {
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < NUM_TILES; tile++) {
        config.row_bytes[tile] = TILE_ROW_BYTES;
        config.rows[tile] = rows[tile];
    }
    return config;
}

/* True where the processor has tiles of bfloat16 and the kernel lets this process use them.
 *
 * Linux keeps tiles from a process until it asks, since they make every thread's saved state larger
 * (https://docs.kernel.org/arch/x86/xstate.html). Asking again is harmless. Threads set their tiles
 * up for themselves, at the start of their part, and release them at its end. */
static inline int can_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        return 0;
    }
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!(edx & amx_bf16) || !(edx & amx_tile)) {
        return 0;
    }
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1u << 5)) { /* AVX512-BF16 */
        return 0;
    }
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif
