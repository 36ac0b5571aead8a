// bfloat16 rows times 4-bit weights, both products of every expert in one persistent kernel.
//
// The matrix units take a tile of the weights as their 64-row side and the rows of an expert as the other, so that few rows waste
// little. Weights go from memory to shared memory as they lie, to registers as 16 bytes a thread, and become bfloat16 there;
// layout.py lays them out so that they arrive where wgmma wants them. The first product ends in SiTU and in the images of the
// second's input, whose tiles begin as soon as their rows are written: no gap lies between the two.
//
// Given by experts.py: GROUPS (warpgroups that multiply; one more loads) and the registers of a thread of each kind, STAGES,
// FOR_EACH_PATH (for tiles of at most so many rows, the widths of wgmma that take them), ROWS and wgmma<width>.

constexpr int TILE = 256;  // weight rows of a work item
constexpr int PARTS = TILE / 64 / GROUPS;  // of 64 weight rows, of each warpgroup
constexpr u32 WEIGHT_BYTES = TILE * DEPTH / 2, STAGE_BYTES = WEIGHT_BYTES + TILE * DEPTH / 32;  // then come the scales
constexpr u32 IMAGE_BYTES = ROWS * DEPTH * 2;

struct Product {  // one of the two; the images of its input, and its weights, stage after stage
    const u8 *weights, *image;
    int tiles, stages;  // tiles of weight rows; stages of columns
    float gain;
};

struct Work {
    Product first, second;
    const Tile* tiles;
    const int* num_tiles;
    int* ready;  // [tiles] parts of the second product's input that are written; complete at first.tiles
    u8* inner;   // the second product's input
    u8* out;     // [rows, latent] bfloat16
    float beta, linear_beta;
    u32 four, eight;
};

struct Item {  // a tile of rows, a tile of weight rows
    bool second;
    int row_tile, weight_tile;
};

// Work item `number`: all of the first product stand before all of the second.
__device__ __forceinline__ bool find_item(const Work& work, int num_tiles, int number, Item& item) {
    const int first = num_tiles * work.first.tiles;
    item.second = number >= first;
    const int in_product = item.second ? number - first : number;
    const int per_tile = item.second ? work.second.tiles : work.first.tiles;
    item.row_tile = in_product / per_tile, item.weight_tile = in_product % per_tile;
    return item.row_tile < num_tiles;
}

