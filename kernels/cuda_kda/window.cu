// KDA's recurrence over the few rows of a verify round (spec k3-model §6), for heads of 128 key and 128 value channels.
// kernels/triton_ops/kda_rows.py has the algebra: with G_t the product of the decays up to row t,
//     e_t + beta_t sum_(s<t) A_ts e_s = beta_t (v_t - S^T (G_t k_t)),    o_t = S^T (G_t q_t) + sum_(s<=t) B_ts e_s,
//     S_new = G_n S + sum_s (k_s G_n / G_s) e_s^T.
// A block has one head of one sequence and a thread for each of its 128 channels.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Shape {
    i64 slot_stride, conv_stride;
    int q_stride, k_stride, v_stride, decay_stride, beta_stride, heads;
    float lower_bound;
};

constexpr int DIM = 128, ROWS = 8, WARPS = 4;
constexpr int PITCH = DIM + 4;  // of a row in shared memory: eight rows of four neighbours lie in 32 banks
constexpr float EPSILON = 1e-6f, SCALE = 0.08838834764831845f;  // 128^-0.5

__device__ float wide(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ u32 narrow2(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ float rounded(float x) { return __uint_as_float(narrow2(x, x) << 16); }
__device__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ u32 tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
__device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The sums over the block's threads of `COUNT` values of each.
template <int COUNT>
__device__ void sum_over_block(float (&values)[COUNT], float (*partial)[COUNT]) {
    for (int n = 0; n < COUNT; n++)
        for (int step = 16; step; step /= 2) values[n] += __shfl_xor_sync(~0u, values[n], step);
    if (threadIdx.x % 32 == 0)
        for (int n = 0; n < COUNT; n++) partial[threadIdx.x / 32][n] = values[n];
    __syncthreads();
    for (int n = 0; n < COUNT; n++) values[n] = partial[0][n] + partial[1][n] + partial[2][n] + partial[3][n];
}

// Reads the state once, in matrix products of tensor cores: [G k | G q] (16 x 128) by the state (128 x 128). The state's values
// go from memory to the registers that the product takes them from, on their way while the rows are prepared.
extern "C" __global__ void __launch_bounds__(128, 3)
    verify(const u16 *q, const u16 *k, const u16 *v, const u16 *decay, const u16 *beta, const float *a_log, const float *dt_bias,
           const float *state, const i64 *slots, const int *bounds, u16 *out, Shape shape) {
    const int heads = shape.heads;
    __shared__ float w[2 * ROWS][PITCH], inverse_keys[ROWS][PITCH], partial[WARPS][2 * ROWS];
    const int sequence = blockIdx.x / heads, head = blockIdx.x % heads, channel = threadIdx.x;
    const int warp = channel / 32, lane = channel % 32, group = lane / 4, part = lane % 4;
    const i64 slot = slots[sequence];
    const i64 first = bounds[sequence];
    const int rows = bounds[sequence + 1] - first;

    // Lane (group, part) holds the state's keys 8 n + part and 8 n + part + 4, values 4 group .. 4 group + 3 of the warp's 32.
    const float *mine = state + slot * shape.slot_stride + head * DIM * DIM + part * DIM + warp * 32 + group * 4;
    float4 held[2][8];
    const auto fetch = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < 8; n++)
            held[chunk % 2][n] =
                slot ? __ldcs((const float4 *)(mine + (chunk * 32 + n * 4) * DIM)) : make_float4(0.f, 0.f, 0.f, 0.f);
    };
    fetch(0);
    fetch(1);

    float keys[ROWS], queries[ROWS], raw[ROWS], squares[2 * ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        const bool real = t < rows;
        const int place = head * DIM + channel;
        keys[t] = real ? wide(k[(first + t) * shape.k_stride + place]) : 0.f;
        queries[t] = real ? wide(q[(first + t) * shape.q_stride + place]) : 0.f;
        raw[t] = real ? wide(decay[(first + t) * shape.decay_stride + place]) : 0.f;
        squares[t] = keys[t] * keys[t];
        squares[ROWS + t] = queries[t] * queries[t];
    }
    const float rate = group < rows ? sigmoid(wide(beta[(first + group) * shape.beta_stride + head])) : 0.f;
    uint4 value = make_uint4(0, 0, 0, 0);  // of row `group`: the warp's values 8 part .. 8 part + 7
    const int of_values = head * DIM + warp * 32 + part * 8;
    if (group < rows) value = *(const uint4 *)(v + (first + group) * shape.v_stride + of_values);

    sum_over_block(squares, partial);
    const float speed = __expf(a_log[head]), shift = dt_bias[head * DIM + channel];
    float log = 0.f;
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        if (t < rows) log += shape.lower_bound * sigmoid(speed * (raw[t] + shift));
        const float grown = __expf(log), key = keys[t] * rsqrtf(squares[t] + EPSILON);
        w[t][channel] = __uint_as_float(tf32(key * grown));
        w[ROWS + t][channel] = __uint_as_float(tf32(queries[t] * rsqrtf(squares[ROWS + t] + EPSILON) * SCALE * grown));
        inverse_keys[t][channel] = __uint_as_float(tf32(key * __expf(-log)));
    }
    __syncthreads();

    float among[4] = {}, seen[4][4] = {};  // A and B; the state's part of values 4 n' + 0..3
