// A weight in the order in which it is read: blocks of BLOCK outputs, in each the pairs of inputs one after the other,
// of each pair those of all outputs.
//
//     [ceil(outputs / BLOCK)][ceil(inputs / 32) * 16][BLOCK][2]      zeros behind the outputs and the inputs
//
// It takes the memory that it takes in the file and is read from its beginning to its end, as processors fetch ahead by
// themselves. A lane is an output: no sum has to be added up over lanes. Every sum takes its pairs of terms in order.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace tandem {

constexpr int64_t PAIRED_INPUTS = 32;  // a row has a multiple of so many

inline int64_t packed_row_bytes(int64_t inputs) { return ceil_div(inputs, PAIRED_INPUTS) * PAIRED_INPUTS * sizeof(bf16); }

// Outputs, BLOCK or fewer, of a weight [outputs, inputs]
inline void pack_block(const bf16* weight, int outputs, int64_t inputs, uint32_t* to) {
    constexpr int PAIRS = PAIRED_INPUTS / 2;
    alignas(64) bf16 rows[LANES][PAIRED_INPUTS];
    const uint32_t* from[LANES];
    for (int64_t k = 0; k < inputs; k += PAIRED_INPUTS, to += PAIRS * BLOCK)
        for (int first = 0; first < BLOCK; first += LANES) {
            const int64_t count = std::min(PAIRED_INPUTS, inputs - k);
            for (int n = 0; n < LANES; n++) {
                const bf16* row = weight + (first + n) * inputs + k;
                const bool is_there = first + n < outputs;
                from[n] = (const uint32_t*)row;
                if (is_there && count == PAIRED_INPUTS) continue;
                std::memset(rows[n], 0, sizeof rows[n]);
                if (is_there) std::memcpy(rows[n], row, count * sizeof(bf16));
                from[n] = (const uint32_t*)rows[n];
            }
            transpose(from, to + first, BLOCK);
        }
}

// Row n of a weight, to [inputs]
inline void unpack_row(const void* weight, int64_t n, int64_t inputs, bf16* to) {
    const bf16* from = (const bf16*)((const char*)weight + n / BLOCK * BLOCK * packed_row_bytes(inputs)) + n % BLOCK * 2;
    for (int64_t k = 0; k < inputs; k++) to[k] = from[k / 2 * BLOCK * 2 + k % 2];
}

}  // namespace tandem
