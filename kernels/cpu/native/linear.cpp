// Linear layers on packed weights in fp32 or bf16, for AVX-512 or AVX2. Sums are fp32, in one order whatever the batch.
//
// A weight is [O / 16, I, 16] in fp32, and [O / 16, I / 2, 16, 2] in bf16. Four groups of 16 outputs are a panel, read
// as four streams, which the CPU prefetches best. The last panel is complete in memory, even if only a part of it is
// wanted. If rows make several tiles, a piece of the panel, 128 inputs deep, stays in the first cache while all of them
// pass over it. Each tile fetches its share of the next piece, so the weight streams from memory while the rows
// compute. AVX2 has half the registers of half the size. So the more rows a tile has, the fewer groups it takes at
// once. In bf16 one instruction multiplies and adds two inputs where the CPU has it. Elsewhere one instruction widens
// 16 numbers, the even inputs by a shift and the odd ones by a mask, and rows are widened once a call.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))

#include <cpuid.h>

constexpr int GROUPS = 4;
constexpr int PANEL = GROUPS * LANES;
constexpr int64_t DEPTH = 128;
constexpr int64_t LINE = 64;  // of a cache, in bytes
// `rows_with` gives the rows of a tile that takes so many groups at once, `with_groups` the groups for so many rows.
// Their sums have 24 of 32 registers, or at most 12 of 16.
#ifdef __AVX512F__
constexpr int64_t MANY_TILES = 16;
constexpr int rows_with(int) { return 6; }
template <class F>
static inline void with_groups(int64_t, F f) {
    f(std::integral_constant<int, GROUPS>());
}
#else
constexpr int64_t MANY_TILES = INT64_MAX;  // never: without AVX-512 the cost of one more instruction is not hidden
constexpr int rows_with(int groups) { return groups == 1 ? 6 : groups == 2 ? 3 : 1; }
template <class F>
static inline void with_groups(int64_t rows, F f) {
    rows > 3   ? f(std::integral_constant<int, 1>())
    : rows > 1 ? f(std::integral_constant<int, 2>())
               : f(std::integral_constant<int, GROUPS>());
}
#endif
// Most rows computed at once. Their inputs stay in the cache, and their copies stay small.
constexpr int64_t MOST_ROWS = 256;
// With several threads, few panels of many rows are also split by rows, into items of at least so many. So no thread is
// idle, or waits long for the last item.
constexpr int64_t ITEMS_A_THREAD = 16, LEAST_ROWS = 48;

template <int R, int G>
using Sums = Floats[R][G * PARTS];

// Call f(v, address of the weights of each register).
template <int G, class W, class F>
static inline void each_register(const W* weight, int64_t apart, F f) {
    for (int v = 0; v < G * PARTS; v++) f(v, weight + v / PARTS * apart + v % PARTS * WIDTH * TOGETHER<W>);
}
// Add the products of one input, or of two that lie together, to the sums of R rows in G groups.
template <int R, int G>
static inline void add_products(const float* x, int64_t stride, const float* weight, int64_t apart, Sums<R, G>& sum) {
    Floats values[G * PARTS];
    each_register<G>(weight, apart, [&](int v, const float* from) { values[v] = read<Floats>(from); });
    for (int r = 0; r < R; r++) {
        const Floats factor = x[r * stride] - Floats{};  // subtracting 0 costs no operation
        for (int v = 0; v < G * PARTS; v++) sum[r][v] += factor * values[v];
    }
}
// The same for bf16 without an instruction for it. The pairs are loaded twice: kept, they would take registers from the
// sums.
template <int R, int G>
static inline void add_products(const float* x, int64_t stride, const bf16* weight, int64_t apart, Sums<R, G>& sum) {
    auto some = [&](int which, auto widened) {
        Floats values[G * PARTS];
        each_register<G>(weight, apart, [&](int v, const bf16* from) { values[v] = (Floats)widened(read<Words>(from)); });
        for (int r = 0; r < R; r++) {
            const Floats factor = x[r * stride + which] - Floats{};
            for (int v = 0; v < G * PARTS; v++) sum[r][v] += factor * values[v];
        }
    };
    some(0, [](Words pairs) { return pairs << 16; });
    some(1, [](Words pairs) { return pairs & 0xffff0000u; });
}
#ifdef __AVX512BF16__
template <int R, int G>
static inline void add_products(const bf16* x, int64_t stride, const bf16* weight, int64_t apart, Sums<R, G>& sum) {
    __m512bh pairs[G];
    each_register<G>(weight, apart, [&](int v, const bf16* from) { pairs[v] = read<__m512bh>(from); });
    for (int r = 0; r < R; r++) {
        const auto factor = (__m512bh)_mm512_set1_epi32(read<int>(x + r * stride));
        for (int v = 0; v < G; v++) sum[r][v] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][v], pairs[v], factor);
    }
}
#endif

