/* Causal attention of queries to the keys of their own sequence, forward and backward.
 *
 * A job is a sequence's run of queries for one key-value head. Keys and values lie in blocks of 16
 * tokens, two bf16 numbers interleaved so that one instruction multiplies both:
 *     "lanes are tokens"   [D/2][16 tokens][2]   for dot products over D
 *     "lanes are D"        [8 token pairs][D][2] for sums over tokens
 * A query's result depends on its own row and keys alone: every sum runs over blocks in order, and
 * what it may not see adds an exact zero.
 */
#include "vectors.h"

#define TILE 8      /* queries that share a load of keys */
#define MAX_D 256   /* padded head size */
#define GRAD_TILE 16

typedef struct {
    float scaling, softcap; /* softcap 0: none */
    int window;             /* 0: none */
    int heads, kv_heads, d, padded_d;
} Shape;

/* The queries of one job: rows [count] of q, each at a position; keys in blocks. */
typedef struct {
    const int32_t *rows, *positions;
    int count;
} Queries;

INLINE int64_t block_size(const Shape *s) { return (int64_t)LANES * s->padded_d; }

/* --- packing ---------------------------------------------------------------------------------- */

INLINE void put_lanes_are_tokens(bf16 *block, const bf16 *row, int token, int d) {
    for (int i = 0; i < d; i++) block[((i >> 1) * LANES + token) * 2 + (i & 1)] = row[i];
}
INLINE void put_lanes_are_d(bf16 *block, const bf16 *row, int token, int d, int padded_d) {
    bf16 *to = block + (token >> 1) * padded_d * 2 + (token & 1);
    for (int i = 0; i < d; i++) to[i * 2] = row[i];
}

/* Tokens [count] of rows [.., stride] into whole blocks, zeros behind them. */
static void pack_tokens(const bf16 *rows, int64_t stride, const int32_t *index, int count, bf16 *to,
                        const Shape *s, int lanes_are_tokens) {
    int blocks = (count + LANES - 1) / LANES;
    memset(to, 0, sizeof(bf16) * (size_t)(blocks * block_size(s)));
    for (int j = 0; j < count; j++) {
        bf16 *block = to + j / LANES * block_size(s);
        const bf16 *row = rows + index[j] * stride;
        if (lanes_are_tokens) put_lanes_are_tokens(block, row, j % LANES, s->d);
        else put_lanes_are_d(block, row, j % LANES, s->d, s->padded_d);
    }
}

/* Store new tokens into a pool: keys and values [blocks, kv_heads, block]. */
API void pool_write(const bf16 *key, const bf16 *value, const int32_t *slots, bf16 *keys,
                    bf16 *values, int64_t count, int kv_heads, int d, int padded_d, int threads) {
    int64_t size = (int64_t)LANES * padded_d;
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 16)
    for (int64_t t = 0; t < count; t++)
        for (int h = 0; h < kv_heads; h++) {
            int64_t from = (t * kv_heads + h) * d;
            int64_t to = ((int64_t)(slots[t] / LANES) * kv_heads + h) * size;
            put_lanes_are_tokens(keys + to, key + from, slots[t] % LANES, d);
            put_lanes_are_d(values + to, value + from, slots[t] % LANES, d, padded_d);
        }
}

/* --- one tile of queries ---------------------------------------------------------------------- */

/* Pairs of numbers of each query as 32-bit words [TILE][padded_d / 2]. */
static void load_queries(const bf16 *rows, int64_t stride, int64_t offset, const int32_t *index,
                         const int32_t *repeat, int count, uint32_t *to, const Shape *s) {
    memset(to, 0, sizeof(uint32_t) * TILE * MAX_D / 2);
    for (int i = 0; i < count; i++)
        memcpy(to + i * MAX_D / 2, rows + index[i] * stride + offset + (int64_t)repeat[i] * s->d,
               sizeof(bf16) * (size_t)s->d);
}

