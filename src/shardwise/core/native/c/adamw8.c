/* The same with moments of 8 bits: codes of values between -1 and 1 in an ascending map of 256, times a scale for each
   block. Updates and codes are those of torchao as its compiler makes them: nothing is contracted. */

#define _GNU_SOURCE
#include <math.h>

#include "dtypes.h"
#include "threads.h"

enum { CODE_BLOCK = 256 };

/* The nearest code of a value by one lookup. The upper half of a float's bits names a span of values so short that at
   most one boundary between codes lies in it. The span's entry has the code at its beginning in the upper half, and in
   the lower what lets the float's lower half carry into the next code from the boundary on. Negative values go by their
   magnitude, and count codes from the top. */
enum { LEAST_BITS = (127 - 25) << 23, MOST_BITS = 127 << 23, NUM_SPANS = ((MOST_BITS - LEAST_BITS) >> 16) + 1 };

typedef struct {
    uint32_t entries[2][NUM_SPANS];
} encoder;

/* torchao's rule: the code below, unless the distance to it is half of that to the next or more. */
static uint32_t nearest(const float *map, float value) {
    uint32_t code = 0;
    for (uint32_t half = 128; half; half /= 2)
        code += value >= map[code + half] ? half : 0;
    uint32_t next = code < 255 ? code + 1 : 255;
    return value - map[code] >= (map[next] - map[code]) * 0.5f ? next : code;
}

static uint32_t counted(const float *map, int is_negative, uint32_t magnitude_bits) {
    float magnitude = from_bits(magnitude_bits);
    return is_negative ? 255 - nearest(map, -magnitude) : nearest(map, magnitude);
}

/* Returns 0, or 1 for a map that has finer steps than spans can tell apart. */
int32_t shardwise_make_encoder(const float *map, encoder *made) {
    for (int is_negative = 0; is_negative < 2; is_negative++) {
        if (counted(map, is_negative, 0) != counted(map, is_negative, LEAST_BITS))
            return 1;
        for (uint32_t span = 0; span < NUM_SPANS; span++) {
            uint32_t begin = LEAST_BITS + (span << 16), low = 0, high = 0x10000;
            uint32_t code = counted(map, is_negative, begin);
            if (begin < MOST_BITS && counted(map, is_negative, begin + 0xffff) > code + 1)
                return 1;
            while (low < high) {
                uint32_t middle = (low + high) / 2;
                if (begin < MOST_BITS && counted(map, is_negative, begin + middle) > code)
                    high = middle;
                else
                    low = middle + 1;
            }
            made->entries[is_negative][span] = (code << 16) + 0x10000 - (low < 0x10000 ? low : 0x10000);
        }
    }
    return 0;
}

typedef struct {
    float *master;
    uint8_t *exp_avg_codes;
    float *exp_avg_scale;
    uint8_t *exp_avg_sq_codes;
    float *exp_avg_sq_scale;
    const float *signed_map, *unsigned_map;
    const encoder *signed_encoder, *unsigned_encoder;
    const void *grad;
    void *out;
    float grad_scale;
    float lr, beta1, beta2, eps, weight_decay, step;
    float lerp_weight, lerp_rest;     /* 1 - beta1, -beta1 */
    float square_weight, square_rest; /* 1 - beta2, -beta2 */
    float least_scale;
    int32_t grad_dtype, out_dtype, is_decoupled;
} adamw8_job;

/* Compilers take gathers apart where they think them slow; here the loop around them is worth it. */
static inline void look_up(const void *table, const uint32_t *restrict places, uint32_t *restrict to, int64_t n) {
    int64_t whole = 0;
#if defined(__AVX512F__)
    whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16)
        _mm512_storeu_si512(to + i, _mm512_i32gather_epi32(_mm512_loadu_si512(places + i), table, 4));
#elif defined(__AVX2__)
    whole = n / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm256_storeu_si256((__m256i *)(to + i),
                            _mm256_i32gather_epi32(table, _mm256_loadu_si256((const __m256i *)(places + i)), 4));
#endif
    for (int64_t i = whole; i < n; i++)
        memcpy(to + i, (const uint32_t *)table + places[i], 4);
}

