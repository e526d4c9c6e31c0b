// How the weights of a few outputs are read with AVX-512: those of one step of inputs at a time, in order.
//
//     Plain     as they stand
//     Shifted   a line of the cache at a time, where lines and rows do not begin together
//     EightBits 8 bits, made plain in registers
//     FourBits  4 bits, the same
//
// Each has a Reader of OUTPUTS rows from n on, whose first input is `begin`. `enter(k)` is called where something begins
// that the inputs from k on have in common, and says where that ends. Of codes operations and their order are those of
// `plain_row`, so the bits are the same.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "quantized.h"
#include "simd.h"

namespace tandem {

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

// --- weights that stand in memory ----------------------------------------------------------------------------------------

template <class X, class W>
struct Plain {
    static constexpr int STEPS = LINE_BYTES / sizeof(W) / Terms<X>::COUNT;  // of each line
    static constexpr bool IS_WHOLE_BLOCKS = false;  // else there are outputs for every reader

    const W* weight;
    int64_t inputs;

    template <int OUTPUTS>
    struct Reader {
        const W* weight;
        int64_t inputs;

        Reader(const Plain& of, int n, int64_t) : weight(of.weight + n * of.inputs), inputs(of.inputs) {}
        int64_t enter(int64_t) { return inputs; }
        auto read(int i, int64_t k) { return Terms<X>::read(weight + i * inputs + k); }
        auto read_part(int i, int64_t k, int count) { return Terms<X>::read_part(weight + i * inputs + k, count); }
    };
};

// Checkpoints begin anywhere in a line, and what is read across two lines takes the time of both: here each line is read
// once, and put together with the one before. The rows have to be whole lines. What is read beside the weight is in its
// first and last line.
template <class X>
struct Shifted {
    static_assert(Terms<X>::COUNT * sizeof(X) == LINE_BYTES);
    static constexpr int STEPS = 1;
    static constexpr bool IS_WHOLE_BLOCKS = false;

    const X* weight;
    int64_t inputs;

    bool fits() const {
        const auto address = (uintptr_t)weight;
        return address % LINE_BYTES != 0 && address % 4 == 0 && inputs % Terms<X>::COUNT == 0;
    }

    template <int OUTPUTS>
    struct Reader {
        const char* lines;
        int64_t inputs, row;
        __m512i places, last[OUTPUTS];

        Reader(const Shifted& of, int n, int64_t begin) : inputs(of.inputs), row(of.inputs * sizeof(X)) {
            const int shift = int((uintptr_t)of.weight % LINE_BYTES / 4);
            const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            places = _mm512_add_epi32(counted, _mm512_set1_epi32(shift));
            lines = (const char*)of.weight + n * row - 4 * shift;
#pragma GCC unroll 4
            for (int i = 0; i < OUTPUTS; i++) last[i] = _mm512_load_si512(lines + i * row + begin * sizeof(X));
        }
        int64_t enter(int64_t) { return inputs; }
        auto read(int i, int64_t k) {
            const __m512i next = in_register(_mm512_load_si512(lines + i * row + k * sizeof(X) + LINE_BYTES));
            const __m512i found = _mm512_permutex2var_epi32(last[i], places, next);
            last[i] = next;
            return (typename Terms<X>::Values)found;
        }
        auto read_part(int, int64_t, int) { return typename Terms<X>::Values(); }  // there is none
    };
};

// --- codes ---------------------------------------------------------------------------------------------------------------

// The groups of rows of codes, from row n on, for steps of COUNT inputs.
template <int COUNT>
struct GroupsOf {
    const float *scales, *offsets;
    int64_t inputs, group, groups, together;  // a step has one group, or two
    int64_t at, next, end = 0;

    GroupsOf(const Linear& layer, int64_t n, int64_t begin)
        : inputs(layer.inputs), group(layer.group), groups(ceil_div(inputs, group)),
          together(group < COUNT ? 2 : 1), next(begin / group) {
        scales = layer.scales + n * groups;
        offsets = layer.offsets ? layer.offsets + n * groups : nullptr;
    }
    int64_t enter(int64_t k) {
        if (k >= end) {
            at = next;
            next += together;
            end = next * group;
        }
        return end;
    }
    // Of row n + i, of the group that was entered or one behind it
    F16 stands_for(F16 codes, int i, bool has_offset, int64_t behind = 0) const {
        const int64_t which = i * groups + at + behind;
        const F16 scale = all(scales[which]);
        return has_offset ? fma(codes, scale, all(offsets[which])) : codes * scale;
    }
};

// What codes stand for is of the type T; X: what it is multiplied as, the same or wider
template <class X, class T, class Code, bool HAS_OFFSETS>
struct EightBits {
    static constexpr int STEPS = LINE_BYTES / Terms<X>::COUNT;
    static constexpr bool IS_WHOLE_BLOCKS = true;

