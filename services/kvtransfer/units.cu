// Gather, verify and scatter on a GPU: a frame's units between the pools and a staging frame, and the frame's checksum.
//
// The checksum is the position sum: the frame as little-endian 64-bit words, zeros behind its end, each times an odd number
// that is its position's, added modulo 2^64. A change of one word always shows; unlike xxh3 the sum has no order, so that
// every thread adds what it copies. It is linear in the bytes too, so that a word may be cut anywhere.
//
// A frame is cut in slices, one to a block of threads in turn; a slice may hold parts of several units.

typedef unsigned long long u64;
typedef unsigned char u8;

struct Run {       // `count` units of one field, one after the other in the frame
    u64 base;      // address of the field's unit 0
    u64 stride;    // bytes from unit to unit
    u64 payload;   // bytes of a unit
    u64 begin;     // where in the frame
    u64 ids;       // index of its first unit's number in `ids`
};

#define SLICE 32768

__device__ __forceinline__ u64 weight(u64 word) {
    u64 mixed = (word + 1) * 0x9E3779B97F4A7C15ull;
    return (mixed ^ (mixed >> 32)) | 1;
}

__device__ __forceinline__ u64 weigh(const uint4 &it, u64 word) {  // two words
    return (((u64)it.y << 32) | it.x) * weight(word) + (((u64)it.w << 32) | it.z) * weight(word + 1);
}

// Adds up over the block; every thread of it takes part.
__device__ void add(u64 sum, u64 *total) {
    __shared__ u64 partial[32];
    for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(~0u, sum, step);
        if (!threadIdx.x) atomicAdd(total, sum);
    }
}

// Copies `length` bytes and, if SUM, returns this thread's part of their sum; `at`: where in the frame they are.
template <bool SUM>
__device__ __forceinline__ u64 copy(u8 *__restrict__ to, const u8 *__restrict__ from, u64 at, u64 length) {
    u64 sum = 0;
    if ((((u64)to | (u64)from | at | length) & 15) == 0) {
        const uint4 *source = (const uint4 *)from;
        uint4 *target = (uint4 *)to;
        u64 count = length / 16, i = threadIdx.x, step = blockDim.x;
        for (; i + 3 * step < count; i += 4 * step) {  // four loads under way
            uint4 a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
            target[i] = a; target[i + step] = b; target[i + 2 * step] = c; target[i + 3 * step] = d;
            if (SUM) {
                u64 word = at / 8 + 2 * i;
                sum += weigh(a, word) + weigh(b, word + 2 * step) + weigh(c, word + 4 * step) + weigh(d, word + 6 * step);
            }
        }
        for (; i < count; i += step) {
            uint4 a = source[i];
            target[i] = a;
            if (SUM) sum += weigh(a, at / 8 + 2 * i);
        }
    } else {
        for (u64 i = threadIdx.x; i < length; i += blockDim.x) {
            u8 byte = from[i];
            to[i] = byte;
            if (SUM) sum += ((u64)byte << (at + i) % 8 * 8) * weight((at + i) / 8);
        }
    }
    return sum;
}

template <bool GATHER>
__device__ void move(u8 *frame, u64 length, const Run *runs, u64 count, const u64 *ids, u64 *total) {
    u64 sum = 0;
    for (u64 at = (u64)blockIdx.x * SLICE; at < length; at += (u64)gridDim.x * SLICE) {
        u64 end = min(at + SLICE, length);
        u64 run = 0;
        for (u64 high = count; high - run > 1;) {  // the last run that begins at or before `at`
            u64 middle = (run + high) / 2;
            if (runs[middle].begin <= at) run = middle; else high = middle;
        }
        for (u64 p = at; p < end;) {
            while (run + 1 < count && runs[run + 1].begin <= p) run++;
            const Run it = runs[run];
            u64 unit = (p - it.begin) / it.payload, inside = (p - it.begin) % it.payload;
            u64 part = min(end - p, it.payload - inside);
            u8 *pool = (u8 *)(it.base + ids[it.ids + unit] * it.stride + inside);
            if (GATHER) sum += copy<true>(frame + p, pool, p, part); else copy<false>(pool, frame + p, p, part);
            p += part;
        }
    }
    if (GATHER) add(sum, total);
}

extern "C" __global__ void gather(u8 *frame, u64 length, const Run *runs, u64 count, const u64 *ids, u64 *total) {
    move<true>(frame, length, runs, count, ids, total);
}

// `told`: tag and sum as they are to be. Nothing is written unless the seal behind the units is the same, which `intact`, in the
// host's memory, then says.
extern "C" __global__ void scatter(u8 *frame, u64 length, const Run *runs, u64 count, const u64 *ids, const u8 *told, u64 *intact) {
    bool same = true;
    for (int i = 0; i < 16; i++) same &= frame[length + i] == told[i];
    if (!blockIdx.x && !threadIdx.x) *intact = same;
    if (same) move<false>(frame, length, runs, count, ids, nullptr);
}

extern "C" __global__ void verify(const u8 *frame, u64 length, u64 *total) {
    const uint4 *source = (const uint4 *)frame;  // a frame begins at a multiple of 16 bytes
    u64 sum = 0, count = length / 16, step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
        u64 word = 2 * i;
        sum += weigh(a, word) + weigh(b, word + 2 * step) + weigh(c, word + 4 * step) + weigh(d, word + 6 * step);
    }
    for (; i < count; i += step) sum += weigh(source[i], 2 * i);
    if (blockIdx.x == 0 && threadIdx.x < length % 16) {
        u64 p = count * 16 + threadIdx.x;
        sum += ((u64)frame[p] << p % 8 * 8) * weight(p / 8);
    }
    add(sum, total);
}
