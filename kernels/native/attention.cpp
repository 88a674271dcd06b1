// Paged attention of one mixed step, fp32 and bf16, over blocks where they lie: nothing is gathered. Keys and values may be
// in 8 bits with a scale each (kernels/kv_pool.py): scores are multiplied by the scales of keys, weights by those of values.
//
// A block holds its keys as [kv head, P / 16, D, 16], so that one dimension of 16 keys is one vector, and its values as
// [kv head, P, D]. Work is cut into items: the G query heads of some tokens of a sequence, as M packed rows, against one
// kv head, in tiles of 64 keys with an online softmax in fp32. A decode is an item of one token. Hidden keys are masked by
// selection, so what lies in slots that no query sees, NaN too, weighs nothing.
//
// T tokens, N query heads, K kv heads, G = N / K, D head size, P tokens a block, M packed rows of an item.

#include <unordered_map>
#include <vector>

#include "lanes.h"

constexpr int TILE_KEYS = 64;
constexpr int TILE_PARTS = TILE_KEYS / LANES;
// Packed rows of a prefill item: accumulators and queries stay in the first two caches.
constexpr int ITEM_ROWS = 32;
// Rows and vectors of one register tile.
constexpr int ROWS = 4;
#ifdef __AVX512F__
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 1;
#endif
constexpr float LOWEST = -3e38f;

// Fields as in kernels/cpu_library.py. `is_bf16` says what `q` and `out` point to, `stored` what `pool` does.
struct Attention {
    const void* q;
    void* out;
    const void* pool;
    const int32_t *query_starts, *context_lens, *table;
    int64_t q_stride, out_stride;  // elements from token to token; heads lie side by side
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t num_rows, table_stride;
    int64_t window;  // 0: none
    int64_t stored;  // as stored_as takes it
    float scale;
};

struct Item {
    int row, first, count, head;  // tokens count from the row's first query
};

// Decode rows whose contexts begin in the same blocks: `tokens` of them, in whole tiles.
struct Group {
    std::vector<int> rows;
    int64_t tokens;
};

// Where 16 keys of one kv head and their values lie, and their scales where they are quantised.
template <class S>
struct Part {
    const S *keys, *values;
    const float *key_scales, *value_scales;
};

// Each asks meanwhile for what it will read of the next tile, if one is named: blocks lie scattered, no prefetcher of the
// hardware guesses the next, and all at once would wait for one another.
template <class S, int R, int J>
static inline void score(const float* q, int64_t dim, const Part<S>* parts, const Part<S>* next, float* scores) {
    f32x16 sums[R][J] = {};
    for (int64_t d = 0; d < dim; d++)
        for (int j = 0; j < J; j++) {
            f32x16 keys = load(parts[j].keys + d * LANES);
            if (next) __builtin_prefetch(next[j].keys + d * LANES);
            for (int r = 0; r < R; r++) sums[r][j] += q[r * dim + d] * keys;
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) {
            if constexpr (QUANTISED<S>) sums[r][j] *= load(parts[j].key_scales);
            store(scores + r * TILE_KEYS + j * LANES, sums[r][j]);
        }
}

template <class S, int R, int J>
static inline void weigh(const float* weights, const float* rescale, const Part<S>* parts, const Part<S>* next, int first,
                         int end, int64_t dim, int64_t column, float* acc) {
    f32x16 sums[R][J];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) sums[r][j] = load(acc + r * dim + column + j * LANES) * rescale[r];
    for (int key = first; key < end; key++) {
        const int64_t place = key % LANES * dim + column;
        for (int j = 0; j < J; j++) {
            f32x16 part = load(parts[key / LANES].values + place + j * LANES);
            if (next) __builtin_prefetch(next[key / LANES].values + place + j * LANES);
            for (int r = 0; r < R; r++) sums[r][j] += weights[r * TILE_KEYS + key] * part;
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) store(acc + r * dim + column + j * LANES, sums[r][j]);
}

// Scores of one row become weights: 2^(score - peak), 0 for keys outside first .. last, times the values' scales. Returns
// what older sums shrink by.
template <class S>
static inline float soften(float* scores, const Part<S>* parts, int num_parts, int first, int last, float& peak,
                           float& total) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 masked[TILE_PARTS], highest = f32x16{} + LOWEST;
    for (int j = 0; j < num_parts; j++) {
        i32x16 key = lane + j * LANES;
        masked[j] = ((key >= first) & (key <= last)) ? load(scores + j * LANES) : f32x16{} - INFINITY;
        highest = larger(masked[j], highest);
    }
    float old_peak = peak;
    peak = std::max(peak, reduced(highest, larger));
    f32x16 sum = {};
    for (int j = 0; j < num_parts; j++) {
        f32x16 weight = exp2_of(masked[j] - peak);
        sum += weight;
        if constexpr (QUANTISED<S>) weight *= load(parts[j].value_scales);
        store(scores + j * LANES, weight);
    }
    float rescale = peak > old_peak ? exp2_of(f32x16{} + (old_peak - peak))[0] : 1.0f;
    total = total * rescale + sum_of(sum);
    return rescale;
}