/* out [n][blocks * 16] = products of each query with each token; n is a constant at each call. */
INLINE void products_of(const int n, const uint32_t *queries, const bf16 *const *blocks, int first,
                        int last, const Shape *s, float *out, int width) {
    int b = first;
    if (n <= 4) /* two blocks at a time: more sums in flight than one instruction takes to finish */
        for (; b + 1 < last; b += 2) {
            f32x16 left[4], right[4];
            for (int i = 0; i < n; i++) left[i] = right[i] = splat(0);
            for (int pair = 0; pair < s->padded_d / 2; pair++) {
                u32x16 a = *(const u32x16_u *)(blocks[b] + pair * LANES * 2);
                u32x16 c = *(const u32x16_u *)(blocks[b + 1] + pair * LANES * 2);
                for (int i = 0; i < n; i++) {
                    left[i] = dot_pairs(left[i], a, queries[i * MAX_D / 2 + pair]);
                    right[i] = dot_pairs(right[i], c, queries[i * MAX_D / 2 + pair]);
                }
            }
            for (int i = 0; i < n; i++) {
                store_f32(out + i * width + b * LANES, left[i]);
                store_f32(out + i * width + (b + 1) * LANES, right[i]);
            }
        }
    for (; b < last; b++) {
        f32x16 sums[TILE];
        for (int i = 0; i < n; i++) sums[i] = splat(0);
        for (int pair = 0; pair < s->padded_d / 2; pair++) {
            u32x16 tokens = *(const u32x16_u *)(blocks[b] + pair * LANES * 2);
            for (int i = 0; i < n; i++)
                sums[i] = dot_pairs(sums[i], tokens, queries[i * MAX_D / 2 + pair]);
        }
        for (int i = 0; i < n; i++) store_f32(out + i * width + b * LANES, sums[i]);
    }
}
static void products(int count, const uint32_t *queries, const bf16 *const *blocks, int first,
                     int last, const Shape *s, float *out, int width) {
    if (count <= 2) products_of(2, queries, blocks, first, last, s, out, width);
    else if (count <= 4) products_of(4, queries, blocks, first, last, s, out, width);
    else products_of(TILE, queries, blocks, first, last, s, out, width);
}

/* Scores in place: scaled, capped, -inf where the query at `position` may not look. */
INLINE void mask_scores(float *scores, int first, int last, int position, const Shape *s) {
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int b = first; b < last; b++) {
        f32x16 x = load_f32(scores + b * LANES) * s->scaling;
        if (s->softcap != 0) {
            float l[LANES];
            store_f32(l, x);
            for (int j = 0; j < LANES; j++) l[j] = s->softcap * tanhf(l[j] / s->softcap);
            x = load_f32(l);
        }
        i32x16 at = lane + b * LANES;
        i32x16 seen = at <= position;
        if (s->window) seen &= at > position - s->window;
        store_f32(scores + b * LANES, choose(seen, x, splat(-INFINITY)));
    }
}

/* First block that any query of the tile sees, when layers have a window. */
INLINE int first_block(int lowest_position, const Shape *s) {
    int first = s->window ? lowest_position - s->window + 1 : 0;
    return first > 0 ? first / LANES : 0;
}

/* out[i] [padded_d] float32 = sum over tokens of weight pair * values, N queries at a time. */
#define SUM_TOKENS(N, VECTORS)                                                                     \
    for (int i0 = 0; i0 < count; i0 += N) {                                                        \
        f32x16 sums[N][VECTORS];                                                                   \
        for (int i = 0; i < N; i++)                                                                \
            for (int v = 0; v < VECTORS; v++) sums[i][v] = splat(0);                               \
        for (int b = first; b < last; b++)                                                         \
            for (int pair = 0; pair < LANES / 2; pair++) {                                         \
                const bf16 *tokens = blocks[b] + pair * s->padded_d * 2 + from * LANES * 2;        \
                u32x16 loaded[VECTORS];                                                            \
                for (int v = 0; v < VECTORS; v++)                                                  \
                    loaded[v] = *(const u32x16_u *)(tokens + v * LANES * 2);                       \
                for (int i = 0; i < N; i++) {                                                      \
                    uint32_t w = weights[(i0 + i) * width / 2 + b * LANES / 2 + pair];             \
                    for (int v = 0; v < VECTORS; v++)                                              \
                        sums[i][v] = dot_pairs(sums[i][v], loaded[v], w);                          \
                }                                                                                  \
            }                                                                                      \
        for (int i = 0; i < N; i++)                                                                \
            for (int v = 0; v < VECTORS; v++)                                                      \
                store_f32(out + (i0 + i) * MAX_D + (from + v) * LANES, sums[i][v]);                \
    }

