// Vectors of 16 floats: loaded from fp32, bf16, int8 or e4m3, computed in fp32, stored rounded to the nearest even.
//
// A vector is one AVX-512 register, two of AVX2, four of NEON. gcc's vector types leave that to the compiler. Only
// conversions are explicit that gcc would do number by number where AVX-512 has one instruction. Sums that should stay
// in registers are `Floats`, which AVX-512 and AVX2 hold in one register: gcc puts vectors of two registers in memory.
// Compiled without -ffast-math, so NaN stays NaN and reaches the sampler, which fails the row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using i16x16 = int16_t __attribute__((vector_size(32)));
using i8x16 = int8_t __attribute__((vector_size(16)));
using u8x16 = uint8_t __attribute__((vector_size(16)));
struct bf16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};

// Whether stored numbers have 8 bits and are multiplied by a scale.
template <class S>
constexpr bool QUANTISED = sizeof(S) == 1;
// The largest magnitude of a stored number.
template <class S>
constexpr float LARGEST = std::is_same_v<S, e4m3> ? 448.0f : 127.0f;

constexpr int LANES = 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = LANES;
#endif
constexpr int PARTS = LANES / WIDTH;
using Floats = float __attribute__((vector_size(4 * WIDTH)));
using Words = uint32_t __attribute__((vector_size(4 * WIDTH)));
constexpr float LOG2_E = 1.44269504f;

// How many numbers lie side by side to be multiplied and added in one go: two for bf16.
template <class S>
constexpr int TOGETHER = std::is_same_v<S, bf16> ? 2 : 1;
// The type of the other factor: bf16 only where an instruction multiplies it.
#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif
template <class S>
using Input = std::conditional_t<MULTIPLIES_BF16 && std::is_same_v<S, bf16>, bf16, float>;

