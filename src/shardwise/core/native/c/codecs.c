/* Integer codecs, symmetric and to the nearest code: bit for bit what wire/reference_codecs.py computes with torch. No
   two roundings are made one (-ffp-contract=off). Loops are plain C that compilers turn into vector instructions. */

#include <math.h>

#include "dtypes.h"

enum { MOST_BLOCK = 2048 };

static const float NEAREST = 12582912.0f;      /* 1.5 * 2^23: floats are spaced by 1 there, ties go to even */
static const float SMALLEST_SCALE = 0x1p-126f; /* below it a block is zeros */

typedef struct {
    const void *values;
    uint8_t *payload;
    float *scales;
    int64_t num_elems;
    float of_largest; /* 1 / the largest code */
    int32_t dtype, block, bits;
} encode_job;

typedef struct {
    const uint8_t *payload; /* of the first row */
    const float *scales;
    void *out;
    int64_t row_bytes, num_rows, num_elems;
    int32_t dtype, block, bits;
} decode_job;

static void read_values(const void *values, enum dtype dtype, int64_t at, float *restrict to, int64_t n) {
    if (dtype == FP32) {
        memcpy(to, (const float *)values + at, (size_t)n * 4);
    } else if (dtype == BF16) {
        const uint16_t *restrict from = (const uint16_t *)values + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = from_bits((uint32_t)from[i] << 16);
    } else {
        widen_fp16((const uint16_t *)values + at, to, n);
    }
}

static void write_values(void *out, enum dtype dtype, int64_t at, const float *restrict from, int64_t n) {
    if (dtype == FP32) {
        memcpy((float *)out + at, from, (size_t)n * 4);
    } else if (dtype == BF16) {
        uint16_t *restrict to = (uint16_t *)out + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = to_bf16(from[i]);
    } else {
        narrow_fp16(from, (uint16_t *)out + at, n);
    }
}

static void encode_block(const encode_job *job, int64_t index) {
    const int64_t at = index * job->block, n = least(job->block, job->num_elems - at);
    float values[MOST_BLOCK];
    uint8_t codes[MOST_BLOCK + 1];
    read_values(job->values, (enum dtype)job->dtype, at, values, n);
    uint32_t most = 0; /* as integers, in which a NaN is the largest */
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = to_bits(values[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const float spread = from_bits(most), scale = spread * job->of_largest;
    const int is_finite = spread < INFINITY, is_usable = is_finite && scale >= SMALLEST_SCALE;
    const float inverse = is_usable ? 1.0f / scale : 0.0f;
    job->scales[index] = is_usable ? scale : is_finite ? 0.0f : NAN;
    const float shift = job->bits == 4 ? NEAREST + 8.0f : NEAREST;
    for (int64_t i = 0; i < n; i++)
        codes[i] = (uint8_t)to_bits(values[i] * inverse + shift);
    if (job->bits == 8) {
        memcpy(job->payload + at, codes, (size_t)n);
        return;
    }
    codes[n] = 0;
    uint8_t *restrict packed = job->payload + at / 2;
    for (int64_t i = 0; i < (n + 1) / 2; i++)
        packed[i] = (uint8_t)((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

static void decode_block(const decode_job *job, int64_t index, int64_t row, float *restrict to, int64_t n) {
    const uint8_t *restrict payload = job->payload + row * job->row_bytes;
    const float scale = *(const float *)((const char *)(job->scales + index) + row * job->row_bytes);
    const int64_t at = index * job->block;
    if (job->bits == 8) {
        const int8_t *restrict codes = (const int8_t *)payload + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = (float)codes[i] * scale;
        return;
    }
    const uint8_t *restrict pairs = payload + at / 2;
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
        to[2 * i] = (float)((pairs[i] & 15) - 8) * scale;
        to[2 * i + 1] = (float)((pairs[i] >> 4) - 8) * scale;
    }
}

void shardwise_encode(const encode_job *job, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; index++)
        encode_block(job, index);
}

void shardwise_decode_sum(const decode_job *job, int64_t first, int64_t last) {
    for (int64_t index = first; index < last; index++) {
        const int64_t at = index * job->block, n = least(job->block, job->num_elems - at);
        float total[MOST_BLOCK + 1], decoded[MOST_BLOCK + 1];
        decode_block(job, index, 0, total, n);
        for (int64_t row = 1; row < job->num_rows; row++) {
            decode_block(job, index, row, decoded, n);
            for (int64_t i = 0; i < n; i++)
                total[i] += decoded[i];
        }
        write_values(job->out, (enum dtype)job->dtype, at, total, n);
    }
}