static void sum_tokens(int count, const uint32_t *weights, int width, const bf16 *const *blocks,
                       int first, int last, const Shape *s, float *out) {
    int vectors = s->padded_d / LANES, from = 0;
    if (count <= 2)
        for (; vectors - from >= 4; from += 4) SUM_TOKENS(2, 4)
    for (; vectors - from >= 4; from += 4) SUM_TOKENS(4, 4)
    for (; from < vectors; from += 1) SUM_TOKENS(TILE, 1)
}

INLINE void store_pairs(uint32_t *to, f32x16 x) {
    *(u16x16_u *)to = __builtin_convertvector(round_bits(x), u16x16);
}

/* Softmax attention of a job's queries, TILE at a time. */
static void attend(const bf16 *q, bf16 *out, float *lse, Queries queries, int kv_head,
                   const bf16 *const *keys, const bf16 *const *values, const Shape *s,
                   float *scores, int width) {
    int repeats = s->heads / s->kv_heads, total = queries.count * repeats;
    int64_t stride = (int64_t)s->heads * s->d, offset = (int64_t)kv_head * repeats * s->d;
    uint32_t *weights = (uint32_t *)(scores + TILE * width);
    for (int at = 0; at < total; at += TILE) {
        int count = total - at < TILE ? total - at : TILE;
        int32_t index[TILE], repeat[TILE], position[TILE];
        int top = 0, low = INT32_MAX;
        for (int i = 0; i < count; i++) {
            index[i] = queries.rows[(at + i) / repeats];
            repeat[i] = (at + i) % repeats;
            position[i] = queries.positions[(at + i) / repeats];
            top = position[i] > top ? position[i] : top;
            low = position[i] < low ? position[i] : low;
        }
        int first = first_block(low, s), last = top / LANES + 1;
        uint32_t packed[TILE * MAX_D / 2];
        load_queries(q, stride, offset, index, repeat, count, packed, s);
        products(count, packed, keys, first, last, s, scores, width);
        float inverse[TILE];
        for (int i = 0; i < TILE; i++) {
            float *row = scores + i * width;
            uint32_t *pairs = weights + i * width / 2;
            if (i >= count) {
                memset(pairs + first * LANES / 2, 0, sizeof(float) * (size_t)(last - first) * LANES / 2);
                continue;
            }
            mask_scores(row, first, last, position[i], s);
            f32x16 best = splat(-INFINITY), sum = splat(0);
            for (int b = first; b < last; b++) best = max_of(load_f32(row + b * LANES), best);
            float m = max_lanes(best);
            for (int b = first; b < last; b++) {
                f32x16 e = exp_f32(load_f32(row + b * LANES) - m);
                sum = sum + e;
                store_pairs(pairs + b * LANES / 2, e);
            }
            float z = sum_lanes(sum);
            inverse[i] = 1.0f / z;
            if (lse) lse[(int64_t)index[i] * s->heads + kv_head * repeats + repeat[i]] = m + logf(z);
        }
        float sums[TILE * MAX_D];
        sum_tokens(count, weights, width, values, first, last, s, sums);
        for (int i = 0; i < count; i++) {
            bf16 *to = out + index[i] * stride + offset + (int64_t)repeat[i] * s->d;
            for (int d = 0; d < s->d; d += LANES)
                store_upto(to + d, load_f32(sums + i * MAX_D + d) * inverse[i], s->d - d);
        }
    }
}

/* --- entry points ----------------------------------------------------------------------------- */

static Shape make_shape(float scaling, float softcap, int window, int heads, int kv_heads, int d) {
    Shape s = {scaling, softcap, window, heads, kv_heads, d, (d + LANES - 1) / LANES * LANES};
    return s;
}
INLINE size_t scratch_floats(int width) { return (size_t)TILE * width * 3 / 2 + LANES; }

/* Entry points return 1 when memory ran out, else 0.
 *
 * Sequences in a pool. Sequence n owns the query rows [starts[n], starts[n + 1]) of `rows`, and
 * block j of its tokens is block tables[n * max_blocks + j] of the pool. */
