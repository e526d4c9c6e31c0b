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
inline F16 code_of(I16 a, int left, int right) {  // shifted by so many bits
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, left), right))};
}

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
inline F16 code_of(I16 x, int left, int right) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.a, left), right)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.b, left), right))};
}

#endif

// --- codes ---------------------------------------------------------------------------------------------------------------

constexpr int64_t PLAIN_INPUTS = 64;  // of a block that are plain at a time

// What a group multiplies codes with, and adds, of a half of the outputs
struct Factors {
    F16 scale, offset;
    F16 operator()(F16 code) const { return fma(code, scale, offset); }
};

// Four inputs of a block, from k on, whose codes begin at `at`. take(input, half of the outputs, weights)
template <int BITS, class Take>
__attribute__((always_inline)) inline void plain_inputs(const char* at, const Factors factors[2], int64_t k, const Take& take) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            F16 code;
            if constexpr (BITS == 4)
                code = code_of(load_numbers(at), 28 - (16 * (i % 2) + 8 * (i / 2) + 4 * half), 28);
            else
                code = code_of(load_words(at + i / 2 * 2 * BLOCK + half * BLOCK), i % 2 ? 0 : 24, i % 2 ? 8 : 24);
            take(k + i, half, factors[half](code));
        }
}

// Inputs [begin, end) of a block, and those behind the end up to a sixteenth
template <int BITS, class Take>
__attribute__((always_inline)) inline void plain_part(const char* block, int64_t begin, int64_t end, const Linear& layer,
                                                      Ahead& ahead, const Take& take) {
    GroupsOfBlock groups(layer, block, begin);
    Factors factors[2];
    auto enter = [&] {
        for (int half = 0; half < 2; half++) {
            const F16 offset = layer.has_offsets ? load(groups.offsets() + half * LANES) : zeros();
            factors[half] = {load(groups.scales() + half * LANES), offset};
        }
    };
    enter();
    Ahead fetched = ahead;  // in registers
    for (int64_t k = begin; k < ceil_div(end, LANES) * LANES; k += 4, groups.left -= 4) {
        if (groups.enters()) {
            enter();
            fetched.read(layer.has_offsets ? 4 : 2);
        }
        fetched.read(BITS / 4);
        plain_inputs<BITS>(groups.codes, factors, k, take);
        groups.codes += BITS * BLOCK / 2;
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
template <int BITS>
__attribute__((noinline)) void micro_one(const float* x, const Places& places, const char* block, const Linear& layer,
                                         Ahead& ahead, float* sums) {
    F16 acc[2] = {zeros(), zeros()};
    plain_part<BITS>(block, 0, layer.inputs, layer, ahead, [&](int64_t k, int half, F16 weight) __attribute__((always_inline)) {
        const float value = x[k / LANES * places.sixteenth + places.of[k % LANES]];
        acc[half] = fma(weight, all(value), acc[half]);
    });
    store(sums, acc[0]);
    store(sums + LANES, acc[1]);
}

// x: tiles of `tile` rows; weight: a block; next: the one that comes then, or null; sums: [rows][BLOCK]
template <class T, int BITS>
inline void products_of_bits(const float* x, int rows, int tile, const char* weight, const Linear& layer, Ahead ahead,
                             float* sums) {
    if (rows == 1) return micro_one<BITS>(x, places<T>(1, layer.inputs), weight, layer, ahead, sums);
    std::memset(sums, 0, rows * BLOCK * sizeof(float));
    alignas(64) float plain[PLAIN_INPUTS][BLOCK];
    for (int64_t k = 0; k < layer.inputs; k += PLAIN_INPUTS) {
        const int64_t end = std::min(layer.inputs, k + PLAIN_INPUTS);
        plain_part<BITS>(weight, k, end, layer, ahead, [&](int64_t input, int half, F16 some) __attribute__((always_inline)) {
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
    if (layer.bits == 4)
        products_of_bits<T, 4>(x, rows, tile, weight, layer, ahead, sums);
    else
        products_of_bits<T, 8>(x, rows, tile, weight, layer, ahead, sums);
}

}  // namespace tandem
