// Linear layers with weights of 4 or 8 bits in groups of inputs, for AVX-512 VNNI or AVX2. Activations have 16 bits, or 8
// where linears in int8 are asked for.
//
// w = (number - zero) * scale, with numbers without a sign. Groups are cut into chunks of at most 128 inputs. Within a
// chunk a row is x = (256 high + low) * its scale, whose bytes are multiplied with the weights one after the other. The
// largest magnitude becomes 127 * 256. So an input is off by at most 2^-16 of the largest in its chunk, 1/128 of what
// bf16 rounds off that one. Sums of a chunk are exact 32-bit integers: at most 128 * 255 * 32512 < 2^31. So a row's
// result does not depend on the rest of the batch, or on the instruction set. In 8 bits a row has no `low`, and the
// largest magnitude becomes 127. That halves the multiplications.
//
// With 16 bits one instruction multiplies 32 numbers, as many as in bf16. On Zen 4 vpdpbusd, vpdpwssd and vdpbf16ps all
// start once a cycle. So where many rows share what is read, 4 bits gain little over bf16, and weights that are unpacked
// to bf16 first would gain nothing.
//
// For 16 outputs, a weight has its numbers, then 16 scales (fp32) of each chunk, then 16 zeros (bytes) of each, then
// padding to a line. A line is 64 bytes: with 8 bits 4 inputs of each output, with 4 bits 8 inputs, of which the first 4
// lie in the low halves of the bytes. AVX2 multiplies bytes to sums in 16 bits. Halves of bytes cannot overflow those,
// so 8 bits are computed as two halves.
//
// T tokens, I input size, O output size.

#include <vector>

#include "lanes.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)

#include <immintrin.h>

namespace {

constexpr int LINE = 64;          // bytes
// The largest magnitude of an input, in 16 bits if it is WIDE and else in 8.
template <bool WIDE>
constexpr float MOST = WIDE ? 127 * 256 : 127;
constexpr float LEAST = 1e-30f;    // a chunk with no larger input counts as zeros

#ifdef __AVX512VNNI__
using Bytes = __m512i;
constexpr int ROWS = 2, GROUPS = 4;
// Groups that several rows take at once. With four, gcc keeps the sums of WIDE inputs in memory.
template <bool WIDE>
constexpr int GROUPS_OF_ROWS = WIDE ? 2 : 4;
static inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes four_of(const int8_t* p) { return _mm512_set1_epi32(read<int>(p)); }
static inline Bytes low_half(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline Bytes high_half(Bytes v) { return low_half(_mm512_srli_epi16(v, 4)); }
template <int BITS>
static inline Bytes dot(Bytes sum, Bytes weights, Bytes x) {
    return _mm512_dpbusd_epi32(sum, weights, x);
}
#else
using Bytes = __m256i;
constexpr int ROWS = 2, GROUPS = 1;
template <bool>
constexpr int GROUPS_OF_ROWS = 1;
static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Bytes four_of(const int8_t* p) { return _mm256_set1_epi32(read<int>(p)); }
static inline Bytes low_half(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
static inline Bytes high_half(Bytes v) { return low_half(_mm256_srli_epi16(v, 4)); }
static inline Bytes dot_of_halves(Bytes sum, Bytes weights, Bytes x, int times) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(times)));
}
template <int BITS>
static inline Bytes dot(Bytes sum, Bytes weights, Bytes x) {
    if constexpr (BITS == 4) return dot_of_halves(sum, weights, x, 1);
    return dot_of_halves(dot_of_halves(sum, low_half(weights), x, 1), high_half(weights), x, 16);
}
#endif
constexpr int PARTS_OF_LINE = LINE / sizeof(Bytes);

// A row's inputs. `high` and `low` are [I], the others have a number for each chunk. In 8 bits `low` is not used.
struct Row {
    int8_t *high, *low;
    float* scale;
    int32_t* sum;  // of its inputs as whole numbers
};

// Memory for the rows of a call, kept, because a step needs it a hundred times.
struct Rows {
    std::vector<int8_t> bytes;
    std::vector<float> scales;
    std::vector<int32_t> sums;
    int64_t inputs = 0, chunks = 0;

