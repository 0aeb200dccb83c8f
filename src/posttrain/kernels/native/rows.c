/* Functions of one row of bf16 numbers: norms, gates, statistics of logits. A row is computed by one
 * thread in one order, whatever else there is. */
#include "vectors.h"

/* y = weight * (x / rms(x)), rounded to bf16 before and after the weight, as transformers does.
 * rstd[row] = 1 / rms is kept for the backward pass. */
API void rms_norm(const bf16 *x, const bf16 *weight, float eps, bf16 *y, float *rstd, int64_t rows,
                  int n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * n > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *in = x + row * n;
        bf16 *out = y + row * n;
        f32x16 squares = splat(0);
        for (int i = 0; i < n; i += LANES) {
            f32x16 v = load_upto(in + i, n - i, 0);
            squares = squares + v * v;
        }
        float r = 1.0f / sqrtf(sum_lanes(squares) / (float)n + eps);
        if (rstd) rstd[row] = r;
        for (int i = 0; i < n; i += LANES) {
            f32x16 normed = round_bf16(load_upto(in + i, n - i, 0) * r);
            store_upto(out + i, load_upto(weight + i, n - i, 0) * normed, n - i);
        }
    }
}

/* dx, and the sum over rows of dy * normed in `dweight` [threads, n] float32, one part a thread. */
API void rms_norm_backward(const bf16 *dy, const bf16 *x, const bf16 *weight, const float *rstd,
                           bf16 *dx, float *dweight, int64_t rows, int n, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *part = dweight + (int64_t)omp_get_thread_num() * (n + LANES);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const bf16 *in = x + row * n, *grad = dy + row * n;
            float r = rstd[row];
            f32x16 dots = splat(0);
            for (int i = 0; i < n; i += LANES) {
                f32x16 v = load_upto(in + i, n - i, 0);
                f32x16 g = load_upto(grad + i, n - i, 0);
                dots = dots + g * load_upto(weight + i, n - i, 0) * v;
                store_f32(part + i, load_f32(part + i) + g * round_bf16(v * r));
            }
            float common = sum_lanes(dots) / (float)n * r * r;
            for (int i = 0; i < n; i += LANES) {
                f32x16 v = load_upto(in + i, n - i, 0);
                f32x16 g = load_upto(grad + i, n - i, 0) * load_upto(weight + i, n - i, 0);
                store_upto(dx + row * n + i, (g - v * common) * r, n - i);
            }
        }
    }
}

/* From exp(-|x|), which cannot overflow. */
INLINE f32x16 sigmoid(f32x16 x) {
    i32x16 negative = x < splat(0);
    f32x16 e = exp_f32(choose(negative, x, -x));
    return choose(negative, e, splat(1.0f)) / (1.0f + e);
}

/* out = silu(gate) * up; silu is rounded to bf16 first, as transformers does. */
API void swiglu(const bf16 *gate, const bf16 *up, bf16 *out, int64_t rows, int n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * n > 16384)
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < n; i += LANES) {
            int64_t at = row * n + i;
            f32x16 g = load_upto(gate + at, n - i, 0);
            f32x16 silu = round_bf16(g * sigmoid(g));
            store_upto(out + at, silu * load_upto(up + at, n - i, 0), n - i);
        }
}

API void swiglu_backward(const bf16 *dout, const bf16 *gate, const bf16 *up, bf16 *dgate, bf16 *dup,
                         int64_t rows, int n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < n; i += LANES) {
            int64_t at = row * n + i;
            f32x16 d = load_upto(dout + at, n - i, 0);
            f32x16 g = load_upto(gate + at, n - i, 0);
            f32x16 s = sigmoid(g);
            store_upto(dup + at, d * round_bf16(g * s), n - i);
            f32x16 slope = s * (1.0f + g * (1.0f - s));
            store_upto(dgate + at, d * load_upto(up + at, n - i, 0) * slope, n - i);
        }
}

/* Rotary positions: out[h] = x[h] * cos + rotate_half(x[h]) * sin for the `heads` heads of each row,
 * every product rounded to bf16, as transformers does. cos and sin are [rows, d]. `sign` -1 gives
 * the transpose, which is the backward pass (cos and sin repeat in both halves). */
API void rotate(const bf16 *x, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t rows, int heads,
                int d, float sign, int threads) {
    int half = d / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * d > 16384)
    for (int64_t row = 0; row < rows; row++)
        for (int h = 0; h < heads; h++) {
            const bf16 *in = x + (row * heads + h) * d;
            bf16 *to = out + (row * heads + h) * d;
            const bf16 *c = cos + row * d, *s = sin + row * d;
            for (int i = 0; i < half; i += LANES) {
                int left = half - i;
                f32x16 a = load_upto(in + i, left, 0), b = load_upto(in + half + i, left, 0);
                f32x16 ca = load_upto(c + i, left, 0), cb = load_upto(c + half + i, left, 0);
                f32x16 sa = load_upto(s + i, left, 0) * sign;
                f32x16 sb = load_upto(s + half + i, left, 0) * sign;
                f32x16 first = round_bf16(a * ca) + round_bf16(-b * sa);
                f32x16 second = round_bf16(b * cb) + round_bf16(a * sb);
                store_upto(to + i, first, left);
                store_upto(to + half + i, second, left);
            }
        }
}

/* --- logits --------------------------------------------------------------------------------- */

#define BLOCK 256 /* entries of a row that are summed together */

typedef struct {
    float top;    /* largest scaled logit */
    double total; /* sum of exp(scaled - top), block by block */
} Sums;

INLINE f32x16 scaled(const bf16 *row, int i, int vocab, float temperature) {
    f32x16 x = load_upto(row + i, vocab - i, -INFINITY);
    return temperature == 1.0f ? x : x / temperature;
}

