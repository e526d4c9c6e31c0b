// Sixteen fp32 lanes, as one AVX-512 register or two of AVX2, and bf16 beside them.
//
// What is written with these functions gives the same bits under both: every lane sees the same operations in the same
// order, products are fused where `fma` says so and nowhere else (-ffp-contract=off), and a sum over lanes is one tree.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace tandem {

// x is loaded once: the compiler would rather load it again for each product.
template <class Register>
inline Register in_register(Register x) {
    asm("" : "+v"(x));
    return x;
}

constexpr int LANES = 16;
constexpr int BLOCK = 2 * LANES;  // outputs of a product that are one unit of work

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}

// To nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// e4m3: four bits of exponent and three of mantissa. There is no infinity; what would be NaN is 480 here.
struct float8 {
    uint8_t bits;
};

inline float to_float(float8 x) {
    const int size = x.bits & 127, exponent = size / 8;
    const float found = exponent ? std::ldexp(float(8 + size % 8), exponent - 10) : std::ldexp(float(size), -9);
    return x.bits & 128 ? -found : found;
}

inline void set(float& to, float x) { to = x; }
inline void set(bf16& to, float x) { to = to_bf16(x); }

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};

inline F16 zeros() { return {_mm512_setzero_ps()}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 widened(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
inline F16 load(const bf16* p) { return widened(_mm256_loadu_si256((const __m256i*)p)); }
inline F16 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline F16 load_halves(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// Of float8 in the lowest bits of each lane, whatever is above them
inline F16 from_float8(__m512i bits) {
    constexpr int OR_AND = 0xf8;
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(127));
    const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
    const __m512 least = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
    const __mmask16 is_least = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
    const __m512i found = _mm512_mask_mov_epi32(normal, is_least, _mm512_castps_si512(least));
    const __m512i sign = _mm512_set1_epi32(int(1u << 31));
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(found, _mm512_slli_epi32(bits, 24), sign, OR_AND))};
}
inline F16 load(const float8* p) { return from_float8(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
#if defined(__AVX512BF16__)
inline __m256i bits_of_bf16(F16 a) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
#else
inline __m256i bits_of_bf16(F16 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_srli_epi32(rounded, 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(rounded);
}
#endif
inline void store(bf16* p, F16 a) { _mm256_storeu_si256((__m256i*)p, bits_of_bf16(a)); }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// Of two where one is NaN: the second.
inline F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 smaller(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline bool any_larger(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline F16 whole(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F16 zero_where_less(F16 x, F16 limit, F16 a) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// a * 2^n; n is a whole number within the range of exponents
inline F16 scaled(F16 a, F16 n) {
    const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(power))};
}
inline void halves(F16 a, __m256& low, __m256& high) {
    low = _mm512_castps512_ps256(a.v);
    high = _mm512_extractf32x8_ps(a.v, 1);
}

#else

struct F16 {
    __m256 a, b;
};

inline F16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widened(const bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load(const bf16* p) { return {widened(p), widened(p + 8)}; }
inline __m256 widened(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F16 load(const int8_t* p) { return {widened(p), widened(p + 8)}; }
inline F16 load_halves(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 from_float8(__m256i bits) {
    const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(127));
    const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32(120 << 23));
    const __m256 least = _mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(0x1p-9f));
    const __m256 is_least = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), size));
    const __m256 sign = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(bits, 24), _mm256_set1_epi32(int(1u << 31))));
    return _mm256_or_ps(_mm256_blendv_ps(_mm256_castsi256_ps(normal), least, is_least), sign);
}
inline __m256 widened(const float8* p) { return from_float8(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline F16 load(const float8* p) { return {widened(p), widened(p + 8)}; }
inline void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(bf16* p, F16 x) {
    const __m256i packed = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 larger(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 smaller(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline bool any_larger(F16 x, F16 y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)));
}
inline F16 whole(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F16 zero_where_less(F16 x, F16 limit, F16 y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline F16 scaled(F16 x, F16 n) {
    return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
inline void halves(F16 x, __m256& low, __m256& high) {
    low = x.a;
    high = x.b;
}

#endif

// --- of both -------------------------------------------------------------------------------------------------------

// The first `count` < LANES elements; zeros behind them. Nothing behind them is read.
template <class T>
inline F16 load_part(const T* p, int count) {
    T some[LANES] = {};
    std::memcpy(some, p, count * sizeof(T));
    return load(some);
}

template <class T>
inline void store_part(T* p, F16 a, int count) {
    T some[LANES];
    store(some, a);
    std::memcpy(p, some, count * sizeof(T));
}

// Elements [i, i + LANES) of `count`
template <class T>
inline F16 load_at(const T* p, int64_t i, int64_t count) {
    return i + LANES <= count ? load(p + i) : load_part(p + i, int(count - i));
}

template <class T>
inline void store_at(T* p, F16 a, int64_t i, int64_t count) {
    if (i + LANES <= count) return store(p + i, a);
    store_part(p + i, a, int(count - i));
}

// What is left of x when it is stored as a T
template <class T>
inline F16 rounded_to(F16 x);
template <>
inline F16 rounded_to<float>(F16 x) { return x; }
template <>
inline F16 rounded_to<bf16>(F16 x) {
#if defined(__AVX512F__)
    return widened(bits_of_bf16(x));
#else
    bf16 some[LANES];
    store(some, x);
    return load(some);
#endif
}

// One tree: lane i + lane i + 8, then 4, 2, 1 apart.
inline float sum(F16 x) {
    __m256 low, high;
    halves(x, low, high);
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// COUNT sums at once, each in the order of `sum`.
template <int COUNT>
inline void store_sums(float* to, const F16* x) {
    for (int i = 0; i < COUNT; i++) to[i] = sum(x[i]);
}

#if defined(__AVX512F__)

inline __m512 halves_added(__m512 a, __m512 b) {  // lanes 0 to 7: of a, the others: of b
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

template <>
inline void store_sums<4>(float* to, const F16* x) {
    const __m512 first = halves_added(x[0].v, x[1].v), second = halves_added(x[2].v, x[3].v);
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));  // four lanes are of one now
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)));
}

#endif

// Where a lane is NaN: of any of the others, or NaN.
inline float largest(F16 x) {
    __m256 low, high;
    halves(x, low, high);
    const __m256 eight = _mm256_max_ps(low, high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// e^x to 2 ulp; 0 below the smallest normal number, so also for -inf; infinite from 88.4 on. NaN stays NaN.
inline F16 exponential(F16 x) {
    const F16 least = all(-87.33f);
    const F16 within = smaller(all(89.0f), larger(least, x));
    const F16 n = whole(within * all(1.44269504f));
    F16 r = fma(n, all(-0.693359375f), within);  // ln 2 in two parts, the first of few bits
    r = fma(n, all(2.12194440e-4f), r);
    F16 p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return zero_where_less(x, least, scaled(p, n));
}

#if defined(__AVX512F__)

// 2^x to 3e-6 of it, where what comes of it is rounded to bf16; 0 for -inf. NaN stays NaN.
inline F16 two_to(F16 x) {
    const F16 f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // what is above a whole number
    F16 p = all(1.3426684e-2f);
    p = fma(p, f, all(5.2242473e-2f));
    p = fma(p, f, all(2.4128020e-1f));
    p = fma(p, f, all(6.9304484e-1f));
    p = fma(p, f, all(1.0f));
    return {_mm512_scalef_ps(p.v, x.v)};
}

#endif

// Rows of LANES 32-bit elements, turned: element j of row i becomes element i of row j. distance: of rows, in elements
#if defined(__AVX512F__)

inline void transpose(__m512i rows[LANES]) {
    __m512i t[LANES];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

inline void transpose(const uint32_t* const from[LANES], uint32_t* to, int64_t distance = LANES) {
    __m512i rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = _mm512_loadu_si512(from[i]);
    transpose(rows);
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + i * distance, rows[i]);
}

#else

inline void transpose_eight(const uint32_t* const* from, int column, uint32_t* to, int64_t distance) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float*)(from[i] + column));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float*)(to + i * distance), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps((float*)(to + (i + 4) * distance), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

inline void transpose(const uint32_t* const from[LANES], uint32_t* to, int64_t distance = LANES) {
    for (int row = 0; row < LANES; row += 8)
        for (int column = 0; column < LANES; column += 8)
            transpose_eight(from + row, column, to + column * distance + row, distance);
}

#endif

}  // namespace tandem
