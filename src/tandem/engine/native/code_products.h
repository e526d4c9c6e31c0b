// Products of few rows with a weight of codes, each of which is expanded in registers, where it is used: for few rows the
// way through a cache costs more than the products. Operations and their order are those of `dequantize_row` and of
// `products`, so the bits are the same.
#pragma once

#include "linear.h"
#include "quantized.h"

namespace tandem {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

static_assert(LEAST_GROUP == Terms<bf16>::COUNT);

struct WordCodes {
    const uint8_t* packed;
    Levels<bf16> levels;

    void set(float scale, float offset) { levels.set(scale, offset); }
    __m512bh some_at(int64_t k, int64_t) const { return at(k); }
    __m512bh at(int64_t k) const {
        const __m512i shift = _mm512_set1_epi16(short(k % PACKED_INPUTS / 32 * 4));
        const __m512i words = _mm512_loadu_si512(packed + k / PACKED_INPUTS * PACKED_BYTES);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shift), levels.values);
    }
};

struct ByteCodes {
    const uint8_t* packed;
    F16 scale, offset;

    void set(float one, float other) {
        scale = all(one);
        offset = all(other);
    }
    __m512bh at(int64_t k) const {
        const int8_t* codes = (const int8_t*)packed + k;
        return _mm512_cvtne2ps_pbh(fma(load(codes + LANES), scale, offset).v, fma(load(codes), scale, offset).v);
    }
    __m512bh some_at(int64_t k, int64_t end) const {
        const int8_t* codes = (const int8_t*)packed;
        const F16 low = fma(load_at(codes, k, end), scale, offset);
        const F16 high = k + LANES < end ? fma(load_at(codes, k + LANES, end), scale, offset) : zeros();
        return _mm512_cvtne2ps_pbh(high.v, low.v);
    }
};

template <class Codes, int OUTPUTS, int ROWS>
inline void micro(const bf16* x, const Linear& layer, int64_t n, float* sums) {
    const int64_t inputs = layer.inputs, groups = ceil_div(inputs, layer.group);
    F16 acc[ROWS][OUTPUTS];
    for (auto& row : acc)
        for (F16& one : row) one = zeros();
    Codes weight[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) weight[i].packed = (const uint8_t*)layer.weight + (n + i) * row_bytes(layer);
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < OUTPUTS; i++) {
            const int64_t at = (n + i) * groups + g;
            weight[i].set(layer.scales[at], layer.offsets ? layer.offsets[at] : 0.0f);
        }
        const int64_t end = std::min(inputs, (g + 1) * layer.group), full = end / LEAST_GROUP * LEAST_GROUP;
        auto step = [&](auto expand, int64_t k) __attribute__((always_inline)) {
            __m512bh w[OUTPUTS];
            for (int i = 0; i < OUTPUTS; i++) w[i] = expand(weight[i], k);
            for (int j = 0; j < ROWS; j++) {
                const __m512bh value = Terms<bf16>::read(x + k * ROWS + j * LEAST_GROUP);
                for (int i = 0; i < OUTPUTS; i++) acc[j][i] = Terms<bf16>::take(acc[j][i], w[i], value);
            }
        };
        for (int64_t k = g * layer.group; k < full; k += LEAST_GROUP)
            step([](const Codes& codes, int64_t at) { return codes.at(at); }, k);
        if (full < end) step([end](const Codes& codes, int64_t at) { return codes.some_at(at, end); }, full);
    }
#pragma GCC unroll 6  // or the compiler keeps the sums in memory
    for (int j = 0; j < ROWS; j++) store_sums<OUTPUTS>(sums + j * BLOCK, acc[j]);
}

template <class Codes, int OUTPUTS, int ROWS>
inline void micro_rows(const bf16* x, int rows, const Linear& layer, int64_t n, float* sums) {
    if (rows == ROWS) return micro<Codes, OUTPUTS, ROWS>(x, layer, n, sums);
    if constexpr (ROWS > 1) micro_rows<Codes, OUTPUTS, ROWS - 1>(x, rows, layer, n, sums);
}

template <class Codes>
inline void few_rows(const bf16* x, int rows, const Linear& layer, int64_t n, int outputs, float* sums) {
    int i = 0;
    for (; i + 4 <= outputs; i += 4) micro_rows<Codes, 4, FEW_ROWS>(x, rows, layer, n + i, sums + i);
    for (; i < outputs; i++) micro_rows<Codes, 1, FEW_ROWS>(x, rows, layer, n + i, sums + i);
}

// x: a tile of at most FEW_ROWS rows; outputs [n, n + outputs)
inline void code_products(const bf16* x, int rows, const Linear& layer, int64_t n, int outputs, float* sums) {
    if (layer.bits == 8)
        few_rows<ByteCodes>(x, rows, layer, n, outputs, sums);
    else
        few_rows<WordCodes>(x, rows, layer, n, outputs, sums);
}

#endif

}  // namespace tandem
