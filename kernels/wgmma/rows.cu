// Rows of experts: how they split into tiles, their way into the images that products.cu reads, and back to where they came from.
//
// The rows of one tile (at most ROWS of one expert) stand together in an image: 64 columns after 64 columns, each such block as
// the 128-byte swizzle of shared memory has it, columns in the order that layout.py explains. So one bulk copy brings a stage.

constexpr int DEPTH = 128;  // columns of a stage
constexpr u32 ROW_BYTES = 128;  // of a row in a block of an image

struct Tile {
    int expert, first, out_row, rows;  // first: where its image starts, in rows; rows: how many are real
    __device__ int padded() const { return (rows + 7) & ~7; }
};

// ---- How an expert's rows split into tiles --------------------------------------------------------------------------------

struct Split {  // equal tiles of at most ROWS rows
    int count, tiles, rows;
    __device__ explicit Split(int count) : count(count), tiles((count + ROWS - 1) / ROWS) {
        rows = tiles ? ((count + tiles - 1) / tiles + 7) & ~7 : 0;
    }
    __device__ Tile tile(int expert, int first, int number, int out_row) const {
        const int start = number * rows;
        return {expert, first + start, out_row + start, min(rows, count - start)};
    }
};

struct Place {  // of an expert: its first tile, its first image row
    int tile, row;
};

// Every block finds the places of all experts by itself, in `places` [experts + 1]; the last is the end.
__device__ void find_places(const int* counts, int experts, Place* places) {
    if (threadIdx.x < 32) {
        Place end{0, 0};
        for (int base = 0; base < experts; base += 32) {
            const int expert = base + threadIdx.x;
            const Split split(expert < experts ? counts[expert] : 0);
            int tiles = split.tiles, rows = split.tiles * split.rows;
            for (int step = 1; step < 32; step *= 2) {
                const int more_tiles = __shfl_up_sync(~0u, tiles, step), more_rows = __shfl_up_sync(~0u, rows, step);
                if (threadIdx.x >= step) tiles += more_tiles, rows += more_rows;
            }
            if (expert < experts) places[expert] = {end.tile + tiles - split.tiles, end.row + rows - split.tiles * split.rows};
            end.tile += __shfl_sync(~0u, tiles, 31), end.row += __shfl_sync(~0u, rows, 31);
        }
        if (threadIdx.x == 0) places[experts] = end;
    }
    __syncthreads();
}

// One block writes the tiles for the products, and sets to zero what they count. pitch: output rows from expert to expert, or
// 0 where the output is in the order of the images.
__device__ void write_schedule(const int* counts, int experts, const Place* places, int pitch, int most_tiles, int most_rows,
                               Tile* tiles, int* num_tiles, int* ready) {
    const Place end = places[experts];
    if (end.tile > most_tiles || end.row > most_rows) __trap();  // the caller's bound on rows does not hold
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        const Split split(counts[expert]);
        const Place place = places[expert];
        for (int number = 0; number < split.tiles; number++) {
            tiles[place.tile + number] = split.tile(expert, place.row, number, pitch ? expert * pitch : place.row);
            ready[place.tile + number] = 0;
        }
    }
    if (threadIdx.x == 0) *num_tiles = end.tile;
}

// ---- Rows into images -----------------------------------------------------------------------------------------------------

// Where 16 bytes of a row, chunk `chunk`, stand in the image of a tile of `padded` rows.
__device__ __forceinline__ u64 image_offset(int padded, int row, int chunk) {
    return u64(chunk >> 3) * padded * ROW_BYTES + row * ROW_BYTES + (((chunk & 7) ^ (row & 7)) << 4);
}

// A row's chunk in an image: of each of the stage's four 32 columns, one pair.
__device__ __forceinline__ uint4 gather_chunk(const u32* row, int chunk) {
    const u32* pairs = row + chunk / 16 * 64 + chunk % 16;
    return {pairs[0], pairs[16], pairs[32], pairs[48]};
}