static inline void decode(const float *map, const uint8_t *restrict codes, float scale, float *restrict to, int64_t n) {
    uint32_t places[CODE_BLOCK], values[CODE_BLOCK];
    for (int64_t i = 0; i < n; i++)
        places[i] = codes[i];
    look_up(map, places, values, n);
    for (int64_t i = 0; i < n; i++)
        to[i] = from_bits(values[i]) * scale;
}

static inline float encode(const encoder *made, const float *restrict from, float least_scale, uint8_t *restrict codes,
                           int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(to_bits(from[i]) & 0x7fffffff);
        most = magnitude > most ? magnitude : most;
    }
    float scale = from_bits((uint32_t)most);
    scale = scale < least_scale ? least_scale : scale;
    uint32_t sign[CODE_BLOCK], span[CODE_BLOCK], rest[CODE_BLOCK], entry[CODE_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = to_bits(from[i] / scale);
        int32_t magnitude = (int32_t)(bits & 0x7fffffff);
        magnitude = magnitude < LEAST_BITS ? LEAST_BITS : magnitude;
        magnitude = magnitude > MOST_BITS ? MOST_BITS : magnitude;
        sign[i] = bits >> 31;
        span[i] = (((uint32_t)magnitude - LEAST_BITS) >> 16) + sign[i] * NUM_SPANS;
        rest[i] = (uint32_t)magnitude & 0xffff;
    }
    look_up(made->entries, span, entry, n);
    for (int64_t i = 0; i < n; i++)
        codes[i] = (uint8_t)((entry[i] + rest[i]) >> 16 ^ (0 - sign[i]));
    return scale;
}

static inline void towards(float *restrict start, const float *restrict end, float weight, float rest, int64_t n) {
    if (fabsf(weight) < 0.5f)
        for (int64_t i = 0; i < n; i++)
            start[i] = start[i] + (end[i] - start[i]) * weight;
    else
        for (int64_t i = 0; i < n; i++)
            start[i] = end[i] + (end[i] - start[i]) * rest;
}

static inline void adamw8_block(const adamw8_job *job, float bias1, float bias2_root, int64_t at, int64_t n) {
    const float lr = job->lr, eps = job->eps, weight_decay = job->weight_decay;
    float *restrict master = job->master + at;
    float grad[CODE_BLOCK], mean[CODE_BLOCK], square[CODE_BLOCK];
    int64_t block = at / CODE_BLOCK;
    read_grad(job->grad, (enum dtype)job->grad_dtype, at, job->grad_scale, grad, n);
    decode(job->signed_map, job->exp_avg_codes + at, job->exp_avg_scale[block], mean, n);
    decode(job->unsigned_map, job->exp_avg_sq_codes + at, job->exp_avg_sq_scale[block], square, n);
    if (job->is_decoupled)
        for (int64_t i = 0; i < n; i++)
            master[i] = master[i] - lr * weight_decay * master[i];
    else
        for (int64_t i = 0; i < n; i++)
            grad[i] = grad[i] + weight_decay * master[i];
    towards(mean, grad, job->lerp_weight, job->lerp_rest, n);
    for (int64_t i = 0; i < n; i++)
        grad[i] = grad[i] * grad[i];
    towards(square, grad, job->square_weight, job->square_rest, n);
    for (int64_t i = 0; i < n; i++)
        master[i] = master[i] - lr * (mean[i] / bias1) / (sqrtf(square[i]) / bias2_root + eps);
    job->exp_avg_scale[block] = encode(job->signed_encoder, mean, job->least_scale, job->exp_avg_codes + at, n);
    job->exp_avg_sq_scale[block] = encode(job->unsigned_encoder, square, job->least_scale, job->exp_avg_sq_codes + at, n);
    write_out(job->out, (enum dtype)job->out_dtype, at, master, n);
}

static void adamw8_piece(const void *argument, int64_t begin, int64_t end) {
    const adamw8_job *job = argument;
    const float bias1 = 1 - powf(job->beta1, job->step), bias2_root = sqrtf(1 - powf(job->beta2, job->step));
    int64_t at = begin;
    for (; at + CODE_BLOCK <= end; at += CODE_BLOCK)
        adamw8_block(job, bias1, bias2_root, at, CODE_BLOCK);
    if (at < end)
        adamw8_block(job, bias1, bias2_root, at, end - at);
}

void shardwise_adamw8(const adamw8_job *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    spread(adamw8_piece, job, n, cpus, num_cpus);
}
