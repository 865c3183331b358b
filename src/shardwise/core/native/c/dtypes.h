/* Gradients in, weights out: 32 bits, or 16. */

#ifndef SHARDWISE_DTYPES_H
#define SHARDWISE_DTYPES_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum dtype { NONE, FP32, BF16, FP16 };
enum { MOST_STRIP = 512 }; /* elements that are read or written at once, at most */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static inline void widen_fp16(const uint16_t *restrict from, float *restrict to, int64_t n) {
#if defined(__F16C__)
    int64_t whole = n / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (int64_t i = whole; i < n; i++)
        to[i] = _cvtsh_ss(from[i]);
#else
    for (int64_t i = 0; i < n; i++) {
        _Float16 half;
        memcpy(&half, from + i, 2);
        to[i] = (float)half;
    }
#endif
}

static inline void narrow_fp16(const float *restrict from, uint16_t *restrict to, int64_t n) {
#if defined(__F16C__)
    int64_t whole = n / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (int64_t i = whole; i < n; i++)
        to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
#else
    for (int64_t i = 0; i < n; i++) {
        _Float16 half = (_Float16)from[i];
        memcpy(to + i, &half, 2);
    }
#endif
}

/* The gradient times scale, rounded to its own dtype, as it would be where it came from. */
static inline void read_grad(const void *grad, enum dtype dtype, int64_t at, float scale, float *restrict to, int64_t n) {
    if (dtype == FP32) {
        const float *restrict from = (const float *)grad + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = from[i] * scale;
    } else if (dtype == BF16) {
        const uint16_t *restrict from = (const uint16_t *)grad + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = from_bits((uint32_t)to_bf16(from_bits((uint32_t)from[i] << 16) * scale) << 16);
    } else {
        widen_fp16((const uint16_t *)grad + at, to, n);
        uint16_t rounded[64];
        for (int64_t i = 0; i < n; i += 64) {
            int64_t some = n - i < 64 ? n - i : 64;
            for (int64_t k = i; k < i + some; k++)
                to[k] *= scale;
            narrow_fp16(to + i, rounded, some);
            widen_fp16(rounded, to + i, some);
        }
    }
}

/* Copies past the caches where both the place and the size allow it. */
static inline void stream(void *to, const void *from, int64_t num_bytes) {
#if defined(__AVX512F__)
    if (((uintptr_t)to | (uintptr_t)num_bytes) % 64 == 0) {
        for (int64_t i = 0; i < num_bytes; i += 64)
            _mm512_stream_si512((void *)((char *)to + i), _mm512_loadu_si512((const char *)from + i));
        return;
    }
#elif defined(__SSE2__)
    if (((uintptr_t)to | (uintptr_t)num_bytes) % 64 == 0) {
        for (int64_t i = 0; i < num_bytes; i += 16)
            _mm_stream_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
        return;
    }
#endif
    memcpy(to, from, (size_t)num_bytes);
}

/* How many elements from `at` on lie before the next line of the cache: what begins there can be streamed. */
static inline int64_t until_line(const void *out, enum dtype dtype, int64_t at) {
    int64_t elem_bytes = dtype == FP32 ? 4 : 2;
    uintptr_t address = (uintptr_t)out + (uintptr_t)(at * elem_bytes);
    return out ? (int64_t)(-address % 64) / elem_bytes : 0;
}

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static inline void write_out(void *out, enum dtype dtype, int64_t at, const float *restrict from, int64_t n) {
    uint16_t narrow[MOST_STRIP];
    if (dtype == FP32) {
        stream((float *)out + at, from, n * 4);
    } else if (dtype == BF16) {
        for (int64_t i = 0; i < n; i++)
            narrow[i] = to_bf16(from[i]);
        stream((uint16_t *)out + at, narrow, n * 2);
    } else if (dtype == FP16) {
        narrow_fp16(from, narrow, n);
        stream((uint16_t *)out + at, narrow, n * 2);
    }
}

#endif
