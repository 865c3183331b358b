/* One contiguous piece of the elements for each processor. */

#ifndef SHARDWISE_THREADS_H
#define SHARDWISE_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stddef.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { PAGE_ELEMS = 4096, LEAST_PAGES = 16, MOST_THREADS = 1024 };

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
    return failed ? pthread_create(thread, NULL, do_piece, mine) : 0; /* that processor may have been taken away */
}

/* Pieces begin at whole pages of elements and depend on n and the number of threads alone: a page is always updated
   by the same processor, and stays in its memory. Threads live as long as the call: there is no pool that would have to
   outlive a fork. */
static void spread(work_fn work, const void *job, int64_t n, const int32_t *cpus, int32_t num_cpus) {
    int64_t num_pages = (n + PAGE_ELEMS - 1) / PAGE_ELEMS;
    int64_t num_threads = num_pages / LEAST_PAGES < num_cpus ? num_pages / LEAST_PAGES : num_cpus;
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
            do_piece(&pieces[i]); /* no more threads to be had */
    for (int64_t i = 0; i < num_threads; i++)
        if (is_running[i])
            pthread_join(threads[i], NULL);
}

#endif
