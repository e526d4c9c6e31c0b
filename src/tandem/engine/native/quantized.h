// Weights of few bits, a scale for each group of inputs: one row at a time becomes what it stands for, in the type that is
// computed with, and goes through the same products as any other weight. So its bits are those of the plain weight. Where
// codes are packed (`packed_codes.h`), they are multiplied in another way.
//
//     weight[n, k] = code[n, k] * scale[n, k / group] + offset[n, k / group]     fused, rounded to the type once
//
//     8 bits   codes are int8, or numbers (float8), a row of `inputs` bytes
//     4 bits   codes -8 .. 7 are stored as 0 .. 15, in blocks of 128 inputs = 32 words of 16 bits: of word j, the bits
//              from 4 * i on are input 32 * i + j of the block. A row is a whole number of blocks.
#pragma once

#include <algorithm>

#include "packed.h"
#include "simd.h"

namespace tandem {

constexpr int64_t PACKED_INPUTS = 128, PACKED_BYTES = 64;
constexpr int64_t LEAST_GROUP = 32;  // groups have a multiple of so many inputs; of 8 bits also sixteen

// Shared with Python, see `library.py`. Null stands for what a layer does not have.
struct Linear {
    const void* weight;  // [outputs, inputs]; or codes, or packed
    const void* bias;    // [outputs]
    int64_t outputs, inputs;
    const float *scales, *offsets;  // [outputs, groups]; of codes in rows
    int64_t bits, group;            // of codes; 0: the weight is of the type that is computed with
    int64_t is_float8;              // codes of eight bits are
    int64_t is_packed;              // in the order of `packed.h`, or of `packed_codes.h`
    int64_t has_offsets;            // of packed codes
    double unit;                    // whose multiples their scales and offsets are, as fp16; 0: they are fp32
};

template <class T>
inline int64_t row_bytes(const Linear& layer) {
    if (layer.bits == 4) return ceil_div(layer.inputs, PACKED_INPUTS) * PACKED_BYTES;
    return layer.inputs * (layer.bits ? sizeof(int8_t) : sizeof(T));
}

// 32 elements of `count`, from i on
template <class T>
__attribute__((always_inline)) inline void store_two(T* p, F16 low, F16 high, int64_t i, int64_t count) {
    if (i + 2 * LANES > count) {
        store_at(p, low, i, count);
        if (i + LANES < count) store_at(p, high, i + LANES, count);
        return;
    }
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2)
        return _mm512_storeu_si512(p + i, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
#endif
    store(p + i, low);
    store(p + i + LANES, high);
}

#if defined(__AVX512F__)

inline F16 four_bits() { return {_mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8)}; }

// Four bits are looked up among the sixteen values that they may stand for.
template <class T>
struct Levels {
    __m512i values;

    void set(float scale, float offset) { set(fma(four_bits(), all(scale), all(offset))); }

    void set(F16 exact) {
        if constexpr (sizeof(T) == 4)
            values = _mm512_castps_si512(exact.v);
        else
            set(exact, exact);
    }

    // A lookup among words takes five bits, of which the highest one chooses.
    void set(F16 first, F16 second) {
#if defined(__AVX512BF16__)
        values = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
#else
        values = _mm512_inserti64x4(_mm512_castsi256_si512(bits_of_bf16(first)), bits_of_bf16(second), 1);
#endif
    }

    // 32 elements, whose codes are the lowest bits of each word
    void expand(__m512i words, T* to, int64_t count) const {
        if constexpr (sizeof(T) == 2) {
            const __m512i found = _mm512_permutexvar_epi16(words, values);
            if (count >= 2 * LANES) return _mm512_storeu_si512(to, found);
            std::memcpy(to, &found, count * sizeof(T));
        } else {
            const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
            const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
            const __m512 table = _mm512_castsi512_ps(values);
            store_two(to, {_mm512_permutexvar_ps(low, table)}, {_mm512_permutexvar_ps(high, table)}, 0, count);
        }
    }
};

