// Linear layers with weights and activations in 8 bits, for AVX-512 VNNI or AVX2. Each row and each output has a scale
// of its own.
//
// Sums are exact 32-bit integers in any order. So a row's result does not depend on the rest of the batch, or on which
// of the two instruction sets computes it. A weight is [O / 16, I / 4 + 2, 64] bytes. For 16 outputs it has 4 inputs of
// each side by side, then their 16 scales (fp32) and 16 corrections (int32). VNNI multiplies unsigned by signed bytes.
// So activations are raised by 128, and the correction subtracts 128 times the sum of the weights. AVX2 adds products
// of bytes in 16 bits, which may overflow. There both are widened to 16 bits first, weights once for all rows of a
// tile.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)

#include <immintrin.h>

constexpr int LINE = 64;  // bytes
#ifdef __AVX512VNNI__
constexpr int ROWS = 4;
constexpr int GROUPS = 4;
using Activation = uint8_t;
#else
constexpr int ROWS = 2;  // 8 registers of sums, 4 of weights, 2 of activations
constexpr int GROUPS = 1;
using Activation = int16_t;
#endif

// Write a row, in 8 bits and raised by 128, into q, and return its scale. A value that is not finite makes the scale
// NaN, and so the result.
template <class T>
static float quantise(const T* x, Activation* q, int64_t width) {
    f32x16 highest = {}, finite = {};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 y = load_some(x + i, width - i);
        highest = larger(y < 0.0f ? -y : y, highest);
        finite += y * 0.0f;
    }
    const float most = reduced(highest, larger), scale = most / 127.0f + sum_of(finite);
    const float inverse = most > 0.0f && scale == scale ? 127.0f / most : 0.0f;
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 y = load_some(x + i, width - i) * inverse + 128.5f;  // truncation rounds to the nearest
        y = larger(y == y ? y : f32x16{} + 128.0f, f32x16{} + 1.0f);
        y = y < 255.0f ? y : f32x16{} + 255.0f;  // also where the inverse is infinite
        i32x16 raised = __builtin_convertvector(y, i32x16);
        Activation some[LANES];
        for (int lane = 0; lane < LANES; lane++) some[lane] = raised[lane];
        memcpy(q + i, some, std::min<int64_t>(LANES, width - i) * sizeof(Activation));
    }
    return scale;
}

// Compute the sums of R rows and G groups of outputs. A line holds four inputs of each group.
#ifdef __AVX512VNNI__
template <int R, int G>
static inline void add_up(const uint8_t* q, int64_t num_inputs, const int8_t* weight, int64_t group_bytes, i32x16 (&result)[R][G]) {
    __m512i sums[R][G] = {};
    for (int64_t k = 0; k < num_inputs / 4; k++) {
        __m512i values[G];
        for (int g = 0; g < G; g++) {
            values[g] = _mm512_loadu_si512(weight + g * group_bytes + k * LINE);
            asm("" : "+v"(values[g]));  // in a register: gcc would load it again for each row
        }
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, q + r * num_inputs + k * 4, 4);
            for (int g = 0; g < G; g++) sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], _mm512_set1_epi32(four), values[g]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) result[r][g] = (i32x16)sums[r][g];
}
#else
template <int R, int G>
static inline void add_up(const int16_t* q, int64_t num_inputs, const int8_t* weight, int64_t group_bytes, i32x16 (&result)[R][G]) {
    constexpr int PARTS = LINE / 16;  // registers of a line, with four outputs each, of which every register has two sums
    for (int g = 0; g < G; g++) {
        __m256i sums[R][PARTS] = {};
        for (int64_t k = 0; k < num_inputs / 4; k++) {
            const int8_t* line = weight + g * group_bytes + k * LINE;
            __m256i values[PARTS];
            for (int part = 0; part < PARTS; part++)
                values[part] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(line + part * 16)));
            for (int r = 0; r < R; r++) {
                int64_t four;
                memcpy(&four, q + r * num_inputs + k * 4, 8);
                for (int part = 0; part < PARTS; part++)
                    sums[r][part] = _mm256_add_epi32(sums[r][part], _mm256_madd_epi16(_mm256_set1_epi64x(four), values[part]));
            }
        }
        for (int r = 0; r < R; r++) {
            int32_t halves[2 * LANES];
            memcpy(halves, sums[r], sizeof halves);
            for (int output = 0; output < LANES; output++) result[r][g][output] = halves[2 * output] + halves[2 * output + 1];
        }
    }
}
#endif

template <class T, int R, int G>
static inline void multiply(const Linear& l, const Activation* q, const float* scales, int64_t row, int64_t group) {
    const int64_t lines = l.num_inputs / 4, group_bytes = (lines + 2) * LINE;
    const int8_t* weight = (const int8_t*)l.weight + group * group_bytes;
    i32x16 sums[R][G];
    add_up(q + row * l.num_inputs, l.num_inputs, weight, group_bytes, sums);
    for (int g = 0; g < G; g++) {
        i32x16 correction;
        const int8_t* tail = weight + g * group_bytes + lines * LINE;
        const f32x16 scale = load((const float*)tail);
        memcpy(&correction, tail + LINE, LINE);
        const int64_t output = (group + g) * LANES;
        const f32x16 bias = l.bias ? load((const T*)l.bias + output) : f32x16{};
        for (int r = 0; r < R; r++) {
            f32x16 sum = __builtin_convertvector(sums[r][g] - correction, f32x16);
            store((T*)l.out + (row + r) * l.out_stride + output, sum * scale * scales[row + r] + bias);
        }
    }
}

template <class T>
static void linear(const Linear& l, int threads) {
    std::vector<Activation> q(l.num_rows * l.num_inputs);
    std::vector<float> scales(l.num_rows);
    const int num_groups = l.num_outputs / LANES;
#pragma omp parallel num_threads(threads) if (l.num_inputs * l.num_outputs >= PARALLEL_WEIGHTS)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < l.num_rows; row++)
            scales[row] = quantise((const T*)l.x + row * l.x_stride, q.data() + row * l.num_inputs, l.num_inputs);
#pragma omp for schedule(dynamic, 4 / GROUPS)
        for (int first = 0; first < num_groups; first += GROUPS)
            in_tiles<GROUPS>(std::min(GROUPS, num_groups - first), [&](int g, auto groups) {
                in_tiles<ROWS>(l.num_rows, [&](int row, auto rows) {
                    multiply<T, rows, groups>(l, q.data(), scales.data(), row, first + g);
                });
            });
    }
}

extern "C" int by_has_int8() { return 1; }
extern "C" void by_int8_linear(int is_bf16, int threads, const Linear* l) {
    is_bf16 ? linear<bf16>(*l, threads) : linear<float>(*l, threads);
}
#else
extern "C" int by_has_int8() { return 0; }
extern "C" void by_int8_linear(int, int, const Linear*) {}
#endif
