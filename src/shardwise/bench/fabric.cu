// Kernels that occupy the wires of the emulated fabric; compiled with NVRTC when a fabric starts.
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory");
    return t;
}

__device__ __forceinline__ void spin_until(u64 instant) {
    while (now_ns() < instant) __nanosleep(100);
}

struct Cells {
    u64 lock, cursor, free_ns[2], busy_ns[2];
    double moved[2];
};

struct Span {
    u64 begin, done, cursor;
};

__device__ Span take(Cells* shared, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 words) {
    volatile Cells* cells = shared;
    u64 ns[2] = {intra_ns, inter_ns};
    double bytes[2] = {intra_bytes, inter_bytes};
    while (atomicCAS(&shared->lock, 0ull, 1ull) != 0ull) __nanosleep(20);
    __threadfence();
    u64 now = now_ns();
    Span span = {now, now, cells->cursor};
    for (int wire = 0; wire < 2; ++wire) {
        if (ns[wire] == 0) continue;
        u64 begin = cells->free_ns[wire] > now ? cells->free_ns[wire] : now;
        u64 done = begin + ns[wire];
        cells->free_ns[wire] = done;
        cells->busy_ns[wire] += ns[wire];
        if (done > span.done) { span.begin = begin; span.done = done; }
    }
    for (int wire = 0; wire < 2; ++wire) cells->moved[wire] += bytes[wire];
    cells->cursor += words;
    __threadfence();
    atomicExch(&shared->lock, 0ull);
    return span;
}

extern "C" __global__ void occupy(
    Cells* cells, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 latency_ns
) {
    Span span = take(cells, intra_ns, inter_ns, intra_bytes, inter_bytes, 0);
    spin_until(span.done + latency_ns);
}

extern "C" __global__ void begin_carrying(
    Cells* cells, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 words, Span* out
) {
    *out = take(cells, intra_ns, inter_ns, intra_bytes, inter_bytes, words);
}

// Chunk i is not touched before its share of the span has passed. Eight words of a thread are in flight at once.
extern "C" __global__ void carry(const Span* in, uint4* scratch, u64 mask, u64 words, u64 latency_ns) {
    const u64 chunk_words = 8 * 512;
    Span span = *in;
    uint4* written = scratch + mask + 1;
    double ns_of_a_word = words ? (double)(span.done - span.begin) / (double)words : 0.0;
    for (u64 first = blockIdx.x * chunk_words; first < words; first += gridDim.x * chunk_words) {
        if (threadIdx.x == 0) spin_until(span.begin + (u64)(ns_of_a_word * (double)first));
        __syncthreads();
        uint4 held[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u64 word = first + i * 512 + threadIdx.x;
            if (word < words) held[i] = scratch[(span.cursor + word) & mask];
        }
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            u64 word = first + i * 512 + threadIdx.x;
            if (word < words) written[(span.cursor + word) & mask] = held[i];
        }
    }
    if (threadIdx.x == 0) spin_until(span.done + latency_ns);
}
