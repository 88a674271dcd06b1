// Linear layers on packed weights in fp32 or bf16, for AVX-512: sums in fp32, in one order whatever the batch.
//
// A weight is [O / 16, I, 16] in fp32, and [O / 16, I / 2, 16, 2] in bf16. Four groups of 16 outputs are a panel, read as
// four streams: that is what the CPU fetches ahead best. The last panel is whole in memory, whatever of it is wanted.
// Where rows make several tiles, a piece of the panel, 128 inputs deep, stays in the first cache while all of them pass
// over it, and each tile fetches its share of the next piece: so the weight streams from memory while the rows compute.
// Of bf16 an instruction widens 16 numbers, the even inputs by a shift, the odd ones by a mask; rows are widened once a
// call.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#ifdef __AVX512F__

constexpr int ROWS = 6;  // of a tile: with GROUPS vectors each, and the weights', 28 of 32 registers
constexpr int GROUPS = 4;
constexpr int PANEL = GROUPS * LANES;
constexpr int64_t DEPTH = 128;
constexpr int64_t MANY_TILES = 16;
// At once: their inputs stay in the cache, and their copies small.
constexpr int64_t MOST_ROWS = 256;

template <class W>
constexpr int64_t TOGETHER = sizeof(float) / sizeof(W);

// The weights of one input, or of two, for the outputs of a panel: each with the number of the input.
template <class F>
static inline void each_input(const float* weight, int64_t apart, F f) {
    f32x16 values[GROUPS];
    for (int g = 0; g < GROUPS; g++) values[g] = load(weight + g * apart);
    f(0, values);
}
// The pairs are loaded twice: kept, they would take registers from the sums.
template <class F>
static inline void each_input(const bf16* weight, int64_t apart, F f) {
    auto some = [&](int which, auto widened) {
        f32x16 values[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            u32x16 pairs;
            memcpy(&pairs, weight + g * apart, sizeof pairs);
            values[g] = (f32x16)widened(pairs);
        }
        f(which, values);
    };
    some(0, [](u32x16 pairs) { return pairs << 16; });
    some(1, [](u32x16 pairs) { return pairs & 0xffff0000u; });
}

// A piece of a panel, whose groups lie `apart`, and what a tile fetches meanwhile: of two groups, or of none, `share`
// inputs each. Of the last piece of all it would be what lies behind, to no harm.
template <class W>
struct Piece {
    const W* weight;
    int64_t apart, depth, share;
    const W* ahead[2];
};

// Adds the piece's inputs to the sums of R rows, and fetches of as many groups as FETCHED says. What MANY rows have of
// these inputs does not stay in the cache either: then the next R rows' is fetched too.
template <class W, int R, int FETCHED, bool MANY>
static inline void add(const float* x, int64_t stride, Piece<W> piece, float* sums) {
    f32x16 sum[R][GROUPS] = {};
    for (int64_t i = 0; i < piece.depth; i += TOGETHER<W>) {
        if (FETCHED && i < piece.share)
            for (int f = 0; f < FETCHED; f++) __builtin_prefetch(piece.ahead[f] + i * LANES, 0, 2);
        if (MANY && i % LANES == 0)
            for (int r = 0; r < R; r++) __builtin_prefetch(x + (R + r) * stride + i);
        each_input(piece.weight + i * LANES, piece.apart, [&](int which, const f32x16* values) {
            for (int r = 0; r < R; r++) {
                const f32x16 factor = x[r * stride + i + which] - f32x16{};  // minus 0 is no operation
                for (int g = 0; g < GROUPS; g++) sum[r][g] += factor * values[g];
            }
        });
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < GROUPS; g++) {
            float* whole = sums + r * PANEL + g * LANES;
            store(whole, load(whole) + sum[r][g]);
        }
}

// Calls f(n) with n as a constant of the compiler, up to MOST.
template <int MOST, class F>
static inline void as_constant(int64_t n, F f) {
    if constexpr (MOST > 0) n == MOST ? f(std::integral_constant<int, MOST>()) : as_constant<MOST - 1>(n, f);
}

// Tile `tile`'s part of the piece that begins at `next`.
template <class W>
static inline void share_out(Piece<W>& piece, const W* next, int64_t tile, int64_t tiles) {
    auto first_of = [&](int64_t group) { return (group * tiles + GROUPS - 1) / GROUPS; };
    if (tiles < GROUPS) {  // whole groups
        piece.share = piece.depth;
        piece.ahead[0] = next + tile * piece.apart;
        piece.ahead[1] = tile + tiles < GROUPS ? next + (tile + tiles) * piece.apart : piece.ahead[0];
        return;
    }
    const int64_t group = tile * GROUPS / tiles, first = first_of(group), sharers = first_of(group + 1) - first;
    piece.share = (piece.depth / 2 + sharers - 1) / sharers * 2;
    piece.ahead[0] = next + group * piece.apart + (tile - first) * piece.share * LANES;
}

// All rows over one panel: `sums` is [T, 64].
template <class W>
static void multiply(const float* x, int64_t stride, int64_t num_rows, const W* panel, int64_t num_inputs, float* sums) {
    const int64_t tiles = (num_rows + ROWS - 1) / ROWS;
    Piece<W> piece{.weight = panel, .apart = num_inputs * LANES};
    for (int64_t i = 0; i < num_inputs; i += DEPTH) {
        piece.depth = std::min(DEPTH, num_inputs - i);
        piece.weight = panel + i * LANES;
        const W* next = i + DEPTH < num_inputs ? piece.weight + DEPTH * LANES : panel + GROUPS * piece.apart;
        for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
            const int64_t rows = (num_rows - row + tiles - tile - 1) / (tiles - tile);
            share_out(piece, next, tile, tiles);
            as_constant<ROWS>(rows, [&](auto r) {
                auto with = [&](auto fetched, auto many) {
                    add<W, r, fetched, many>(x + row * stride + i, stride, piece, sums + row * PANEL);
                };
                const std::false_type few;
                tiles == 1           ? with(std::integral_constant<int, 0>(), few)  // the CPU does it better
                : tiles < GROUPS     ? with(std::integral_constant<int, 2>(), few)
                : tiles < MANY_TILES ? with(std::integral_constant<int, 1>(), few)
                                     : with(std::integral_constant<int, 1>(), std::true_type());
            });
            row += rows;
        }
    }
}

template <class T>
static void linear(Linear l, int threads) {
    if (l.num_rows > MOST_ROWS) {  // one half after the other
        Linear first = l;
        first.num_rows = l.num_rows / 2;
        linear<T>(first, threads);
        l.x = (const T*)l.x + first.num_rows * l.x_stride;
        l.out = (T*)l.out + first.num_rows * l.out_stride;
        l.num_rows -= first.num_rows;
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
        // A thread whose core is taken for a while, by another program or another machine, leaves panels to the others.
#pragma omp for schedule(dynamic, 1)
        for (int64_t output = 0; output < l.num_outputs; output += PANEL) {
            const int64_t wanted = std::min<int64_t>(PANEL, l.num_outputs - output);
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int g = 0; g < wanted; g += LANES)
                    store(sums.data() + row * PANEL + g, l.bias ? load((const T*)l.bias + output + g) : f32x16{});
            multiply(x, stride, l.num_rows, (const T*)l.weight + output * l.num_inputs, l.num_inputs, sums.data());
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int g = 0; g < wanted; g += LANES)
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