// M packed rows against one kv head, and what is known of them so far: weighted values, and weights, by their peak.
struct Packed {
    int count;
    float *q, *acc, *scores, *peak, *total, *rescale;

    Packed(std::vector<float>& memory, int count, int64_t dim) : count(count) {
        memory.assign(count * (2 * dim + TILE_KEYS + 3), 0.0f);
        q = memory.data(), acc = q + count * dim, scores = acc + count * dim;
        peak = scores + count * TILE_KEYS, total = peak + count, rescale = total + count;
        std::fill(peak, total, LOWEST);
    }
};

// The keys from first_key up to `end`, which a row sees up to its position.
template <class S, class F>
static inline void attend_keys(const Attention& a, const int32_t* table, int head, Packed& p, int64_t first_key, int64_t end,
                               F position_of) {
    const int64_t dim = a.head_dim, row_numbers = a.block_size * dim, row_bytes = stored_bytes<S>(a.block_size, dim);
    Part<S> parts[TILE_PARTS], next[TILE_PARTS] = {};
    auto locate = [&](int64_t base) {
        for (int64_t j = 0, key = base; j < TILE_PARTS && key < end; j++, key += LANES) {
            int64_t head_row = (int64_t)table[key / a.block_size] * 2 * a.num_kv_heads + head;
            const char *keys = (const char*)a.pool + head_row * row_bytes, *values = keys + a.num_kv_heads * row_bytes;
            const int64_t offset = key % a.block_size;
            next[j] = {(const S*)keys + offset * dim, (const S*)values + offset * dim,
                       (const float*)((const S*)keys + row_numbers) + offset,
                       (const float*)((const S*)values + row_numbers) + offset};
            if constexpr (QUANTISED<S>) {
                __builtin_prefetch(next[j].key_scales);
                __builtin_prefetch(next[j].value_scales);
            }
        }
    };
    const int64_t first_base = first_key / LANES * LANES;
    locate(first_base);
    for (int64_t base = first_base; base < end; base += TILE_KEYS) {
        std::copy(next, next + TILE_PARTS, parts);
        locate(base + TILE_KEYS);
        const bool has_next = base + TILE_KEYS < end;
        const int num_keys = std::min<int64_t>(TILE_KEYS, end - base), num_parts = (num_keys + LANES - 1) / LANES;
        in_tiles<ROWS>(p.count, [&](int m, auto rows) {
            in_tiles<VECTORS>(num_parts, [&](int j, auto vectors) {
                score<S, rows, vectors>(p.q + m * dim, dim, parts + j, has_next && !m ? next + j : nullptr,
                                        p.scores + m * TILE_KEYS + j * LANES);
            });
        });
        for (int m = 0; m < p.count; m++) {
            const int64_t last = position_of(m) - base, first = a.window ? last - a.window + 1 : -base;
            p.rescale[m] = soften(p.scores + m * TILE_KEYS, parts, num_parts, std::max<int64_t>(first, -1),
                                  std::min<int64_t>(last, TILE_KEYS), p.peak[m], p.total[m]);
        }
        const int first = std::max<int64_t>(0, first_key - base);
        in_tiles<ROWS>(p.count, [&](int m, auto rows) {
            in_tiles<VECTORS>(dim / LANES, [&](int j, auto vectors) {
                weigh<S, rows, vectors>(p.scores + m * TILE_KEYS, p.rescale + m, parts, has_next && !m ? next : nullptr,
                                        first, num_keys, dim, j * LANES, p.acc + m * dim);
            });
        });
    }
}

// A step's attention by parts: what a group shares is read once for some of its rows at a time, and what becomes of it
// is kept until each row goes on from there. The bits are those of a row that is alone.
template <class T, class S>
struct Attending {
    const Attention& a;
    const int64_t dim = a.head_dim, heads = a.num_heads / a.num_kv_heads;  // of one kv head
    std::vector<int64_t> shared = std::vector<int64_t>(a.num_rows);       // tokens of each row that its group has read
    std::vector<float> states;                                            // [row, N, D + 2]: values, peak, total

    // The queries of one token, times the scale.
    void load_queries(int64_t token, int head, float* q) const {
        const T* queries = (const T*)a.q + token * a.q_stride + head * heads * dim;
        for (int64_t d = 0; d < heads * dim; d += LANES) store(q + d, load(queries + d) * (a.scale * LOG2_E));
    }

    // Calls f(where a head's state is kept, m) for the query heads of one row.
    template <class F>
    void each_state(int row, int head, F f) {
        for (int64_t m = 0; m < heads; m++) f(states.data() + ((row * a.num_kv_heads + head) * heads + m) * (dim + 2), m);
    }

    // `count` of the group's rows from `first` on.
    void attend_shared(const Group& group, int first, int count, int head, std::vector<float>& memory) {
        Packed p(memory, count * heads, dim);
        const int* rows = group.rows.data() + first;
        for (int i = 0; i < count; i++) load_queries(a.query_starts[rows[i]], head, p.q + i * heads * dim);
        attend_keys<S>(a, a.table + rows[0] * a.table_stride, head, p, 0, group.tokens, [&](int) { return group.tokens; });
        for (int i = 0; i < count; i++)
            each_state(rows[i], head, [&](float* state, int64_t m) {
                m += i * heads;
                std::copy_n(p.acc + m * dim, dim, state);
                state[dim] = p.peak[m], state[dim + 1] = p.total[m];
            });
    }

