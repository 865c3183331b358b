/* Decoding of nf4: bit for bit what wire/nf4.py computes with torch. A block of 64 elements has 16 possible values. They
   are computed once, rounded, and then looked up, 32 elements at a time where the processor can. */

#include "dtypes.h"

/* The table is there twice: compilers turn a loop over 32 numbers into vector instructions, and unroll one over 16. */
enum { BLOCK = 64, SCALED = 256, CODES = 32 };

typedef struct {
    const uint8_t *payload, *absmax;
    const float *scales; /* of the absmaxes; behind them their offset */
    const float *codes, *levels;
    void *out;
    int64_t num_elems, num_scales;
    int32_t dtype;
} nf4_job;

static void look_up16(const uint8_t *restrict pairs, const uint16_t *restrict table, uint16_t *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512BW__)
    const __m512i known = _mm512_loadu_si512(table), low = _mm512_set1_epi32(15);
    for (; i + 16 <= n; i += 16) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(pairs + i)));
        const __m512i second = _mm512_slli_epi32(_mm512_and_si512(wide, low), 16);
        const __m512i at = _mm512_or_si512(_mm512_srli_epi32(wide, 4), second);
        _mm512_storeu_si512(to + 2 * i, _mm512_permutexvar_epi16(at, known));
    }
#endif
    for (; i < n; i++) {
        to[2 * i] = table[pairs[i] >> 4];
        to[2 * i + 1] = table[pairs[i] & 15];
    }
}

static void look_up32(const uint8_t *restrict pairs, const float *restrict table, float *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512 known = _mm512_loadu_ps(table);
    const __m512i low = _mm512_set1_epi64(15);
    for (; i + 8 <= n; i += 8) {
        const __m512i wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(pairs + i)));
        const __m512i second = _mm512_slli_epi64(_mm512_and_si512(wide, low), 32);
        const __m512i at = _mm512_or_si512(_mm512_srli_epi64(wide, 4), second);
        _mm512_storeu_ps(to + 2 * i, _mm512_permutexvar_ps(at, known));
    }
#endif
    for (; i < n; i++) {
        to[2 * i] = table[pairs[i] >> 4];
        to[2 * i + 1] = table[pairs[i] & 15];
    }
}

void shardwise_decode_nf4(const nf4_job *job, int64_t first, int64_t last) {
    float codes[CODES];
    memcpy(codes, job->codes, 64);
    memcpy(codes + 16, job->codes, 64);
    const float offset = job->scales[job->num_scales];
    for (int64_t index = first; index < last; index++) {
        const int64_t at = index * BLOCK, n = least(BLOCK, job->num_elems - at);
        const float absmax = job->levels[job->absmax[index]] * job->scales[index / SCALED] + offset;
        const uint8_t *pairs = job->payload + at / 2;
        float values[CODES], wide[BLOCK];
        uint16_t table[CODES], narrow[BLOCK];
        for (int i = 0; i < CODES; i++)
            values[i] = codes[i] * absmax;
        if (job->dtype == FP32) {
            look_up32(pairs, values, wide, (n + 1) / 2);
            stream((float *)job->out + at, wide, n * 4);
            continue;
        }
        if (job->dtype == BF16)
            for (int i = 0; i < CODES; i++)
                table[i] = to_bf16(values[i]);
        else
            narrow_fp16(values, table, CODES);
        look_up16(pairs, table, narrow, (n + 1) / 2);
        stream((uint16_t *)job->out + at, narrow, n * 2);
    }
}