#pragma unroll
    for (int chunk = 0; chunk < 4; chunk++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int key = chunk * 32 + n * 8 + part;
            const u32 a[4] = {__float_as_uint(w[group][key]), __float_as_uint(w[group + 8][key]),
                              __float_as_uint(w[group][key + 4]), __float_as_uint(w[group + 8][key + 4])};
            mma(among, a, __float_as_uint(inverse_keys[group][key]), __float_as_uint(inverse_keys[group][key + 4]));
            const float4 upper = held[chunk % 2][2 * n], lower = held[chunk % 2][2 * n + 1];
            mma(seen[0], a, tf32(upper.x), tf32(lower.x));
            mma(seen[1], a, tf32(upper.y), tf32(lower.y));
            mma(seen[2], a, tf32(upper.z), tf32(lower.z));
            mma(seen[3], a, tf32(upper.w), tf32(lower.w));
        }
        if (chunk < 2) fetch(chunk + 2);
    }

    // Lane (group, part) now has row `group` of A (columns 2 part, 2 part + 1) and of B, and of values 8 part .. 8 part + 7.
    float error[8], o[8];
    const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float one = n % 2 ? __uint_as_float(words[n / 2] & 0xffff0000u) : __uint_as_float(words[n / 2] << 16);
        error[n] = rate * (one - seen[n % 4][n / 4]);
        o[n] = seen[n % 4][2 + n / 4];
    }
#pragma unroll
    for (int s = 0; s < ROWS; s++) {
        const float a = rate * __shfl_sync(~0u, among[s % 2], (lane & ~3) | (s / 2));
        const float b = __shfl_sync(~0u, among[2 + s % 2], (lane & ~3) | (s / 2));
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float e = __shfl_sync(~0u, error[n], s * 4 + part);
            if (group > s) error[n] -= a * e;
            if (group >= s) o[n] += b * e;
        }
    }
    if (group < rows)
        *(uint4 *)(out + ((first + group) * heads) * DIM + of_values) =
            make_uint4(narrow2(o[0], o[1]), narrow2(o[2], o[3]), narrow2(o[4], o[5]), narrow2(o[6], o[7]));
}

// The last three of a channel's history and its first `count` rows, convolved on the way: [ROWS] values and the new history.
__device__ void convolve(const u16 *rows, int stride, int count, const float4 &taps, u16 *history, float (&values)[ROWS]) {
    float x0 = wide(history[0]), x1 = wide(history[1]), x2 = wide(history[2]);
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        if (t < count) {
            const float x3 = wide(rows[(i64)t * stride]), y = taps.x * x0 + taps.y * x1 + taps.z * x2 + taps.w * x3;
            values[t] = rounded(y * sigmoid(y));
            x0 = x1, x1 = x2, x2 = x3;
        } else {
            values[t] = 0.f;
        }
    }
    history[0] = __float_as_uint(x0) >> 16, history[1] = __float_as_uint(x1) >> 16, history[2] = __float_as_uint(x2) >> 16;
}

