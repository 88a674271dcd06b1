// Linear layers on packed weights in fp32 or bf16, for AVX-512: sums in fp32, input after input, whatever the batch.
//
// A weight is [O / 64, I, 64] in fp32, and [O / 64, I / 2, 64, 2] in bf16: panels of 64 outputs. A piece of a panel, 128
// inputs deep, stays in the first cache while all rows pass over it, tile by tile, and each tile fetches its share of the
// next piece: so the weight streams from memory while the rows compute. Of bf16 an instruction widens 16 numbers, the
// even inputs by a shift, the odd ones by a mask; rows are widened once a call.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#ifdef __AVX512F__

constexpr int ROWS = 6;  // of a tile: with GROUPS vectors each, and the weights', 28 of 32 registers
constexpr int GROUPS = 4;
constexpr int PANEL = GROUPS * LANES;
constexpr int64_t DEPTH = 128;
constexpr int64_t LINE = 64;  // bytes
// At once: their inputs stay in the cache, and their copies small.
constexpr int64_t MOST_ROWS = 512;
// Of a matrix: below it waking other threads costs more than they save.
constexpr int64_t PARALLEL_WEIGHTS = 1 << 18;

// The weights of one input, or of two, for the outputs of a panel: each with the number of the input.
template <class F>
static inline void each_input(const float* weight, F f) {
    f32x16 values[GROUPS];
    for (int g = 0; g < GROUPS; g++) values[g] = load(weight + g * LANES);
    f(0, values);
}
// The pairs are loaded twice: kept, they would take registers from the sums.
template <class F>
static inline void each_input(const bf16* weight, F f) {
    auto some = [&](int which, auto widened) {
        f32x16 values[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            u32x16 pairs;
            memcpy(&pairs, weight + 2 * g * LANES, sizeof pairs);
            values[g] = (f32x16)widened(pairs);
        }
        f(which, values);
    };
    some(0, [](u32x16 pairs) { return pairs << 16; });
    some(1, [](u32x16 pairs) { return pairs & 0xffff0000u; });
}
template <class W>
constexpr int64_t TOGETHER = sizeof(float) / sizeof(W);

// Adds `depth` inputs to the sums of R rows, and asks for FETCHED lines an input group from `ahead`.
template <class W, int R, int FETCHED>
static inline void add(const float* x, int64_t stride, const W* weight, int64_t depth, float* sums, const char* ahead) {
    f32x16 sum[R][GROUPS];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < GROUPS; g++) sum[r][g] = load(sums + r * PANEL + g * LANES);
    for (int64_t i = 0; i < depth; i += TOGETHER<W>) {
        for (int line = 0; line < FETCHED; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        each_input(weight + i * PANEL, [&](int which, const f32x16* values) {
            for (int r = 0; r < R; r++) {
                const f32x16 factor = x[r * stride + i + which] - f32x16{};  // minus 0 is no operation
                for (int g = 0; g < GROUPS; g++) sum[r][g] += factor * values[g];
            }
        });
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < GROUPS; g++) store(sums + r * PANEL + g * LANES, sum[r][g]);
}

// Calls f(n) with n as a constant of the compiler, up to MOST.
template <int MOST, class F>
static inline void as_constant(int64_t n, F f) {
    if constexpr (MOST > 0) n == MOST ? f(std::integral_constant<int, MOST>()) : as_constant<MOST - 1>(n, f);
}

// All rows over one panel: `sums` is [T, 64].
template <class W>
static void multiply(const float* x, int64_t stride, int64_t num_rows, const W* panel, int64_t num_inputs, float* sums) {
    const int64_t tiles = (num_rows + ROWS - 1) / ROWS, fetched = tiles < 2 ? 4 : tiles < 4 ? 2 : 1;
    for (int64_t i = 0; i < num_inputs; i += DEPTH) {
        const int64_t depth = std::min(DEPTH, num_inputs - i), share = depth / TOGETHER<W> * fetched * LINE;
        const W* piece = panel + i * PANEL;
        const char *ahead = (const char*)(piece + depth * PANEL), *end = ahead + depth * PANEL * sizeof(W);
        for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
            const int64_t rows = (num_rows - row + tiles - tile - 1) / (tiles - tile);
            as_constant<ROWS>(rows, [&](auto r) {
                auto with = [&](auto lines) {
                    add<W, r, lines>(x + row * stride + i, stride, piece, depth, sums + row * PANEL, ahead + tile * share);
                };
                if (ahead + (tile + 1) * share > end) return with(std::integral_constant<int, 0>());
                fetched == 4   ? with(std::integral_constant<int, 4>())
                : fetched == 2 ? with(std::integral_constant<int, 2>())
                               : with(std::integral_constant<int, 1>());
            });
            row += rows;
        }
    }
}

template <class T>
static void linear(Linear l, int threads) {
    if (l.num_rows > MOST_ROWS) {  // one part after the other
        Linear first = l;
        first.num_rows = MOST_ROWS;
        linear<T>(first, threads);
        l.x = (const T*)l.x + MOST_ROWS * l.x_stride;
        l.out = (T*)l.out + MOST_ROWS * l.out_stride;
        l.num_rows -= MOST_ROWS;
        return linear<T>(l, threads);
    }
    static thread_local std::vector<float> widened;  // kept: a step asks for it a hundred times
    const float* x = (const float*)l.x;
    int64_t stride = l.x_stride;
    if constexpr (sizeof(T) < sizeof(float)) {
        stride = l.num_inputs;
        widened.resize(std::max<size_t>(widened.size(), l.num_rows * stride));
        x = widened.data();
    }
    float* wide = widened.data();
#pragma omp parallel num_threads(threads) if (l.num_inputs * l.num_outputs >= PARALLEL_WEIGHTS)
    {
        if constexpr (sizeof(T) < sizeof(float)) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int64_t i = 0; i < stride; i += LANES)
                    store_some(wide + row * stride + i, load_some((const T*)l.x + row * l.x_stride + i, stride - i), stride - i);
        }
        static thread_local std::vector<float> sums;
        sums.resize(std::max<size_t>(sums.size(), l.num_rows * PANEL));
#pragma omp for schedule(static)
        for (int64_t output = 0; output < l.num_outputs; output += PANEL) {
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int g = 0; g < PANEL; g += LANES)
                    store(sums.data() + row * PANEL + g, l.bias ? load((const T*)l.bias + output + g) : f32x16{});
            multiply(x, stride, l.num_rows, (const T*)l.weight + output * l.num_inputs, l.num_inputs, sums.data());
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int g = 0; g < PANEL; g += LANES)
                    store((T*)l.out + row * l.out_stride + output + g, load(sums.data() + row * PANEL + g));
        }
    }
}

// Where the CPU multiplies bf16 itself, oneDNN's way of it is the faster.
extern "C" int by_has_linear(int is_bf16) {
#ifdef __AVX512BF16__
    return !is_bf16;
#else
    return 1;
#endif
}
extern "C" void by_linear(int is_bf16, int threads, const Linear* l) {
    is_bf16 ? linear<bf16>(*l, threads) : linear<float>(*l, threads);
}
#else
extern "C" int by_has_linear(int) { return 0; }
extern "C" void by_linear(int, int, const Linear*) {}
#endif
