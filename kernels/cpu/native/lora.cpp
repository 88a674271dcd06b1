// LoRA: adds (x A^T) B of each token's adapter to a linear's output. Sums are fp32.
//
// A token's slot says which A and B it reads. Items are tokens of one slot, so a piece of A or B is loaded once for four
// of them. A is read by rows of the rank, and B by columns in runs of 64 outputs. The tokens at the rank lie between the
// two passes. An item that names a slot or token out of range is skipped: nothing else is read.
//
// T tokens, M tokens with an adapter, W items, S slots, P parts, R largest rank, I input size, O output size.

#include "lanes.h"

constexpr int MOST_TOKENS = 16;  // of an item, as in kernels/lora.py
constexpr int TILE = 4;
constexpr int64_t RUN = 64;

// As in kernels/cpu/library.py.
struct Lora {
    const void* x;             // [T, I]
    void* out;                 // [T, O]
    const void *a, *b;         // [S, P, R, I] and [S, R, O]
    const int32_t* ranks;      // [S]
    const int32_t* starts;     // [P + 1]
    const int32_t* tokens;     // [M]
    const int32_t* items;      // [W, 3]: slot, first of `tokens`, count
    float* between;            // [M, P, R]
    int64_t x_stride, out_stride, num_rows, num_tokens, num_items;
    int64_t num_slots, num_parts, max_rank, num_inputs, num_outputs;
};

struct Item {
    int64_t slot, first, count, rank;
    const int32_t* tokens;
};

// The item, or one of no tokens where anything of it is out of range.
static inline Item item_of(const Lora& l, int64_t index) {
    const int32_t* item = l.items + index * 3;
    Item found{item[0], item[1], item[2], 0, l.tokens + item[1]};
    bool is_sound = found.slot >= 0 && found.slot < l.num_slots && found.first >= 0 && found.count >= 0 &&
                    found.count <= MOST_TOKENS && found.first + found.count <= l.num_tokens;
    for (int64_t t = 0; is_sound && t < found.count; t++)
        is_sound = found.tokens[t] >= 0 && found.tokens[t] < l.num_rows;
    if (!is_sound) return Item{0, 0, 0, 0, l.tokens};
    found.rank = std::min<int64_t>(l.ranks[found.slot], l.max_rank);
    return found;
}

// Call f(first, load) for each register of a run of numbers, the last of which may be partly filled.
template <class F>
static inline void over_registers(int64_t count, F f) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) f(i, [](auto* p) { return load_floats(p); });
    if (i < count) f(i, [=](auto* p) { return load_some_floats(p, count - i); });
}

// Multiply rows of A from `rank` on with the item's tokens.
template <class T>
static inline void shrink(const Lora& l, const Item& item, int64_t part, int64_t rank, int64_t num_ranks) {
    const T* a = (const T*)l.a + ((item.slot * l.num_parts + part) * l.max_rank + rank) * l.num_inputs;
    float* between = l.between + (item.first * l.num_parts + part) * l.max_rank + rank;
    in_tiles<TILE>(item.count, [&](int token, auto few) {
        constexpr int tokens = few;
        const T* x[tokens];
        for (int t = 0; t < tokens; t++) x[t] = (const T*)l.x + item.tokens[token + t] * l.x_stride;
        in_tiles<TILE>(num_ranks, [&](int row, auto some) {
            constexpr int rows = some;
            Floats sum[rows][tokens] = {};
            over_registers(l.num_inputs, [&](int64_t i, auto load_from) {
                Floats values[tokens];
                for (int t = 0; t < tokens; t++) values[t] = load_from(x[t] + i);
                for (int r = 0; r < rows; r++) {
                    const Floats weights = load_from(a + (row + r) * l.num_inputs + i);
                    for (int t = 0; t < tokens; t++) sum[r][t] += weights * values[t];
                }
            });
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < tokens; t++)
                    between[(token + t) * l.num_parts * l.max_rank + row + r] = sum_of(sum[r][t]);
        });
    });
}