// Both states moved on by the accepted rows. A thread has one channel of q, k and v each, their histories, and in registers one
// value column of the state; everything of the state is float32. With room for three blocks on a multiprocessor some of a
// column is spilled, and it takes three quarters of the time that two take.
extern "C" __global__ void __launch_bounds__(128, 3)
    commit(const u16 *qkv, const float4 *taps, u16 *conv, const u16 *decay, const u16 *beta, const float *a_log,
           const float *dt_bias, float *state, const i64 *slots, const int *bounds, const i64 *accepted, Shape shape) {
    const int heads = shape.heads, stride = shape.q_stride;
    __shared__ float grown_keys[ROWS][PITCH], inverse_keys[ROWS][PITCH], left_keys[ROWS][PITCH], kept[DIM];
    __shared__ float triangle[ROWS][ROWS], partial[WARPS][ROWS];
    const int sequence = blockIdx.x / heads, head = blockIdx.x % heads, channel = threadIdx.x;
    const i64 slot = slots[sequence];
    if (slot == 0) return;
    float *column = state + slot * shape.slot_stride + head * DIM * DIM + channel;
    float s[DIM];
#pragma unroll
    for (int key = 0; key < DIM; key++) s[key] = __ldcs(column + key * DIM);

    const i64 first = bounds[sequence];
    const int rows = bounds[sequence + 1] - first, count = min(min((int)accepted[sequence], rows), ROWS);
    const int of_q = head * DIM + channel, of_k = of_q + heads * DIM, of_v = of_k + heads * DIM;
    const u16 *start = qkv + first * stride;
    u16 *history = conv + slot * shape.conv_stride;
    float keys[ROWS], values[ROWS], squares[ROWS];
    convolve(start + of_q, stride, count, taps[of_q], history + 3 * of_q, values);  // for the history alone
    convolve(start + of_v, stride, count, taps[of_v], history + 3 * of_v, values);
    convolve(start + of_k, stride, count, taps[of_k], history + 3 * of_k, keys);
#pragma unroll
    for (int t = 0; t < ROWS; t++) squares[t] = keys[t] * keys[t];
    sum_over_block(squares, partial);

    const float speed = __expf(a_log[head]), shift = dt_bias[of_q];
    float logs[ROWS], log = 0.f;
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        if (t < count) log += shape.lower_bound * sigmoid(speed * (wide(decay[(first + t) * shape.decay_stride + of_q]) + shift));
        logs[t] = log;
    }
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        const float key = keys[t] * rsqrtf(squares[t] + EPSILON);
        grown_keys[t][channel] = key * __expf(logs[t]);
        inverse_keys[t][channel] = key * __expf(-logs[t]);
        left_keys[t][channel] = key * __expf(log - logs[t]);
    }
    kept[channel] = __expf(log);
    __syncthreads();
    {  // two threads for each pair of rows
        const int t = channel / 16, other = channel / 2 % 8, half = channel % 2;
        float sum = 0.f;
        for (int n = half; n < DIM; n += 2) sum += grown_keys[t][n] * inverse_keys[other][n];
        triangle[t][other] = sum + __shfl_xor_sync(~0u, sum, 1);
    }
    __syncthreads();

    float errors[ROWS];
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
        errors[t] = 0.f;
        if (t < count) {
            float p0 = 0.f, p1 = 0.f, p2 = 0.f, p3 = 0.f;
#pragma unroll
            for (int key = 0; key < DIM; key += 4) {
                const float4 grown = *(const float4 *)&grown_keys[t][key];
                p0 += s[key] * grown.x, p1 += s[key + 1] * grown.y, p2 += s[key + 2] * grown.z, p3 += s[key + 3] * grown.w;
            }
            float behind = (p0 + p1) + (p2 + p3);
#pragma unroll
            for (int other = 0; other < t; other++) behind += triangle[t][other] * errors[other];
            errors[t] = sigmoid(wide(beta[(first + t) * shape.beta_stride + head])) * (values[t] - behind);
        }
    }
#pragma unroll
    for (int key = 0; key < DIM; key++) s[key] *= kept[key];
#pragma unroll
    for (int t = 0; t < ROWS; t++)
        if (t < count)
#pragma unroll
            for (int key = 0; key < DIM; key += 4) {
                const float4 left = *(const float4 *)&left_keys[t][key];
                s[key] += left.x * errors[t], s[key + 1] += left.y * errors[t];
                s[key + 2] += left.z * errors[t], s[key + 3] += left.w * errors[t];
            }
#pragma unroll
    for (int key = 0; key < DIM; key++) __stcs(column + key * DIM, s[key]);
}
