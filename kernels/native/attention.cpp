// Paged attention of one mixed step, fp32 and bf16, over blocks where they lie: nothing is gathered. Keys and values may be
// in 8 bits with a scale each (kernels/kv_pool.py): scores are multiplied by the scales of keys, weights by those of values.
//
// A block holds its keys as [kv head, P / 16, D, 16], so that one dimension of 16 keys is one vector, and its values as
// [kv head, P, D]. Work is cut into items: the G query heads of some tokens of a sequence, as M packed rows, against one
// kv head, in tiles of 64 keys with an online softmax in fp32. A decode is an item of one token. Hidden keys are masked by
// selection, so what lies in slots that no query sees, NaN too, weighs nothing.
//
// T tokens, N query heads, K kv heads, G = N / K, D head size, P tokens a block, M packed rows of an item.

#include <atomic>
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

// The keys that an item sees: from `first_key` to before `end`, its first token being at `position`.
struct Span {
    int64_t position, first_key, end;
    int64_t first_base() const { return first_key / LANES * LANES; }
};

static inline Span span_of(const Attention& a, Item item) {
    const int64_t query_len = a.query_starts[item.row + 1] - a.query_starts[item.row];
    const int64_t position = a.context_lens[item.row] - query_len + item.first;
    return {position, a.window ? std::max<int64_t>(0, position - a.window + 1) : 0, position + item.count};
}

// Where 16 keys of one kv head and their values lie, and their scales where they are quantised.
template <class S>
struct Part {
    const S *keys, *values;
    const float *key_scales, *value_scales;
};

// Fills in the parts of the tile at `base`, as many as the item sees.
template <class S>
static inline void locate(const Attention& a, Item item, int64_t base, Part<S>* parts) {
    const int32_t* table = a.table + item.row * a.table_stride;
    const int64_t end = span_of(a, item).end;
    const int64_t row_numbers = a.block_size * a.head_dim, row_bytes = stored_bytes<S>(a.block_size, a.head_dim);
    for (int64_t j = 0, key = base; j < TILE_PARTS && key < end; j++, key += LANES) {
        int64_t head_row = (int64_t)table[key / a.block_size] * 2 * a.num_kv_heads + item.head;
        const char *keys = (const char*)a.pool + head_row * row_bytes, *values = keys + a.num_kv_heads * row_bytes;
        const int64_t offset = key % a.block_size;
        parts[j] = {(const S*)keys + offset * a.head_dim, (const S*)values + offset * a.head_dim,
                    (const float*)((const S*)keys + row_numbers) + offset,
                    (const float*)((const S*)values + row_numbers) + offset};
        if constexpr (QUANTISED<S>) {
            __builtin_prefetch(parts[j].key_scales);
            __builtin_prefetch(parts[j].value_scales);
        }
    }
}

// Each asks meanwhile for what will be read of the next tile, into the second cache, as two tiles of floats are more than
// the first holds: blocks lie scattered, no prefetcher of the hardware guesses the next, and all at once would wait for one
// another.
template <class S, int R, int J>
static inline void score(const float* q, int64_t dim, const Part<S>* parts, const Part<S>* next, float* scores) {
    Floats sums[R][J * PARTS] = {};
    for (int64_t d = 0; d < dim; d++)
        for (int v = 0; v < J * PARTS; v++) {
            const int j = v / PARTS, lane = v % PARTS * WIDTH;
            Floats keys = load_floats(parts[j].keys + d * LANES + lane);
            if (next && !lane) __builtin_prefetch(next[j].keys + d * LANES, 0, 2);
            for (int r = 0; r < R; r++) sums[r][v] += q[r * dim + d] * keys;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) {
            if constexpr (QUANTISED<S>) sums[r][v] *= load_floats(parts[v / PARTS].key_scales + v % PARTS * WIDTH);
            store_floats(scores + r * TILE_KEYS + v * WIDTH, sums[r][v]);
        }
}

