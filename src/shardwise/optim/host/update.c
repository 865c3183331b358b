/* Updates of host-resident optimizer state in one pass over memory. Compiled and called by library.py.

   The arrays are cut into one contiguous piece for each thread, each piece into blocks that stay in registers and the
   first cache: a block's gradient is read and widened, moments and weights are updated in place, and weights in the
   compute dtype leave by stores that bypass the caches, for nobody here reads them again.

   The order of operations is torch's, rounding by rounding: the compiler contracts nothing (-ffp-contract=off), and
   fmaf stands where torch's kernels contract. Loops are plain C that compilers turn into vector instructions. */

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum dtype { NONE, FP32, BF16, FP16 };
enum { STRIP = 64, LONG_STRIP = 512, CODE_BLOCK = 256, PAGE_ELEMS = 4096, MOST_THREADS = 1024 };

/* 1. Dtypes */

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
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++)
        to[i] = _cvtsh_ss(from[i]);
#else
    for (; i < n; i++) {
        _Float16 half;
        memcpy(&half, from + i, 2);
        to[i] = (float)half;
    }
#endif
}

static inline void narrow_fp16(const float *restrict from, uint16_t *restrict to, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++)
        to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
#else
    for (; i < n; i++) {
        _Float16 half = (_Float16)from[i];
        memcpy(to + i, &half, 2);
    }
#endif
}

