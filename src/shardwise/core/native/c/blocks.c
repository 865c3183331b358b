/* Reads and writes parts of a file and computes the checksums of their blocks: the same numbers as checked_io.py.

   One call does both, so that the threads do not wait for the interpreter's lock in between. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, PAGE_WORDS = PAGE_BYTES / 8 };

typedef struct {
    const uint64_t *of_words, *of_pages; /* the factors of a page's words, and of a block's pages */
    int64_t block_pages;
} sum_factors;

static uint64_t sum_of(const uint64_t *restrict words, int64_t num_pages, const sum_factors *factors) {
    const uint64_t *restrict of_words = factors->of_words;
    uint64_t sum = 0;
    for (int64_t page = 0; page < num_pages; page++, words += PAGE_WORDS) {
        uint64_t of_page = 0;
        for (int64_t i = 0; i < PAGE_WORDS; i++)
            of_page += words[i] * of_words[i];
        sum += of_page * factors->of_pages[page];
    }
    return sum;
}

static void sum_blocks(const char *memory, int64_t num_bytes, const sum_factors *factors, uint64_t *sums) {
    const int64_t num_pages = num_bytes / PAGE_BYTES, block_pages = factors->block_pages;
    for (int64_t page = 0; page < num_pages; page += block_pages)
        *sums++ = sum_of((const uint64_t *)(memory + page * PAGE_BYTES),
                         num_pages - page < block_pages ? num_pages - page : block_pages, factors);
}

/* Both return how much was moved: less than all where the system refused, or the file ended. */

int64_t shardwise_write_blocks(int32_t file, const char *memory, int64_t num_bytes, int64_t offset,
                               const sum_factors *factors, uint64_t *sums) {
    int64_t done = 0;
    sum_blocks(memory, num_bytes, factors, sums);
    while (done < num_bytes) {
        ssize_t num = pwrite(file, memory + done, (size_t)(num_bytes - done), offset + done);
        if (num < 0 && errno != EINTR)
            break;
        done += num < 0 ? 0 : num;
    }
    return done;
}

int64_t shardwise_read_blocks(int32_t file, char *memory, int64_t num_bytes, int64_t offset,
                              const sum_factors *factors, uint64_t *sums) {
    int64_t done = 0;
    while (done < num_bytes) {
        ssize_t num = pread(file, memory + done, (size_t)(num_bytes - done), offset + done);
        if (num == 0 || (num < 0 && errno != EINTR))
            break;
        done += num < 0 ? 0 : num;
    }
    if (done == num_bytes)
        sum_blocks(memory, num_bytes, factors, sums);
    return done;
}
