// Products with AVX-512: of 32 registers up to 24 are sums, sixteen lanes each: of a few rows and four outputs, or of more
// rows and fewer outputs. Of a weight less is read where a tile has more rows; of the rows, where it has fewer.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "simd.h"
#include "weights_avx512.h"

namespace tandem {

constexpr int MICRO_ROWS = 12;
constexpr int FEW_ROWS = 6;  // whose products take less time than reading the weight does ...
constexpr int64_t FEW_BYTES = 24 << 10;  // ... if they stay in the first cache
constexpr int64_t PANEL_BYTES = 28 << 10;  // of rows and weights that are read again: in the first cache

constexpr int micro_outputs(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 3 : 2; }

// --- x: tiles of up to MICRO_ROWS rows, [steps][rows][COUNT], zeros behind the inputs ------------------------------------

template <class X>
inline int64_t padded(int64_t inputs) { return ceil_div(inputs, Terms<X>::COUNT) * Terms<X>::COUNT; }

// Sixteen inputs of a row, from k on, to their place in a tile of `rows`. X: what T is widened to
template <class T, class X>
inline void place(F16 values, int row, int64_t k, int rows, int64_t, X* to) {
    constexpr int COUNT = Terms<X>::COUNT;
    store(to + k / COUNT * COUNT * rows + row * COUNT + k % COUNT, values);
}

// --- products of a few outputs and a tile of rows ------------------------------------------------------------------------

// Adds the inputs [begin, end) of the outputs from n on. kept: [ROWS * OUTPUTS], what those before have given
template <class X, class Source, int OUTPUTS, int ROWS>
inline void micro(const X* x, const Source& source, int n, int64_t inputs, int64_t begin, int64_t end, F16* kept,
                  Ahead& ahead, float* sums) {
    using T = Terms<X>;
    constexpr int COUNT = ROWS * OUTPUTS;
    typename Source::template Reader<OUTPUTS> weights(source, n, begin);
    F16 acc[COUNT];
#pragma GCC unroll 24  // here and below, or the compiler keeps the sums in memory
    for (int i = 0; i < COUNT; i++) acc[i] = begin ? kept[i] : zeros();
    auto step = [&](auto read, int64_t k) __attribute__((always_inline)) {
        typename T::Values w[OUTPUTS];
#pragma GCC unroll 4
        for (int i = 0; i < OUTPUTS; i++) w[i] = in_register(read(i, k));
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; j++) {
            const auto value = in_register(T::read(x + k * ROWS + j * T::COUNT));
#pragma GCC unroll 4
            for (int i = 0; i < OUTPUTS; i++) acc[j * OUTPUTS + i] = T::take(acc[j * OUTPUTS + i], w[i], value);
        }
    };
    const int64_t full = end / T::COUNT * T::COUNT;
    Ahead fetched = ahead;  // in registers
    for (int64_t k = begin; k < full;)
        for (const int64_t until = std::min(full, weights.enter(k)); k < until; k += T::COUNT) {
            fetched.read(OUTPUTS);
            step([&](int i, int64_t at) __attribute__((always_inline)) { return weights.read(i, at); }, k);
        }
    ahead = fetched;
    if (const int rest = int(end - full)) {
        weights.enter(full);
        step([&](int i, int64_t at) { return weights.read_part(i, at, rest); }, full);
    }
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
template <class X, class Source, int ROWS>
inline void micro_rows(const X* x, int rows, const Source& source, int outputs, int64_t inputs, int64_t panel,
                       Ahead& ahead, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return micro_rows<X, Source, ROWS - 1>(x, rows, source, outputs, inputs, panel, ahead, sums);
    constexpr int TOGETHER = micro_outputs(ROWS);
    F16 kept[BLOCK][ROWS * TOGETHER];  // of each few outputs
    for (int64_t k = 0; k < inputs; k += panel) {
        const int64_t end = std::min(inputs, k + panel);
        int group = 0;
        if constexpr (!Source::IS_WHOLE_BLOCKS)
            if (outputs < TOGETHER) {
                for (int n = 0; n < outputs; n++, group++)
                    micro<X, Source, 1, ROWS>(x, source, n, inputs, k, end, kept[group], ahead, sums + n);
                continue;
            }
        for (int n = 0; n < outputs; n += TOGETHER, group++) {
            const int first = std::min(n, outputs - TOGETHER);  // some of the last are computed twice
            micro<X, Source, TOGETHER, ROWS>(x, source, first, inputs, k, end, kept[group], ahead, sums + first);
        }
    }
}

// Few rows wait for the weight: it is read in its order, and what is fetched is near.
template <class X>
inline bool are_few(int rows, int64_t inputs) {
    return rows <= FEW_ROWS && rows * inputs * int64_t(sizeof(X)) <= FEW_BYTES;
}

// How many outputs further what is fetched is.
template <class X>
inline int outputs_ahead(int rows, int outputs, int64_t inputs) {
    return are_few<X>(rows, inputs) ? std::min(micro_outputs(rows), outputs) : outputs;
}

template <int MOST_ROWS = MICRO_ROWS, class X, class Source>
inline void products_of(const X* x, int rows, int tile, const Source& source, int outputs, int64_t inputs, Ahead ahead,
                        float* sums) {
    const int most = std::min(tile, rows);
    const int64_t fits = PANEL_BYTES / ((most + micro_outputs(most)) * sizeof(X));
    const int64_t even = ceil_div(inputs, ceil_div(inputs, fits));
    const int64_t panel = are_few<X>(rows, inputs) ? inputs : ceil_div(even, PACKED_INPUTS) * PACKED_INPUTS;
    for (int m = 0; m < rows; m += tile)
        micro_rows<X, Source, MOST_ROWS>(x + m * padded<X>(inputs), std::min(tile, rows - m), source, outputs, inputs,
                                          panel, ahead, sums + m * BLOCK);
}

// How often an `Ahead` is told of each line of a weight.
template <class X, class W>
inline int times_read(int rows, int tile) { return int(ceil_div(rows, tile)) * Plain<X, W>::STEPS; }

// x: tiles of `tile` rows, the last one of what is left. sums: [rows, BLOCK]
template <class X, class W>
inline void products(const X* x, int rows, int tile, const W* weight, int outputs, int64_t inputs, const Ahead& ahead,
                     float* sums) {
    if constexpr (sizeof(X) == sizeof(W)) {
        const Shifted<X> shifted{weight, inputs};
        if (shifted.fits()) return products_of(x, rows, tile, shifted, outputs, inputs, ahead, sums);
    }
    products_of(x, rows, tile, Plain<X, W>{weight, inputs}, outputs, inputs, ahead, sums);
}

// For how many rows codes become weights of the type T in the registers of products with X: for more rows the way through
// a cache costs less than doing it again for each tile, sooner so where values are rounded by themselves.
template <class X, class T>
constexpr int EXPANDED_ROWS = sizeof(X) > sizeof(T) ? 4 : MICRO_ROWS;

// The same with a weight of codes, of which rows from n on are read, for a tile of up to EXPANDED_ROWS and all outputs of
// a block.
template <class T, class X>
inline void products_of_codes(const X* x, int rows, const Linear& layer, int64_t n, const void* next, float* sums) {
    const int64_t row = row_bytes<T>(layer);
    auto of = [&](auto source) {
        const char* codes = (const char*)layer.weight + n * row;
        const Ahead ahead(codes, next, BLOCK * row, outputs_ahead<X>(rows, BLOCK, layer.inputs) * row, source.STEPS);
        products_of<EXPANDED_ROWS<X, T>>(x, rows, rows, source, BLOCK, layer.inputs, ahead, sums);
    };
    if (layer.is_float8)
        of(EightBits<X, T, float8, false>{layer, n});
    else if (layer.bits == 8)
        layer.offsets ? of(EightBits<X, T, int8_t, true>{layer, n}) : of(EightBits<X, T, int8_t, false>{layer, n});
    else
        of(FourBits<X, T>{layer, n});
}

}  // namespace tandem
