/* Sixteen lanes at a time, in GCC's vector extensions: any processor runs them, with the widest
 * instructions it has. Within one build an output is always the same operations in the same order.
 *
 * Every function here works on whole vectors. A row that does not fill its last vector is padded
 * with a neutral value, so an output never depends on where a loop was cut.
 */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef f32x16 f32x16_u __attribute__((aligned(4)));
typedef u32x16 u32x16_u __attribute__((aligned(4)));
typedef u16x16 u16x16_u __attribute__((aligned(2)));

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }
INLINE f32x16 as_f32(u32x16 x) { return (f32x16)x; }
INLINE u32x16 as_u32(f32x16 x) { return (u32x16)x; }
INLINE f32x16 load_f32(const float *p) { return *(const f32x16_u *)p; }
INLINE void store_f32(float *p, f32x16 x) { *(f32x16_u *)p = x; }
/* `mask` is all ones or all zeros in each lane, as comparisons give it. */
INLINE f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

/* Threads that find no memory say so, and leave their share undone. */
INLINE void note(int *failed) {
#pragma omp atomic write
    *failed = 1;
}

INLINE float to_f32(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Round to nearest, ties to even; a NaN stays one. */
INLINE u32x16 round_bits(f32x16 x) {
    u32x16 bits = as_u32(x);
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    i32x16 nan = (i32x16)((bits & 0x7fffffffu) > 0x7f800000u);
    return ((bits >> 16 | 0x40u) & (u32x16)nan) | (rounded & ~(u32x16)nan);
}
INLINE f32x16 round_bf16(f32x16 x) { return as_f32(round_bits(x) << 16); }

INLINE f32x16 load_bf16(const bf16 *p) {
    return as_f32(__builtin_convertvector(*(const u16x16_u *)p, u32x16) << 16);
}
INLINE void store_bf16(bf16 *p, f32x16 x) {
    *(u16x16_u *)p = __builtin_convertvector(round_bits(x), u16x16);
}

/* The first `count` values, the rest `fill`. */
INLINE f32x16 load_some(const bf16 *p, int count, float fill) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = i < count ? to_f32(p[i]) : fill;
    return load_f32(lanes);
}
INLINE void store_some(bf16 *p, f32x16 x, int count) {
    bf16 lanes[LANES];
    store_bf16(lanes, x);
    for (int i = 0; i < count; i++) p[i] = lanes[i];
}
INLINE f32x16 load_upto(const bf16 *p, int left, float fill) {
    return left >= LANES ? load_bf16(p) : load_some(p, left, fill);
}
INLINE void store_upto(bf16 *p, f32x16 x, int left) {
    if (left >= LANES) store_bf16(p, x);
    else store_some(p, x, left);
}

INLINE float sum_lanes(f32x16 x) {
    float l[LANES];
    store_f32(l, x);
    for (int half = 8; half; half >>= 1)
        for (int i = 0; i < half; i++) l[i] += l[i + half];
    return l[0];
}
INLINE float max_lanes(f32x16 x) {
    float l[LANES];
    store_f32(l, x);
    for (int half = 8; half; half >>= 1)
        for (int i = 0; i < half; i++) l[i] = l[i] > l[i + half] ? l[i] : l[i + half];
    return l[0];
}
INLINE f32x16 max_of(f32x16 a, f32x16 b) { return choose(a > b, a, b); }

/* e^x within 2 ulp for x in [-87, 88], e^88 above; exactly 0 below -87, so that what is masked adds
 * nothing.
 * Range reduction and coefficients: Cody and Waite; Cephes' expf. A NaN stays one. */
INLINE f32x16 exp_f32(f32x16 x) {
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    f32x16 safe = choose(x < splat(-87.0f), splat(-87.0f), x);
    safe = choose(safe > splat(88.0f), splat(88.0f), safe);
    f32x16 shifted = safe * 1.44269504088896341f + magic;
    f32x16 n = shifted - magic;
    f32x16 r = safe - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    u32x16 power = (as_u32(shifted) - as_u32(magic) + 127u) << 23;
    return choose(x < splat(-87.0f), splat(0.0f), y * as_f32(power));
}

/* accumulator + the products of two bf16 pairs a lane: `pairs` holds 16 x (low, high). */
INLINE f32x16 dot_pairs(f32x16 accumulator, u32x16 pairs, uint32_t factor) {
#ifdef __AVX512BF16__
    return (f32x16)_mm512_dpbf16_ps((__m512)accumulator, (__m512bh)(__m512i)pairs,
                                    (__m512bh)_mm512_set1_epi32((int)factor));
#else
    f32x16 low = splat(to_f32((bf16)factor)), high = splat(to_f32((bf16)(factor >> 16)));
    accumulator = accumulator + as_f32(pairs << 16) * low;
    return accumulator + as_f32(pairs & 0xffff0000u) * high;
#endif
}