API int pool_attention(const bf16 *q, const bf16 *keys, const bf16 *values, const int32_t *tables,
                        int max_blocks, const int32_t *rows, const int32_t *positions,
                        const int32_t *starts, int64_t sequences, bf16 *out, float scaling,
                        float softcap, int window, int heads, int kv_heads, int d, int threads) {
    Shape s = make_shape(scaling, softcap, window, heads, kv_heads, d);
    int width = max_blocks * LANES, failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * scratch_floats(width));
        const bf16 **blocks = malloc(sizeof(bf16 *) * (size_t)max_blocks * 2);
        int ready = scores && blocks;
        if (!ready) note(&failed);
#pragma omp for schedule(dynamic, 4)
        for (int64_t job = 0; job < sequences * kv_heads; job++) {
            if (!ready) continue;
            int64_t n = job / kv_heads, head = job % kv_heads;
            Queries own = {rows + starts[n], positions + starts[n], starts[n + 1] - starts[n]};
            int last = 0;
            for (int i = 0; i < own.count; i++)
                last = own.positions[i] / LANES + 1 > last ? own.positions[i] / LANES + 1 : last;
            for (int b = 0; b < last; b++) {
                int64_t at = ((int64_t)tables[n * max_blocks + b] * kv_heads + head) * block_size(&s);
                blocks[b] = keys + at;
                blocks[max_blocks + b] = values + at;
            }
            attend(q, out, NULL, own, (int)head, blocks, blocks + max_blocks, &s, scores, width);
        }
        free(scores);
        free(blocks);
    }
    return failed;
}

static void block_pointers(const bf16 *packed, int blocks, const Shape *s, const bf16 **to) {
    for (int b = 0; b < blocks; b++) to[b] = packed + b * block_size(s);
}

/* Sequences as paths through rows (a prefix tree): sequence n is path[starts[n] .. starts[n + 1]],
 * and owns the queries from its token first_owned[n] on. lse is [rows, heads]. */
API int tree_attention(const bf16 *q, const bf16 *k, const bf16 *v, const int32_t *path,
                        const int32_t *position, const int32_t *starts, const int32_t *first_owned,
                        int64_t sequences, int longest, bf16 *out, float *lse, float scaling,
                        float softcap, int window, int heads, int kv_heads, int d, int threads) {
    Shape s = make_shape(scaling, softcap, window, heads, kv_heads, d);
    int max_blocks = (longest + LANES - 1) / LANES, width = max_blocks * LANES, failed = 0;
    int64_t stride = (int64_t)kv_heads * d;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * scratch_floats(width));
        bf16 *packed = malloc(sizeof(bf16) * (size_t)(2 * max_blocks * block_size(&s)));
        const bf16 **blocks = malloc(sizeof(bf16 *) * (size_t)max_blocks * 2);
        int ready = scores && packed && blocks;
        if (!ready) note(&failed);
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < sequences * kv_heads; job++) {
            if (!ready) continue;
            int64_t n = job / kv_heads, head = job % kv_heads;
            int length = starts[n + 1] - starts[n], owned = first_owned[n];
            if (owned >= length) continue;
            const int32_t *own_path = path + starts[n];
            bf16 *values = packed + max_blocks * block_size(&s);
            pack_tokens(k + head * d, stride, own_path, length, packed, &s, 1);
            pack_tokens(v + head * d, stride, own_path, length, values, &s, 0);
            int count = (length + LANES - 1) / LANES;
            block_pointers(packed, count, &s, blocks);
            block_pointers(values, count, &s, blocks + max_blocks);
            Queries own = {own_path + owned, position + starts[n] + owned, length - owned};
            attend(q, out, lse, own, (int)head, blocks, blocks + max_blocks, &s, scores, width);
        }
        free(scores);
        free(packed);
        free(blocks);
    }
    return failed;
}

/* --- backward --------------------------------------------------------------------------------- */

typedef struct {
    const bf16 *key_products, *value_products; /* lanes are tokens */
    const bf16 *key_sums;                      /* lanes are D */
} Packed;

/* Query pairs with lanes along D: [GRAD_TILE / 2][padded_d][2]. */
static void pair_queries(const bf16 *rows, int64_t stride, int64_t offset, const int32_t *index,
                         const int32_t *repeat, int count, bf16 *to, const Shape *s) {
    memset(to, 0, sizeof(bf16) * GRAD_TILE * (size_t)s->padded_d);
    for (int i = 0; i < count; i++)
        put_lanes_are_d(to, rows + index[i] * stride + offset + (int64_t)repeat[i] * s->d, i, s->d,
                        s->padded_d);
}

