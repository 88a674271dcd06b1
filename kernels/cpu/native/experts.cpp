// Experts: chooses the experts of each token, and runs their MLPs on gathered rows with the linears of the other files.
//
// A token adds its experts in fp32, in the order of their numbers, so the other tokens of the step change nothing. All
// memory is the caller's and has the same size for any choice, so a call can be recorded.
//
// T tokens, K experts a token, E experts, H hidden size, I intermediate size, R rows of one expert at once.

#include <vector>

#include "lanes.h"

// As in kernels/cpu/library.py. One matrix of each expert.
struct ExpertMatrix {
    const char* weight;    // [E], each as its linear reads it, `bytes` apart
    const int32_t* order;  // [E, inputs], of grouped.cpp. null: columns as they are
    int64_t bytes;
    int64_t bits, depth;  // bits of a number, 0 in full precision; inputs of a chunk of grouped.cpp, 0 for int8.cpp
};

struct Experts {
    const void* x;       // [T, H]
    const void* logits;  // [T, E]
    ExpertMatrix gate_up, down;
    void* out;       // [T, H]
    int32_t* pairs;  // [T, K]: expert of each pair, then [T K]: pairs in the order of experts
    float* weights;  // [T, K]
    void* rows;      // [R, H]
    void* gate_up_rows;  // [R, 2 I]
    void* inner;         // [R, I]
    void* expert_out;    // [R, H]
    float* sums;         // [T, H]
    int64_t x_stride, logits_stride;
    int64_t num_tokens, num_experts, top_k, hidden, width, most_rows, normalizes;
};

extern "C" void by_linear(int is_bf16, int threads, const Linear* l);
extern "C" void by_int8_linear(int is_bf16, int threads, const Linear* l);
extern "C" void by_grouped_linear(int is_bf16, int threads, const GroupedLinear* l);
extern "C" void by_silu_mul(int is_bf16, int threads, const SiluMul* s);

// Write the experts and weights of a token. The largest logit is first, and of equals the first. NaN is never larger
// than a number, and makes all weights NaN.
template <class T>
static void choose(const Experts& e, int64_t token, std::vector<float>& powers) {
    const T* logits = (const T*)e.logits + token * e.logits_stride;
    int32_t* experts = e.pairs + token * e.top_k;
    float* weights = e.weights + token * e.top_k;
    float largest = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < e.num_experts; i++) {
        powers[i] = load_some_floats(logits + i, 1)[0];
        largest = powers[i] > largest ? powers[i] : largest;
    }
    for (int64_t i = 0; i < e.num_experts; i++) {
        const float logit = powers[i];
        total += std::exp(logit - largest);
        powers[i] = logit == logit ? logit : -INFINITY;
    }
    float chosen = 0.0f;
    for (int64_t k = 0; k < e.top_k; k++) {
        int64_t best = -1;
        for (int64_t i = 0; i < e.num_experts; i++) {
            bool is_taken = false;
            for (int64_t j = 0; j < k; j++) is_taken |= experts[j] == i;
            if (!is_taken && (best < 0 || powers[i] > powers[best])) best = i;
        }
        experts[k] = best;
        weights[k] = std::exp(powers[best] - largest);
        chosen += weights[k];
    }
    const float divisor = e.normalizes ? chosen + 0.0f * total : total;  // NaN where a logit is NaN
    for (int64_t k = 0; k < e.top_k; k++) weights[k] /= divisor;
}

template <class T>
static void add_row(const Experts& e, int64_t row, int32_t pair) {
    const T* from = (const T*)e.expert_out + row * e.hidden;
    float* to = e.sums + pair / e.top_k * e.hidden;
    for (int64_t i = 0; i < e.hidden; i += WIDTH) {
        const int64_t count = e.hidden - i;
        const Floats product = load_some_floats(from + i, count) * e.weights[pair];
        store_some_floats(to + i, load_some_floats(to + i, count) + product, count);
    }
}

// Compute a linear of one expert, whose weight is not set yet.
template <class T>
static void multiply(const ExpertMatrix& matrix, int64_t expert, Linear l, int threads) {
    constexpr bool IS_BF16 = sizeof(T) == 2;
    l.weight = matrix.weight + expert * matrix.bytes;
    if (!matrix.depth) return (matrix.bits ? by_int8_linear : by_linear)(IS_BF16, threads, &l);
    const int32_t* order = matrix.order ? matrix.order + expert * l.num_inputs : nullptr;
    const GroupedLinear grouped{.linear = l, .order = order, .bits = matrix.bits, .depth = matrix.depth, .input_bits = 16};
    by_grouped_linear(IS_BF16, threads, &grouped);
}

// Run one expert on as many rows as there is memory for, and add what it returns.
template <class T>
static void run(const Experts& e, int64_t expert, const int32_t* pairs, int64_t num_rows, int threads) {
    for (int64_t row = 0; row < num_rows; row++)
        memcpy((T*)e.rows + row * e.hidden, (const T*)e.x + pairs[row] / e.top_k * e.x_stride, e.hidden * sizeof(T));
    const Linear gate_up{.x = e.rows,
                         .out = e.gate_up_rows,
                         .x_stride = e.hidden,
                         .out_stride = 2 * e.width,
                         .num_rows = num_rows,
                         .num_inputs = e.hidden,
                         .num_outputs = 2 * e.width};
    multiply<T>(e.gate_up, expert, gate_up, threads);
    const SiluMul silu_mul{.gate_up = e.gate_up_rows,
                           .out = e.inner,
                           .gate_up_stride = 2 * e.width,
                           .out_stride = e.width,
                           .num_rows = num_rows,
                           .width = e.width};
    by_silu_mul(sizeof(T) == 2, threads, &silu_mul);
    const Linear down{.x = e.inner,
                      .out = e.expert_out,
                      .x_stride = e.width,
                      .out_stride = e.hidden,
                      .num_rows = num_rows,
                      .num_inputs = e.width,
                      .num_outputs = e.hidden};
    multiply<T>(e.down, expert, down, threads);
    for (int64_t row = 0; row < num_rows; row++) add_row<T>(e, row, pairs[row]);
}

template <class T>
static void experts(const Experts& e, int threads) {
    const int64_t num_pairs = e.num_tokens * e.top_k;
    std::vector<float> powers(e.num_experts);
    std::vector<int64_t> starts(e.num_experts + 1);
    for (int64_t token = 0; token < e.num_tokens; token++) choose<T>(e, token, powers);
    for (int64_t pair = 0; pair < num_pairs; pair++) starts[e.pairs[pair] + 1]++;
    for (int64_t i = 0; i < e.num_experts; i++) starts[i + 1] += starts[i];
    int32_t* sorted = e.pairs + num_pairs;
    std::vector<int64_t> next(starts);
    for (int64_t pair = 0; pair < num_pairs; pair++) sorted[next[e.pairs[pair]]++] = pair;
    std::fill_n(e.sums, e.num_tokens * e.hidden, 0.0f);
    for (int64_t expert = 0; expert < e.num_experts; expert++)
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += e.most_rows)
            run<T>(e, expert, sorted + first, std::min(e.most_rows, starts[expert + 1] - first), threads);
    for (int64_t i = 0; i < e.num_tokens * e.hidden; i += WIDTH) {
        const int64_t count = e.num_tokens * e.hidden - i;
        store_some_floats((T*)e.out + i, load_some_floats(e.sums + i, count), count);
    }
}

extern "C" void by_experts(int is_bf16, int threads, const Experts* e) {
    is_bf16 ? experts<bf16>(*e, threads) : experts<float>(*e, threads);
}
