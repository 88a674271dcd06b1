// Paged attention of one mixed step, fp32 and bf16, over blocks in place, without gathering. Keys and values may be in
// 8 bits with a scale each (kernels/kv_pool.py). Scores are multiplied by the scales of keys, weights by those of
// values.
//
// A block holds its keys as [kv head, P / 16, D, 16], so that one dimension of 16 keys is one vector, and its values as
// [kv head, P, D]. In bf16 they are [kv head, P / 16, D / 2, 16, 2] and [kv head, P / 2, D, 2]. A vector then has two
// dimensions of 16 keys, or 16 dimensions of two values. One instruction multiplies and adds these where the CPU has
// it, with the weights rounded to bf16. Elsewhere they are widened, one half after the other.
//
// Work is cut into items: the G query heads of some tokens of a sequence, as M packed rows, against one kv head. An
// item goes through tiles of 64 keys with an online softmax in fp32. Decodes with the same first blocks form one
// item (cascade). Their shared keys are read once for all of them, then each reads on alone. The tiles of a row, and so
// its bits, do not depend on the rows that it shares with. Hidden keys are masked by selection, so slots that no query
// sees may hold anything, NaN too.
//
// T tokens, N query heads, K kv heads, G = N / K, D head size, P tokens a block, M packed rows of an item.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "lanes.h"

constexpr int TILE_KEYS = 64;
constexpr int TILE_PARTS = TILE_KEYS / LANES;
// Packed rows of an item. Accumulators and queries stay in the first two caches.
constexpr int ITEM_ROWS = 32;
// Rows and vectors of one register tile.
constexpr int ROWS = 4;
#ifdef __AVX512F__
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 1;
#endif
constexpr float LOWEST = -3e38f;
constexpr double LEAST_SAVED = 0.125;

// Fields as in kernels/cpu/library.py. `is_bf16` gives the type of `q` and `out`, `stored` that of `pool`.
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

// `count` tokens of each of `num_rows` rows, from a row's query `first` on. They are many tokens of one row, or one
// token each of many decodes that have their first `shared` keys in the same blocks. Neither `count` nor `num_rows` is
// 0.
struct Item {
    const int* rows;
    int num_rows, first, count, head;
    int64_t shared;
    int num_tokens() const { return num_rows * count; }
};

static inline int64_t query_len(const Attention& a, int row) { return a.query_starts[row + 1] - a.query_starts[row]; }

static inline int64_t token_of(const Attention& a, const Item& item, int t) {
    return a.query_starts[item.rows[t / item.count]] + item.first + t % item.count;
}

// Keys from `base` on, before `end`, in blocks of `row`, against the item's tokens from `first_token` to before
// `end_token`. The first of these sees keys from `first_key` to `position`, each later one sees one more. Shared keys
// are seen by all.
struct Tile {
    int row, first_token, end_token;
    int64_t first_key, position, base, end;
};

static inline Tile own_tile(const Attention& a, const Item& item, int member) {
    const int row = item.rows[member];
    const int64_t position = a.context_lens[row] - query_len(a, row) + item.first;
    const int64_t first_key = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
    return {row, member * item.count, (member + 1) * item.count, first_key, position,
            std::max(item.shared, first_key / LANES * LANES), position + item.count};
}

static inline Tile first_tile(const Attention& a, const Item& item) {
    if (!item.shared) return own_tile(a, item, 0);
    return {item.rows[0], 0, item.num_tokens(), 0, item.shared, 0, item.shared};
}

// Move to the item's next tile. Return false, and stay, if there is none.
static inline bool advance(const Attention& a, const Item& item, Tile& tile) {
    if (tile.base + TILE_KEYS < tile.end) {
        tile.base += TILE_KEYS;
        return true;
    }
    const int member = tile.end == item.shared ? 0 : tile.end_token / item.count;
    if (member == item.num_rows) return false;
    tile = own_tile(a, item, member);
    return true;
}

// Pointers to 16 keys of one kv head and their values, and to their scales if they are quantised.
template <class S>
struct Part {
    const S *keys, *values;
    const float *key_scales, *value_scales;
};

