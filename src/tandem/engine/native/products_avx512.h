// Products with AVX-512: of 32 registers 24 are sums, of six rows and four outputs, sixteen lanes each.
#pragma once

#include <algorithm>

#include "simd.h"

namespace tandem {

constexpr int MICRO_ROWS = 6, MICRO_OUTPUTS = 4;

// --- what an accumulator takes at once ---------------------------------------------------------------------------------

template <class T>
struct Terms;

template <>
struct Terms<float> {
    static constexpr int COUNT = LANES;
    using Values = F16;

    template <class W>
    static Values read(const W* p) { return load(p); }
    template <class W>
    static Values read_part(const W* p, int count) { return load_part(p, count); }
    static F16 take(F16 sum, Values weight, Values x) { return fma(weight, x, sum); }
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

// --- x: tiles of MICRO_ROWS rows, [steps][MICRO_ROWS][COUNT], zeros behind the inputs ------------------------------------

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
                store(to + k * MICRO_ROWS + row * COUNT + i,
                      at < inputs ? load_at(x + row * inputs, at, inputs) : zeros());
            }
}

// --- products of a few outputs and a tile of rows ------------------------------------------------------------------------

// next: where the weight of as many outputs more begins, to be fetched meanwhile; or null
template <class X, class W, int OUTPUTS, int ROWS>
inline void micro(const X* x, const W* weight, const W* next, int64_t inputs, float* sums) {
    using T = Terms<X>;
    F16 acc[ROWS][OUTPUTS];
    for (auto& row : acc)
        for (F16& one : row) one = zeros();
    const int64_t full = inputs / T::COUNT * T::COUNT;
    auto step = [&](auto read, int64_t k) __attribute__((always_inline)) {
        typename T::Values w[OUTPUTS];
        for (int i = 0; i < OUTPUTS; i++) w[i] = read(weight + i * inputs + k);
        for (int j = 0; j < ROWS; j++) {
            const auto value = T::read(x + k * MICRO_ROWS + j * T::COUNT);
            for (int i = 0; i < OUTPUTS; i++) acc[j][i] = T::take(acc[j][i], w[i], value);
        }
    };
    auto whole = [](const W* p) __attribute__((always_inline)) { return T::read(p); };
    if (next)
        for (int64_t k = 0; k < full; k += T::COUNT) {
            for (int i = 0; i < OUTPUTS; i++) _mm_prefetch((const char*)(next + i * inputs + k), _MM_HINT_T1);
            step(whole, k);
        }
    else
        for (int64_t k = 0; k < full; k += T::COUNT) step(whole, k);
    if (const int rest = int(inputs - full)) step([rest](const W* p) { return T::read_part(p, rest); }, full);
#pragma GCC unroll 6  // or the compiler keeps the sums in memory
    for (int j = 0; j < ROWS; j++) store_sums<OUTPUTS>(sums + j * BLOCK, acc[j]);
}

template <class X, class W, int OUTPUTS, int ROWS>
inline void micro_rows(const X* x, int rows, const W* weight, const W* next, int64_t inputs, float* sums) {
    if (rows == ROWS) return micro<X, W, OUTPUTS, ROWS>(x, weight, next, inputs, sums);
    if constexpr (ROWS > 1) micro_rows<X, W, OUTPUTS, ROWS - 1>(x, rows, weight, next, inputs, sums);
}

// x: tiles. sums: [rows, BLOCK]
template <class X, class W>
inline void products(const X* x, int rows, const W* weight, int outputs, int64_t inputs, float* sums) {
    for (int m = 0; m < rows; m += MICRO_ROWS) {
        const int some = std::min(MICRO_ROWS, rows - m);
        const X* from = x + m * padded<X>(inputs);
        float* to = sums + m * BLOCK;
        auto at = [&](int n) { return weight + n * inputs; };
        auto next = [&](int n) { return m == 0 && n < outputs ? at(n) : nullptr; };
        int n = 0;
        if (some == 1)
            for (; n + 4 <= outputs; n += 4) micro<X, W, 4, 1>(from, at(n), next(n + 4), inputs, to + n);
        constexpr int FEW = MICRO_OUTPUTS;
        for (; n + FEW <= outputs; n += FEW)
            micro_rows<X, W, FEW, MICRO_ROWS>(from, some, at(n), next(n + FEW), inputs, to + n);
        for (; n < outputs; n++) micro_rows<X, W, 1, MICRO_ROWS>(from, some, at(n), nullptr, inputs, to + n);
    }
}

}  // namespace tandem
