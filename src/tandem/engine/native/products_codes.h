// Products with codes that are packed (`packed_codes.h`): of the codes themselves, which bf16 holds exactly. Of every piece
// of a group the sum is scaled once, and an offset is multiplied with the sum of the inputs:
//
//     y = sum over pieces of  scale * sum(code * x) + offset * sum(x)
//
// So no weight is rounded, and a code costs a part of a lookup in a table that is the same for all. A lane is an output;
// every sum takes its pieces in order, and in each its pairs of terms.
#pragma once

#include "ahead.h"
#include "packed_codes.h"
#include "products_packed.h"

namespace tandem {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// --- codes as bf16, of sixteen outputs and a pair of inputs at a time ------------------------------------------------------
//
// `read(at, i)` of the CODED_TOGETHER inputs that begin at `at`: i / 2 is the pair, i % 2 which outputs. BYTES: of these
// inputs, of all outputs.

struct SixteenBits {
    static constexpr int64_t BYTES = CODED_TOGETHER * BLOCK * sizeof(bf16);
    __m512bh read(const char* at, int i) const { return (__m512bh)_mm512_load_si512(at + i * LINE_BYTES); }
};

// What a piece of a group has read is in the first cache, so it may be read in parts.
struct EightBitCodes {
    static constexpr int64_t BYTES = CODED_TOGETHER * BLOCK;
    __m512bh read(const char* at, int i) const {
        const auto* codes = (const int8_t*)at + i * BLOCK;
        return _mm512_cvtne2ps_pbh(load(codes + LANES).v, load(codes).v);
    }
};

// The bits of a number of bf16 but for the bias of the exponent; those that have no leading one are looked up.
struct Float8Codes {
    static constexpr int64_t BYTES = CODED_TOGETHER * BLOCK;
    __m512i least;  // looked up by five bits

    Float8Codes() {
        alignas(64) bf16 some[32];
        for (int i = 0; i < 32; i++) some[i] = to_bf16(to_float(float8{uint8_t(i)}));
        least = _mm512_load_si512(some);
    }
    __m512bh read(const char* at, int i) const {
        constexpr int SECOND_WHERE_SET = 0xd8;
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)at + i));
        const __m512i size = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x7f0));
        const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
        const __mmask32 is_least = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(15 << 3));
        const __m512i found = _mm512_mask_permutexvar_epi16(normal, is_least, words, least);
        const __m512i sign = _mm512_set1_epi16(short(1u << 15));
        return (__m512bh)_mm512_ternarylogic_epi32(found, words, sign, SECOND_WHERE_SET);
    }
};

struct FourBitCodes {
    static constexpr int64_t BYTES = CODED_TOGETHER * BLOCK / 2;
    __m512i values;  // twice: a lookup takes five bits

    FourBitCodes() {
        alignas(64) bf16 some[32];
        for (int i = 0; i < 32; i++) some[i] = to_bf16(float(i % 16 < 8 ? i % 16 : i % 16 - 16));
        values = _mm512_load_si512(some);
    }
    __m512bh read(const char* at, int i) const { return (__m512bh)_mm512_permutexvar_epi16(lowest_four(at, i), values); }

    // Of each word; whatever is above them
    static __m512i lowest_four(const char* at, int i) {
        return _mm512_srli_epi16(_mm512_load_si512(at + i / 4 * LINE_BYTES), i % 4 * 4);
    }
};

struct SixBitCodes {
    static constexpr int64_t BYTES = CODED_TOGETHER * BLOCK * 6 / 8;
    __m512i positive, negative;
    __m512i four = _mm512_set1_epi16(15);

    SixBitCodes() {
        alignas(64) bf16 values[64];
        for (int i = 0; i < 64; i++) values[i] = to_bf16(float(i < 32 ? i : i - 64));
        positive = _mm512_load_si512(values);
        negative = _mm512_load_si512(values + 32);
    }
    __m512bh read(const char* at, int i) const {
        constexpr int LOW_WHERE_SET = 0xe4;  // else `high`
        const __m512i low = FourBitCodes::lowest_four(at, i), others = _mm512_load_si512(at + 2 * LINE_BYTES);
        const __m512i high = i < 2 ? _mm512_slli_epi16(others, 4 - 2 * i) : _mm512_srli_epi16(others, 2 * i - 4);
        const __m512i words = _mm512_ternarylogic_epi32(low, high, four, LOW_WHERE_SET);
        return (__m512bh)_mm512_permutex2var_epi16(positive, words, negative);
    }
};