    void resize(int64_t rows, int64_t num_inputs, int64_t num_chunks) {
        inputs = num_inputs, chunks = num_chunks;
        bytes.resize(std::max<size_t>(bytes.size(), 2 * rows * inputs));
        scales.resize(std::max<size_t>(scales.size(), rows * chunks));
        sums.resize(std::max<size_t>(sums.size(), rows * chunks));
    }
    Row operator[](int64_t row) {
        int8_t* high = bytes.data() + 2 * row * inputs;
        return {high, high + inputs, scales.data() + row * chunks, sums.data() + row * chunks};
    }
};

// Write the chunk `c` of a row. A value that is not finite makes the scale NaN, and so the result.
template <bool WIDE>
static void quantise_chunk(const float* x, Row row, int64_t c, int64_t depth) {
    f32x16 highest = {}, finite = {};
    for (int64_t i = 0; i < depth; i += LANES) {
        f32x16 y = load_some(x + i, depth - i);
        highest = larger(magnitude(y), highest);
        finite += y * 0.0f;
    }
    const float most = reduced(highest, larger);
    row.scale[c] = most / MOST<WIDE> + sum_of(finite);
    const float inverse = most > LEAST && row.scale[c] == row.scale[c] ? MOST<WIDE> / most : 0.0f;
    u32x16 sum = {};
    for (int64_t i = 0; i < depth; i += LANES) {
        f32x16 y = load_some(x + i, depth - i);
        y = inverse > 0.0f ? whole(y * inverse) : f32x16{};
        const i32x16 number = __builtin_convertvector(y, i32x16), high = WIDE ? (number + 128) >> 8 : number;
        const i8x16 bytes[] = {__builtin_convertvector(high, i8x16), __builtin_convertvector(number - high * 256, i8x16)};
        const int64_t count = std::min<int64_t>(LANES, depth - i);
        memcpy(row.high + c * depth + i, &bytes[0], count);
        if (WIDE) memcpy(row.low + c * depth + i, &bytes[1], count);
        sum += (u32x16)number;
    }
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += (int32_t)sum[lane];
    row.sum[c] = total;
}

template <bool WIDE, class T>
static void quantise(const T* x, const int32_t* order, Row row, int64_t inputs, int64_t depth) {
    float chunk[128];
    for (int64_t c = 0; c < inputs / depth; c++) {
        if (order) {
            for (int64_t i = 0; i < depth; i++) {
                T one[LANES] = {x[order[c * depth + i]]};
                chunk[i] = load(one)[0];
            }
        } else {
            for (int64_t i = 0; i < depth; i += LANES)
                store_some(chunk + i, load_some(x + c * depth + i, depth - i), depth - i);
        }
        quantise_chunk<WIDE>(chunk, row, c, depth);
    }
}

// Where the parts of a weight lie, in bytes.
template <int BITS>
struct Layout {
    static constexpr int TOGETHER = 32 / BITS;  // inputs of a line
    int64_t chunks, depth, scales, zeros, group;

    Layout(int64_t inputs, int64_t depth) : chunks(inputs / depth), depth(depth) {
        scales = inputs / TOGETHER * LINE;
        zeros = scales + chunks * LINE;
        group = (zeros + chunks * LANES + LINE - 1) / LINE * LINE;
    }
};