// Write the tile's parts, of 16 keys each, to `parts`, and prefetch their scales, if they have any.
template <class S>
static inline void locate(const Attention& a, int head, const Tile& tile, Part<S>* parts) {
    const int32_t* table = a.table + tile.row * a.table_stride;
    const int64_t row_numbers = a.block_size * a.head_dim, row_bytes = stored_bytes<S>(a.block_size, a.head_dim);
    for (int64_t j = 0, key = tile.base; j < TILE_PARTS && key < tile.end; j++, key += LANES) {
        int64_t head_row = (int64_t)table[key / a.block_size] * 2 * a.num_kv_heads + head;
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

// A register of stored numbers, which are bf16 pairs if the pool is bf16.
template <class S>
using Held = std::conditional_t<TOGETHER<S> == 2, Words, Floats>;
template <class S>
static inline Held<S> hold(const S* p) {
    if constexpr (TOGETHER<S> == 2) return read<Words>(p);
    else return load_floats(p);
}
static inline void add_product(Floats& sum, const float* x, Floats y) { sum += *x * y; }
#ifdef __AVX512BF16__
static inline void add_product(Floats& sum, const bf16* x, Words y) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)y, (__m512bh)_mm512_set1_epi32(read<int>(x)));
}
#else
static inline void add_product(Floats& sum, const float* x, Words y) {
    sum += x[0] * (Floats)(y << 16);
    sum += x[1] * (Floats)(y & 0xffff0000u);
}
#endif

// Write the scaled scores of R rows with J parts. Each call prefetches a part of the next tile into the second cache,
// because two tiles of floats do not fit the first. Blocks lie scattered, so no hardware prefetcher finds the next one.
// All prefetches at once would wait for one another.
template <class S, int R, int J>
static inline void score(const Input<S>* q, int64_t dim, float scale, const Part<S>* parts, const Part<S>* next,
                         float* scores) {
    Floats sums[R][J * PARTS] = {};
    for (int64_t d = 0; d < dim; d += TOGETHER<S>) {
        Held<S> keys[J * PARTS];
        for (int v = 0; v < J * PARTS; v++) {
            const int j = v / PARTS, lane = v % PARTS * WIDTH;
            keys[v] = hold(parts[j].keys + d * LANES + lane * TOGETHER<S>);
            if (next && !lane) __builtin_prefetch(next[j].keys + d * LANES, 0, 2);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < J * PARTS; v++) add_product(sums[r][v], q + r * dim + d, keys[v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) {
            sums[r][v] *= scale;
            if constexpr (QUANTISED<S>) sums[r][v] *= load_floats(parts[v / PARTS].key_scales + v % PARTS * WIDTH);
            store_floats(scores + r * TILE_KEYS + v * WIDTH, sums[r][v]);
        }
}

// Weights from one row to the next. They lie in place of the row's scores.
template <class S>
constexpr int ROW_WEIGHTS = TILE_KEYS * sizeof(float) / sizeof(Input<S>);
// Masks of a bf16 pair: which of the two values count.
constexpr uint32_t FIRST = 0xffffu, SECOND = 0xffff0000u, BOTH = FIRST | SECOND;

template <class S, int R, int J>
static inline void weigh(const Input<S>* weights, const float* rescale, const Part<S>* parts, const Part<S>* next, int first,
                         int end, int64_t dim, int64_t column, float* acc) {
    Floats sums[R][J * PARTS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) sums[r][v] = load_floats(acc + r * dim + column + v * WIDTH) * rescale[r];
    auto add = [&](int key, auto kept) {
        const int64_t place = key % LANES * dim + column * TOGETHER<S>;
        Held<S> values[J * PARTS];
        for (int v = 0; v < J * PARTS; v++) {
            values[v] = hold(parts[key / LANES].values + place + v * WIDTH * TOGETHER<S>);
            if constexpr (kept != BOTH) values[v] = (Held<S>)((Words)values[v] & kept());
            if (next && v % PARTS == 0)
                __builtin_prefetch(next[key / LANES].values + place + v * WIDTH * TOGETHER<S>, 0, 2);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < J * PARTS; v++) add_product(sums[r][v], weights + r * ROW_WEIGHTS<S> + key, values[v]);
    };
    int key = first;
    if (key % TOGETHER<S>) add(key++ - 1, std::integral_constant<uint32_t, SECOND>());
    for (; key + TOGETHER<S> <= end; key += TOGETHER<S>) add(key, std::integral_constant<uint32_t, BOTH>());
    if (key < end) add(key, std::integral_constant<uint32_t, FIRST>());
    for (int r = 0; r < R; r++)
        for (int v = 0; v < J * PARTS; v++) store_floats(acc + r * dim + column + v * WIDTH, sums[r][v]);
}

// Turn the scores of one row into weights: 2^(score - peak), 0 for keys outside first .. last, times the values'
// scales. Return the factor for older sums.
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
        store_floats((Input<S>*)scores + v * WIDTH, weight);
    }
    float rescale = peak > old_peak ? exp2_of(Floats{} + (old_peak - peak))[0] : 1.0f;
    total = total * rescale + sum_of(sum);
    return rescale;
}