/* The gradient as float32(grad) * scale. */
static inline void read_grad(const void *grad, enum dtype dtype, int64_t at, float scale, float *restrict to, int64_t n) {
    if (dtype == FP32) {
        const float *restrict from = (const float *)grad + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = from[i] * scale;
    } else if (dtype == BF16) {
        const uint16_t *restrict from = (const uint16_t *)grad + at;
        for (int64_t i = 0; i < n; i++)
            to[i] = from_bits((uint32_t)from[i] << 16) * scale;
    } else {
        widen_fp16((const uint16_t *)grad + at, to, n);
        for (int64_t i = 0; i < n; i++)
            to[i] *= scale;
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

static inline void write_out(void *out, enum dtype dtype, int64_t at, const float *restrict from, int64_t n) {
    uint16_t narrow[LONG_STRIP];
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

/* 2. Threads */

typedef void (*work_fn)(const void *job, int64_t begin, int64_t end);

typedef struct {
    work_fn work;
    const void *job;
    int64_t begin, end;
} piece;

static void *do_piece(void *argument) {
    const piece *mine = argument;
    mine->work(mine->job, mine->begin, mine->end);
#if defined(__SSE2__)
    _mm_sfence(); /* what was streamed must be seen by whoever joins this thread */
#endif
    return NULL;
}

static int start_pinned(pthread_t *thread, piece *mine, int32_t cpu) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < CPU_SETSIZE) {
        CPU_SET((size_t)cpu, &set);
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
#endif
    int failed = pthread_create(thread, &attributes, do_piece, mine);
    pthread_attr_destroy(&attributes);
    return failed;
}

/* Pieces begin at whole pages of elements and depend on n and the number of threads alone: a page is always updated
   by the same processor, and stays in its memory. Threads live as long as the call, which costs some 20 us each. */
static void spread(work_fn work, const void *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    int64_t num_pages = (n + PAGE_ELEMS - 1) / PAGE_ELEMS;
    int64_t num_threads = num_pages / 16 < num_cpus ? num_pages / 16 : num_cpus;
    pthread_t threads[MOST_THREADS];
    piece pieces[MOST_THREADS];
    int is_running[MOST_THREADS];
    if (num_threads > MOST_THREADS)
        num_threads = MOST_THREADS;
    if (num_threads < 2) {
        piece whole = {work, job, 0, n};
        do_piece(&whole);
        return;
    }
    for (int64_t i = 0; i < num_threads; i++) {
        int64_t end = num_pages * (i + 1) / num_threads * PAGE_ELEMS;
        pieces[i] = (piece){work, job, num_pages * i / num_threads * PAGE_ELEMS, end < n ? end : n};
        is_running[i] = !start_pinned(&threads[i], &pieces[i], cpus[i]);
    }
    for (int64_t i = 0; i < num_threads; i++)
        if (!is_running[i])
            do_piece(&pieces[i]); /* no thread could be had for it: limits, or a processor that was taken away */
    for (int64_t i = 0; i < num_threads; i++)
        if (is_running[i])
            pthread_join(threads[i], NULL);
}

/* 3. Moments in 32 bits */

typedef void (*roots_fn)(int32_t n, const float *values, float *roots, int64_t mode);
typedef int32_t (*threads_fn)(int32_t num_threads);

typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *out;
    roots_fn roots;         /* torch's own square root where it is not the processor's, or NULL */
    threads_fn set_threads; /* of the library that has it: one, within a thread of ours */
    int64_t last;           /* from here on squares are rounded as in the remainder of torch's fused loop */
    float grad_scale;
    float kept;                 /* what AdamW's decay leaves of a weight */
    float into_gradient;        /* how much of a weight Adam's decay adds to its gradient */
    float lerp_weight;          /* 1 - beta1 */
    float beta2, square_weight; /* and 1 - beta2 */
    float bias_root, eps, minus_step_size;
    int32_t grad_dtype, out_dtype;
} adamw_job;

static inline void moments(const adamw_job *job, int is_last, const float *restrict grad, float *restrict exp_avg,
                           float *restrict exp_avg_sq, int64_t n) {
    const float weight = job->lerp_weight, beta2 = job->beta2, square_weight = job->square_weight;
    if (fabsf(weight) < 0.5f)
        for (int64_t i = 0; i < n; i++)
            exp_avg[i] = fmaf(weight, grad[i] - exp_avg[i], exp_avg[i]);
    else
        for (int64_t i = 0; i < n; i++)
            exp_avg[i] = fmaf(weight - 1, grad[i] - exp_avg[i], grad[i]);
    if (is_last)
        for (int64_t i = 0; i < n; i++)
            exp_avg_sq[i] = fmaf(exp_avg_sq[i], beta2, square_weight * grad[i] * grad[i]);
    else
        for (int64_t i = 0; i < n; i++)
            exp_avg_sq[i] = fmaf(square_weight * grad[i], grad[i], exp_avg_sq[i] * beta2);
}

static inline void adamw_strip(const adamw_job *job, int64_t at, int64_t n, int is_own_root) {
    const float kept = job->kept, into_gradient = job->into_gradient;
    const float bias_root = job->bias_root, eps = job->eps, minus_step_size = job->minus_step_size;
    float *restrict master = job->master + at;
    float *restrict exp_avg = job->exp_avg + at, *restrict exp_avg_sq = job->exp_avg_sq + at;
    float grad[LONG_STRIP], root[LONG_STRIP];
    read_grad(job->grad, (enum dtype)job->grad_dtype, at, job->grad_scale, grad, n);
    if (into_gradient != 0)
        for (int64_t i = 0; i < n; i++)
            grad[i] = fmaf(master[i], into_gradient, grad[i]);
    moments(job, at >= job->last, grad, exp_avg, exp_avg_sq, n);
    if (is_own_root)
        for (int64_t i = 0; i < n; i++)
            root[i] = sqrtf(exp_avg_sq[i]);
    else
        job->roots((int32_t)n, exp_avg_sq, root, 0x140102); /* the mode in which torch calls it */
    for (int64_t i = 0; i < n; i++)
        master[i] = master[i] * kept + minus_step_size * exp_avg[i] / (root[i] / bias_root + eps);
    write_out(job->out, (enum dtype)job->out_dtype, at, master, n);
}

static void adamw_piece(const void *argument, int64_t begin, int64_t end) {
    const adamw_job *job = argument;
    int64_t at = begin, last = job->last < end ? job->last : end;
    if (job->roots) {
        int32_t before = job->set_threads ? job->set_threads(1) : 0;
        for (; at < last; at += LONG_STRIP)
            adamw_strip(job, at, last - at < LONG_STRIP ? last - at : LONG_STRIP, 0);
        if (job->set_threads)
            job->set_threads(before);
    } else {
        for (; at + STRIP <= last; at += STRIP)
            adamw_strip(job, at, STRIP, 1);
        if (at < last)
            adamw_strip(job, at, last - at, 1);
        if (last < end)
            adamw_strip(job, last, end - last, 1);
    }
}

void shardwise_adamw(const adamw_job *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    spread(adamw_piece, job, n, cpus, num_cpus);
}

/* 4. Weights alone */

typedef struct {
    const float *master;
    void *out;
    int32_t out_dtype;
} cast_job;

static void cast_piece(const void *argument, int64_t begin, int64_t end) {
    const cast_job *job = argument;
    for (int64_t at = begin; at < end; at += LONG_STRIP)
        write_out(job->out, (enum dtype)job->out_dtype, at, job->master + at,
                  end - at < LONG_STRIP ? end - at : LONG_STRIP);
}

void shardwise_cast(const cast_job *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    spread(cast_piece, job, n, cpus, num_cpus);
}

/* 5. Moments in 8 bits: codes of values between -1 and 1 in an ascending map of 256, times a scale for each block */

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

static inline void decode(const float *restrict map, const uint8_t *restrict codes, float scale, float *restrict to,
                          int64_t n) {
    for (int64_t i = 0; i < n; i++)
        to[i] = map[codes[i]] * scale;
}

static inline float encode(const encoder *made, const float *restrict from, float least_scale, uint8_t *restrict codes,
                           int64_t n) {
    const uint32_t *restrict entries = made->entries[0];
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(to_bits(from[i]) & 0x7fffffff);
        most = magnitude > most ? magnitude : most;
    }
    float scale = from_bits((uint32_t)most);
    scale = scale < least_scale ? least_scale : scale;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = to_bits(from[i] / scale), is_negative = bits >> 31;
        int32_t magnitude = (int32_t)(bits & 0x7fffffff);
        magnitude = magnitude < LEAST_BITS ? LEAST_BITS : magnitude;
        magnitude = magnitude > MOST_BITS ? MOST_BITS : magnitude;
        int32_t span = ((magnitude - LEAST_BITS) >> 16) + (int32_t)(is_negative * NUM_SPANS);
        uint32_t code = (entries[span] + ((uint32_t)magnitude & 0xffff)) >> 16;
        codes[i] = (uint8_t)(code ^ (0 - is_negative));
    }
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

static inline void adamw8_block(const adamw8_job *job, int64_t at, int64_t n) {
    const float lr = job->lr, eps = job->eps, weight_decay = job->weight_decay;
    const float bias1 = 1 - powf(job->beta1, job->step), bias2_root = sqrtf(1 - powf(job->beta2, job->step));
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
    for (int64_t at = begin; at < end; at += CODE_BLOCK)
        adamw8_block(argument, at, end - at < CODE_BLOCK ? end - at : CODE_BLOCK);
}

void shardwise_adamw8(const adamw8_job *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    spread(adamw8_piece, job, n, cpus, num_cpus);
}