// Add the products of one chunk of R rows and G groups to their sums.
template <int BITS, bool WIDE, int R, int G>
static inline void add_chunk(const Layout<BITS>& at, const Row (&rows)[R], const uint8_t* weight, int64_t c, f32x16 (&sums)[R][G]) {
    constexpr int TOGETHER = Layout<BITS>::TOGETHER, FOURS = TOGETHER / 4;
    Bytes high[R][G][PARTS_OF_LINE] = {}, low[R][G][PARTS_OF_LINE] = {};
    const uint8_t* lines = weight + c * at.depth / TOGETHER * LINE;
    for (int64_t i = 0; i < at.depth; i += TOGETHER) {
        const uint8_t* line = lines + i / TOGETHER * LINE;
        for (int part = 0; part < PARTS_OF_LINE; part++) {
            Bytes numbers[G][FOURS];
            for (int g = 0; g < G; g++) {
                const Bytes all = load_bytes(line + g * at.group + part * sizeof(Bytes));
                numbers[g][0] = BITS == 4 ? low_half(all) : all;
                if (BITS == 4) numbers[g][FOURS - 1] = high_half(all);
            }
            for (int r = 0; r < R; r++)
                for (int four = 0; four < FOURS; four++) {
                    const int64_t input = c * at.depth + i + four * 4;
                    const Bytes x_high = four_of(rows[r].high + input), x_low = four_of(rows[r].low + input);
                    for (int g = 0; g < G; g++) {
                        high[r][g][part] = dot<BITS>(high[r][g][part], numbers[g][four], x_high);
                        if (WIDE) low[r][g][part] = dot<BITS>(low[r][g][part], numbers[g][four], x_low);
                    }
                }
        }
    }
    for (int g = 0; g < G; g++) {
        const uint8_t* group = weight + g * at.group;
        const f32x16 scale = load((const float*)(group + at.scales + c * LINE));
        const u32x16 zero = widened(read<u8x16>(group + at.zeros + c * LANES));
        for (int r = 0; r < R; r++) {
            // Element by element: with the address of an array taken, gcc would keep it in memory.
            Bytes sums_of[2][PARTS_OF_LINE];
            for (int part = 0; part < PARTS_OF_LINE; part++) {
                sums_of[0][part] = high[r][g][part];
                sums_of[1][part] = low[r][g][part];
            }
            u32x16 sum = read<u32x16>(sums_of[0]);
            if (WIDE) sum = (sum << 8) + read<u32x16>(sums_of[1]);
            sum -= zero * (uint32_t)rows[r].sum[c];
            sums[r][g] += __builtin_convertvector((i32x16)sum, f32x16) * (scale * rows[r].scale[c]);
        }
    }
}

template <class T, int BITS, bool WIDE, int R, int G>
static inline void multiply(const Linear& l, const Layout<BITS>& at, Rows& all, int64_t row, int64_t group) {
    Row rows[R];
    for (int r = 0; r < R; r++) rows[r] = all[row + r];
    f32x16 sums[R][G] = {};
    const uint8_t* weight = (const uint8_t*)l.weight + group * at.group;
    for (int64_t c = 0; c < at.chunks; c++) add_chunk<BITS, WIDE, R, G>(at, rows, weight, c, sums);
    for (int g = 0; g < G; g++) {
        const int64_t output = (group + g) * LANES;
        const f32x16 bias = l.bias ? load((const T*)l.bias + output) : f32x16{};
        for (int r = 0; r < R; r++) store((T*)l.out + (row + r) * l.out_stride + output, sums[r][g] + bias);
    }
}

template <class T, int BITS, bool WIDE>
static void linear(const GroupedLinear& grouped, int threads) {
    const Linear& l = grouped.linear;
    const Layout<BITS> at(l.num_inputs, grouped.depth);
    static thread_local Rows kept;
    kept.resize(l.num_rows, l.num_inputs, at.chunks);
    Rows& rows = kept;  // of this thread, for all of its team
    const int64_t num_groups = l.num_outputs / LANES;
#pragma omp parallel num_threads(threads) if (l.num_inputs * l.num_outputs >= PARALLEL_WEIGHTS)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < l.num_rows; row++)
            quantise<WIDE>((const T*)l.x + row * l.x_stride, grouped.order, rows[row], l.num_inputs, grouped.depth);
        // Dynamic: a thread on a core that is busy with another program leaves items to the others.
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < num_groups; first += GROUPS) {
            const int few = std::min<int64_t>(GROUPS, num_groups - first);
            if (l.num_rows == 1)
                in_tiles<GROUPS>(few, [&](int g, auto groups) { multiply<T, BITS, WIDE, 1, groups>(l, at, rows, 0, first + g); });
            else
                in_tiles<GROUPS_OF_ROWS<WIDE>>(few, [&](int g, auto groups) {
                    in_tiles<ROWS>(l.num_rows, [&](int row, auto some) {
                        multiply<T, BITS, WIDE, some, groups>(l, at, rows, row, first + g);
                    });
                });
        }
    }
}

}  // namespace

extern "C" void by_grouped_linear(int is_bf16, int threads, const GroupedLinear* l) {
    auto with = [&](auto element, auto is_wide) {
        using T = decltype(element);
        l->bits == 4 ? linear<T, 4, is_wide>(*l, threads) : linear<T, 8, is_wide>(*l, threads);
    };
    auto of = [&](auto element) { l->input_bits == 16 ? with(element, std::true_type()) : with(element, std::false_type()); };
    is_bf16 ? of(bf16()) : of(float());
}
#else
extern "C" void by_grouped_linear(int, int, const GroupedLinear*) {}
#endif
