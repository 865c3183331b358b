// Kernels of the emulated fabric; compiled with NVRTC when a fabric starts.
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
    u64 lock, free_ns[2], busy_ns[2];
    double moved[2];
};

struct Span {
    u64 begin, done;
};

// Takes the wires for one transfer. Waits until its data begins to arrive, or, if nothing is copied, until its end.
extern "C" __global__ void occupy(
    Cells* shared, u64 intra_ns, u64 inter_ns, double intra_bytes, double inter_bytes, u64 latency_ns, u64 has_copies,
    Span* out
) {
    volatile Cells* cells = shared;
    u64 ns[2] = {intra_ns, inter_ns};
    double bytes[2] = {intra_bytes, inter_bytes};
    while (atomicCAS(&shared->lock, 0ull, 1ull) != 0ull) __nanosleep(20);
    __threadfence();
    u64 now = now_ns();
    Span span = {now, now};
    for (int wire = 0; wire < 2; ++wire) {
        cells->moved[wire] += bytes[wire];
        if (ns[wire] == 0) continue;
        u64 begin = cells->free_ns[wire] > now ? cells->free_ns[wire] : now;
        u64 done = begin + ns[wire];
        cells->free_ns[wire] = done;
        cells->busy_ns[wire] += ns[wire];
        if (done > span.done) { span.begin = begin; span.done = done; }
    }
    __threadfence();
    atomicExch(&shared->lock, 0ull);
    *out = span;
    spin_until(has_copies ? span.begin : span.done + latency_ns);
}

__device__ __forceinline__ uint4 load(const uint4* from) {
    uint4 word;  // volatile: what a reduction would send is read, although nothing here uses it
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from));
    return word;
}

// Moves `words` of the `total` words of a transfer; `before` of them were moved by earlier kernels. Word i is read from
// source[i], or source[i % part] if `part` is not 0, and written to target[i - first] if first <= i < last and it is not
// one of those that are there already (from `skip` to `skip_end`). A chunk is not touched before its share of the span
// has passed. Sixteen words of a thread are in flight at once.
extern "C" __global__ void __launch_bounds__(512) carry(
    const Span* in, u64 total, u64 before, u64 words, u64 part, u64 first, u64 last, u64 skip, u64 skip_end,
    u64 latency_ns, u64 is_last, const uint4* source, uint4* target
) {
    const unsigned chunk = 16 * 512;
    Span span = *in;
    double ns_of_a_word = (double)(span.done - span.begin) / (double)total;
    for (u64 from = blockIdx.x * (u64)chunk; from < words; from += gridDim.x * (u64)chunk) {
        if (threadIdx.x == 0) spin_until(span.begin + (u64)(ns_of_a_word * (double)(before + from)));
        __syncthreads();
        u64 end = from + chunk, read = part ? from % part : from;
        bool is_simple = end <= words && (part == 0 || read + chunk <= part);
        bool is_written = from >= first && end <= last && (end <= skip || from >= skip_end);
        bool is_left = end <= first || from >= last || (from >= skip && end <= skip_end);
        uint4 held[16];
        if (is_simple && (is_written || is_left)) {
            const uint4* from_here = source + read + threadIdx.x;
            uint4* to_here = target + (from - first) + threadIdx.x;
            #pragma unroll
            for (int i = 0; i < 16; ++i) held[i] = load(from_here + i * 512);
            if (is_written) {
                #pragma unroll
                for (int i = 0; i < 16; ++i) to_here[i * 512] = held[i];
            }
            continue;
        }
        for (u64 word = from + threadIdx.x; word < end && word < words; word += 512) {
            uint4 value = load(source + (part ? word % part : word));
            if (word >= first && word < last && (word < skip || word >= skip_end)) target[word - first] = value;
        }
    }
    if (is_last && blockIdx.x == 0 && threadIdx.x == 0) spin_until(span.done + latency_ns);
}
