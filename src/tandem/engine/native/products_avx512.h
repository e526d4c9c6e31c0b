// Products with AVX-512: of 32 registers up to 24 are sums, sixteen lanes each: of up to six rows and four outputs, or of
// more rows and fewer outputs. Of a weight less is read where a tile has more rows; of the rows, where it has fewer.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "simd.h"

namespace tandem {

constexpr int MICRO_ROWS = 12;
constexpr int FEW_ROWS = 6;  // whose products take less time than reading the weight does
constexpr int CODED_OUTPUTS = 12;  // of a weight of codes, that are made plain together
constexpr int64_t PANEL_BYTES = 28 << 10;  // of rows and weights that are read again: in the first cache

constexpr int micro_outputs(int rows) { return std::min(4, 24 / rows); }

// --- what an accumulator takes at once ---------------------------------------------------------------------------------

template <class T>
struct Terms;

template <>
struct Terms<float> {
    static constexpr int COUNT = LANES;
    using Values = __m512;

    template <class W>
    static Values read(const W* p) { return load(p).v; }
    template <class W>
    static Values read_part(const W* p, int count) { return load_part(p, count).v; }
    static F16 take(F16 sum, Values weight, Values x) { return fma({weight}, {x}, sum); }
};

#if defined(__AVX512BF16__)

template <>
struct Terms<bf16> {
    static constexpr int COUNT = 2 * LANES;
    using Values = __m512bh;

    static Values read(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static Values read_part(const bf16* p, int count) {
        return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1), p);
    }
    static F16 take(F16 sum, Values weight, Values x) { return {_mm512_dpbf16_ps(sum.v, weight, x)}; }
};

#endif

// --- x: tiles of up to MICRO_ROWS rows, [steps][rows][COUNT], zeros behind the inputs ------------------------------------

template <class T>
inline int64_t padded(int64_t inputs) { return ceil_div(inputs, Terms<T>::COUNT) * Terms<T>::COUNT; }

// X: what x is widened to
template <class X, class T>
inline void pack_rows(const T* x, int rows, int64_t inputs, X* to) {
    constexpr int COUNT = Terms<X>::COUNT;
    for (int64_t k = 0; k < inputs; k += COUNT)
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < COUNT; i += LANES) {
                const int64_t at = k + i;
                store(to + k * rows + row * COUNT + i,
                      at < inputs ? load_at(x + row * inputs, at, inputs) : zeros());
            }
}

// --- products of a few outputs and a tile of rows ------------------------------------------------------------------------

// Adds the inputs [begin, end). kept: [ROWS * OUTPUTS], what those before have given
template <class X, class W, int OUTPUTS, int ROWS>
inline void micro(const X* x, const W* weight, int64_t inputs, int64_t begin, int64_t end, F16* kept, Ahead& ahead,
                  float* sums) {
    using T = Terms<X>;
    constexpr int COUNT = ROWS * OUTPUTS;
    F16 acc[COUNT];
#pragma GCC unroll 24  // here and below, or the compiler keeps the sums in memory
    for (int i = 0; i < COUNT; i++) acc[i] = begin ? kept[i] : zeros();
    auto step = [&](auto read, int64_t k) __attribute__((always_inline)) {
        typename T::Values w[OUTPUTS];
#pragma GCC unroll 4
        for (int i = 0; i < OUTPUTS; i++) w[i] = in_register(read(weight + i * inputs + k));
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; j++) {
            const auto value = in_register(T::read(x + k * ROWS + j * T::COUNT));
#pragma GCC unroll 4
            for (int i = 0; i < OUTPUTS; i++) acc[j * OUTPUTS + i] = T::take(acc[j * OUTPUTS + i], w[i], value);
        }
    };
    const int64_t full = end / T::COUNT * T::COUNT;
    Ahead fetched = ahead;  // in registers
    constexpr int LINE = 64 / sizeof(W);
    int64_t k = begin;
    auto whole = [](const W* p) __attribute__((always_inline)) { return T::read(p); };
    for (; k + LINE <= full; k += LINE) {
        fetched.read(OUTPUTS);
#pragma GCC unroll 2
        for (int64_t at = k; at < k + LINE; at += T::COUNT) step(whole, at);
    }
    for (; k < full; k += T::COUNT) step(whole, k);
    ahead = fetched;
    if (const int rest = int(end - full)) step([rest](const W* p) { return T::read_part(p, rest); }, full);
    if (end < inputs) {
#pragma GCC unroll 24
        for (int i = 0; i < COUNT; i++) kept[i] = acc[i];
    } else if constexpr (OUTPUTS == 4) {
#pragma GCC unroll 6
        for (int j = 0; j < ROWS; j++) store_sums<4>(sums + j * BLOCK, acc + 4 * j);
    } else {
        float some[COUNT];
        constexpr int FOURS = COUNT / 4 * 4;
#pragma GCC unroll 6
        for (int i = 0; i < FOURS; i += 4) store_sums<4>(some + i, acc + i);
        store_sums<COUNT - FOURS>(some + FOURS, acc + FOURS);
        for (int j = 0; j < ROWS; j++)
            for (int i = 0; i < OUTPUTS; i++) sums[j * BLOCK + i] = some[j * OUTPUTS + i];
    }
}

// A tile times all outputs of a block, in panels of `panel` inputs.
template <class X, class W, int ROWS>
inline void micro_rows(const X* x, int rows, const W* weight, int outputs, int64_t inputs, int64_t panel, Ahead& ahead,
                       float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return micro_rows<X, W, ROWS - 1>(x, rows, weight, outputs, inputs, panel, ahead, sums);
    constexpr int TOGETHER = micro_outputs(ROWS);
    F16 kept[BLOCK][ROWS];
    for (int64_t k = 0; k < inputs; k += panel) {
        const int64_t end = std::min(inputs, k + panel);
        auto some = [&](auto count, int n) {
            micro<X, W, count, ROWS>(x, weight + n * inputs, inputs, k, end, kept[n], ahead, sums + n);
        };
        int n = 0;
        for (; n + TOGETHER <= outputs; n += TOGETHER) some(std::integral_constant<int, TOGETHER>(), n);
        for (; n < outputs; n++) some(std::integral_constant<int, 1>(), n);
    }
}

// x: tiles of `tile` rows, the last one of what is left. next: the weight that is read then, or null. sums: [rows, BLOCK]
template <class X, class W>
inline void products(const X* x, int rows, int tile, const W* weight, int outputs, int64_t inputs, const W* next,
                     float* sums) {
    // Few rows wait for the weight: it is read in its order, and what is fetched is near.
    const bool are_few = rows <= FEW_ROWS;
    const int most = std::min(tile, rows), together = micro_outputs(most);
    const int64_t fits = PANEL_BYTES / (most * sizeof(X) + together * sizeof(W));
    const int64_t panel = are_few ? inputs : padded<X>(ceil_div(inputs, ceil_div(inputs, fits)));
    const int64_t row = inputs * sizeof(W), distance = are_few ? std::min(together, outputs) : outputs;
    Ahead ahead(weight, next, outputs * row, distance * row, int(ceil_div(rows, tile)));
    for (int m = 0; m < rows; m += tile)
        micro_rows<X, W, MICRO_ROWS>(x + m * padded<X>(inputs), std::min(tile, rows - m), weight, outputs, inputs, panel,
                                     ahead, sums + m * BLOCK);
}

}  // namespace tandem