    const Linear& layer;
    int64_t n;  // the first output

    template <int OUTPUTS>
    struct Reader : GroupsOf<Terms<X>::COUNT> {
        const Code* codes;

        Reader(const EightBits& of, int n, int64_t begin)
            : GroupsOf<Terms<X>::COUNT>(of.layer, of.n + n, begin),
              codes((const Code*)of.layer.weight + (of.n + n) * of.layer.inputs) {}
        auto read(int i, int64_t k) const {
            return made(i, k, load(row(i) + k), [&] { return load(row(i) + k + LANES); });
        }
        auto read_part(int i, int64_t k, int count) const {
            return made(i, k, load_at(row(i), k, k + count), [&] {
                return count > LANES ? load_part(row(i) + k + LANES, count - LANES) : zeros();
            });
        }
        const Code* row(int i) const { return codes + i * this->inputs; }
        // second: what is behind the first sixteen, if it is wanted
        template <class Second>
        auto made(int i, int64_t k, F16 first, const Second& second) const {
            const F16 low = this->stands_for(first, i, HAS_OFFSETS);
            if constexpr (Terms<X>::COUNT == LANES) {
                return rounded_to<T>(low).v;
            } else {
                const bool is_next = this->group == LANES && k + LANES < this->inputs;
                return _mm512_cvtne2ps_pbh(this->stands_for(second(), i, HAS_OFFSETS, is_next).v, low.v);
            }
        }
    };
};

// What is behind the last input is a code for something: there x is 0. Of bf16 a register has the levels of two groups, so
// what has groups of 32 makes them half as often.
template <class X, class T>
struct FourBits {
    static constexpr int GROUPED = Terms<X>::COUNT == LANES ? LANES : 2 * LEAST_GROUP;  // inputs that are entered together
    static constexpr int STEPS = PACKED_INPUTS / Terms<X>::COUNT;
    static constexpr bool IS_WHOLE_BLOCKS = true;

    const Linear& layer;
    int64_t n;

    template <int OUTPUTS>
    struct Reader : GroupsOf<GROUPED> {
        const uint8_t* packed;
        int64_t row;
        Levels<X> levels[OUTPUTS];

        Reader(const FourBits& of, int n, int64_t begin)
            : GroupsOf<GROUPED>(of.layer, of.n + n, begin), row(row_bytes<X>(of.layer)) {
            packed = (const uint8_t*)of.layer.weight + (of.n + n) * row;
        }
        int64_t enter(int64_t k) {
            const int64_t end = GroupsOf<GROUPED>::enter(k);
            const bool has_two = this->together == 2 && this->at + 1 < this->groups;
            for (int i = 0; i < OUTPUTS; i++) {
                const F16 first = this->stands_for(four_bits(), i, this->offsets);
                if constexpr (Terms<X>::COUNT == LANES)
                    levels[i].set(rounded_to<T>(first));
                else
                    levels[i].set(first, has_two ? this->stands_for(four_bits(), i, this->offsets, 1) : first);
            }
            return end;
        }
        auto read(int i, int64_t k) const {
            const uint8_t* words = packed + i * row + k / PACKED_INPUTS * PACKED_BYTES;
            const int bits = int(k % PACKED_INPUTS / LEAST_GROUP * 4);
            if constexpr (Terms<X>::COUNT == LANES) {
                const __m256i half = _mm256_loadu_si256((const __m256i*)words + k % LEAST_GROUP / LANES);
                const __m512i wide = _mm512_srl_epi32(_mm512_cvtepu16_epi32(half), _mm_cvtsi32_si128(bits));
                return _mm512_permutexvar_ps(wide, _mm512_castsi512_ps(levels[i].values));
            } else {
                __m512i code = _mm512_srl_epi16(_mm512_loadu_si512(words), _mm_cvtsi32_si128(bits));
                if (this->together == 2) {  // else both halves of the levels are the same
                    const __m512i second = _mm512_set1_epi16(short(k % GROUPED / LEAST_GROUP * LANES));
                    constexpr int AND_OR = 0xea;
                    code = _mm512_ternarylogic_epi32(code, _mm512_set1_epi16(15), second, AND_OR);
                }
                return (__m512bh)_mm512_permutexvar_epi16(code, levels[i].values);
            }
        }
        auto read_part(int i, int64_t k, int) const { return read(i, k); }
    };
};

}  // namespace tandem