/* to[token] [padded_d] += sum over query pairs of factor * pair, tokens of blocks first..last. */
INLINE void add_to_tokens(const uint32_t *factors, int width, const bf16 *pairs, int first, int last,
                          const Shape *s, float *to) {
    for (int v0 = 0; v0 < s->padded_d; v0 += LANES)
        for (int j = first * LANES; j < last * LANES; j += 4) {
            f32x16 sums[4];
            for (int t = 0; t < 4; t++) sums[t] = load_f32(to + (int64_t)(j + t) * s->padded_d + v0);
            for (int p = 0; p < GRAD_TILE / 2; p++) {
                u32x16 both = *(const u32x16_u *)(pairs + ((int64_t)p * s->padded_d + v0) * 2);
                for (int t = 0; t < 4; t++)
                    sums[t] = dot_pairs(sums[t], both, factors[p * width + j + t]);
            }
            for (int t = 0; t < 4; t++) store_f32(to + (int64_t)(j + t) * s->padded_d + v0, sums[t]);
        }
}

/* Slope of the soft cap at a capped score. */
INLINE f32x16 cap_slope(f32x16 capped, float softcap) {
    f32x16 t = capped / softcap;
    return 1.0f - t * t;
}

/* Gradients of one job: dq of its queries, dk and dv [length padded][padded_d] float32 of its keys. */
static void attend_backward(const bf16 *q, const bf16 *out, const bf16 *dout, const float *lse,
                            Queries queries, int kv_head, const Packed *packed,
                            const bf16 **pointers, int max_blocks, const Shape *s, float *scratch,
                            int width, bf16 *dq, float *dk, float *dv) {
    int repeats = s->heads / s->kv_heads, total = queries.count * repeats;
    int64_t stride = (int64_t)s->heads * s->d, offset = (int64_t)kv_head * repeats * s->d;
    float *scores = scratch, *slopes = scratch + TILE * width;
    uint32_t *row_pairs = (uint32_t *)(slopes + TILE * width);
    uint32_t *p_pairs = row_pairs + TILE * width / 2, *ds_pairs = p_pairs + GRAD_TILE / 2 * width;
    const bf16 **keys = pointers, **values = pointers + max_blocks, **sums = values + max_blocks;
    block_pointers(packed->key_products, max_blocks, s, keys);
    block_pointers(packed->value_products, max_blocks, s, values);
    block_pointers(packed->key_sums, max_blocks, s, sums);
    for (int at = 0; at < total; at += GRAD_TILE) {
        int32_t index[GRAD_TILE], repeat[GRAD_TILE], position[GRAD_TILE];
        int count = total - at < GRAD_TILE ? total - at : GRAD_TILE, top = 0, low = INT32_MAX;
        for (int i = 0; i < count; i++) {
            index[i] = queries.rows[(at + i) / repeats];
            repeat[i] = (at + i) % repeats;
            position[i] = queries.positions[(at + i) / repeats];
            top = position[i] > top ? position[i] : top;
            low = position[i] < low ? position[i] : low;
        }
        int first = first_block(low, s), last = top / LANES + 1;
        memset(p_pairs, 0, sizeof(uint32_t) * GRAD_TILE * (size_t)width);
        for (int half = 0; half < count; half += TILE) {
            int n = count - half < TILE ? count - half : TILE;
            uint32_t loaded[TILE * MAX_D / 2];
            load_queries(q, stride, offset, index + half, repeat + half, n, loaded, s);
            products(n, loaded, keys, first, last, s, scores, width);
            load_queries(dout, stride, offset, index + half, repeat + half, n, loaded, s);
            products(n, loaded, values, first, last, s, slopes, width);
            memset(row_pairs, 0, sizeof(float) * TILE * (size_t)width / 2);
            for (int i = 0; i < n; i++) {
                int64_t row = index[half + i], r = repeat[half + i];
                const bf16 *o = out + row * stride + offset + r * s->d;
                const bf16 *g = dout + row * stride + offset + r * s->d;
                f32x16 dots = splat(0);
                for (int d = 0; d < s->d; d += LANES)
                    dots = dots + load_upto(o + d, s->d - d, 0) * load_upto(g + d, s->d - d, 0);
                float delta = sum_lanes(dots), z = lse[row * s->heads + kv_head * repeats + r];
                mask_scores(scores + i * width, first, last, position[half + i], s);
                uint32_t *pp = p_pairs + (half + i) / 2 * width, *dp = ds_pairs + (half + i) / 2 * width;
                for (int b = first; b < last; b++) {
                    f32x16 score = load_f32(scores + i * width + b * LANES);
                    f32x16 p = exp_f32(score - z);
                    f32x16 ds = p * (load_f32(slopes + i * width + b * LANES) - delta) * s->scaling;
                    if (s->softcap != 0)
                        ds = choose(p == splat(0), splat(0), ds * cap_slope(score, s->softcap));
                    u32x16 high = round_bits(p), high_ds = round_bits(ds);
                    store_pairs(row_pairs + i * width / 2 + b * LANES / 2, ds);
                    if ((half + i) % 2 == 0) {
                        *(u32x16_u *)(pp + b * LANES) = high;
                        *(u32x16_u *)(dp + b * LANES) = high_ds;
                    } else {
                        *(u32x16_u *)(pp + b * LANES) |= high << 16;
                        *(u32x16_u *)(dp + b * LANES) |= high_ds << 16;
                    }
                }
            }
            float dq_rows[TILE * MAX_D];
            sum_tokens(n, row_pairs, width, sums, first, last, s, dq_rows);
            for (int i = 0; i < n; i++) {
                bf16 *to = dq + index[half + i] * stride + offset + (int64_t)repeat[half + i] * s->d;
                for (int d = 0; d < s->d; d += LANES)
                    store_upto(to + d, load_f32(dq_rows + i * MAX_D + d), s->d - d);
            }
        }
        bf16 pairs[GRAD_TILE * MAX_D];
        pair_queries(q, stride, offset, index, repeat, count, pairs, s);
        add_to_tokens(ds_pairs, width, pairs, first, last, s, dk);
        pair_queries(dout, stride, offset, index, repeat, count, pairs, s);
        add_to_tokens(p_pairs, width, pairs, first, last, s, dv);
    }
}

