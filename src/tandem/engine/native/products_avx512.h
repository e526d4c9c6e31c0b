// Products with AVX-512: of 32 registers up to 24 are sums, sixteen lanes each: of a few rows and four outputs, or of more
// rows and fewer outputs. Of a weight less is read where a tile has more rows; of the rows, where it has fewer.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "simd.h"

namespace tandem {

constexpr int MICRO_ROWS = 12;
constexpr int FEW_ROWS = 6;  // whose products take less time than reading the weight does
constexpr int CODED_OUTPUTS = 12;  // of a weight of codes, that are made plain together
constexpr int64_t PANEL_BYTES = 28 << 10;  // of rows and weights that are read again: in the first cache

constexpr int micro_outputs(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 3 : 2; }

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

// --- weights of a few outputs, a line of the cache at a time -------------------------------------------------------------

// As it stands
template <class T, class W, int OUTPUTS, bool SHIFTED>
struct Weights {
    const W* weight;
    int64_t inputs;

    Weights(const W* weight, int64_t inputs, int64_t) : weight(weight), inputs(inputs) {}
    typename T::Values read(int i, int64_t k) { return T::read(weight + i * inputs + k); }
};

// Checkpoints begin anywhere in a line, and what is read across two lines takes the time of both: here each line is read
// once, and put together with the one before. The rows have to be whole lines. What is read beside the weight is in its
// first and last line.
template <class T, class W, int OUTPUTS>
struct Weights<T, W, OUTPUTS, true> {
    static_assert(T::COUNT * sizeof(W) == LINE_BYTES);

    const char* lines;
    int64_t row;
    __m512i places, last[OUTPUTS];

    static bool fits(const W* weight, int64_t inputs) {
        const auto address = (uintptr_t)weight;
        return address % LINE_BYTES != 0 && address % 4 == 0 && inputs % T::COUNT == 0;
    }

    Weights(const W* weight, int64_t inputs, int64_t begin) : row(inputs * sizeof(W)) {
        const int shift = int((uintptr_t)weight % LINE_BYTES / 4);
        const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        places = _mm512_add_epi32(counted, _mm512_set1_epi32(shift));
        lines = (const char*)weight - 4 * shift;
#pragma GCC unroll 4
        for (int i = 0; i < OUTPUTS; i++) last[i] = _mm512_load_si512(lines + i * row + begin * sizeof(W));
    }

    // In order of k, each once
    typename T::Values read(int i, int64_t k) {
        const __m512i next = in_register(_mm512_load_si512(lines + i * row + k * sizeof(W) + LINE_BYTES));
        const __m512i found = _mm512_permutex2var_epi32(last[i], places, next);
        last[i] = next;
        return (typename T::Values)found;
    }
};

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
template <class X, class W, bool SHIFTED, int OUTPUTS, int ROWS>
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
        for (int i = 0; i < OUTPUTS; i++) w[i] = in_register(read(i, k));
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; j++) {
            const auto value = in_register(T::read(x + k * ROWS + j * T::COUNT));
#pragma GCC unroll 4
            for (int i = 0; i < OUTPUTS; i++) acc[j * OUTPUTS + i] = T::take(acc[j * OUTPUTS + i], w[i], value);
        }
    };
    const int64_t full = end / T::COUNT * T::COUNT;
    auto plain = [&](int i, int64_t at) __attribute__((always_inline)) { return T::read(weight + i * inputs + at); };
    Weights<T, W, OUTPUTS, SHIFTED> weights(weight, inputs, begin);
    auto line = [&](int i, int64_t at) __attribute__((always_inline)) { return weights.read(i, at); };
    constexpr int LINE = LINE_BYTES / sizeof(W);
    Ahead fetched = ahead;  // in registers
    int64_t k = begin;
    for (; k + LINE <= full; k += LINE) {
        fetched.read(OUTPUTS);
#pragma GCC unroll 2
        for (int64_t at = k; at < k + LINE; at += T::COUNT) step(line, at);
    }
    ahead = fetched;
    for (; k < full; k += T::COUNT) step(plain, k);
    if (const int rest = int(end - full))
        step([&](int i, int64_t at) { return T::read_part(weight + i * inputs + at, rest); }, full);
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
template <class X, class W, bool SHIFTED, int ROWS>
inline void micro_rows(const X* x, int rows, const W* weight, int outputs, int64_t inputs, int64_t panel, Ahead& ahead,
                       float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return micro_rows<X, W, SHIFTED, ROWS - 1>(x, rows, weight, outputs, inputs, panel, ahead, sums);
    constexpr int TOGETHER = micro_outputs(ROWS);
    F16 kept[BLOCK][ROWS * TOGETHER];  // of each few outputs
    for (int64_t k = 0; k < inputs; k += panel) {
        const int64_t end = std::min(inputs, k + panel);
        auto at = [&](int n) { return weight + n * inputs; };
        int group = 0;
        if (outputs < TOGETHER)
            for (int n = 0; n < outputs; n++, group++)
                micro<X, W, false, 1, ROWS>(x, at(n), inputs, k, end, kept[group], ahead, sums + n);
        else
            for (int n = 0; n < outputs; n += TOGETHER, group++) {
                const int first = std::min(n, outputs - TOGETHER);  // some of the last are computed twice
                micro<X, W, SHIFTED, TOGETHER, ROWS>(x, at(first), inputs, k, end, kept[group], ahead, sums + first);
            }
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
    auto all = [&](auto shifted) {
        for (int m = 0; m < rows; m += tile)
            micro_rows<X, W, shifted, MICRO_ROWS>(x + m * padded<X>(inputs), std::min(tile, rows - m), weight, outputs,
                                                  inputs, panel, ahead, sums + m * BLOCK);
    };
    if constexpr (sizeof(X) == sizeof(W))
        if (Weights<Terms<X>, W, 1, true>::fits(weight, inputs)) return all(std::true_type());
    all(std::false_type());
}

}  // namespace tandem
