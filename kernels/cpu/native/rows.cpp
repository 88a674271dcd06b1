// Operations on single tokens besides attention: rotary embedding with the KV write, norms, SiLU-mul and GELU-mul,
// scaling, and the argmax token of logits. fp32 and bf16.
//
// Computed in fp32 and rounded where Hugging Face's Llama rounds. attention.cpp defines the layout of a block, and
// kernels/kv_pool.py the meaning of 8 bits.
//
// T tokens, N query heads, K kv heads, D head size, P tokens a block, H hidden size, I intermediate size.

#include "lanes.h"

// As in kernels/cpu/backend.py and kernels/kv_pool.py.
constexpr int MAX_HEAD_DIM = 256;
constexpr float SMALLEST_PEAK = 1e-30f;
// GELU with tanh is x / (1 + e^-u) with u = GELU_FACTOR (x + GELU_CUBE x^3).
constexpr float GELU_FACTOR = 1.5957691216057308f, GELU_CUBE = 0.044715f;

template <class F>
static void over_rows(int64_t rows, int64_t width, int threads, F f) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 1 && rows * width >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) f(row);
}

// Fields of the structs as in kernels/cpu/library.py. `is_bf16` gives the type of every void pointer except `pool`.
struct Placement {
    void* q;
    const void *k, *v;
    void* pool;
    const float* cos_sin;  // null: no rotation
    const int64_t *positions, *slots;
    const void *q_norm, *k_norm;           // null: no head norms
    int64_t q_stride, k_stride, v_stride;  // elements from token to token; heads lie side by side
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    int64_t stored;  // the type of `pool`, as stored_as takes it
    int64_t norm_is_fp32;  // the type of the norms' weights: fp32 rounds once
    float eps;
};

template <class T>
static inline float inverse_norm(const T* x, int64_t width, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < width; i += WIDTH) {
        Floats y = load_some_floats(x + i, width - i);
        squares += y * y;
    }
    return 1.0f / std::sqrt(sum_of(squares) / width + eps);
}

// Return lanes * weight as type T. The product of an fp32 weight is rounded once.
template <class T>
static inline Floats weighted(Floats lanes, const void* weight, int64_t first, int64_t count, bool is_fp32) {
    if (is_fp32) return rounded_to<T>(lanes * load_some_floats((const float*)weight + first, count));
    return rounded_to<T>(rounded_to<T>(lanes) * load_some_floats((const T*)weight + first, count));
}

// Pass the head at x, normalised and rotated if wanted, to put(dimension, lanes, count) in pieces.
template <class T, class F>
static inline void rotated(const T* x, const void* norm, const Placement& p, const float* cos_sin, F put) {
    const int64_t dim = p.head_dim, half = dim / 2;
    const float inverse = norm ? inverse_norm(x, dim, p.eps) : 1.0f;
    for (int64_t d = 0; d < half; d += WIDTH) {
        const int64_t count = std::min<int64_t>(WIDTH, half - d);
        Floats first = load_some_floats(x + d, count), second = load_some_floats(x + half + d, count);
        if (norm) {
            first = weighted<T>(first * inverse, norm, d, count, p.norm_is_fp32);
            second = weighted<T>(second * inverse, norm, half + d, count, p.norm_is_fp32);
        }
        if (cos_sin) {
            Floats cosine = load_some_floats(cos_sin + d, count), sine = load_some_floats(cos_sin + half + d, count);
            Floats rotated = first * cosine - second * sine;
            second = second * cosine + first * sine;
            first = rotated;
        }
        put(d, first, count);
        put(half + d, second, count);
    }
}

// Store a head's numbers and its scale.
template <class T, class S>
static inline void quantise(const T* head, int64_t dim, S* numbers, float* scale) {
    f32x16 spoilt = {}, peaks = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 lanes = load(head + d);
        peaks = larger(magnitude(lanes), peaks);
        spoilt += lanes * 0.0f;  // NaN if a value is not finite
    }
    const float peak = reduced(peaks, larger), inverse = LARGEST<S> / std::max(peak, SMALLEST_PEAK);
    *scale = peak / LARGEST<S> + sum_of(spoilt);
    for (int64_t d = 0; d < dim; d += LANES) store(numbers + d, load(head + d) * inverse);
}