// A piece of a panel, with groups that lie `apart`, and the part of the next piece that a tile fetches: `share` inputs of
// each of two groups, or of none. For the last piece this is the memory behind it, which does no harm.
template <class W>
struct Piece {
    const W* weight;
    int64_t apart, depth, share;
    const W* ahead[2];
};

// Add the piece's inputs to the sums of R rows in G groups, and prefetch as many groups as FETCHED says. With MANY
// rows, their inputs do not stay in the cache either. Then the inputs of the next R rows are prefetched too.
template <class W, int R, int G, int FETCHED, bool MANY>
static inline void add(const Input<W>* x, int64_t stride, Piece<W> piece, float* sums) {
    Sums<R, G> sum = {};
    for (int64_t i = 0; i < piece.depth; i += TOGETHER<W>) {
        if (FETCHED && i < piece.share)
            for (int f = 0; f < FETCHED; f++) __builtin_prefetch(piece.ahead[f] + i * LANES, 0, 2);
        if (MANY && i % (LINE / sizeof(Input<W>)) == 0)
            for (int r = 0; r < R; r++) __builtin_prefetch(x + (R + r) * stride + i);
        add_products<R, G>(x + i, stride, piece.weight + i * LANES, piece.apart, sum);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < G * PARTS; v++) {
            float* whole = sums + r * PANEL + v * WIDTH;
            const Floats all = read<Floats>(whole) + sum[r][v];
            memcpy(whole, &all, sizeof all);
        }
}

// Call f(n) with n as a constant of the compiler, up to MOST.
template <int MOST, class F>
static inline void as_constant(int64_t n, F f) {
    if constexpr (MOST > 0) n == MOST ? f(std::integral_constant<int, MOST>()) : as_constant<MOST - 1>(n, f);
}

// Set which part of the next piece, of G groups from `next` on, the tile `tile` of `tiles` fetches.
template <int G, class W>
static inline void share_out(Piece<W>& piece, const W* next, int64_t tile, int64_t tiles) {
    auto first_of = [&](int64_t group) { return (group * tiles + G - 1) / G; };
    if (tiles < G) {  // whole groups
        piece.share = piece.depth;
        piece.ahead[0] = next + tile * piece.apart;
        piece.ahead[1] = tile + tiles < G ? next + (tile + tiles) * piece.apart : piece.ahead[0];
        return;
    }
    const int64_t group = tile * G / tiles, first = first_of(group), sharers = first_of(group + 1) - first;
    piece.share = (piece.depth / 2 + sharers - 1) / sharers * 2;
    piece.ahead[0] = next + group * piece.apart + (tile - first) * piece.share * LANES;
}

// Pass all rows over one piece of G groups, which `next` follows.
template <int G, class W>
static inline void pass(const Input<W>* x, int64_t stride, int64_t num_rows, Piece<W> piece, const W* next, float* sums) {
    constexpr int ROWS = rows_with(G);
    const int64_t tiles = (num_rows + ROWS - 1) / ROWS;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
        const int64_t rows = (num_rows - row + tiles - tile - 1) / (tiles - tile);
        share_out<G>(piece, next, tile, tiles);
        as_constant<ROWS>(rows, [&](auto r) {
            auto with = [&](auto fetched, auto many) {
                add<W, r, G, fetched, many>(x + row * stride, stride, piece, sums + row * PANEL);
            };
            const std::false_type few;
            tiles == 1 && G > 1  ? with(std::integral_constant<int, 0>(), few)  // the CPU prefetches several streams better by itself
            : tiles < G          ? with(std::integral_constant<int, 2>(), few)
            : tiles < MANY_TILES ? with(std::integral_constant<int, 1>(), few)
                                 : with(std::integral_constant<int, 1>(), std::true_type());
        });
        row += rows;
    }
}