struct Ring {  // of stages in shared memory: images first (aligned to the swizzle's 1024), then weights, then barriers
    u32 base;
    int stage = 0;
    u32 parity = 0;
    __device__ explicit Ring(u32 base) : base(base) {}
    __device__ u32 image() const { return base + stage * IMAGE_BYTES; }
    __device__ u32 weights() const { return base + STAGES * IMAGE_BYTES + stage * STAGE_BYTES; }
    __device__ u32 full() const { return base + STAGES * (IMAGE_BYTES + STAGE_BYTES) + stage * 16; }
    __device__ u32 empty() const { return full() + 8; }
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void load_items(const Work& work, Ring ring) {
    const int num_tiles = *work.num_tiles;
    Item item;
    for (int number = blockIdx.x; find_item(work, num_tiles, number, item); number += gridDim.x) {
        const Product& product = item.second ? work.second : work.first;
        const Tile tile = work.tiles[item.row_tile];
        const u32 rows = tile.padded() * DEPTH * 2;  // bytes of a stage
        const u8* weights = product.weights + u64(tile.expert * product.tiles + item.weight_tile) * product.stages * STAGE_BYTES;
        const u8* image = product.image + u64(tile.first) * product.stages * (DEPTH * 2);
        auto load_weights = [&](const Ring& at, int stage) {
            wait(at.empty(), at.parity ^ 1);
            expect(at.full(), STAGE_BYTES + rows);
            bulk_copy(at.weights(), weights + u64(stage) * STAGE_BYTES, STAGE_BYTES, at.full());
        };
        auto load_image = [&](const Ring& at, int stage) { bulk_copy(at.image(), image + u64(stage) * rows, rows, at.full()); };
        int stage = 0;
        if (item.second) {  // weights may come before the rows are there
            auto written = [&] {
                int parts;
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(parts) : "l"(work.ready + item.row_tile) : "memory");
                return parts == work.first.tiles;
            };
            if (!written()) {
                Ring ahead = ring;
                const int most = min(STAGES, product.stages);
                for (int n = 0; n < most; n++, ahead.next()) load_weights(ahead, n);
                while (!written()) __nanosleep(64);
                asm volatile("fence.proxy.async;" ::: "memory");
                for (; stage < most; stage++, ring.next()) load_image(ring, stage);
            }
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        for (; stage < product.stages; stage++, ring.next()) {
            load_weights(ring, stage);
            load_image(ring, stage);
        }
    }
}

// Four pairs of 4-bit weights to bfloat16, times their scales. Exponent and mantissa of a weight, shifted to those of a
// bfloat16, make it too small by 2^126, which the scales bring back. layout.py has the order of the bits. Most shifts are
// products, by factors that the compiler does not see: multipliers are idle here, while the units that shift are not.
__device__ __forceinline__ void dequantize(const Work& work, u32 word, u32 upper_scale, u32 lower_scale, u32* a) {
    constexpr u32 PAIR = 0x81C081C0;  // sign, two bits of exponent, one of mantissa; twice
    const u32 third = word & 0x40074007, fourth = word & 0x2E002E00;
    a[0] = multiply_bf16x2(word & PAIR, upper_scale);
    a[1] = multiply_bf16x2(word * work.eight & PAIR, lower_scale);
    a[2] = multiply_bf16x2(third * (64 + 2) & PAIR, upper_scale);
    a[3] = multiply_bf16x2((fourth >> 3 | fourth * work.four) & PAIR, lower_scale);
}

__device__ __forceinline__ u32 scale_of(u32 exponent) { return exponent * 0x00800080; }  // as bfloat16, twice

using Sums = float[PARTS][ROWS / 2];  // of a thread

// A warp's 16 weight rows of part `part`, counted in sixteens.
__device__ __forceinline__ int sixteen(int part) { return threadIdx.x / 128 * PARTS * 4 + part * 4 + threadIdx.x / 32 % 4; }

// One block of rows after another, as far as the tile has rows: `a` holds 32 columns of the weights, `image` says where those of
// the rows stand.
template <int FIRST, int WIDTH, int... MORE>
__device__ __forceinline__ void multiply_blocks(Sums& sums, const u32 (&a)[PARTS][8], u64 image, int rows) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        wgmma<WIDTH>(sums[part] + FIRST / 2, a[part], image + FIRST * ROW_BYTES / 16);
        wgmma<WIDTH>(sums[part] + FIRST / 2, a[part] + 4, image + FIRST * ROW_BYTES / 16 + 2);
    }
    if constexpr (sizeof...(MORE) > 0)
        if (FIRST + WIDTH < rows) multiply_blocks<FIRST + WIDTH, MORE...>(sums, a, image, rows);
}

template <int... WIDTHS>
__device__ __forceinline__ void multiply(const Work& work, const Tile& tile, Sums& sums, Ring& ring, int stages) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, GROUP_STRIDE = u64(1024 >> 4) << 32;
    const u32 lane = threadIdx.x % 32, block = tile.padded() * ROW_BYTES >> 4;
    const u32 words_at = sixteen(0) * 1024 + lane * 16, scales_at = WEIGHT_BYTES + sixteen(0) * 64 + lane * 2;
    u32 a[2][PARTS][8];
    u32 done = 0;  // the barrier of the stage before
    for (int stage = 0; stage < stages; stage++, ring.next()) {
        wait(ring.full(), ring.parity);
        uint4 words[PARTS][2];
        u32 upper[PARTS], lower[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            words[part][0] = load_shared_16(ring.weights() + words_at + part * 4096);
            words[part][1] = load_shared_16(ring.weights() + words_at + part * 4096 + 512);
            const u32 scales = load_shared_2(ring.weights() + scales_at + part * 256);
            upper[part] = scale_of(scales & 0xFF), lower[part] = scale_of(scales >> 8);
        }
        const u64 image = SWIZZLE_128 | GROUP_STRIDE | 1 << 16 | ring.image() >> 4;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {  // one is dequantised while the one before is multiplied
            u32(&next)[PARTS][8] = a[quarter % 2];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const uint4& four = words[part][quarter / 2];
                dequantize(work, quarter % 2 ? four.z : four.x, upper[part], lower[part], next[part]);
                dequantize(work, quarter % 2 ? four.w : four.y, upper[part], lower[part], next[part] + 4);
            }
            wgmma_wait();
            if (quarter == 0 && stage && lane == 0) arrive(done);
            wgmma_fence();
            multiply_blocks<0, WIDTHS...>(sums, next, image + quarter / 2 * block + quarter % 2 * 4, tile.rows);
            wgmma_commit();
        }
        done = ring.empty();
    }
    wgmma_wait();
    if (lane == 0) arrive(done);
}

