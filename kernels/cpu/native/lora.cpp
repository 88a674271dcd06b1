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

// Multiply rows of A from `rank` on with the item's tokens.
template <class T>
static inline void shrink(const Lora& l, const Item& item, int64_t part, int64_t rank, int64_t num_ranks) {
    const T* a = (const T*)l.a + ((item.slot * l.num_parts + part) * l.max_rank + rank) * l.num_inputs;
    float* between = l.between + (item.first * l.num_parts + part) * l.max_rank + rank;
    in_tiles<TILE>(item.count, [&](int token, auto few) {
        constexpr int tokens = few;
        in_tiles<TILE>(num_ranks, [&](int row, auto some) {
            constexpr int rows = some;
            Floats sum[rows][tokens] = {};
            const T* x[tokens];
            for (int t = 0; t < tokens; t++) x[t] = (const T*)l.x + item.tokens[token + t] * l.x_stride;
            for (int64_t i = 0; i < l.num_inputs; i += WIDTH) {
                const int64_t count = l.num_inputs - i;
                Floats values[tokens];
                for (int t = 0; t < tokens; t++) values[t] = load_some_floats(x[t] + i, count);
                for (int r = 0; r < rows; r++) {
                    const Floats weights = load_some_floats(a + (row + r) * l.num_inputs + i, count);
                    for (int t = 0; t < tokens; t++) sum[r][t] += weights * values[t];
                }
            }
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
    in_tiles<TILE>(item.count, [&](int token, auto few) {
        constexpr int tokens = few;
        for (int64_t o = 0; o < num_outputs; o += TILE * WIDTH) {
            Floats sum[TILE][tokens] = {};
            for (int64_t r = 0; r < item.rank; r++)
                for (int g = 0; g < TILE; g++) {
                    const int64_t count = num_outputs - o - g * WIDTH;
                    if (count <= 0) break;
                    const Floats weights = load_some_floats(b + r * l.num_outputs + o + g * WIDTH, count);
                    for (int t = 0; t < tokens; t++)
                        sum[g][t] += weights * between[(token + t) * l.num_parts * l.max_rank + r];
                }
            for (int t = 0; t < tokens; t++) {
                T* out = (T*)l.out + item.tokens[token + t] * l.out_stride + output + o;
                for (int g = 0; g < TILE; g++) {
                    const int64_t count = num_outputs - o - g * WIDTH;
                    if (count <= 0) break;
                    store_some_floats(out + g * WIDTH, load_some_floats(out + g * WIDTH, count) + sum[g][t], count);
                }
            }
        }
    });
}

template <class T>
static void add_lora(const Lora& l, int threads) {
    const int64_t rank_tiles = (l.max_rank + TILE - 1) / TILE;
    const int64_t work = l.num_tokens * l.max_rank * (l.num_parts * l.num_inputs + l.num_outputs);
    const int sharers = work >= PARALLEL_WEIGHTS ? threads : 1;
    int64_t runs = 0;
    for (int64_t part = 0; part < l.num_parts; part++) runs += (l.starts[part + 1] - l.starts[part] + RUN - 1) / RUN;
#pragma omp parallel num_threads(sharers)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < l.num_items * l.num_parts * rank_tiles; i++) {
            const Item item = item_of(l, i / rank_tiles / l.num_parts);
            const int64_t rank = i % rank_tiles * TILE, left = std::min<int64_t>(TILE, item.rank - rank);
            if (left > 0) shrink<T>(l, item, i / rank_tiles % l.num_parts, rank, left);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < l.num_items * runs; i++) {
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
