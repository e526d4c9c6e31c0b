// What rows have made of the keys so far: a running maximum of their scores, and the values, weighted.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "simd.h"
#include "tiles.h"

namespace tandem {

constexpr int MAX_HEAD_DIM = 512;
#if defined(__AMX_BF16__)
constexpr int MAX_ROWS = 64;  // of a unit
#else
constexpr int MAX_ROWS = 32;
#endif

#if defined(__AVX512BF16__)
template <class T>
using ShareOf = T;
#else
template <class T>
using ShareOf = float;
#endif

// Of a block, in sixteens: with bf16 products a query is read once for two of these; tiles wait for each other less often
// where there are more.
template <class Share>
constexpr int PARTS_OF = HAS_TILES<Share> ? 4 : sizeof(Share) < sizeof(float) ? 2 : 1;
template <class Share>
constexpr int KEYS_OF = PARTS_OF<Share> * LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Running softmax of the rows of a unit. Share: the type in which the shares of keys are multiplied with values. Where that
// is bf16, scores are logarithms to base two: of such powers there are enough digits for little.
template <class Share>
struct Mixture {
    static constexpr int KEYS = KEYS_OF<Share>, PARTS = PARTS_OF<Share>;
    static constexpr bool IS_BASE_TWO = sizeof(Share) < sizeof(float);
    static constexpr float UNIT = IS_BASE_TWO ? 1.44269504f : 1.0f;  // of scores

    static F16 power(F16 score) {
#if defined(__AVX512BF16__)
        if constexpr (IS_BASE_TWO) return two_to(score);
#endif
        return exponential(score);
    }

    int64_t width;                                    // of a row of sums
    alignas(64) float sums[MAX_ROWS * MAX_HEAD_DIM];  // of values, weighted; next to each other as queries are
    alignas(64) Share shares[MAX_ROWS][KEYS];         // of the keys of a block
    alignas(64) float totals[MAX_ROWS][LANES];        // of all shares, by their place in a block
    float most[MAX_ROWS];                             // largest score so far

    float* row(int r) { return sums + r * width; }

    // Of ROWS rows, 16 * PARTS elements from d on. From row to row by addition: many products are more than registers hold.
    template <int ROWS, int PARTS>
    void load_sums(int first, int64_t d, F16 (&to)[ROWS][PARTS]) {
        const float* from = row(first) + d;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++, from += width)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) to[r][p] = load(from + p * LANES);
    }
    template <int ROWS, int PARTS>
    void store_sums(int first, int64_t d, const F16 (&from)[ROWS][PARTS]) {
        float* to = row(first) + d;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++, to += width)
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) store(to + p * LANES, from[r][p]);
    }

    void clear(int rows, int64_t head_dim) {
        width = ceil_div(head_dim, LANES) * LANES;
        std::memset(sums, 0, rows * width * sizeof(float));
        std::memset(totals, 0, rows * sizeof totals[0]);
        std::fill(most, most + rows, NOTHING);
    }

    // A larger score than any before: what there is counts for less.
    __attribute__((noinline)) void raise_to(int r, float best) {
        const F16 shrink = power(all(most[r] - best));
        store(totals[r], load(totals[r]) * shrink);
        for (int64_t d = 0; d < width; d += LANES) store(row(r) + d, load(row(r) + d) * shrink);
        most[r] = best;
    }

    // Takes the scores of a block in. A score that is NaN makes the row NaN.
    __attribute__((always_inline)) void weigh(int r, const F16 (&scores)[PARTS]) {
        F16 best = scores[0];
        for (int p = 1; p < PARTS; p++) best = larger(best, scores[p]);
        if (any_larger(best, all(most[r]))) [[unlikely]] raise_to(r, std::max(most[r], largest(best)));
        F16 total = load(totals[r]);
        for (int p = 0; p < PARTS; p++) {
            const F16 weights = power(scores[p] - all(most[r]));
            store(shares[r] + p * LANES, weights);
            total = total + weights;
        }
        store(totals[r], total);
    }
};

// Where keys from first_key on are not within [least, last]: nothing
inline F16 seen_only(F16 scores, int64_t first_key, int64_t least, int64_t last) {
    if (first_key >= least && first_key + LANES - 1 <= last) return scores;
    float some[LANES];
    store(some, scores);
    for (int j = 0; j < LANES; j++)
        if (first_key + j > last || first_key + j < least) some[j] = NOTHING;
    return load(some);
}

// Takes the scores of a block in, of `rows` rows from `row` on; false: none of them sees anything of it.
template <class Share>
inline bool weigh_rows(Mixture<Share>& mixture, int row, int rows, const F16 (*scores)[PARTS_OF<Share>],
                       const int64_t* positions, int64_t first_key, int64_t window, float scale) {
    constexpr int KEYS = KEYS_OF<Share>, PARTS = PARTS_OF<Share>;
    bool any = false;
    for (int r = 0; r < rows; r++) {
        const int64_t last = positions[row + r], least = window ? last + 1 - window : 0;
        if (last < first_key || least > first_key + KEYS - 1) [[unlikely]] {  // of this block nothing
            std::memset(mixture.shares[row + r], 0, sizeof mixture.shares[row + r]);
            continue;
        }
        F16 seen[PARTS];
        for (int p = 0; p < PARTS; p++)
            seen[p] = seen_only(scores[r][p] * all(scale), first_key + p * LANES, least, last);
        mixture.weigh(row + r, seen);
        any = true;
    }
    return any;
}

}  // namespace tandem
