/* AdamW and Adam of host-resident state in one pass over memory.

   Each thread's piece is cut into strips that stay in registers and the first cache: a strip's gradient is read and
   widened, and moments and weights are updated, in place or into other memory. Weights in the compute dtype, and all
   that goes to other memory, leave by stores that bypass the caches, for nobody here reads them again.

   The order of operations is torch's, rounding by rounding: the compiler contracts nothing (-ffp-contract=off), and
   fmaf stands where torch's kernels contract. Loops are plain C that compilers turn into vector instructions. */

#define _GNU_SOURCE
#include <math.h>

#include "dtypes.h"
#include "threads.h"

enum { STRIP = 64 };

typedef void (*roots_fn)(int32_t n, const float *values, float *roots, int64_t mode);
typedef int32_t (*threads_fn)(int32_t num_threads);

typedef struct {
    const float *master, *exp_avg, *exp_avg_sq;
    float *new_master, *new_exp_avg, *new_exp_avg_sq; /* the same three, or other memory */
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

/* Not `restrict`: in place, old and new moments are the same. */
static inline void moments(const adamw_job *job, int is_last, const float *restrict grad, const float *mean,
                           const float *square, float *exp_avg, float *exp_avg_sq, int64_t n) {
    const float weight = job->lerp_weight, beta2 = job->beta2, square_weight = job->square_weight;
    if (fabsf(weight) < 0.5f)
        for (int64_t i = 0; i < n; i++)
            exp_avg[i] = fmaf(weight, grad[i] - mean[i], mean[i]);
    else
        for (int64_t i = 0; i < n; i++)
            exp_avg[i] = fmaf(weight - 1, grad[i] - mean[i], grad[i]);
    if (is_last)
        for (int64_t i = 0; i < n; i++)
            exp_avg_sq[i] = fmaf(square[i], beta2, square_weight * grad[i] * grad[i]);
    else
        for (int64_t i = 0; i < n; i++)
            exp_avg_sq[i] = fmaf(square_weight * grad[i], grad[i], square[i] * beta2);
}

static inline void adamw_strip(const adamw_job *job, int64_t at, int64_t n, int is_own_root, int is_in_place) {
    const float kept = job->kept, into_gradient = job->into_gradient;
    const float bias_root = job->bias_root, eps = job->eps, minus_step_size = job->minus_step_size;
    float grad[MOST_STRIP], root[MOST_STRIP], copies[3][MOST_STRIP];
    float *restrict master = is_in_place ? job->new_master + at : copies[0];
    float *restrict exp_avg = is_in_place ? job->new_exp_avg + at : copies[1];
    float *restrict exp_avg_sq = is_in_place ? job->new_exp_avg_sq + at : copies[2];
    const float *old = is_in_place ? master : job->master + at;
    const float *mean = is_in_place ? exp_avg : job->exp_avg + at;
    const float *square = is_in_place ? exp_avg_sq : job->exp_avg_sq + at;
    read_grad(job->grad, (enum dtype)job->grad_dtype, at, job->grad_scale, grad, n);
    if (into_gradient != 0)
        for (int64_t i = 0; i < n; i++)
            grad[i] = fmaf(old[i], into_gradient, grad[i]);
    moments(job, at >= job->last, grad, mean, square, exp_avg, exp_avg_sq, n);
    if (is_own_root)
        for (int64_t i = 0; i < n; i++)
            root[i] = sqrtf(exp_avg_sq[i]);
    else
        job->roots((int32_t)n, exp_avg_sq, root, 0x140102); /* the mode in which torch calls it */
    for (int64_t i = 0; i < n; i++)
        master[i] = old[i] * kept + minus_step_size * exp_avg[i] / (root[i] / bias_root + eps);
    if (!is_in_place) {
        stream(job->new_master + at, master, n * 4);
        stream(job->new_exp_avg + at, exp_avg, n * 4);
        stream(job->new_exp_avg_sq + at, exp_avg_sq, n * 4);
    }
    write_out(job->out, (enum dtype)job->out_dtype, at, master, n);
}

static inline void adamw_strips(const adamw_job *job, int64_t begin, int64_t end, int is_in_place) {
    int64_t last = least(job->last, end);
    int64_t at = least(begin + until_line(job->out, (enum dtype)job->out_dtype, begin), last);
    if (job->roots) {
        int32_t before = job->set_threads(1);
        adamw_strip(job, begin, at - begin, 0, is_in_place);
        int64_t strip = is_in_place ? MOST_STRIP : 2 * STRIP; /* shorter, because copies of the strip are at work, too */
        for (; at < last; at += strip)
            adamw_strip(job, at, least(last - at, strip), 0, is_in_place);
        job->set_threads(before);
    } else {
        adamw_strip(job, begin, at - begin, 1, is_in_place);
        for (; at + STRIP <= last; at += STRIP)
            adamw_strip(job, at, STRIP, 1, is_in_place);
        adamw_strip(job, at, last - at, 1, is_in_place);
        adamw_strip(job, last, end - last, 1, is_in_place);
    }
}

static void adamw_piece(const void *argument, int64_t begin, int64_t end) {
    const adamw_job *job = argument;
    if (job->new_master == job->master) /* two copies of the loop: neither checks in every strip */
        adamw_strips(job, begin, end, 1);
    else
        adamw_strips(job, begin, end, 0);
}

void shardwise_adamw(const adamw_job *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    spread(adamw_piece, job, n, cpus, num_cpus);
}
