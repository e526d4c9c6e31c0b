// A weight of few bits in the order in which it is read: blocks of BLOCK outputs, in each the groups of inputs one after
// the other, of each group the scales of all outputs, their offsets if there are some, and then the codes:
//
//     [ceil(outputs / BLOCK)][groups] { float scales[BLOCK]; float offsets[BLOCK]; codes of `group` inputs }
//
//     8, 6 bits   a byte each: of every pair of inputs those of all outputs, [group / 2][BLOCK][2]
//     4 bits      two pairs are a line of the cache, 32 words of 16 bits: of word j the bits from 4 * i on are of pair
//                 i / 2, of output 16 * (i % 2) + j / 2 and input j % 2; negative ones are stored as 8 .. 15
//
// A lane is an output, as of `packed.h`, and all of a block is read from its beginning to its end.
#pragma once

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "packed.h"
#include "quantized.h"

namespace tandem {

inline int64_t coded_bytes(const Linear& layer, int64_t inputs) { return inputs * BLOCK * (layer.bits == 4 ? 4 : 8) / 8; }

// Of the scales of a group, and its offsets
inline int64_t head_bytes(const Linear& layer) { return (layer.has_offsets ? 2 : 1) * BLOCK * sizeof(float); }

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
    const float* scales() const { return (const float*)head; }
    const float* offsets() const { return (const float*)head + BLOCK; }
    // Whether the next group begins, as all of this one was passed
    bool enters() {
        if (left) return false;
        head += group_bytes(layer);
        codes = head + head_bytes(layer);
        left = layer.group;
        return true;
    }
};

// How many sums of the inputs of a row offsets are multiplied with
inline int64_t input_sums_size(int64_t inputs) { return ceil_div(inputs, PAIRED_INPUTS); }

// Row n of such a weight, to [inputs]: what is in rows gives the same.
template <class T>
inline void unpack_codes(const Linear& layer, int64_t n, T* to) {
    const char* at = (const char*)layer.weight + n / BLOCK * packed_codes_bytes(layer);
    const int64_t lane = n % BLOCK, half = lane / LANES, word = lane % LANES * 2;
    for (int64_t first = 0; first < layer.inputs; first += layer.group, at += group_bytes(layer)) {
        const float* scales = (const float*)at;
        const float scale = scales[lane], offset = layer.has_offsets ? scales[BLOCK + lane] : 0.0f;
        const char* codes = at + head_bytes(layer);
        for (int64_t k = 0; k < std::min(layer.group, layer.inputs - first); k++) {
            int code;
            if (layer.bits == 4) {
                const uint16_t* words = (const uint16_t*)codes + k / 4 * BLOCK;
                code = (words[word + k % 2] >> (4 * (k / 2 % 2 * 2 + half)) & 15 ^ 8) - 8;
            } else {
                code = ((const int8_t*)codes)[(k / 2 * BLOCK + lane) * 2 + k % 2];
            }
            set(to[first + k], std::fma(float(code), scale, offset));
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

// Outputs from n on of a weight of codes in rows, to a block of `layer`, which is like it otherwise.
inline void pack_codes(const Linear& rows, const Linear& layer, int64_t n, char* to) {
    constexpr int HALF = LANES;  // of the outputs
    const int64_t groups = ceil_div(layer.inputs, layer.group), inputs = groups * layer.group;
    const int64_t size = ceil_div(inputs, PACKED_INPUTS) * PACKED_INPUTS;
    const int count = int(std::min<int64_t>(BLOCK, rows.outputs - n));
    static thread_local Buffer memory;
    uint8_t* codes = (uint8_t*)memory.get(BLOCK * size);
    std::memset(codes, 0, BLOCK * size);
    for (int i = 0; i < count; i++) codes_of_row(rows, n + i, codes + i * size);
    for (int64_t k = 0; k < inputs; k += 4) {
        if (k % layer.group == 0) {
            auto put = [&](const float* from) {
                float some[BLOCK] = {};
                for (int i = 0; i < count; i++) some[i] = from[(n + i) * groups + k / layer.group];
                std::memcpy(to, some, sizeof some);
                to += sizeof some;
            };
            put(rows.scales);
            if (layer.has_offsets) put(rows.offsets);
        }
        uint8_t some[4][HALF][2];  // of two pairs, and of both halves of the outputs
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < HALF; j++) std::memcpy(some[i][j], codes + (i % 2 * HALF + j) * size + k + i / 2 * 2, 2);
        if (layer.bits == 4) {
            uint16_t words[BLOCK];
            for (int j = 0; j < BLOCK; j++) {
                words[j] = 0;
                for (int i = 0; i < 4; i++) words[j] |= uint16_t((some[i][j / 2][j % 2] & 15) << (4 * i));
            }
            std::memcpy(to, words, sizeof words);
        } else {
            std::memcpy(to, some, sizeof some);
        }
        to += coded_bytes(layer, 4);
    }
}

}  // namespace tandem