/* `mass` [blocks] gets the sum of each block if it is given. */
static Sums row_sums(const bf16 *row, int vocab, float temperature, float *mass) {
    f32x16 top = splat(-INFINITY);
    i32x16 nan = {0};
    for (int i = 0; i < vocab; i += LANES) {
        f32x16 x = load_upto(row + i, vocab - i, -INFINITY);
        top = max_of(x, top);
        nan |= x != x;
    }
    Sums sums = {max_lanes(top), 0};
    for (int i = 0; i < LANES; i++)
        if (nan[i]) sums.top = NAN;
    if (temperature != 1.0f) sums.top /= temperature;
    for (int b = 0; b < vocab; b += BLOCK) {
        f32x16 sum = splat(0);
        for (int i = b; i < vocab && i < b + BLOCK; i += LANES)
            sum = sum + exp_f32(scaled(row, i, vocab, temperature) - sums.top);
        float block = sum_lanes(sum);
        if (mass) mass[b / BLOCK] = block;
        sums.total += (double)block;
    }
    return sums;
}

INLINE float logit(const bf16 *row, int64_t id, float temperature) {
    float x = to_f32(row[id]);
    return temperature == 1.0f ? x : x / temperature;
}

/* Of each row: log-prob of its label, log-normaliser, and entropy. */
API void logit_stats(const bf16 *logits, const int64_t *labels, float temperature, float *logprob,
                     float *normaliser, float *entropy, int64_t rows, int vocab, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *row = logits + r * vocab;
        Sums sums = row_sums(row, vocab, temperature, NULL);
        float lse = sums.top + logf((float)sums.total);
        f32x16 weighted = splat(0);
        for (int i = 0; i < vocab; i += LANES) {
            f32x16 centred = scaled(row, i, vocab, temperature) - sums.top;
            f32x16 e = exp_f32(centred);
            weighted = weighted + choose(e == splat(0), splat(0), e * centred);
        }
        logprob[r] = logit(row, labels[r], temperature) - lse;
        normaliser[r] = lse;
        entropy[r] = logf((float)sums.total) - sum_lanes(weighted) / (float)sums.total;
    }
}

/* Gradient of sum(g_logprob * logprob + g_entropy * entropy) in the logits, over them. */
API void logit_stats_backward(bf16 *logits, const int64_t *labels, float temperature,
                              const float *normaliser, const float *entropy, const float *g_logprob,
                              const float *g_entropy, int64_t rows, int vocab, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *row = logits + r * vocab;
        float lp = g_logprob[r] / temperature, h = g_entropy ? g_entropy[r] / temperature : 0;
        float chosen = 0;
        for (int i = 0; i < vocab; i += LANES) {
            f32x16 log_p = scaled(row, i, vocab, temperature) - normaliser[r];
            f32x16 p = exp_f32(log_p);
            f32x16 g = p * -lp;
            if (h != 0) g = g - choose(p == splat(0), splat(0), p * (log_p + entropy[r]) * h);
            if (labels[r] >= i && labels[r] < i + LANES) chosen = g[labels[r] - i] + lp;
            store_upto(row + i, g, vocab - i);
        }
        f32x16 last = splat(chosen);
        store_some(row + labels[r], last, 1);
    }
}

/* The id at which the running sum of exp(scaled - top) passes uniform * total: first the block, then
 * the place in it, from zero on and in double, so that masses far below the sum before them count.
 * Rounding can leave the target above the last sum: then the last id of positive mass. */
static int64_t invert(const bf16 *row, int vocab, float temperature, Sums sums, const float *mass,
                      double uniform) {
    double target = uniform * sums.total, before = 0, rest = target;
    int blocks = (vocab + BLOCK - 1) / BLOCK, block = -1;
    for (int b = 0; b < blocks; b++) {
        if (mass[b] > 0) {
            block = b;
            rest = target - before;
            if (before + (double)mass[b] > target) break;
        }
        before += (double)mass[b];
    }
    int64_t found = -1;
    double sum = 0;
    for (int i = block * BLOCK; i < vocab && i < (block + 1) * BLOCK; i += LANES) {
        float e[LANES];
        store_f32(e, exp_f32(scaled(row, i, vocab, temperature) - sums.top));
        for (int j = 0; j < LANES; j++)
            if (e[j] > 0) {
                found = i + j;
                sum += (double)e[j];
                if (sum > rest) return found;
            }
    }
    return found;
}

/* One token a row by inverting its distribution at uniform[row]; temperature 0 takes the first
 * largest, with log-prob 0. Ids are -1 where the logits are not numbers. Returns 1 when memory ran
 * out. */
API int sample(const bf16 *logits, const float *temperature, const double *uniform, int64_t *ids,
               float *logprob, int64_t rows, int vocab, int threads) {
    int blocks = (vocab + BLOCK - 1) / BLOCK, failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *mass = malloc(sizeof(float) * (size_t)blocks);
        if (!mass) note(&failed);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            if (!mass) continue;
            const bf16 *row = logits + r * vocab;
            float t = temperature[r] == 0 ? 1.0f : temperature[r];
            Sums sums = row_sums(row, vocab, t, mass);
            float lse = sums.top + logf((float)sums.total);
            if (!isfinite(lse)) {
                ids[r] = -1;
                logprob[r] = NAN;
            } else if (temperature[r] == 0) {
                int64_t best = 0;
                while (to_f32(row[best]) != sums.top) best++;
                ids[r] = best;
                logprob[r] = 0;
            } else {
                ids[r] = invert(row, vocab, t, sums, mass, uniform[r]);
                logprob[r] = logit(row, ids[r], t) - lse;
            }
        }
        free(mass);
    }
    return failed;
}
