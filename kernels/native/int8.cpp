// Linear layers with weights and activations in 8 bits, for AVX-512 VNNI: by its own scale each row and each output.
//
// Sums are whole numbers in 32 bits, exact in any order, so a row's result does not depend on what else is in the batch.
// A weight is [O / 16, I / 4 + 2, 64] bytes: of 16 outputs, 4 inputs of each side by side, then their 16 scales (fp32)
// and 16 corrections (int32). The instruction multiplies unsigned by signed bytes: activations are raised by 128, and the
// correction takes 128 times the sum of the weights off again.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#ifdef __AVX512VNNI__

constexpr int ROWS = 4;
constexpr int GROUPS = 4;
constexpr int LINE = 64;  // bytes

// Raised by 128 into q, and the scale. What is not finite makes the scale NaN, and so the row's result.
template <class T>
static float quantise(const T* x, uint8_t* q, int64_t width) {
    f32x16 highest = {}, finite = {};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 y = load_some(x + i, width - i);
        highest = larger(y < 0.0f ? -y : y, highest);
        finite += y * 0.0f;
    }
    const float most = reduced(highest, larger), scale = most / 127.0f + sum_of(finite);
    const float inverse = most > 0.0f && scale == scale ? 127.0f / most : 0.0f;
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 y = load_some(x + i, width - i) * inverse + 128.5f;  // rounds to the nearest by cutting off
        y = larger(y == y ? y : f32x16{} + 128.0f, f32x16{} + 1.0f);
        __m128i bytes = _mm512_cvtusepi32_epi8((__m512i)__builtin_convertvector(y, i32x16));
        memcpy(q + i, &bytes, std::min<int64_t>(LANES, width - i));
    }
    return scale;
}

template <class T, int R, int G>
static inline void multiply(const Linear& l, const uint8_t* q, const float* scales, int64_t row, int64_t group) {
    const int64_t lines = l.num_inputs / 4, group_bytes = (lines + 2) * LINE;
    const int8_t* weight = (const int8_t*)l.weight + group * group_bytes;
    __m512i sums[R][G] = {};
    for (int64_t k = 0; k < lines; k++) {
        __m512i values[G];
        for (int g = 0; g < G; g++) values[g] = _mm512_loadu_si512(weight + g * group_bytes + k * LINE);
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, q + (row + r) * l.num_inputs + k * 4, 4);
            for (int g = 0; g < G; g++) sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], _mm512_set1_epi32(four), values[g]);
        }
    }
    for (int g = 0; g < G; g++) {
        i32x16 correction;
        const int8_t* tail = weight + g * group_bytes + lines * LINE;
        const f32x16 scale = load((const float*)tail);
        memcpy(&correction, tail + LINE, LINE);
        const int64_t output = (group + g) * LANES;
        const f32x16 bias = l.bias ? load((const T*)l.bias + output) : f32x16{};
        for (int r = 0; r < R; r++) {
            f32x16 sum = __builtin_convertvector((i32x16)sums[r][g] - correction, f32x16);
            store((T*)l.out + (row + r) * l.out_stride + output, sum * scale * scales[row + r] + bias);
        }
    }
}

template <class T>
static void linear(const Linear& l, int threads) {
    std::vector<uint8_t> q(l.num_rows * l.num_inputs);
    std::vector<float> scales(l.num_rows);
    const int num_groups = l.num_outputs / LANES;
#pragma omp parallel num_threads(threads) if (l.num_inputs * l.num_outputs >= PARALLEL_WEIGHTS)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < l.num_rows; row++)
            scales[row] = quantise((const T*)l.x + row * l.x_stride, q.data() + row * l.num_inputs, l.num_inputs);
#pragma omp for schedule(static)
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
