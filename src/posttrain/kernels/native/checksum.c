/* Universal hashing of 32-bit words: NH of UMAC (RFC 4418, section 5.2.2), over chunks. */
#include "vectors.h"

/* For each chunk of `chunk` words of data: NH under key and under the key shifted by four words,
 * out [chunks][2]. What is missing at the end of the last chunk counts as zero. key has chunk + 4
 * words; chunk is even. */
API void nh_chunks(const uint32_t *data, int64_t count, const uint32_t *key, int chunk,
                   uint64_t *out, int threads) {
    int64_t chunks = (count + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) num_threads(threads) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        const uint32_t *words = data + c * chunk;
        int64_t left = count - c * chunk;
        int whole = (int)(left < chunk ? left : chunk) / 2 * 2;
        uint64_t first = 0, second = 0;
        for (int i = 0; i < whole; i += 2) {
            uint32_t a = words[i], b = words[i + 1];
            first += (uint64_t)(uint32_t)(a + key[i]) * (uint32_t)(b + key[i + 1]);
            second += (uint64_t)(uint32_t)(a + key[i + 4]) * (uint32_t)(b + key[i + 5]);
        }
        for (int i = whole; i < chunk; i += 2) {
            uint32_t a = i < left ? words[i] : 0;
            first += (uint64_t)(uint32_t)(a + key[i]) * key[i + 1];
            second += (uint64_t)(uint32_t)(a + key[i + 4]) * key[i + 5];
        }
        out[c * 2] = first;
        out[c * 2 + 1] = second;
    }
}