// Pass all rows over one panel. `sums` is [T, 64].
template <int G, class W>
static void multiply(const Input<W>* x, int64_t stride, int64_t num_rows, const W* panel, int64_t num_inputs, float* sums) {
    Piece<W> piece{.weight = panel, .apart = num_inputs * LANES};
    for (int64_t i = 0; i < num_inputs; i += DEPTH) {
        piece.depth = std::min(DEPTH, num_inputs - i);
        for (int group = 0; group < GROUPS; group += G) {
            piece.weight = panel + group * piece.apart + i * LANES;
            const W* next = group + G < GROUPS       ? piece.weight + G * piece.apart
                            : i + DEPTH < num_inputs ? panel + (i + DEPTH) * LANES
                                                     : panel + GROUPS * piece.apart;
            pass<G>(x + i, stride, num_rows, piece, next, sums + group * LANES);
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
    static thread_local std::vector<float> widened;  // kept, because a step needs it a hundred times
    constexpr bool IS_WIDENED = sizeof(Input<T>) > sizeof(T);
    auto x = (const Input<T>*)l.x;
    int64_t stride = l.x_stride;
    if constexpr (IS_WIDENED) {
        stride = l.num_inputs;
        widened.resize(std::max<size_t>(widened.size(), l.num_rows * stride));
        x = widened.data();
    }
    float* wide = widened.data();
    const int sharers = l.num_inputs * l.num_outputs >= PARALLEL_WEIGHTS ? threads : 1;
    const int64_t panels = (l.num_outputs + PANEL - 1) / PANEL;
    const int64_t most_parts = sharers > 1 ? std::max<int64_t>(1, l.num_rows / LEAST_ROWS) : 1;
    const int64_t parts = std::clamp<int64_t>(ITEMS_A_THREAD * sharers / std::max<int64_t>(1, panels), 1, most_parts);
#pragma omp parallel num_threads(sharers)
    {
        if constexpr (IS_WIDENED) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < l.num_rows; row++)
                for (int64_t i = 0; i < stride; i += LANES)
                    store_some(wide + row * stride + i, load_some((const T*)l.x + row * l.x_stride + i, stride - i), stride - i);
        }
        static thread_local std::vector<float> sums;
        sums.resize(std::max<size_t>(sums.size(), l.num_rows * PANEL));
        // Dynamic: a thread on a core that is busy with another program leaves items to the others.
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < panels * parts; item++) {
            const int64_t output = item / parts * PANEL, wanted = std::min<int64_t>(PANEL, l.num_outputs - output);
            const int64_t first = item % parts * l.num_rows / parts, end = (item % parts + 1) * l.num_rows / parts;
            for (int64_t row = first; row < end; row++)
                for (int g = 0; g < wanted; g += LANES)
                    store(sums.data() + row * PANEL + g, l.bias ? load((const T*)l.bias + output + g) : f32x16{});
            with_groups(end - first, [&](auto groups) {
                multiply<groups>(x + first * stride, stride, end - first, (const T*)l.weight + output * l.num_inputs,
                                 l.num_inputs, sums.data() + first * PANEL);
            });
            for (int64_t row = first; row < end; row++)
                for (int g = 0; g < wanted; g += LANES)
                    store((T*)l.out + row * l.out_stride + output + g, load(sums.data() + row * PANEL + g));
        }
    }
}

// Where the CPU multiplies tiles of bf16 (AMX, whether or not the compiler knows it), oneDNN is faster.
extern "C" int by_has_linear(int is_bf16) {
    unsigned a, b, c, features = 0;
    const bool has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &features) && (features >> 22 & 1);
    return !(is_bf16 && has_tiles);
}
extern "C" void by_linear(int is_bf16, int threads, const Linear* l) {
    is_bf16 ? linear<bf16>(*l, threads) : linear<float>(*l, threads);
}
#else
extern "C" int by_has_linear(int) { return 0; }
extern "C" void by_linear(int, int, const Linear*) {}
#endif