struct Situ {  // beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), by one reciprocal
    float gate_rate, up_rate, factor;
    __device__ Situ(float beta, float linear_beta)
        : gate_rate(-2.8853900818f / beta), up_rate(-2.8853900818f / linear_beta), factor(beta * linear_beta) {}
    __device__ __forceinline__ float operator()(float gate, float up) const {
        auto limited = [](float x) { return fminf(fmaxf(x, -30.f), 30.f); };  // where tanh is 1, and no product overflows
        const float g = exp2_fast(limited(gate * gate_rate)), u = exp2_fast(limited(up * up_rate));
        const float s = exp2_fast(fminf(gate * -1.4426950409f, 60.f));
        return factor * (1 - g) * (1 - u) * reciprocal((1 + g) * (1 + s) * (1 + u));
    }
};

// The first product's sums hold gate columns in their upper 8 rows and the same up columns in the lower 8.
__device__ __forceinline__ void finish_first(const Work& work, const Tile& tile, const Item& item, const Sums& sums) {
    const int lane = threadIdx.x % 32, padded = tile.padded();
    const Situ situ(work.beta, work.linear_beta);
    const float gain = work.first.gain;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int chunk = item.weight_tile * (TILE / 16) + sixteen(part);
        u8* target = work.inner + u64(tile.first) * work.second.stages * (DEPTH * 2) + image_offset(padded, lane / 4, chunk);
#pragma unroll
        for (int group = 0; group < ROWS / 8; group++) {
            if (group * 8 >= padded) break;
            const float* sum = sums[part] + group * 4;
            const u32 pair = to_bf16x2(situ(gain * sum[0], gain * sum[2]), situ(gain * sum[1], gain * sum[3]));
            *(u32*)(target + group * 8 * ROW_BYTES + lane % 4 * 4) = transpose_8x8(pair);
        }
    }
    asm volatile("fence.proxy.async;" ::: "memory");  // bulk copies will read it
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
    if (threadIdx.x == 0) {
        __threadfence();  // for all, whose writes stand before the barrier
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(work.ready + item.row_tile) : "memory");
    }
}

__device__ __forceinline__ void finish_second(const Work& work, const Tile& tile, const Item& item, const Sums& sums) {
    const int lane = threadIdx.x % 32;
    const u64 pitch = u64(work.second.tiles) * TILE * 2;
    const float gain = work.second.gain;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int column = item.weight_tile * TILE + sixteen(part) * 16 + lane % 4 * 4;
        u8* target = work.out + u64(tile.out_row + lane / 4) * pitch + column * 2;
#pragma unroll
        for (int group = 0; group < ROWS / 8; group++) {
            if (group * 8 >= tile.rows) break;
            const float* sum = sums[part] + group * 4;
            const u32 left = transpose_8x8(to_bf16x2(gain * sum[0], gain * sum[1]));
            const u32 right = transpose_8x8(to_bf16x2(gain * sum[2], gain * sum[3]));
            if (group * 8 + lane / 4 < tile.rows) *(uint2*)(target + group * 8 * pitch) = {left, right};
        }
    }
}

__device__ __forceinline__ void compute_items(const Work& work, Ring ring) {
    const int num_tiles = *work.num_tiles;
    Item item;
    for (int number = blockIdx.x; find_item(work, num_tiles, number, item); number += gridDim.x) {
        const Tile tile = work.tiles[item.row_tile];
        const int stages = item.second ? work.second.stages : work.first.stages;
        Sums sums;
#pragma unroll
        for (int n = 0; n < PARTS * ROWS / 2; n++) sums[n / (ROWS / 2)][n % (ROWS / 2)] = 0;
#define RUN(MOST, ...) \
    if (tile.rows <= MOST) \
        multiply<__VA_ARGS__>(work, tile, sums, ring, stages); \
    else
        FOR_EACH_PATH(RUN) __trap();
        if (item.second)
            finish_second(work, tile, item, sums);
        else
            finish_first(work, tile, item, sums);
    }
}

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1) multiply_experts(const __grid_constant__ Work work) {
    extern __shared__ __align__(1024) u8 memory[];
    Ring ring(shared_address(memory));
    if (threadIdx.x == 0) {
        Ring each = ring;
        for (int n = 0; n < STAGES; n++, each.next()) barrier_init(each.full(), 1), barrier_init(each.empty(), GROUPS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
        if (threadIdx.x == GROUPS * 128) load_items(work, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
        compute_items(work, ring);
    }
}