using Words = __m512i;
inline Words load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
template <int BITS>
inline Words shifted(Words words) { return _mm512_srli_epi16(words, BITS); }

#else

struct Words {
    __m256i a, b;
};
inline Words load_words(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
template <int BITS>
inline Words shifted(Words words) { return {_mm256_srli_epi16(words.a, BITS), _mm256_srli_epi16(words.b, BITS)}; }

template <class T>
struct Levels {
    F16 scale, offset;

    void set(float one, float other) {
        scale = all(one);
        offset = all(other);
    }

    __attribute__((always_inline)) F16 values(__m256i words) const {
        const __m256i codes = _mm256_sub_epi16(_mm256_and_si256(words, _mm256_set1_epi16(15)), _mm256_set1_epi16(8));
        const __m256i low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(codes));
        const __m256i high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(codes, 1));
        return fma({_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}, scale, offset);
    }

    __attribute__((always_inline)) void expand(Words words, T* to, int64_t count) const {
        store_two(to, values(words.a), values(words.b), 0, count);
    }
};

#endif

// Scales and offsets of the groups of a row, in turn.
struct Groups {
    const float *scales, *offsets;
    float scale() const { return *scales; }
    float offset() const { return offsets ? *offsets : 0.0f; }
    void next() {
        scales++;
        if (offsets) offsets++;
    }
};

template <class T>
inline void dequantize_words(const uint8_t* packed, Groups groups, int64_t group, int64_t inputs, T* to) {
    Levels<T> levels;
    int64_t left = 0;  // inputs of the group
    for (int64_t k = 0; k < inputs; k += PACKED_INPUTS, packed += PACKED_BYTES) {
        const Words words = load_words(packed);
        auto part = [&](Words some, int64_t at) __attribute__((always_inline)) {
            if (at >= inputs) return;
            if (left == 0) {
                levels.set(groups.scale(), groups.offset());
                groups.next();
                left = group;
            }
            left -= LEAST_GROUP;
            levels.expand(some, to + at, inputs - at);
        };
        part(words, k);
        part(shifted<4>(words), k + 32);
        part(shifted<8>(words), k + 64);
        part(shifted<12>(words), k + 96);
    }
}

template <class Code, class T>
inline void dequantize_bytes(const Code* codes, Groups groups, int64_t group, int64_t inputs, T* to) {
    F16 scale = zeros(), offset = zeros();
    int64_t end = 0;  // of the group
    auto some = [&](auto read, int64_t k) __attribute__((always_inline)) {
        if (k >= end) {
            scale = all(groups.scale());
            offset = all(groups.offset());
            groups.next();
            end += group;
        }
        return fma(read(k), scale, offset);
    };
    auto whole = [&](int64_t k) __attribute__((always_inline)) { return load(codes + k); };
    auto part = [&](int64_t k) { return load_at(codes, k, inputs); };
    int64_t k = 0;
    for (; k + 2 * LANES <= inputs; k += 2 * LANES) {
        const F16 low = some(whole, k);
        store_two(to, low, some(whole, k + LANES), k, inputs);
    }
    for (; k < inputs; k += LANES) store_at(to, some(part, k), k, inputs);
}

// Row n of a weight that is codes in rows, to [inputs]
template <class T>
inline void dequantize_row(const Linear& layer, int64_t n, T* to) {
    const int64_t first = n * ceil_div(layer.inputs, layer.group);
    const Groups groups{layer.scales + first, layer.offsets ? layer.offsets + first : nullptr};
    const uint8_t* codes = (const uint8_t*)layer.weight + n * row_bytes<T>(layer);
    if (layer.is_float8)
        dequantize_bytes((const float8*)codes, groups, layer.group, layer.inputs, to);
    else if (layer.bits == 8)
        dequantize_bytes((const int8_t*)codes, groups, layer.group, layer.inputs, to);
    else
        dequantize_words(codes, groups, layer.group, layer.inputs, to);
}

}  // namespace tandem