// Add up to 64 outputs from `output` on to the item's tokens.
template <class T>
static inline void expand(const Lora& l, const Item& item, int64_t part, int64_t output, int64_t num_outputs) {
    const T* b = (const T*)l.b + item.slot * l.max_rank * l.num_outputs + output;
    const float* between = l.between + (item.first * l.num_parts + part) * l.max_rank;
    const int64_t stride = l.num_parts * l.max_rank;
    in_tiles<TILE>(item.count, [&](int token, auto few) {
        constexpr int tokens = few;
        auto add = [&](int64_t first, auto some, auto load_from, auto store_to) {
            constexpr int groups = some;
            Floats sum[groups][tokens] = {};
            for (int64_t r = 0; r < item.rank; r++) {
                Floats weights[groups];
                const T* row = b + r * l.num_outputs + first;
                // Runs are too short for the processor to see that the next one follows.
                for (int g = 0; g < groups; g++) {
                    weights[g] = load_from(row + g * WIDTH);
                    if (!token) __builtin_prefetch(row + RUN + g * WIDTH);
                }
                for (int t = 0; t < tokens; t++) {
                    const Floats factor = between[(token + t) * stride + r] - Floats{};
                    for (int g = 0; g < groups; g++) sum[g][t] += weights[g] * factor;
                }
            }
            for (int t = 0; t < tokens; t++)
                for (int g = 0; g < groups; g++) {
                    T* out = (T*)l.out + item.tokens[token + t] * l.out_stride + output + first + g * WIDTH;
                    store_to(out, load_from(out) + sum[g][t]);
                }
        };
        const int64_t whole = num_outputs / WIDTH * WIDTH, rest = num_outputs - whole;
        in_tiles<TILE>(num_outputs / WIDTH, [&](int group, auto some) {
            add(group * WIDTH, some, [](const T* p) { return load_floats(p); },
                [](T* p, Floats v) { store_floats(p, v); });
        });
        if (rest)
            add(whole, std::integral_constant<int, 1>(), [=](const T* p) { return load_some_floats(p, rest); },
                [=](T* p, Floats v) { store_some_floats(p, v, rest); });
    });
}

template <class T>
static void add_lora(const Lora& l, int threads) {
    // A recorded step pads its items with ones of no tokens. Without them, threads share what there is evenly.
    int64_t num_items = l.num_items;
    while (num_items && !l.items[num_items * 3 - 1]) num_items--;
    if (!num_items) return;
    const int64_t rank_tiles = (l.max_rank + TILE - 1) / TILE;
    const int64_t work = l.num_tokens * l.max_rank * (l.num_parts * l.num_inputs + l.num_outputs);
    const int sharers = work >= PARALLEL_WEIGHTS ? threads : 1;
    int64_t runs = 0;
    for (int64_t part = 0; part < l.num_parts; part++) runs += (l.starts[part + 1] - l.starts[part] + RUN - 1) / RUN;
#pragma omp parallel num_threads(sharers)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items * l.num_parts * rank_tiles; i++) {
            const Item item = item_of(l, i / rank_tiles / l.num_parts);
            const int64_t rank = i % rank_tiles * TILE, left = std::min<int64_t>(TILE, item.rank - rank);
            if (left > 0) shrink<T>(l, item, i / rank_tiles % l.num_parts, rank, left);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_items * runs; i++) {
            const Item item = item_of(l, i / runs);
            if (!item.count || !item.rank) continue;
            int64_t run = i % runs, part = 0;
            for (;; part++) {
                const int64_t own = (l.starts[part + 1] - l.starts[part] + RUN - 1) / RUN;
                if (run < own) break;
                run -= own;
            }
            const int64_t output = l.starts[part] + run * RUN;
            expand<T>(l, item, part, output, std::min<int64_t>(RUN, l.starts[part + 1] - output));
        }
    }
}

extern "C" void by_add_lora(int is_bf16, int threads, const Lora* l) {
    is_bf16 ? add_lora<bf16>(*l, threads) : add_lora<float>(*l, threads);
}