/* Parts of a wave of sequences, float32: one for each sequence and head, of its own padded length.
 * At 16 MB the C library hands the same memory out again, call after call. */
#define WAVE_FLOATS (4 << 20)

/* Add the wave's parts to the rows of their paths, sequence after sequence. sums [kv_heads][rows]
 * [padded_d]. */
static void add_parts(const float *parts, const int64_t *offsets, const int32_t *path,
                      const int32_t *starts, const int32_t *first_owned, int64_t from, int64_t to,
                      int64_t num_rows, float *sums, const Shape *s, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int head = 0; head < s->kv_heads; head++) {
        float *rows = sums + head * num_rows * s->padded_d;
        for (int64_t n = from; n < to; n++) {
            int length = starts[n + 1] - starts[n];
            if (first_owned[n] >= length) continue;
            const float *part = parts + offsets[(n - from) * s->kv_heads + head];
            for (int j = 0; j < length; j++) {
                float *row = rows + (int64_t)path[starts[n] + j] * s->padded_d;
                for (int d = 0; d < s->padded_d; d += LANES)
                    store_f32(row + d, load_f32(row + d) + load_f32(part + (int64_t)j * s->padded_d + d));
            }
        }
    }
}

static void round_rows(const float *sums, int64_t num_rows, bf16 *to, const Shape *s, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < num_rows; t++)
        for (int head = 0; head < s->kv_heads; head++)
            for (int d = 0; d < s->d; d += LANES)
                store_upto(to + (t * s->kv_heads + head) * s->d + d,
                           load_f32(sums + (head * num_rows + t) * s->padded_d + d), s->d - d);
}

/* Gradients of `tree_attention` in q, k and v. dq must be zero where no sequence owns a query. What
 * is held beside them grows with the rows, not with the lengths of all paths: sequences are taken in
 * waves. */