// Compute one item. `next` holds the parts of its first tile, and at the end those of the following item's. When the
// last tile begins, `take` gives the following item, or null. Return that item.
template <class T, class S, class F>
static const Item* attend_item(const Attention& a, const Item& item, F take, Part<S>* next, std::vector<float>& scratch) {
    const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads, num_packed = item.num_tokens() * group;
    scratch.assign(num_packed * (2 * dim + TILE_KEYS + 3), 0.0f);
    auto q = (Input<S>*)scratch.data();
    float *acc = scratch.data() + num_packed * dim, *scores = acc + num_packed * dim;
    float *peak = scores + num_packed * TILE_KEYS, *total = peak + num_packed, *rescale = total + num_packed;
    for (int64_t m = 0; m < num_packed; m++) {
        peak[m] = LOWEST;
        const int64_t head = item.head * group + m % group;
        const T* query = (const T*)a.q + token_of(a, item, m / group) * a.q_stride + head * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(q + m * dim + d, load(query + d));
    }
    Part<S> parts[TILE_PARTS];
    const Item* following = nullptr;
    Tile coming = first_tile(a, item);
    for (bool is_last = false; !is_last;) {
        const Tile tile = coming;
        std::copy(next, next + TILE_PARTS, parts);
        is_last = !advance(a, item, coming);
        if (!is_last) locate(a, item.head, coming, next);
        else if ((following = take())) locate(a, following->head, first_tile(a, *following), next);
        const bool has_next = !is_last || following;
        const int num_keys = std::min<int64_t>(TILE_KEYS, tile.end - tile.base), num_parts = (num_keys + LANES - 1) / LANES;
        const int64_t start = tile.first_token * group, num_rows = (tile.end_token - tile.first_token) * group;
        in_tiles<ROWS>(num_rows, [&](int m, auto rows) {
            in_tiles<VECTORS>(num_parts, [&](int j, auto vectors) {
                score<S, rows, vectors>(q + (start + m) * dim, dim, a.scale * LOG2_E, parts + j,
                                        has_next && !m ? next + j : nullptr, scores + (start + m) * TILE_KEYS + j * LANES);
            });
        });
        for (int64_t m = start; m < start + num_rows; m++) {
            const int64_t last = tile.position + (m - start) / group - tile.base;
            const int64_t first = a.window ? last - a.window + 1 : -1;
            rescale[m] = soften(scores + m * TILE_KEYS, parts, num_parts, std::max<int64_t>(first, -1),
                                std::min<int64_t>(last, TILE_KEYS), peak[m], total[m]);
        }
        const int first = std::max<int64_t>(0, tile.first_key - tile.base);
        in_tiles<ROWS>(num_rows, [&](int m, auto rows) {
            in_tiles<VECTORS>(dim / LANES, [&](int j, auto vectors) {
                weigh<S, rows, vectors>((Input<S>*)(scores + (start + m) * TILE_KEYS), rescale + start + m, parts,
                                        has_next && !m ? next : nullptr, first, num_keys, dim, j * LANES,
                                        acc + (start + m) * dim);
            });
        });
    }
    for (int64_t m = 0; m < num_packed; m++) {
        T* out = (T*)a.out + token_of(a, item, m / group) * a.out_stride + (item.head * group + m % group) * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(acc + m * dim + d) * (1.0f / total[m]));
    }
    return following;
}

// Sort rows with one query each by their block tables, so that rows with a common prefix are adjacent.
static void sort_decodes(const Attention& a, int* rows, int num_decodes) {
    auto num_blocks = [&](int row) { return (a.context_lens[row] + a.block_size - 1) / a.block_size; };
    std::sort(rows, rows + num_decodes, [&](int left, int right) {
        const int64_t blocks = std::min(num_blocks(left), num_blocks(right));
        const int32_t *of_left = a.table + left * a.table_stride, *of_right = a.table + right * a.table_stride;
        const int order = std::memcmp(of_left, of_right, blocks * sizeof(int32_t));
        return order ? order < 0 : std::pair(num_blocks(left), left) < std::pair(num_blocks(right), right);
    });
}

// Return how many keys, in whole tiles and at most `most`, two rows share. Each keeps at least one of its own.
static int64_t keys_in_common(const Attention& a, int left, int right, int64_t most) {
    most = std::min<int64_t>(most, std::min(a.context_lens[left], a.context_lens[right]) - 1);
    const int32_t *of_left = a.table + left * a.table_stride, *of_right = a.table + right * a.table_stride;
    const int64_t blocks = (most + a.block_size - 1) / a.block_size;
    const int64_t alike = std::mismatch(of_left, of_left + blocks, of_right).first - of_left;
    return std::min(most, alike * a.block_size) / TILE_KEYS * TILE_KEYS;
}

// Decodes that form one item: `count` of the sorted rows from `first` on. They share `shared` keys, and see `keys` in
// all.
struct Group {
    int first, count;
    int64_t shared, keys;
};