template <class V>
static inline V read(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// One instruction of AVX-512 each. gcc 12 would go by halves, and from 8 bits number by number.
#ifdef __AVX512F__
static inline u32x16 widened(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
static inline i32x16 widened(i8x16 v) { return (i32x16)_mm512_cvtepi8_epi32((__m128i)v); }
static inline u32x16 widened(u8x16 v) { return (u32x16)_mm512_cvtepu8_epi32((__m128i)v); }
#else
static inline u32x16 widened(u16x16 v) { return __builtin_convertvector(v, u32x16); }
static inline i32x16 widened(i8x16 v) {
    return __builtin_convertvector(__builtin_convertvector(v, i16x16), i32x16);
}
static inline u32x16 widened(u8x16 v) { return (u32x16)widened((i8x16)v) & 255u; }
#endif

static inline f32x16 load(const float* p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline f32x16 load(const bf16* p) {
    u16x16 half;
    memcpy(&half, p, sizeof half);
    return (f32x16)(widened(half) << 16);
}
static inline f32x16 load(const int8_t* p) {
    i8x16 numbers;
    memcpy(&numbers, p, sizeof numbers);
    return __builtin_convertvector(widened(numbers), f32x16);
}
// Return the numbers of e4m3 bits, which were widened with their sign. Read as those of an fp32, exponent and mantissa
// are 2^120 times too small.
template <class F, class U>
static inline F from_e4m3(U bits) {
    return (F)(bits << 20 & 0x87f00000u) * 0x1p120f;
}
static inline f32x16 load(const e4m3* p) {
    i8x16 numbers;
    memcpy(&numbers, p, sizeof numbers);
    return from_e4m3<f32x16>((u32x16)widened(numbers));
}
static inline void store(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }
// Round the bits of fp32 numbers to bf16. NaN, where `is_nan`, stays NaN.
template <class U, class M>
static inline U rounded_to_bf16(U bits, M is_nan) {
    U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return is_nan ? U{} + 0x7fc0u : rounded;
}
static inline void store(bf16* p, f32x16 v) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
    u16x16 half = __builtin_convertvector(rounded_to_bf16((u32x16)v, v != v), u16x16);
#endif
    memcpy(p, &half, sizeof half);
}
// The numbers of one register.
#if defined(__AVX2__) && !defined(__AVX512F__)
static inline Floats load_floats(const float* p) { return (Floats)_mm256_loadu_ps(p); }
static inline Floats load_floats(const bf16* p) {
    return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
}
static inline Floats load_floats(const int8_t* p) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
}
static inline Floats load_floats(const e4m3* p) {
    return from_e4m3<Floats>((Words)_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
}
static inline void store_floats(float* p, Floats v) { memcpy(p, &v, sizeof v); }
static inline void store_floats(bf16* p, Floats v) {
    const __m256i words = (__m256i)rounded_to_bf16((Words)v, v != v);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(halves));
}
#else
template <class S>
static inline Floats load_floats(const S* p) {
    return load(p);
}
template <class S>
static inline void store_floats(S* p, Floats v) {
    store(p, v);
}
#endif
// The first `count` of a register. The others are 0, and are not stored.
template <class T>
static inline Floats load_some_floats(const T* p, int64_t count) {
    if (count >= WIDTH) return load_floats(p);
    T part[WIDTH] = {};
    memcpy(part, p, count * sizeof(T));
    return load_floats(part);
}
template <class T>
static inline void store_some_floats(T* p, Floats v, int64_t count) {
    if (count >= WIDTH) return store_floats(p, v);
    T part[WIDTH];
    store_floats(part, v);
    memcpy(p, part, count * sizeof(T));
}
// Round to whole numbers below 2^22, ties to even.
static inline f32x16 whole(f32x16 v) { return (v + 0x1.8p23f) - 0x1.8p23f; }
static inline f32x16 magnitude(f32x16 v) { return (f32x16)((i32x16)v & 0x7fffffff); }
static inline void store(int8_t* p, f32x16 v) {
    i16x16 wide = __builtin_convertvector(__builtin_convertvector(whole(v), i32x16), i16x16);
    i8x16 numbers = __builtin_convertvector(wide, i8x16);
    memcpy(p, &numbers, sizeof numbers);
}
// From 2^-6 on, a number is 8 to 16 steps of 2^(exponent - 3), and below it 0 to 8 steps of 2^-9. The number of steps
// is added to the exponent's code.
static inline void store(e4m3* p, f32x16 v) {
    i32x16 bits = (i32x16)v, exponent = (bits >> 23 & 0xff) - 127;
    exponent = exponent < -6 ? i32x16{} - 6 : exponent;
    f32x16 steps = whole(magnitude(v) * (f32x16)((130 - exponent) << 23));
    i32x16 number = ((exponent + 6) << 3) + __builtin_convertvector(steps, i32x16);
    u16x16 wide = __builtin_convertvector(number | (bits >> 24 & 0x80), u16x16);
    u8x16 numbers = __builtin_convertvector(wide, u8x16);
    memcpy(p, &numbers, sizeof numbers);
}
// The first `count` lanes. The others are 0, and are not stored.
template <class T>
static inline f32x16 load_some(const T* p, int64_t count) {
    if (count >= LANES) return load(p);
    T part[LANES] = {};
    memcpy(part, p, count * sizeof(T));
    return load(part);
}
template <class T>
static inline void store_some(T* p, f32x16 v, int64_t count) {
    if (count >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    memcpy(p, part, count * sizeof(T));
}
template <class T>
static inline Floats rounded_to(Floats v) {
    T part[WIDTH];
    store_floats(part, v);
    return load_floats(part);
}

constexpr auto larger = [](auto a, auto b) { return a > b ? a : b; };
// Lane numbers from 0 on.
template <class V>
static inline auto lanes_of(V) {
    using Numbers = decltype(V{} < V{});
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Numbers first;
    memcpy(&first, &lanes, sizeof first);
    return first;
}
template <class V, class F>
static inline float reduced(V v, F join) {
#pragma GCC unroll 4
    for (int apart = sizeof(V) / sizeof(float) / 2; apart; apart /= 2) v = join(v, __builtin_shuffle(v, lanes_of(v) ^ apart));
    return v[0];
}
template <class V>
static inline float sum_of(V v) {
    return reduced(v, [](V a, V b) { return a + b; });
}

// Return 2^x for x up to 126, and 0 below -126; relative error 2e-7 (the polynomial of Cephes' exp2f).
template <class V>
static inline V exp2_of(V x) {
    using Whole = decltype(x < x);
    Whole whole = __builtin_convertvector(x + (x < 0.0f ? V{} - 0.5f : V{} + 0.5f), Whole);
    V rest = x - __builtin_convertvector(whole, V);
    V y = rest * 1.535336188e-4f + 1.339887440e-3f;
    y = y * rest + 9.618437358e-3f;
    y = y * rest + 5.550332471e-2f;
    y = y * rest + 2.402264791e-1f;
    y = y * rest + 6.931472029e-1f;
    y = y * rest + 1.0f;
    y = (V)((Whole)y + (whole << 23));
    return x < -126.0f ? V{} : y;
}

// Call f(first, n) over 0 .. count in tiles of MOST and smaller ones. n is a constant of the compiler.
template <int MOST, class F>
static inline void in_tiles(int count, F f, int first = 0) {
    for (; count - first >= MOST; first += MOST) f(first, std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) in_tiles<MOST / 2>(count, f, first);
}

// Bytes of the keys, or values, of one block and kv head: its numbers, then a scale for each token.
template <class S>
static inline int64_t stored_bytes(int64_t block_size, int64_t dim) {
    return block_size * (dim * (int64_t)sizeof(S) + (QUANTISED<S> ? (int64_t)sizeof(float) : 0));
}

// Call f(an element, a stored number). `stored` is 0 for the elements' type, 1 for int8, 2 for e4m3.
template <class F>
static inline void stored_as(bool is_bf16, int64_t stored, F f) {
    auto of = [&](auto element) {
        stored == 0 ? f(element, element) : stored == 1 ? f(element, int8_t()) : f(element, e4m3());
    };
    is_bf16 ? of(bf16()) : of(float());
}

// With fewer elements of rows, or weights of a matrix, waking other threads costs more than they save.
constexpr int64_t PARALLEL_ELEMENTS = 32768;
constexpr int64_t PARALLEL_WEIGHTS = 1 << 18;

// A linear layer: x [T, I] and the bias, if any, in the elements' type. The weight has its kernel's layout.
struct Linear {
    const void* x;
    const void* weight;
    const void* bias;  // null: no bias
    void* out;         // [T, O]
    int64_t x_stride, out_stride, num_rows, num_inputs, num_outputs;
};

// A linear layer of grouped.cpp. Input c of the weight is column order[c] of x.
struct GroupedLinear {
    Linear linear;
    const int32_t* order;  // null: columns as they are
    int64_t bits, depth;   // of a number; inputs of a chunk
    int64_t input_bits;    // 16 or 8
};

// silu(first half) * second half, or GELU's approximation by tanh in place of SiLU.
struct SiluMul {
    const void* gate_up;
    void* out;
    int64_t gate_up_stride, out_stride, num_rows, width;
    int64_t is_gelu;
};