template <class S, int R, int J>
static inline void weigh(const float* weights, const float* rescale, const Part<S>* parts, const Part<S>* next, int first,
                         int end, int64_t dim, int64_t column, float* acc) {
    Floats sums[R][J * PARTS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) sums[r][v] = load_floats(acc + r * dim + column + v * WIDTH) * rescale[r];
    for (int key = first; key < end; key++) {
        const int64_t place = key % LANES * dim + column;
        for (int v = 0; v < J * PARTS; v++) {
            Floats part = load_floats(parts[key / LANES].values + place + v * WIDTH);
            if (next && v % PARTS == 0) __builtin_prefetch(next[key / LANES].values + place + v * WIDTH, 0, 2);
            for (int r = 0; r < R; r++) sums[r][v] += weights[r * TILE_KEYS + key] * part;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) store_floats(acc + r * dim + column + v * WIDTH, sums[r][v]);
}

// Scores of one row become weights: 2^(score - peak), 0 for keys outside first .. last, times the values' scales. Returns
// what older sums shrink by.
template <class S>
static inline float soften(float* scores, const Part<S>* parts, int num_parts, int first, int last, float& peak,
                           float& total) {
    Floats masked[TILE_PARTS * PARTS], highest = Floats{} + LOWEST;
    for (int v = 0; v < num_parts * PARTS; v++) {
        auto key = lanes_of(highest) + v * WIDTH;
        masked[v] = ((key >= first) & (key <= last)) ? load_floats(scores + v * WIDTH) : Floats{} - INFINITY;
        highest = larger(masked[v], highest);
    }
    float old_peak = peak;
    peak = std::max(peak, reduced(highest, larger));
    Floats sum = {};
    for (int v = 0; v < num_parts * PARTS; v++) {
        Floats weight = exp2_of(masked[v] - peak);
        sum += weight;
        if constexpr (QUANTISED<S>) weight *= load_floats(parts[v / PARTS].value_scales + v % PARTS * WIDTH);
        store_floats(scores + v * WIDTH, weight);
    }
    float rescale = peak > old_peak ? exp2_of(Floats{} + (old_peak - peak))[0] : 1.0f;
    total = total * rescale + sum_of(sum);
    return rescale;
}

// `next` is the item's first tile, and then that of the following item, which `take` gives when the last tile begins: an
// item or null. Returns it.
template <class T, class S, class F>
static const Item* attend_item(const Attention& a, Item item, F take, Part<S>* next, std::vector<float>& scratch) {
    const Span span = span_of(a, item);
    const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads, num_packed = item.count * group;
    scratch.assign(num_packed * (2 * dim + TILE_KEYS + 3), 0.0f);
    float *q = scratch.data(), *acc = q + num_packed * dim, *scores = acc + num_packed * dim;
    float *peak = scores + num_packed * TILE_KEYS, *total = peak + num_packed, *rescale = total + num_packed;
    const int64_t token = a.query_starts[item.row] + item.first;
    const T* queries = (const T*)a.q + token * a.q_stride + item.head * group * dim;
    for (int64_t m = 0; m < num_packed; m++) {
        peak[m] = LOWEST;
        for (int64_t d = 0; d < dim; d += LANES)
            store(q + m * dim + d, load(queries + m / group * a.q_stride + m % group * dim + d) * (a.scale * LOG2_E));
    }
    const auto [position, first_key, end] = span;
    Part<S> parts[TILE_PARTS];
    const Item* following = nullptr;
    for (int64_t base = span.first_base(); base < end; base += TILE_KEYS) {
        std::copy(next, next + TILE_PARTS, parts);
        const bool is_last = base + TILE_KEYS >= end;
        if (!is_last) locate(a, item, base + TILE_KEYS, next);
        else if ((following = take())) locate(a, *following, span_of(a, *following).first_base(), next);
        const bool has_next = !is_last || following;
        const int num_keys = std::min<int64_t>(TILE_KEYS, end - base), num_parts = (num_keys + LANES - 1) / LANES;
        in_tiles<ROWS>(num_packed, [&](int m, auto rows) {
            in_tiles<VECTORS>(num_parts, [&](int j, auto vectors) {
                score<S, rows, vectors>(q + m * dim, dim, parts + j, has_next && !m ? next + j : nullptr,
                                        scores + m * TILE_KEYS + j * LANES);
            });
        });
        for (int64_t m = 0; m < num_packed; m++) {
            const int64_t last = position + m / group - base, first = a.window ? last - a.window + 1 : -base;
            rescale[m] = soften(scores + m * TILE_KEYS, parts, num_parts, std::max<int64_t>(first, -1),
                                std::min<int64_t>(last, TILE_KEYS), peak[m], total[m]);
        }
        const int first = std::max<int64_t>(0, first_key - base);
        in_tiles<ROWS>(num_packed, [&](int m, auto rows) {
            in_tiles<VECTORS>(dim / LANES, [&](int j, auto vectors) {
                weigh<S, rows, vectors>(scores + m * TILE_KEYS, rescale + m, parts, has_next && !m ? next : nullptr,
                                        first, num_keys, dim, j * LANES, acc + m * dim);
            });
        });
    }
    T* out = (T*)a.out + token * a.out_stride + item.head * group * dim;
    for (int64_t m = 0; m < num_packed; m++)
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + m / group * a.out_stride + m % group * dim + d, load(acc + m * dim + d) * (1.0f / total[m]));
    return following;
}

template <class T, class S>
static void attend(const Attention& a, int threads) {
    const int tokens = std::max<int64_t>(1, ITEM_ROWS / (a.num_heads / a.num_kv_heads));
    std::vector<Item> items;
    // Prefill rows come last and take longest: they are begun first.
    for (int row = a.num_rows - 1; row >= 0; row--) {
        const int query_len = a.query_starts[row + 1] - a.query_starts[row];
        for (int head = 0; head < a.num_kv_heads; head++)
            for (int first = (query_len - 1) / tokens * tokens; first >= 0; first -= tokens)
                items.push_back({row, first, std::min(tokens, query_len - first), head});
    }
    std::atomic<size_t> num_taken = 0;
#pragma omp parallel num_threads(threads) if (items.size() > 1)
    {
        std::vector<float> scratch;
        Part<S> next[TILE_PARTS] = {};
        // Whoever is free takes an item, and the following one a tile ahead: as far as its last tile reaches, it fetches that
        // one's first.
        auto take = [&]() -> const Item* {
            const size_t i = num_taken++;
            return i < items.size() ? &items[i] : nullptr;
        };
        const Item* item = take();
        if (item) locate(a, *item, span_of(a, *item).first_base(), next);
        while (item) item = attend_item<T>(a, *item, take, next, scratch);
    }
}

extern "C" void by_attend(int is_bf16, int threads, const Attention* a) {
    stored_as(is_bf16, a->stored, [&](auto element, auto number) {
        attend<decltype(element), decltype(number)>(*a, threads);
    });
}