// Sort the decodes, and partition them so that the most key reads are saved. A group fills at most an item's packed
// rows, and saves at least LEAST_SAVED of its keys. It keeps a thread busy for at most half of its share, or others
// would wait for it. Return the groups, most keys first. Under a window nothing is shared.
static std::vector<Group> group_decodes(const Attention& a, int* rows, int num_decodes, int threads) {
    const int most = a.window ? 1 : std::max<int64_t>(1, ITEM_ROWS * a.num_kv_heads / a.num_heads);
    if (most > 1) sort_decodes(a, rows, num_decodes);
    // For each number of leading rows: their keys, the most that can be saved, and the last group of that best
    // partition.
    std::vector<int64_t> keys(num_decodes + 1), saved(num_decodes + 1);
    std::vector<Group> last(num_decodes + 1);
    for (int i = 0; i < num_decodes; i++) keys[i + 1] = keys[i] + a.context_lens[rows[i]];
    const int64_t most_keys = keys[num_decodes] * a.num_kv_heads / (2 * threads);
    for (int end = 1; end <= num_decodes; end++) {
        saved[end] = saved[end - 1];
        last[end] = {end - 1, 1, 0, keys[end] - keys[end - 1]};
        int64_t shared = INT64_MAX;
        for (int first = end - 2; first >= 0 && end - first <= most; first--) {
            shared = keys_in_common(a, rows[first], rows[first + 1], shared);
            const int64_t seen = keys[end] - keys[first], gain = shared * (end - first - 1);
            if (!shared || seen > most_keys) break;
            if (gain < seen * LEAST_SAVED || saved[first] + gain <= saved[end]) continue;
            saved[end] = saved[first] + gain;
            last[end] = {first, end - first, shared, seen};
        }
    }
    std::vector<Group> groups;
    for (int end = num_decodes; end > 0; end = last[end].first) groups.push_back(last[end]);
    std::stable_sort(groups.begin(), groups.end(), [](const Group& x, const Group& y) { return x.keys > y.keys; });
    return groups;
}

// Return how many rows have one query, up to the first that has more.
static int count_decodes(const Attention& a) {
    int count = 0;
    while (count < a.num_rows && query_len(a, count) == 1) count++;
    return count;
}

template <class T, class S>
static void attend(const Attention& a, int threads) {
    const int tokens = std::max<int64_t>(1, ITEM_ROWS / (a.num_heads / a.num_kv_heads));
    std::vector<Item> items;
    std::vector<int> rows(a.num_rows);
    for (int row = 0; row < a.num_rows; row++) rows[row] = row;
    const int num_decodes = count_decodes(a);
    // Prefill rows come last and take longest, so they start first.
    for (int row = a.num_rows - 1; row >= num_decodes; row--)
        for (int head = 0; head < a.num_kv_heads; head++)
            for (int first = (query_len(a, row) - 1) / tokens * tokens; first >= 0; first -= tokens)
                items.push_back({&rows[row], 1, first, std::min<int>(tokens, query_len(a, row) - first), head, 0});
    for (const Group& group : group_decodes(a, rows.data(), num_decodes, threads))
        for (int head = 0; head < a.num_kv_heads; head++)
            items.push_back({&rows[group.first], group.count, 0, 1, head, group.shared});
    std::atomic<size_t> num_taken = 0;
#pragma omp parallel num_threads(threads) if (items.size() > 1)
    {
        std::vector<float> scratch;
        Part<S> next[TILE_PARTS] = {};
        // A thread takes its next item when the last tile of its present one begins, and prefetches the next one's
        // first tile meanwhile.
        auto take = [&]() -> const Item* {
            const size_t i = num_taken++;
            return i < items.size() ? &items[i] : nullptr;
        };
        const Item* item = take();
        if (item) locate(a, item->head, first_tile(a, *item), next);
        while (item) item = attend_item<T>(a, *item, take, next, scratch);
    }
}

extern "C" void by_attend(int is_bf16, int threads, const Attention* a) {
    stored_as(is_bf16, a->stored, [&](auto element, auto number) {
        attend<decltype(element), decltype(number)>(*a, threads);
    });
}

// Return how many items the decodes form for each kv head, most keys first, and for each the keys that its rows share
// and its rows. For tests: the results do not show which rows were read together.
extern "C" int by_decode_groups(int threads, const Attention* a, int64_t* shared, int32_t* counts, int32_t* rows) {
    const int num_decodes = count_decodes(*a);
    std::vector<int> sorted(num_decodes);
    for (int row = 0; row < num_decodes; row++) sorted[row] = row;
    const std::vector<Group> groups = group_decodes(*a, sorted.data(), num_decodes, threads);
    for (const Group& group : groups) {
        *shared++ = group.shared;
        *counts++ = group.count;
        rows = std::copy_n(sorted.begin() + group.first, group.count, rows);
    }
    return groups.size();
}