// --- products ------------------------------------------------------------------------------------------------------------

constexpr int64_t LEAST_PIECE = 16;

// Inputs whose products are scaled together
inline int64_t piece_of(const Linear& layer) { return layer.group % 64 == 0 ? 64 : layer.group % 32 == 0 ? 32 : 16; }

// Of each row, the sums of every PAIRED_INPUTS inputs: what offsets are multiplied with. x: a tile of `rows`;
// to: [rows][input_sums_size]
inline void input_sums(const bf16* x, int rows, int64_t inputs, float* to) {
    const int64_t size = input_sums_size(inputs);
    for (int64_t i = 0; i < size; i++)
        for (int row = 0; row < rows; row++, x += PAIRED_INPUTS) to[row * size + i] = sum(load(x) + load(x + LANES));
}

constexpr int64_t PART_INPUTS = 256;  // whose codes are widened together, for more rows: in the first cache

// Where the codes of some inputs of a block stand.
struct CodedInputs {
    const char* block;
    const char* widened;  // null: as they are packed
    int64_t begin, end;   // parts, or the last input
};

inline void add(float* to, __m512 sum, __m512 factor) {
    _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(to)));
}

// Adds the inputs to the sums. x: [steps][ROWS][PAIRED_INPUTS], all of a tile; codes: that are read; sums: [ROWS][BLOCK].
// Not a part of who calls it: there the compiler has too few registers.
template <class Codes, int ROWS>
__attribute__((noinline)) void micro_codes(const bf16* x, const Codes& codes, const CodedInputs& inputs, const Linear& layer,
                                           Ahead& ahead, float* sums) {
    constexpr int LINES = LEAST_PIECE / CODED_TOGETHER * Codes::BYTES / LINE_BYTES;
    const int64_t piece = piece_of(layer);
    GroupsOfBlock groups(layer, inputs.block, inputs.begin);
    const char* at = inputs.widened ? inputs.widened : groups.codes;
    for (int64_t k = inputs.begin; k < inputs.end; groups.left -= piece) {
        if (groups.enters()) {
            if (!inputs.widened) at = groups.codes;
            ahead.read(int(head_bytes(layer) / LINE_BYTES));
        }
        __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 12  // here and below, or the compiler keeps the sums in memory
        for (int j = 0; j < ROWS; j++) low[j] = high[j] = _mm512_setzero_ps();
        for (const int64_t end = std::min(k + piece, inputs.end); k < end; k += LEAST_PIECE) {
            const bf16* from = x + k / PAIRED_INPUTS * PAIRED_INPUTS * ROWS + k % PAIRED_INPUTS;
            ahead.read(LINES);
            for (const bf16* last = from + LEAST_PIECE; from < last; from += CODED_TOGETHER, at += Codes::BYTES)
#pragma GCC unroll 4
                for (int pair = 0; pair < CODED_TOGETHER / 2; pair++) {
                    const auto some = in_register(codes.read(at, 2 * pair));
                    const auto others = in_register(codes.read(at, 2 * pair + 1));
#pragma GCC unroll 12
                    for (int j = 0; j < ROWS; j++) {
                        int two;
                        std::memcpy(&two, from + j * PAIRED_INPUTS + 2 * pair, sizeof two);
                        const auto value = (__m512bh)in_register(_mm512_set1_epi32(two));
                        low[j] = _mm512_dpbf16_ps(low[j], some, value);
                        high[j] = _mm512_dpbf16_ps(high[j], others, value);
                    }
                }
        }
        const __m512 scales = groups.scales(0).v, others = groups.scales(1).v;
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; j++) {
            add(sums + j * BLOCK, low[j], scales);
            add(sums + j * BLOCK + LANES, high[j], others);
        }
    }
}

