// A weight of few bits in the order in which it is read: blocks of BLOCK outputs, in each the groups of inputs one after
// the other, of each group the scales of all outputs, their offsets if there are some, and then the codes:
//
//     [ceil(outputs / BLOCK)][groups] { scales[BLOCK]; offsets[BLOCK]; codes of `group` inputs }
//
//     8 bits      a byte each, int8 or float8: of every pair of inputs those of all outputs, [group / 2][BLOCK][2]
//     4 bits      two pairs are a line of the cache, 32 words of 16 bits: of word j the bits from 4 * i on are of pair
//                 i / 2, of output 16 * (i % 2) + j / 2 and input j % 2
//     6 bits      four pairs are three lines: the lowest four bits of each code, as above, and a line of the other two,
//                 of whose word j the bits from 2 * i on are of pair i / 2, of the same output and input
//
// Negative codes of 4 and 6 bits are their lowest bits. Scales and offsets are fp32, or fp16 times `unit`, a power of two
// that brings the largest into its range. A lane is an output, as of `packed.h`, and all of a block is read from its
// beginning to its end.
#pragma once

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "packed.h"
#include "quantized.h"

namespace tandem {

constexpr int64_t CODED_TOGETHER = 8;  // inputs, whose codes are whole lines; groups have a multiple of so many

inline int64_t coded_bytes(const Linear& layer, int64_t inputs) { return inputs * BLOCK * layer.bits / 8; }

// Of the scales of a group, and its offsets
inline int64_t head_bytes(const Linear& layer) {
    return (layer.has_offsets ? 2 : 1) * BLOCK * (layer.unit ? sizeof(uint16_t) : sizeof(float));
}

inline int64_t group_bytes(const Linear& layer) { return head_bytes(layer) + coded_bytes(layer, layer.group); }

inline int64_t packed_codes_bytes(const Linear& layer) {  // of a block
    return ceil_div(layer.inputs, layer.group) * group_bytes(layer);
}

// The groups of a block from an input on, one after the other.
struct GroupsOfBlock {
    const Linear& layer;
    const char *head, *codes;  // of the group; the codes of the first one from that input on
    int64_t left;              // inputs of the group

    GroupsOfBlock(const Linear& of, const char* block, int64_t begin) : layer(of), left(of.group - begin % of.group) {
        head = block + begin / of.group * group_bytes(of);
        codes = head + head_bytes(of) + coded_bytes(of, begin % of.group);
    }
    // Of a half of the outputs
    F16 scales(int half) const { return factors(half); }
    F16 offsets(int half) const { return factors(2 + half); }
    // Whether the next group begins, as all of this one was passed
    bool enters() {
        if (left) return false;
        head += group_bytes(layer);
        codes = head + head_bytes(layer);
        left = layer.group;
        return true;
    }

