// Products with AVX2: sixteen registers, of eight lanes, so sixteen lanes are two halves. Where there are many rows, twelve
// registers are sums of six rows and two outputs, of one half at a time: what is widened of a weight is used six times.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "simd.h"

namespace tandem {

constexpr int MICRO_ROWS = 6;
constexpr int64_t PANEL_BYTES = 1 << 15;  // of x and weights that are read again: in the first cache

// Which of sixteen inputs are in a half: of fp32 the first and the last eight, of bf16 the even and the odd ones, which are
// widened by one instruction each.
template <class W>
struct Halves;

template <>
struct Halves<float> {
    static __m256 read(int half, const float* p) { return _mm256_loadu_ps(p + 8 * half); }
    static F16 in_order(__m256 first, __m256 second) { return {first, second}; }
};

template <>
struct Halves<bf16> {
    static __m256 read(int half, const bf16* p) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
        if (half == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
    }
    static F16 in_order(__m256 even, __m256 odd) {
        const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    }
};

// --- x: tiles of up to MICRO_ROWS rows, [2][steps][rows][8], zeros behind the inputs -------------------------------------

template <class X>
inline int64_t padded(int64_t inputs) { return ceil_div(inputs, LANES) * LANES; }

// Sixteen inputs of a row, from k on, to their places in a tile of `rows`
template <class T>
inline void place(F16 values, int row, int64_t k, int rows, int64_t inputs, float* to) {
    T some[LANES];
    store(some, values);
    to += k / 2 * rows + row * 8;
    _mm256_store_ps(to, Halves<T>::read(0, some));
    _mm256_store_ps(to + padded<float>(inputs) / 2 * rows, Halves<T>::read(1, some));
}

// --- products of a few outputs and a tile of rows ------------------------------------------------------------------------

// Whether both halves are multiplied in one pass over the inputs
constexpr bool is_one_pass(int rows, int outputs) { return rows * outputs <= 6; }

// Adds the inputs [begin, end) to sums, [HALVES][ROWS][OUTPUTS], of the halves from FIRST on.
template <class W, int FIRST, int HALVES, int OUTPUTS, int ROWS>
inline void pass(const float* x, const W* weight, int64_t inputs, int64_t begin, int64_t end, Ahead& ahead,
                 __m256* sums) {
    const int64_t plane = padded<float>(inputs) / 2 * ROWS;
    constexpr int COUNT = HALVES * ROWS * OUTPUTS;
    __m256 acc[COUNT];
#pragma GCC unroll 12  // here and below, or the compiler keeps the sums in memory
    for (int i = 0; i < COUNT; i++) acc[i] = begin ? sums[i] : _mm256_setzero_ps();
    auto step = [&](int64_t k, const auto& at) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            __m256 w[OUTPUTS];
#pragma GCC unroll 4
            for (int i = 0; i < OUTPUTS; i++) w[i] = Halves<W>::read(FIRST + h, at(i));
#pragma GCC unroll 6
            for (int j = 0; j < ROWS; j++) {
                const __m256 value = in_register(_mm256_load_ps(x + (FIRST + h) * plane + k / 2 * ROWS + j * 8));
                __m256* to = acc + (h * ROWS + j) * OUTPUTS;
#pragma GCC unroll 4
                for (int i = 0; i < OUTPUTS; i++) to[i] = _mm256_fmadd_ps(w[i], value, to[i]);
            }
        }
    };
    const int64_t full = end / LANES * LANES;
    Ahead fetched = ahead;  // in registers
    constexpr int LINE = LINE_BYTES / sizeof(W);
    int64_t k = begin;
    auto whole = [&](int64_t at) __attribute__((always_inline)) {
        step(at, [&](int i) __attribute__((always_inline)) { return weight + i * inputs + at; });
    };
    for (; k + LINE <= full; k += LINE) {
        fetched.read(OUTPUTS);
#pragma GCC unroll 2
        for (int64_t at = k; at < k + LINE; at += LANES) whole(at);
    }
    for (; k < full; k += LANES) whole(k);
    ahead = fetched;
    if (full < end) {
        W rest[OUTPUTS][LANES] = {};
        for (int i = 0; i < OUTPUTS; i++) std::memcpy(rest[i], weight + i * inputs + full, (end - full) * sizeof(W));
        step(full, [&](int i) { return rest[i]; });
    }
