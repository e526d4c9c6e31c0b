// Products of fp32 with packed codes (`packed_codes.h`): some inputs of a block at a time become, in the first cache, the
// weights that they stand for, and are multiplied with all rows. They are not rounded to bf16, whatever the type of the rows.
//
// A lane is an output, and every sum takes its terms in order, with fused products: the same bits under AVX2 and AVX-512.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "packed_codes.h"
#include "simd.h"

namespace tandem {

// --- sixteen whole numbers -----------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct I16 {
    __m512i v;
};

inline I16 load_numbers(const char* p) { return {_mm512_loadu_si512(p)}; }
inline I16 load_words(const char* p) { return {_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
inline I16 shifted(I16 a, int left) {
    return {left < 0 ? _mm512_srli_epi32(a.v, -left) : _mm512_slli_epi32(a.v, left)};
}
inline I16 with_highest_two(I16 a, I16 two) {
    constexpr int SECOND_WHERE_SET = 0xd8;
    return {_mm512_ternarylogic_epi32(a.v, two.v, _mm512_set1_epi32(int(3u << 30)), SECOND_WHERE_SET)};
}
inline F16 highest(I16 a, int bits) { return {_mm512_cvtepi32_ps(_mm512_srai_epi32(a.v, 32 - bits))}; }  // signed
inline F16 lowest_float8(I16 a) { return from_float8(a.v); }

#else

struct I16 {
    __m256i a, b;
};

inline I16 load_numbers(const char* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline I16 load_words(const char* p) {
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
inline I16 shifted(I16 x, int left) {
    if (left < 0) return {_mm256_srli_epi32(x.a, -left), _mm256_srli_epi32(x.b, -left)};
    return {_mm256_slli_epi32(x.a, left), _mm256_slli_epi32(x.b, left)};
}
inline __m256i with_highest_two(__m256i x, __m256i two) {
    const __m256i which = _mm256_set1_epi32(int(3u << 30));
    return _mm256_or_si256(_mm256_andnot_si256(which, x), _mm256_and_si256(which, two));
}
inline I16 with_highest_two(I16 x, I16 two) { return {with_highest_two(x.a, two.a), with_highest_two(x.b, two.b)}; }
inline F16 highest(I16 x, int bits) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(x.a, 32 - bits)), _mm256_cvtepi32_ps(_mm256_srai_epi32(x.b, 32 - bits))};
}
inline F16 lowest_float8(I16 x) { return {from_float8(x.a), from_float8(x.b)}; }

#endif

// --- codes ---------------------------------------------------------------------------------------------------------------

constexpr int64_t PLAIN_INPUTS = 64;  // of a block that are plain at a time

// What a group multiplies codes with, and adds, of a half of the outputs
struct Factors {
    F16 scale, offset;
    F16 operator()(F16 code) const { return fma(code, scale, offset); }
};

// What codes are: whole numbers of so many bits, or float8
template <int MANY, bool ARE_FLOAT8 = false>
struct CodesOf {
    static constexpr int BITS = MANY;
    static constexpr bool IS_FLOAT8 = ARE_FLOAT8;
};

// Input i of CODED_TOGETHER, whose codes begin at `at`, of a half of the outputs
template <class Codes>
__attribute__((always_inline)) inline F16 code_of(const char* at, int i, int half) {
    constexpr int BITS = Codes::BITS;
    if constexpr (BITS == 8) {
        const I16 words = load_words(at + (i / 2 * 2 + half) * BLOCK);  // two inputs each
        if constexpr (Codes::IS_FLOAT8) return lowest_float8(shifted(words, i % 2 ? -8 : 0));
        return highest(shifted(words, i % 2 ? 16 : 24), 8);
    }
    const int word = i % 2 * 16, part = i / 2 * 2 + half;
    const I16 four = load_numbers(at + part / 4 * LINE_BYTES);
    const int bit = word + part % 4 * 4;
    if constexpr (BITS == 4) return highest(shifted(four, 28 - bit), 4);
    const I16 two = shifted(load_numbers(at + 2 * LINE_BYTES), 30 - (word + part * 2));
    return highest(with_highest_two(shifted(four, 26 - bit), two), 6);
}

// Inputs [begin, end) of a block, and those behind the end up to a sixteenth
template <class Codes, class Take>
__attribute__((always_inline)) inline void plain_part(const char* block, int64_t begin, int64_t end, const Linear& layer,
                                                      Ahead& ahead, const Take& take) {
    constexpr int BYTES = CODED_TOGETHER * BLOCK * Codes::BITS / 8;
    GroupsOfBlock groups(layer, block, begin);
    Factors factors[2];
    auto enter = [&] {
        for (int half = 0; half < 2; half++)
            factors[half] = {groups.scales(half), layer.has_offsets ? groups.offsets(half) : zeros()};
    };
    enter();
    Ahead fetched = ahead;  // in registers
    for (int64_t k = begin; k < ceil_div(end, LANES) * LANES; k += CODED_TOGETHER, groups.left -= CODED_TOGETHER) {
        if (groups.enters()) {
            enter();
            fetched.read(int(head_bytes(layer) / LINE_BYTES));
        }
        fetched.read(BYTES / LINE_BYTES);
#pragma GCC unroll 8
        for (int i = 0; i < CODED_TOGETHER; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                take(k + i, half, factors[half](code_of<Codes>(groups.codes, i, half)));
        groups.codes += BYTES;
    }
    ahead = fetched;
}

// --- rows ----------------------------------------------------------------------------------------------------------------

// Where the inputs of a sixteenth stand, in a tile of `rows`: how far from its first one, of the same row
struct Places {
    int64_t of[LANES];
    int64_t sixteenth, row;  // how far the next ones are
};

#if defined(__AVX512F__)

template <class T>
inline Places places(int rows, int64_t) {
    Places found{{}, LANES * rows, LANES};
    for (int i = 0; i < LANES; i++) found.of[i] = i;
    return found;
}

constexpr int HALVES_AT_ONCE = 2;

#else

template <class T>
inline Places places(int rows, int64_t inputs) {
    Places found{{}, LANES / 2 * rows, LANES / 2};
    for (int i = 0; i < LANES; i++) {
        const int half = sizeof(T) == sizeof(float) ? i / 8 : i % 2, place = sizeof(T) == sizeof(float) ? i % 8 : i / 2;
        found.of[i] = half * (padded<float>(inputs) / 2 * rows) + place;
    }
    return found;
}

constexpr int HALVES_AT_ONCE = 1;

#endif

// Adds to the sums of some halves of the outputs. x: of the first input; weights: [count][BLOCK]; sums: [ROWS][BLOCK]
template <int ROWS>
__attribute__((noinline)) void micro_plain(const float* x, const Places& places, const float* weights, int64_t count,
                                           float* sums) {
    F16 acc[ROWS][HALVES_AT_ONCE];
#pragma GCC unroll 12  // here and below, or the compiler keeps the sums in memory
    for (int j = 0; j < ROWS; j++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES_AT_ONCE; h++) acc[j][h] = load(sums + j * BLOCK + h * LANES);
    for (int64_t k = 0; k < count; k += LANES, x += places.sixteenth)
        for (int i = 0; i < LANES; i++, weights += BLOCK) {
            const float* from = x + places.of[i];
            F16 w[HALVES_AT_ONCE];
#pragma GCC unroll 2
            for (int h = 0; h < HALVES_AT_ONCE; h++) w[h] = load(weights + h * LANES);
#pragma GCC unroll 12
            for (int j = 0; j < ROWS; j++) {
                const F16 value = all(from[j * places.row]);
#pragma GCC unroll 2
                for (int h = 0; h < HALVES_AT_ONCE; h++) acc[j][h] = fma(w[h], value, acc[j][h]);
            }
        }
#pragma GCC unroll 12
    for (int j = 0; j < ROWS; j++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES_AT_ONCE; h++) store(sums + j * BLOCK + h * LANES, acc[j][h]);
}

template <int ROWS = MICRO_ROWS>
inline void micro_plain_rows(const float* x, int rows, const Places& places, const float* weights, int64_t count,
                             float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return micro_plain_rows<ROWS - 1>(x, rows, places, weights, count, sums);
    for (int half = 0; half < 2; half += HALVES_AT_ONCE)
        micro_plain<ROWS>(x, places, weights + half * LANES, count, sums + half * LANES);
}

// One row, whose weights are multiplied as soon as they are made. x: of the first input
template <class Codes>
__attribute__((noinline)) void micro_one(const float* x, const Places& places, const char* block, const Linear& layer,
                                         Ahead& ahead, float* sums) {
    F16 acc[2] = {zeros(), zeros()};
    plain_part<Codes>(block, 0, layer.inputs, layer, ahead, [&](int64_t k, int half, F16 weight) __attribute__((always_inline)) {
        const float value = x[k / LANES * places.sixteenth + places.of[k % LANES]];
        acc[half] = fma(weight, all(value), acc[half]);
    });
    store(sums, acc[0]);
    store(sums + LANES, acc[1]);
}

// x: tiles of `tile` rows; weight: a block; next: the one that comes then, or null; sums: [rows][BLOCK]
template <class T, class Codes>
inline void products_of_packed(const float* x, int rows, int tile, const char* weight, const Linear& layer, Ahead ahead,
                             float* sums) {
    if (rows == 1) return micro_one<Codes>(x, places<T>(1, layer.inputs), weight, layer, ahead, sums);
    std::memset(sums, 0, rows * BLOCK * sizeof(float));
    alignas(64) float plain[PLAIN_INPUTS][BLOCK];
    for (int64_t k = 0; k < layer.inputs; k += PLAIN_INPUTS) {
        const int64_t end = std::min(layer.inputs, k + PLAIN_INPUTS);
        plain_part<Codes>(weight, k, end, layer, ahead, [&](int64_t input, int half, F16 some) __attribute__((always_inline)) {
            store(plain[input - k] + half * LANES, some);
        });
        for (int m = 0; m < rows; m += tile) {
            const int count = std::min(tile, rows - m);
            const Places found = places<T>(count, layer.inputs);
            micro_plain_rows(x + m * padded<float>(layer.inputs) + k / LANES * found.sixteenth, count, found, plain[0],
                             end - k, sums + m * BLOCK);
        }
    }
}

template <class T>
inline void products_packed_codes(const float* x, const float*, int rows, int tile, const char* weight,
                                  const Linear& layer, const char* next, float* sums) {
    const int64_t bytes = packed_codes_bytes(layer);
    const Ahead ahead(weight, next, bytes, std::min(NEAR_BYTES, bytes), 1);
    const auto with = [&](auto codes) { products_of_packed<T, decltype(codes)>(x, rows, tile, weight, layer, ahead, sums); };
    if (layer.is_float8) return with(CodesOf<8, true>());
    if (layer.bits == 4) return with(CodesOf<4>());
    layer.bits == 6 ? with(CodesOf<6>()) : with(CodesOf<8>());
}

}  // namespace tandem