    void attend_item(Item item, std::vector<float>& memory) {
        Packed p(memory, item.count * heads, dim);
        const int64_t token = a.query_starts[item.row] + item.first;
        for (int i = 0; i < item.count; i++) load_queries(token + i, item.head, p.q + i * heads * dim);
        const int64_t query_len = a.query_starts[item.row + 1] - a.query_starts[item.row];
        const int64_t position = a.context_lens[item.row] - query_len + item.first;  // of the item's first token
        int64_t first_key = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
        if (shared[item.row]) {
            first_key = shared[item.row];
            each_state(item.row, item.head, [&](const float* state, int64_t m) {
                std::copy_n(state, dim, p.acc + m * dim);
                p.peak[m] = state[dim], p.total[m] = state[dim + 1];
            });
        }
        attend_keys<S>(a, a.table + item.row * a.table_stride, item.head, p, first_key, position + item.count,
                       [&](int m) { return position + m / heads; });
        T* out = (T*)a.out + token * a.out_stride + item.head * heads * dim;
        for (int64_t m = 0; m < p.count; m++)
            for (int64_t d = 0; d < dim; d += LANES)
                store(out + m / heads * a.out_stride + m % heads * dim + d, load(p.acc + m * dim + d) * (1.0f / p.total[m]));
    }
};

// Tokens in whole tiles, of those before the rows' own, that lie in the same blocks.
static int64_t tokens_alike(const Attention& a, int row, int other) {
    const int32_t *table = a.table + row * a.table_stride, *others = a.table + other * a.table_stride;
    const int64_t before = std::min(a.context_lens[row], a.context_lens[other]) - 1, num_blocks = before / a.block_size;
    const int64_t alike = std::mismatch(table, table + num_blocks, others).first - table;
    return alike * a.block_size / TILE_KEYS * TILE_KEYS;
}

// Each row joins the group of the first row that begins in the same block.
static std::vector<Group> find_groups(const Attention& a) {
    std::vector<Group> groups;
    std::unordered_map<int32_t, size_t> by_first_block;
    for (int row = 0; row < a.num_rows && !a.window; row++) {
        if (a.query_starts[row + 1] - a.query_starts[row] != 1 || a.context_lens[row] <= TILE_KEYS) continue;
        const auto [found, is_new] = by_first_block.try_emplace(a.table[row * a.table_stride], groups.size());
        if (is_new) {
            groups.push_back({{row}, a.context_lens[row]});
            continue;
        }
        Group& group = groups[found->second];
        const int64_t tokens = tokens_alike(a, group.rows[0], row);
        if (!tokens) continue;
        group.rows.push_back(row);
        group.tokens = std::min(group.tokens, tokens);
    }
    groups.erase(std::remove_if(groups.begin(), groups.end(), [](const Group& g) { return g.rows.size() < 2; }), groups.end());
    return groups;
}

template <class T, class S>
static void attend(const Attention& a, int threads) {
    Attending<T, S> work{a};
    const int tokens = std::max<int64_t>(1, ITEM_ROWS / work.heads);
    const std::vector<Group> groups = find_groups(a);
    for (const Group& group : groups)
        for (int row : group.rows) work.shared[row] = group.tokens;
    if (!groups.empty()) work.states.resize(a.num_rows * a.num_heads * (a.head_dim + 2));
    // What groups share comes first, because their rows wait for it; then rows of prompts, which take longest.
    std::vector<Item> shared_items, items, waiting_items;
    for (size_t group = 0; group < groups.size(); group++)
        for (int head = 0; head < a.num_kv_heads; head++)
            for (int first = 0, size = groups[group].rows.size(); first < size; first += tokens)
                shared_items.push_back({(int)group, first, std::min(tokens, size - first), head});
    for (int row = a.num_rows - 1; row >= 0; row--) {
        const int query_len = a.query_starts[row + 1] - a.query_starts[row];
        for (int head = 0; head < a.num_kv_heads; head++)
            for (int first = (query_len - 1) / tokens * tokens; first >= 0; first -= tokens)
                (work.shared[row] ? waiting_items : items).push_back({row, first, std::min(tokens, query_len - first), head});
    }
    const size_t num_shared = shared_items.size(), num_first = num_shared + items.size();
#pragma omp parallel num_threads(threads) if (num_first > 1)
    {
        std::vector<float> memory;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < num_first; i++) {
            if (i >= num_shared) {
                work.attend_item(items[i - num_shared], memory);
            } else {
                const Item& item = shared_items[i];
                work.attend_shared(groups[item.row], item.first, item.count, item.head, memory);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < waiting_items.size(); i++) work.attend_item(waiting_items[i], memory);
    }
}

extern "C" void by_attend(int is_bf16, int threads, const Attention* a) {
    stored_as(is_bf16, a->stored, [&](auto element, auto number) {
        attend<decltype(element), decltype(number)>(*a, threads);
    });
}