extern "C" __global__ void __launch_bounds__(256) pack_grouped(const u32* x, const int* counts, int experts, int pitch,
                                                               int chunks, int most_tiles, int most_rows, Tile* tiles,
                                                               int* num_tiles, int* ready, u8* image) {
    extern __shared__ Place places[];
    find_places(counts, experts, places);
    if (blockIdx.x == 0) write_schedule(counts, experts, places, pitch, most_tiles, most_rows, tiles, num_tiles, ready);
    const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32, pieces = (chunks + 31) / 32;
    int expert = 0;
    for (int item = (blockIdx.x * blockDim.x + threadIdx.x) / 32; item < places[experts].row * pieces; item += warps) {
        const int slot = item / pieces, chunk = item % pieces * 32 + lane;
        while (slot >= places[expert + 1].row) expert++;
        const Split split(counts[expert]);
        const int position = slot - places[expert].row;
        if (position >= split.count || chunk >= chunks) continue;  // an image's last rows are nobody's
        const Tile tile = split.tile(expert, places[expert].row, position / split.rows, 0);
        u8* target = image + u64(tile.first) * chunks * 16;
        const u32* source = x + (u64(expert) * pitch + position) * chunks * 4;
        *(uint4*)(target + image_offset(tile.padded(), position % split.rows, chunk)) = gather_chunk(source, chunk);
    }
}

// The place of each route among its expert's: slots [rows * k], counts [experts] zero before.
extern "C" __global__ void __launch_bounds__(256) count_routes(const long long* ids, int routes, int* counts, int* slots) {
    const int route = blockIdx.x * blockDim.x + threadIdx.x;
    if (route >= routes) return;
    const int expert = int(ids[route]);
    slots[route] = expert < 0 ? -1 : atomicAdd(counts + expert, 1);
}

// As pack_grouped, a warp for each source row; slots become image rows.
extern "C" __global__ void __launch_bounds__(256) pack_routed(const u32* x, const long long* ids, int rows, int k,
                                                              const int* counts, int experts, int chunks, int most_tiles,
                                                              int most_rows, Tile* tiles, int* num_tiles, int* ready,
                                                              int* slots, u8* image) {
    extern __shared__ Place places[];
    find_places(counts, experts, places);
    if (blockIdx.x == 0) write_schedule(counts, experts, places, 0, most_tiles, most_rows, tiles, num_tiles, ready);
    const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
    for (int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
        const int expert = lane < k ? int(ids[row * k + lane]) : -1;
        u64 target = 0;  // of this lane's route
        int padded = 0, in_tile = 0;
        if (expert >= 0) {
            const Split split(counts[expert]);
            const int position = slots[row * k + lane];
            const Tile tile = split.tile(expert, places[expert].row, position / split.rows, 0);
            slots[row * k + lane] = places[expert].row + position;
            target = u64(image) + u64(tile.first) * chunks * 16, padded = tile.padded(), in_tile = position % split.rows;
        }
        const u32 live = __ballot_sync(~0u, expert >= 0);
        if (!live) continue;
        for (int base = 0; base < chunks; base += 32) {
            const int chunk = base + lane;
            const uint4 value = chunk < chunks ? gather_chunk(x + u64(row) * chunks * 4, chunk) : uint4{};
            for (u32 left = live; left; left &= left - 1) {
                const int route = __ffs(left) - 1;
                const u64 there = __shfl_sync(~0u, target, route);
                const u64 offset = image_offset(__shfl_sync(~0u, padded, route), __shfl_sync(~0u, in_tile, route), chunk);
                if (chunk < chunks) *(uint4*)(there + offset) = value;
            }
        }
    }
}

// ---- Back to source rows --------------------------------------------------------------------------------------------------

// out[row] = sum over its routes, in their order, of weight * y[slot]; a warp for each row.
extern "C" __global__ void __launch_bounds__(256) combine_routes(const uint4* y, const int* slots, const float* weights, int rows,
                                                                 int k, int chunks, uint4* out) {
    const int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const int slot = lane < k ? slots[row * k + lane] : -1;
    const float weight = slot < 0 ? 0 : weights[row * k + lane];
    const u32 live = __ballot_sync(~0u, slot >= 0);
    for (int base = 0; base < chunks; base += 32) {
        const int chunk = base + lane;
        float sums[8] = {};
        for (u32 left = live; left; left &= left - 1) {
            const int route = __ffs(left) - 1;
            const float w = __shfl_sync(~0u, weight, route);
            const u64 from = u64(__shfl_sync(~0u, slot, route)) * chunks + chunk;
            if (chunk >= chunks) continue;
            const uint4 value = y[from];
            const u32 pairs[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                sums[2 * n] += w * __uint_as_float(pairs[n] << 16);
                sums[2 * n + 1] += w * __uint_as_float(pairs[n] & 0xFFFF0000);
            }
        }
        if (chunk < chunks)
            out[u64(row) * chunks + chunk] = {to_bf16x2(sums[0], sums[1]), to_bf16x2(sums[2], sums[3]),
                                              to_bf16x2(sums[4], sums[5]), to_bf16x2(sums[6], sums[7])};
    }
}