template <class T, class S>
static void place_token(const Placement& p, int64_t token) {
    const int64_t dim = p.head_dim, row_bytes = stored_bytes<S>(p.block_size, dim);
    const float* cos_sin = p.cos_sin ? p.cos_sin + p.positions[token] * dim : nullptr;
    for (int64_t head = 0; head < p.num_heads; head++) {
        T* q = (T*)p.q + token * p.q_stride + head * dim;
        // In place: each piece is read before it is written, and the norm reads all of them first.
        rotated(q, p.q_norm, p, cos_sin,
               [&](int64_t d, Floats lanes, int64_t count) { store_some_floats(q + d, lanes, count); });
    }
    const int64_t slot = p.slots[token];
    if (slot < 0) return;  // padding
    const int64_t offset = slot % p.block_size;
    T rotated_key[MAX_HEAD_DIM];
    S numbers[MAX_HEAD_DIM];
    for (int64_t head = 0; head < p.num_kv_heads; head++) {
        const T *k = (const T*)p.k + token * p.k_stride + head * dim, *v = (const T*)p.v + token * p.v_stride + head * dim;
        char* key_row = (char*)p.pool + (slot / p.block_size * 2 * p.num_kv_heads + head) * row_bytes;
        S *keys = (S*)key_row, *values = (S*)(key_row + p.num_kv_heads * row_bytes);
        rotated(k, p.k_norm, p, cos_sin,
               [&](int64_t d, Floats lanes, int64_t count) { store_some_floats(rotated_key + d, lanes, count); });
        if constexpr (QUANTISED<S>) {
            quantise(rotated_key, dim, numbers, (float*)(keys + p.block_size * dim) + offset);
            quantise(v, dim, values + offset * dim, (float*)(values + p.block_size * dim) + offset);
        } else {
            memcpy(numbers, rotated_key, dim * sizeof(T));
            values += offset / TOGETHER<S> * TOGETHER<S> * dim + offset % TOGETHER<S>;
            for (int64_t d = 0; d < dim; d++) values[d * TOGETHER<S>] = v[d];
        }
        keys += offset / LANES * LANES * dim + offset % LANES * TOGETHER<S>;
        for (int64_t d = 0; d < dim; d += TOGETHER<S>) memcpy(keys + d * LANES, numbers + d, TOGETHER<S> * sizeof(S));
    }
}

struct Norm {
    const void* x;
    void* residual;  // null: no residual
    const void* weight;
    void* out;
    int64_t x_stride, residual_stride, out_stride, num_rows, hidden;
    int64_t weight_is_fp32;  // rounds once
    int64_t adds_after;      // out = residual + norm(x), instead of norm(residual = residual + x)
    float eps;
};

template <class T>
static void norm_row(const Norm& n, int64_t row) {
    const T* x = (const T*)n.x + row * n.x_stride;
    T *residual = n.residual ? (T*)n.residual + row * n.residual_stride : nullptr, *out = (T*)n.out + row * n.out_stride;
    const bool adds_before = residual && !n.adds_after;
    Floats squares = {};
    for (int64_t h = 0; h < n.hidden; h += WIDTH) {
        const int64_t count = n.hidden - h;
        Floats y = load_some_floats(x + h, count);
        if (adds_before) {
            y = rounded_to<T>(y + load_some_floats(residual + h, count));
            store_some_floats(residual + h, y, count);
        }
        squares += y * y;
    }
    const float inverse = 1.0f / std::sqrt(sum_of(squares) / n.hidden + n.eps);
    const T* y = adds_before ? residual : x;
    for (int64_t h = 0; h < n.hidden; h += WIDTH) {
        const int64_t count = n.hidden - h;
        Floats normed = weighted<T>(load_some_floats(y + h, count) * inverse, n.weight, h, count, n.weight_is_fp32);
        if (n.adds_after) normed += load_some_floats(residual + h, count);
        store_some_floats(out + h, normed, count);
    }
}