API int tree_attention_backward(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out,
                                const bf16 *dout, const float *lse, const int32_t *path,
                                const int32_t *position, const int32_t *starts,
                                const int32_t *first_owned, int64_t sequences, int longest,
                                int64_t num_rows, bf16 *dq, bf16 *dk, bf16 *dv, float scaling,
                                float softcap, int window, int heads, int kv_heads, int d,
                                int threads) {
    Shape s = make_shape(scaling, softcap, window, heads, kv_heads, d);
    int max_blocks = (longest + LANES - 1) / LANES, width = max_blocks * LANES, failed = 0;
    int64_t stride = (int64_t)kv_heads * d, of_rows = kv_heads * num_rows * s.padded_d;
    int64_t all = 0, longest_part = max_blocks * block_size(&s) * kv_heads;
    for (int64_t n = 0; n < sequences; n++)
        all += (starts[n + 1] - starts[n] + LANES - 1) / LANES * block_size(&s) * kv_heads;
    int64_t wave = all < WAVE_FLOATS ? all : WAVE_FLOATS;
    wave = wave > longest_part ? wave : longest_part;
    int64_t *offsets = malloc(sizeof(int64_t) * (size_t)(sequences * kv_heads + 1));
    float *sum_dk = calloc((size_t)of_rows + 1, sizeof(float));
    float *sum_dv = calloc((size_t)of_rows + 1, sizeof(float));
    float *part_dk = malloc(sizeof(float) * (size_t)(wave + 1));
    float *part_dv = malloc(sizeof(float) * (size_t)(wave + 1));
    failed = !offsets || !sum_dk || !sum_dv || !part_dk || !part_dv;
    for (int64_t from = 0, to = 0; from < sequences && !failed; from = to) {
        int64_t parts = 0;
        for (; to < sequences; to++) {
            int length = starts[to + 1] - starts[to];
            int64_t size = first_owned[to] < length ? (length + LANES - 1) / LANES * block_size(&s) : 0;
            if (parts + size * kv_heads > wave) break;
            for (int head = 0; head < kv_heads; head++, parts += size)
                offsets[(to - from) * kv_heads + head] = parts;
        }
        memset(part_dk, 0, sizeof(float) * (size_t)parts);
        memset(part_dv, 0, sizeof(float) * (size_t)parts);
#pragma omp parallel num_threads(threads)
        {
            size_t floats = (size_t)width * (TILE * 2 + TILE / 2 + GRAD_TILE);
            float *scratch = malloc(sizeof(float) * floats);
            bf16 *packed = malloc(sizeof(bf16) * (size_t)(3 * max_blocks * block_size(&s)));
            const bf16 **pointers = malloc(sizeof(bf16 *) * (size_t)max_blocks * 3);
            int ready = scratch && packed && pointers;
            if (!ready) note(&failed);
#pragma omp for schedule(dynamic, 1)
            for (int64_t job = 0; job < (to - from) * kv_heads; job++) {
                if (!ready) continue;
                int64_t n = from + job / kv_heads, head = job % kv_heads;
                int64_t size = max_blocks * block_size(&s);
                int length = starts[n + 1] - starts[n], owned = first_owned[n];
                if (owned >= length) continue;
                const int32_t *own_path = path + starts[n];
                Packed views = {packed, packed + size, packed + 2 * size};
                pack_tokens(k + head * d, stride, own_path, length, packed, &s, 1);
                pack_tokens(v + head * d, stride, own_path, length, packed + size, &s, 1);
                pack_tokens(k + head * d, stride, own_path, length, packed + 2 * size, &s, 0);
                Queries own = {own_path + owned, position + starts[n] + owned, length - owned};
                attend_backward(q, out, dout, lse, own, (int)head, &views, pointers, max_blocks, &s,
                                scratch, width, dq, part_dk + offsets[job], part_dv + offsets[job]);
            }
            free(scratch);
            free(packed);
            free(pointers);
        }
        if (failed) break;
        add_parts(part_dk, offsets, path, starts, first_owned, from, to, num_rows, sum_dk, &s, threads);
        add_parts(part_dv, offsets, path, starts, first_owned, from, to, num_rows, sum_dv, &s, threads);
    }
    if (!failed) {
        round_rows(sum_dk, num_rows, dk, &s, threads);
        round_rows(sum_dv, num_rows, dv, &s, threads);
    }
    free(offsets), free(sum_dk), free(sum_dv), free(part_dk), free(part_dv);
    return failed;
}