  private:
    F16 factors(int i) const {
        if (!layer.unit) return load((const float*)head + i * LANES);
        return load_halves((const uint16_t*)head + i * LANES) * all(float(layer.unit));
    }
};

// How many sums of the inputs of a row offsets are multiplied with
inline int64_t input_sums_size(int64_t inputs) { return ceil_div(inputs, PAIRED_INPUTS); }

// Input k of a lane, of the codes of CODED_TOGETHER inputs
inline float code_at(const Linear& layer, const char* codes, int64_t k, int64_t lane) {
    const int64_t byte = (k / 2 * BLOCK + lane) * 2 + k % 2;
    if (layer.is_float8) return to_float(((const float8*)codes)[byte]);
    if (layer.bits == 8) return ((const int8_t*)codes)[byte];
    const uint16_t* words = (const uint16_t*)codes + lane % LANES * 2 + k % 2;
    const int64_t i = k / 2 * 2 + lane / LANES;
    const int low = words[i / 4 * BLOCK] >> (i % 4 * 4) & 15;
    if (layer.bits == 4) return float((low ^ 8) - 8);
    return float(((low | (words[2 * BLOCK] >> (2 * i) & 3) << 4) ^ 32) - 32);
}

// Row n of such a weight, to [inputs]: with scales of fp32 it is what codes in rows give.
template <class T>
inline void unpack_codes(const Linear& layer, int64_t n, T* to) {
    const char* block = (const char*)layer.weight + n / BLOCK * packed_codes_bytes(layer);
    const int64_t lane = n % BLOCK;
    for (int64_t first = 0; first < layer.inputs; first += layer.group) {
        const GroupsOfBlock groups(layer, block, first);
        float scales[LANES], offsets[LANES] = {};
        store(scales, groups.scales(lane / LANES));
        if (layer.has_offsets) store(offsets, groups.offsets(lane / LANES));
        for (int64_t k = 0; k < std::min(layer.group, layer.inputs - first); k++) {
            const char* codes = groups.codes + coded_bytes(layer, k / CODED_TOGETHER * CODED_TOGETHER);
            const float code = code_at(layer, codes, k % CODED_TOGETHER, lane);
            set(to[first + k], std::fma(code, scales[lane % LANES], offsets[lane % LANES]));
        }
    }
}

// --- any weight that is not plain rows -----------------------------------------------------------------------------------

// Where the outputs from n on begin, the first ones of a block
template <class T>
inline const char* block_at(const Linear& layer, int64_t n) {
    const char* weight = (const char*)layer.weight;
    if (!layer.is_packed) return weight + n * row_bytes<T>(layer);
    return weight + (layer.bits ? n / BLOCK * packed_codes_bytes(layer) : n * packed_row_bytes(layer.inputs));
}

// Row n of a weight that is codes or packed, to [inputs]
template <class T>
inline void plain_row(const Linear& layer, int64_t n, T* to) {
    if (!layer.is_packed) return dequantize_row(layer, n, to);
    if (layer.bits) return unpack_codes(layer, n, to);
    if constexpr (sizeof(T) == sizeof(bf16)) unpack_row(layer.weight, n, layer.inputs, to);
}

// --- packing -------------------------------------------------------------------------------------------------------------

// Codes of a row of codes, a byte each. to: whole blocks of PACKED_INPUTS
inline void codes_of_row(const Linear& rows, int64_t n, uint8_t* to) {
    const uint8_t* from = (const uint8_t*)rows.weight + n * row_bytes<bf16>(rows);
    if (rows.bits == 8) {
        std::memcpy(to, from, rows.inputs);
        return;
    }
    constexpr int64_t WORDS = PACKED_BYTES / 2;
    for (int64_t k = 0; k < rows.inputs; k += PACKED_INPUTS, from += PACKED_BYTES)
        for (int i = 0; i < 4; i++)
            for (int64_t word = 0; word < WORDS; word++) {
                uint16_t bits;
                std::memcpy(&bits, from + 2 * word, sizeof bits);
                to[k + i * WORDS + word] = uint8_t((bits >> (4 * i) & 15) - 8);
            }
}

template <class T>
inline char* put_value(T value, char* to) {
    std::memcpy(to, &value, sizeof value);
    return to + sizeof value;
}

// The codes of CODED_TOGETHER inputs of a block. codes: from the first of them on, of all outputs, `size` apart
inline void pack_together(const Linear& layer, const uint8_t* codes, int64_t size, char* to) {
    uint8_t some[CODED_TOGETHER][LANES][2];  // of a pair of inputs and a half of the outputs each
    for (int i = 0; i < CODED_TOGETHER; i++)
        for (int j = 0; j < LANES; j++) std::memcpy(some[i][j], codes + (i % 2 * LANES + j) * size + i / 2 * 2, 2);
    if (layer.bits == 8) {
        std::memcpy(to, some, sizeof some);
        return;
    }
    uint16_t words[3][BLOCK] = {};
    for (int i = 0; i < CODED_TOGETHER; i++)
        for (int j = 0; j < BLOCK; j++) {
            const int code = some[i][j / 2][j % 2];
            words[i / 4][j] |= uint16_t((code & 15) << (i % 4 * 4));
            words[2][j] |= uint16_t((code >> 4 & 3) << (2 * i));
        }
    std::memcpy(to, words, coded_bytes(layer, CODED_TOGETHER));
}

// Outputs from n on of a weight of codes in rows, to a block of `layer`, which is like it otherwise.
inline void pack_codes(const Linear& rows, const Linear& layer, int64_t n, char* to) {
    const int64_t groups = ceil_div(layer.inputs, layer.group), inputs = groups * layer.group;
    const int64_t size = ceil_div(inputs, PACKED_INPUTS) * PACKED_INPUTS;
    const int count = int(std::min<int64_t>(BLOCK, rows.outputs - n));
    static thread_local Buffer memory;
    uint8_t* codes = (uint8_t*)memory.get(BLOCK * size);
    std::memset(codes, 0, BLOCK * size);
    for (int i = 0; i < count; i++) codes_of_row(rows, n + i, codes + i * size);
    for (int64_t k = 0; k < inputs; k += CODED_TOGETHER, to += coded_bytes(layer, CODED_TOGETHER)) {
        if (k % layer.group == 0) {
            auto put = [&](const float* from) {
                for (int i = 0; i < BLOCK; i++) {
                    const float factor = i < count ? from[(n + i) * groups + k / layer.group] : 0.0f;
                    to = layer.unit ? put_value(_cvtss_sh(float(factor / layer.unit), 0), to) : put_value(factor, to);
                }
            };
            put(rows.scales);
            if (layer.has_offsets) put(rows.offsets);
        }
        pack_together(layer, codes + k, size, to);
    }
}

}  // namespace tandem
