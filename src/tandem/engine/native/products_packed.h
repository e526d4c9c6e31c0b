// Products with AVX-512 and a packed weight (`packed.h`): a tile of rows times all outputs of a block, one pair of inputs
// after the other. Rows lie as for other weights (`products_avx512.h`).
#pragma once

#include "ahead.h"
#include "packed.h"
#include "products_avx512.h"

namespace tandem {

#if defined(__AVX512BF16__)

// x: [steps][ROWS][PAIRED_INPUTS]; weight: a block; sums: [ROWS][BLOCK]
template <int ROWS>
inline void micro_packed(const bf16* x, const char* weight, int64_t inputs, Ahead& ahead, float* sums) {
    __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 12  // or the compiler keeps the sums in memory
    for (int j = 0; j < ROWS; j++) low[j] = high[j] = _mm512_setzero_ps();
    Ahead fetched = ahead;  // in registers
    for (int64_t k = 0; k < inputs; k += PAIRED_INPUTS, x += ROWS * PAIRED_INPUTS)
        for (int i = 0; i < PAIRED_INPUTS; i += 2, weight += 2 * LINE_BYTES) {
            fetched.read(2);
            const auto first = (__m512bh)in_register(_mm512_load_si512(weight));
            const auto second = (__m512bh)in_register(_mm512_load_si512(weight + LINE_BYTES));
#pragma GCC unroll 12
            for (int j = 0; j < ROWS; j++) {
                int pair;
                std::memcpy(&pair, x + j * PAIRED_INPUTS + i, sizeof pair);
                const auto value = (__m512bh)in_register(_mm512_set1_epi32(pair));
                low[j] = _mm512_dpbf16_ps(low[j], first, value);
                high[j] = _mm512_dpbf16_ps(high[j], second, value);
            }
        }
    ahead = fetched;
#pragma GCC unroll 12
    for (int j = 0; j < ROWS; j++) {
        _mm512_storeu_ps(sums + j * BLOCK, low[j]);
        _mm512_storeu_ps(sums + j * BLOCK + LANES, high[j]);
    }
}

template <int ROWS>
inline void micro_packed_rows(const bf16* x, int rows, const char* weight, int64_t inputs, Ahead& ahead, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return micro_packed_rows<ROWS - 1>(x, rows, weight, inputs, ahead, sums);
    micro_packed<ROWS>(x, weight, inputs, ahead, sums);
}

// As `products`, with a block of such a weight. next: the one that comes then, or null
inline void products_packed(const bf16* x, int rows, int tile, const char* weight, int64_t inputs, const char* next,
                            float* sums) {
    const int64_t bytes = BLOCK * packed_row_bytes(inputs), tiles = ceil_div(rows, tile);
    Ahead ahead(weight, next, bytes, tiles == 1 ? std::min(NEAR_BYTES, bytes) : bytes, int(tiles));
    for (int m = 0; m < rows; m += tile)
        micro_packed_rows<MICRO_ROWS>(x + m * padded<bf16>(inputs), std::min(tile, rows - m), weight, inputs, ahead,
                                      sums + m * BLOCK);
}

#endif

}  // namespace tandem