// Adds what offsets give.
template <int ROWS>
__attribute__((noinline)) void micro_offsets(const float* of, const CodedInputs& inputs, const Linear& layer, float* sums) {
    const int64_t size = input_sums_size(layer.inputs);
    __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 12
    for (int j = 0; j < ROWS; j++) {
        low[j] = _mm512_loadu_ps(sums + j * BLOCK);
        high[j] = _mm512_loadu_ps(sums + j * BLOCK + LANES);
    }
    GroupsOfBlock groups(layer, inputs.block, inputs.begin);
    for (int64_t k = inputs.begin; k < inputs.end; k += PAIRED_INPUTS, groups.left -= PAIRED_INPUTS) {
        groups.enters();
        const __m512 offset = in_register(groups.offsets(0).v), other = in_register(groups.offsets(1).v);
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; j++) {
            const __m512 sum = in_register(_mm512_set1_ps(of[j * size + k / PAIRED_INPUTS]));
            low[j] = _mm512_fmadd_ps(sum, offset, low[j]);
            high[j] = _mm512_fmadd_ps(sum, other, high[j]);
        }
    }
#pragma GCC unroll 12
    for (int j = 0; j < ROWS; j++) {
        _mm512_storeu_ps(sums + j * BLOCK, low[j]);
        _mm512_storeu_ps(sums + j * BLOCK + LANES, high[j]);
    }
}

template <class Codes, int ROWS = MICRO_ROWS>
inline void micro_codes_rows(const bf16* x, const float* of, int rows, const Codes& codes, const CodedInputs& inputs,
                             const Linear& layer, Ahead& ahead, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return micro_codes_rows<Codes, ROWS - 1>(x, of, rows, codes, inputs, layer, ahead, sums);
    micro_codes<Codes, ROWS>(x, codes, inputs, layer, ahead, sums);
    if (layer.has_offsets) micro_offsets<ROWS>(of, inputs, layer, sums);
}

template <class Codes>
inline void widen_codes(const Codes& codes, const CodedInputs& inputs, const Linear& layer, char* to) {
    GroupsOfBlock groups(layer, inputs.block, inputs.begin);
    const int64_t end = ceil_div(inputs.end, LEAST_PIECE) * LEAST_PIECE;
    for (int64_t k = inputs.begin; k < end; k += CODED_TOGETHER, groups.left -= CODED_TOGETHER, groups.codes += Codes::BYTES) {
        groups.enters();
#pragma GCC unroll 8
        for (int part = 0; part < CODED_TOGETHER; part++, to += LINE_BYTES)
            _mm512_store_si512(to, (__m512i)codes.read(groups.codes, part));
    }
}

// As `products_packed`, with a block of such a weight. of: [rows][input_sums_size], or null without offsets.
template <class T>
inline void products_packed_codes(const bf16* x, const float* of, int rows, int tile, const char* weight,
                                  const Linear& layer, const char* next, float* sums) {
    const int64_t bytes = packed_codes_bytes(layer), size = input_sums_size(layer.inputs);
    std::memset(sums, 0, rows * BLOCK * sizeof(float));
    const auto with = [&](const auto& codes) {
        const auto part = [&](int64_t k) { return std::min(layer.inputs, k + PART_INPUTS); };
        if (rows <= tile) {
            Ahead ahead(weight, next, bytes, std::min(NEAR_BYTES, bytes), 1);
            for (int64_t k = 0; k < layer.inputs; k += PART_INPUTS)
                micro_codes_rows(x, of, rows, codes, {weight, nullptr, k, part(k)}, layer, ahead, sums);
            return;
        }
        alignas(64) char widened[PART_INPUTS / CODED_TOGETHER * SixteenBits::BYTES];
        Ahead ahead(nullptr, next, 0, bytes, int(ceil_div(rows, tile) * (16 / layer.bits)));
        for (int64_t k = 0; k < layer.inputs; k += PART_INPUTS) {
            const CodedInputs inputs{weight, widened, k, part(k)};
            widen_codes(codes, inputs, layer, widened);
            for (int m = 0; m < rows; m += tile)
                micro_codes_rows(x + m * padded<bf16>(layer.inputs), of ? of + m * size : of, std::min(tile, rows - m),
                                 SixteenBits(), inputs, layer, ahead, sums + m * BLOCK);
        }
    };
    if (layer.is_float8) return with(Float8Codes());
    if (layer.bits == 4) return with(FourBitCodes());
    layer.bits == 6 ? with(SixBitCodes()) : with(EightBitCodes());
}

#endif

}  // namespace tandem