#pragma GCC unroll 12
    for (int i = 0; i < COUNT; i++) sums[i] = acc[i];
}

// Both halves of it. kept: [2][ROWS][OUTPUTS], what the inputs before have given
template <class W, int OUTPUTS, int ROWS>
inline void micro(const float* x, const W* weight, int64_t inputs, int64_t begin, int64_t end, __m256* kept,
                  Ahead& ahead, float* sums) {
    constexpr int COUNT = ROWS * OUTPUTS;
    if constexpr (is_one_pass(ROWS, OUTPUTS)) {
        pass<W, 0, 2, OUTPUTS, ROWS>(x, weight, inputs, begin, end, ahead, kept);
    } else {
        pass<W, 0, 1, OUTPUTS, ROWS>(x, weight, inputs, begin, end, ahead, kept);
        pass<W, 1, 1, OUTPUTS, ROWS>(x, weight, inputs, begin, end, ahead, kept + COUNT);
    }
    if (end < inputs) return;
    for (int j = 0; j < ROWS; j++)
        for (int i = 0; i < OUTPUTS; i++) {
            const __m256* one = kept + j * OUTPUTS + i;
            sums[j * BLOCK + i] = sum(Halves<W>::in_order(one[0], one[COUNT]));
        }
}

constexpr int micro_outputs(int rows) { return rows == 1 ? 4 : 2; }

// A tile times all outputs of a block, in panels of `panel` inputs.
template <class W, int ROWS>
inline void micro_rows(int rows, const float* x, const W* weight, int outputs, int64_t inputs, int64_t panel,
                       Ahead& ahead, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return micro_rows<W, ROWS - 1>(rows, x, weight, outputs, inputs, panel, ahead, sums);
    constexpr int TOGETHER = micro_outputs(ROWS);
    __m256 kept[BLOCK][2 * ROWS];
    for (int64_t k = 0; k < inputs; k += panel) {
        const int64_t end = std::min(inputs, k + panel);
        auto at = [&](int output) { return weight + output * inputs; };
        int n = 0;
        for (; n + TOGETHER <= outputs; n += TOGETHER)
            micro<W, TOGETHER, ROWS>(x, at(n), inputs, k, end, kept[n], ahead, sums + n);
        for (; n < outputs; n++) micro<W, 1, ROWS>(x, at(n), inputs, k, end, kept[n], ahead, sums + n);
    }
}

// How many outputs further what is fetched is.
template <class X>
inline int outputs_ahead(int rows, int outputs, int64_t) {
    return rows <= MICRO_ROWS ? std::min(micro_outputs(rows), outputs) : outputs;
}

// How often an `Ahead` is told of each line of a weight.
template <class X, class W>
inline int times_read(int rows, int tile) {
    const int most = std::min(tile, rows);
    return int(ceil_div(rows, tile)) * (is_one_pass(most, micro_outputs(most)) ? 1 : 2);
}

template <class X, class T>
constexpr int EXPANDED_ROWS = 0;  // codes become weights in a cache: there are too few registers

// x: tiles of `tile` rows, the last one of what is left. sums: [rows, BLOCK]
template <class W>
inline void products(const float* x, int rows, int tile, const W* weight, int outputs, int64_t inputs, Ahead ahead,
                     float* sums) {
    const int most = std::min(tile, rows);
    const int64_t fits = PANEL_BYTES / (most * sizeof(float) + micro_outputs(most) * sizeof(W));
    const int64_t panel = padded<float>(ceil_div(inputs, ceil_div(inputs, fits)));
    for (int m = 0; m < rows; m += tile)
        micro_rows<W, MICRO_ROWS>(std::min(tile, rows - m), x + m * padded<float>(inputs), weight, outputs, inputs, panel,
                                  ahead, sums + m * BLOCK);
}

}  // namespace tandem