template <class T>
static void silu_mul_row(const SiluMul& s, int64_t row) {
    const T *gate = (const T*)s.gate_up + row * s.gate_up_stride, *up = gate + s.width;
    T* out = (T*)s.out + row * s.out_stride;
    for (int64_t i = 0; i < s.width; i += WIDTH) {
        const int64_t count = s.width - i;
        Floats x = load_some_floats(gate + i, count), power = x * -LOG2_E;
        if (s.is_gelu) power *= (x * x * GELU_CUBE + 1.0f) * GELU_FACTOR;
        power = power > 126.0f ? Floats{} + 126.0f : power;
        store_some_floats(out + i, x / (exp2_of(power) + 1.0f) * load_some_floats(up + i, count), count);
    }
}

struct Scaling {
    void* x;
    int64_t stride, num_rows, width;
    float factor;
};

template <class T>
static void scale_row(const Scaling& s, int64_t row) {
    T* x = (T*)s.x + row * s.stride;
    for (int64_t i = 0; i < s.width; i += WIDTH)
        store_some_floats(x + i, load_some_floats(x + i, s.width - i) * s.factor, s.width - i);
}

struct GreedyTokens {
    const void* logits;
    int64_t* tokens;
    bool* is_finite;
    int64_t stride, num_rows, vocab_size;
};

// The first of equals. The token of a row that is not finite is arbitrary.
template <class T>
static void greedy_token_of_row(const GreedyTokens& l, int64_t row) {
    const T* logits = (const T*)l.logits + row * l.stride;
    Floats best = Floats{} - INFINITY, spoilt = {};
    const auto lane = lanes_of(best);
    auto places = lane;
    for (int64_t i = 0; i < l.vocab_size; i += WIDTH) {
        const int32_t count = std::min<int64_t>(WIDTH, l.vocab_size - i);
        Floats some = load_some_floats(logits + i, count);
        spoilt += some * 0.0f;  // NaN if a value is not finite
        auto is_better = some > best;
        if (count < WIDTH) is_better &= lane < count;
        places = is_better ? lane + (int32_t)i : places;
        best = is_better ? some : best;
    }
    int first = 0;
    for (int j = 1; j < WIDTH; j++)
        if (best[j] > best[first] || (best[j] == best[first] && places[j] < places[first])) first = j;
    l.tokens[row] = places[first];
    l.is_finite[row] = sum_of(spoilt) == 0.0f;
}

extern "C" {
void by_place(int is_bf16, int threads, const Placement* p) {
    over_rows(p->num_tokens, (p->num_heads + 2 * p->num_kv_heads) * p->head_dim, threads,
              [&](int64_t token) {
                  stored_as(is_bf16, p->stored, [&](auto element, auto number) {
                      place_token<decltype(element), decltype(number)>(*p, token);
                  });
              });
}
void by_norm(int is_bf16, int threads, const Norm* n) {
    over_rows(n->num_rows, n->hidden, threads,
              [&](int64_t row) { is_bf16 ? norm_row<bf16>(*n, row) : norm_row<float>(*n, row); });
}
void by_silu_mul(int is_bf16, int threads, const SiluMul* s) {
    over_rows(s->num_rows, s->width, threads,
              [&](int64_t row) { is_bf16 ? silu_mul_row<bf16>(*s, row) : silu_mul_row<float>(*s, row); });
}
void by_scale(int is_bf16, int threads, const Scaling* s) {
    over_rows(s->num_rows, s->width, threads,
              [&](int64_t row) { is_bf16 ? scale_row<bf16>(*s, row) : scale_row<float>(*s, row); });
}
void by_greedy_tokens(int is_bf16, int threads, const GreedyTokens* l) {
    over_rows(l->num_rows, l->vocab_size, threads,
              [&](int64_t row) { is_bf16 ? greedy_token_of_row<bf16>(*l, row) : greedy_token_of_row<float>(*l, row); });
}
}
