// Attention read in place from the pages of the KV memory.
//
// Tokens of one request that stand together, and the query heads that look at one KV head, are the rows of a unit of
// work. Keys come in blocks of 16 whose first position is a multiple of 16; a row takes them in order of positions with
// a running maximum, and a block that it does not see leaves it as it is. So the bits of a row depend on its own
// keys only: not on the rows beside it, the cut of the prompt, or which pages hold it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "pool.h"
#include "simd.h"

namespace tandem {

constexpr int KEYS = LANES;
constexpr int MAX_HEAD_DIM = 512;
constexpr int MAX_ROWS = 32;  // of a unit
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// [pages, kv_heads, layers, 2 (key, value), page_size] rows of head_dim values: of T, or int8 and behind them their scale
template <class T>
struct KvPages {
    char* base;
    int64_t page_size, kv_heads, layers, head_dim;
    bool is_int8;

    int64_t row_bytes() const { return head_dim * (is_int8 ? 1 : sizeof(T)) + (is_int8 ? sizeof(float) : 0); }
    char* key(int64_t page, int64_t slot, int64_t head, int64_t layer) const {
        return base + (((page * kv_heads + head) * layers + layer) * 2 * page_size + slot) * row_bytes();
    }
    char* value(int64_t page, int64_t slot, int64_t head, int64_t layer) const {
        return key(page, slot, head, layer) + page_size * row_bytes();
    }

    // To a row of the memory, rounded to the nearest of 255 multiples of a scale where it is int8.
    void put(char* row, const T* values) const {
        if (!is_int8) return (void)std::memcpy(row, values, head_dim * sizeof(T));
        float most = 0.0f;
        for (int64_t d = 0; d < head_dim; d++) most = std::max(most, std::fabs(to_float(values[d])));
        const float scale = most / 127.0f;
        std::memcpy(row + head_dim, &scale, sizeof scale);
        for (int64_t d = 0; d < head_dim; d++)
            row[d] = scale > 0.0f ? char(int8_t(std::nearbyintf(to_float(values[d]) / scale))) : 0;
    }

    // What stands in a row, in `room` where it has to be made.
    const T* get(const char* row, T* room) const {
        if (!is_int8) return (const T*)row;
        float scale;
        std::memcpy(&scale, row + head_dim, sizeof scale);
        for (int64_t d = 0; d < head_dim; d += LANES)
            store_at(room, load_at((const int8_t*)row, d, head_dim) * all(scale), d, head_dim);
        return room;
    }
};

// What the tokens of a batch see; shared with Python, see `batch_view.py`.
struct BatchView {
    int64_t num_tokens;
    const int64_t* positions;  // [num_tokens]
    const int64_t* slots;      // [num_tokens] page * page_size + slot: where its key and value go
    const int64_t* tables;     // [num_tokens] where in `pages` its request's begin; equal for tokens of one request
    const int64_t* pages;
    int64_t window;  // tokens that a query sees, itself included; 0: all
};

// Tokens [first, last) of a batch: positions that follow each other in one request.
struct Span {
    int64_t first, last;
};

// The span that begins with this token.
inline Span span_at(const BatchView& batch, int64_t first, int64_t most) {
    int64_t last = first + 1;
    while (last < batch.num_tokens && last - first < most && batch.tables[last] == batch.tables[first] &&
           batch.positions[last] == batch.positions[last - 1] + 1)
        last++;
    return {first, last};
}

// Keys of one block, turned: unit u of all sixteen stands together. A unit is 32 bits: one fp32, or two bf16.
template <class T>
struct KeyBlock {
    static constexpr int PER_UNIT = 4 / sizeof(T);
    alignas(64) uint32_t units[MAX_HEAD_DIM / PER_UNIT][KEYS];

    void fill(const T* const keys[KEYS], int64_t head_dim) {
        constexpr int64_t STEP = LANES * PER_UNIT;
        const uint32_t* from[KEYS];
        int64_t d = 0;
        for (; d + STEP <= head_dim; d += STEP) {
            for (int j = 0; j < KEYS; j++) from[j] = (const uint32_t*)(keys[j] + d);
            transpose(from, units[d / PER_UNIT]);
        }
        if (d == head_dim) return;
        alignas(64) T ends[KEYS][STEP] = {};
        for (int j = 0; j < KEYS; j++) {
            std::memcpy(ends[j], keys[j] + d, (head_dim - d) * sizeof(T));
            from[j] = (const uint32_t*)ends[j];
        }
        transpose(from, units[d / PER_UNIT]);
    }
};

// Queries of the rows, as the scores want them: padded with zeros to whole units.
template <class T>
struct Queries {
    static constexpr int PER_UNIT = KeyBlock<T>::PER_UNIT;
    alignas(64) float values[MAX_ROWS][MAX_HEAD_DIM];
    alignas(64) uint32_t units[MAX_ROWS][MAX_HEAD_DIM / PER_UNIT];
    int64_t num_units;

    void set(int row, const T* query, int64_t head_dim) {
        num_units = (head_dim + PER_UNIT - 1) / PER_UNIT;
        std::memset(units[row], 0, num_units * 4);
        std::memcpy(units[row], query, head_dim * sizeof(T));
        for (int64_t d = 0; d < num_units * PER_UNIT; d++) values[row][d] = d < head_dim ? to_float(query[d]) : 0.0f;
    }
};

#if defined(__AVX512F__)
inline F16 low_half(const uint32_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_load_si512(p), 16))};
}
inline F16 high_half(const uint32_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_load_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
constexpr int ROWS_AT_ONCE = 8;
#else
inline __m256 low_eight(const uint32_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i*)p), 16));
}
inline __m256 high_eight(const uint32_t* p) {
    const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_load_si256((const __m256i*)p), mask));
}
inline F16 low_half(const uint32_t* p) { return {low_eight(p), low_eight(p + 8)}; }
inline F16 high_half(const uint32_t* p) { return {high_eight(p), high_eight(p + 8)}; }
constexpr int ROWS_AT_ONCE = 2;
#endif

// Products of ROWS queries, from `row` on, with the keys of a block. Even and odd elements have sums of their own.
template <int ROWS>
inline void score(const Queries<float>& q, int row, const KeyBlock<float>& keys, F16* scores) {
    F16 even[ROWS], odd[ROWS];
    for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zeros();
    int64_t u = 0;
    for (; u + 2 <= q.num_units; u += 2) {
        const F16 first = load((const float*)keys.units[u]), second = load((const float*)keys.units[u + 1]);
        for (int r = 0; r < ROWS; r++) {
            even[r] = fma(all(q.values[row + r][u]), first, even[r]);
            odd[r] = fma(all(q.values[row + r][u + 1]), second, odd[r]);
        }
    }
    if (u < q.num_units)
        for (int r = 0; r < ROWS; r++)
            even[r] = fma(all(q.values[row + r][u]), load((const float*)keys.units[u]), even[r]);
    for (int r = 0; r < ROWS; r++) scores[r] = even[r] + odd[r];
}

template <int ROWS>
inline void score(const Queries<bf16>& q, int row, const KeyBlock<bf16>& keys, F16* scores) {
#if defined(__AVX512BF16__)
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t u = 0; u < q.num_units; u++) {
        const __m512bh pair = (__m512bh)_mm512_load_si512(keys.units[u]);
        for (int r = 0; r < ROWS; r++)
            sums[r] = _mm512_dpbf16_ps(sums[r], pair, (__m512bh)_mm512_set1_epi32(int(q.units[row + r][u])));
    }
    for (int r = 0; r < ROWS; r++) scores[r] = {sums[r]};
#else
    F16 even[ROWS], odd[ROWS];
    for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zeros();
    for (int64_t u = 0; u < q.num_units; u++) {
        const F16 first = low_half(keys.units[u]), second = high_half(keys.units[u]);
        for (int r = 0; r < ROWS; r++) {
            even[r] = fma(all(q.values[row + r][2 * u]), first, even[r]);
            odd[r] = fma(all(q.values[row + r][2 * u + 1]), second, odd[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) scores[r] = even[r] + odd[r];
#endif
}

// Running softmax of the rows of a unit.
struct Mixture {
    alignas(64) float sums[MAX_ROWS][MAX_HEAD_DIM];  // of values, weighted
    alignas(64) float shares[MAX_ROWS][KEYS];        // of the keys of a block
    float most[MAX_ROWS];                            // largest score so far
    float total[MAX_ROWS];                           // of all shares

    void clear(int rows, int64_t width) {
        for (int r = 0; r < rows; r++) {
            std::memset(sums[r], 0, width * sizeof(float));
            most[r] = NOTHING;
            total[r] = 0.0f;
        }
    }

    // Takes the scores of a block in. A score that is NaN makes the row NaN.
    void weigh(int row, F16 scores, int64_t width) {
        const float best = std::max(most[row], largest(scores));
        const F16 weights = exponential(scores - all(best));
        store(shares[row], weights);
        if (best > most[row]) {
            const float shrink = exponential_of(most[row] - best);
            total[row] *= shrink;
            for (int64_t d = 0; d < width; d += LANES) store(sums[row] + d, load(sums[row] + d) * all(shrink));
            most[row] = best;
        }
        total[row] += sum(weights);
    }

    static float exponential_of(float x) {
        float lanes[LANES];
        store(lanes, exponential(all(x)));
        return lanes[0];
    }
};

// sums += shares * values, for ROWS rows from `row` on and 16 * PARTS elements from d on
template <class T, int ROWS, int PARTS>
inline void mix(Mixture& mixture, int row, const T* const values[KEYS], int64_t d, int64_t head_dim) {
    F16 acc[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) acc[r][p] = load(mixture.sums[row + r] + d + p * LANES);
    for (int j = 0; j < KEYS; j++) {
        F16 value[PARTS];
        for (int p = 0; p < PARTS; p++) value[p] = load_at(values[j], d + p * LANES, head_dim);
        for (int r = 0; r < ROWS; r++) {
            const F16 share = all(mixture.shares[row + r][j]);
            for (int p = 0; p < PARTS; p++) acc[r][p] = fma(share, value[p], acc[r][p]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) store(mixture.sums[row + r] + d + p * LANES, acc[r][p]);
}

template <class T, int ROWS>
inline void take_block(const Queries<T>& q, int row, const KeyBlock<T>& keys, const T* const values[KEYS],
                       const int64_t* positions, int64_t first_key, int64_t window, float scale, int64_t head_dim,
                       Mixture& mixture) {
    F16 scores[ROWS];
    score<ROWS>(q, row, keys, scores);
    bool any = false;
    for (int r = 0; r < ROWS; r++) {
        const int64_t last = positions[row + r], least = window ? last + 1 - window : 0;
        if (last < first_key || least > first_key + KEYS - 1) {  // of this block nothing
            std::memset(mixture.shares[row + r], 0, sizeof mixture.shares[row + r]);
            continue;
        }
        F16 seen = scores[r] * all(scale);
        if (last < first_key + KEYS - 1 || least > first_key) {
            float some[KEYS];
            store(some, seen);
            for (int j = 0; j < KEYS; j++)
                if (first_key + j > last || first_key + j < least) some[j] = NOTHING;
            seen = load(some);
        }
        mixture.weigh(row + r, seen, head_dim);
        any = true;
    }
    if (!any) return;
    int64_t d = 0;
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES) mix<T, ROWS, 2>(mixture, row, values, d, head_dim);
    for (; d < head_dim; d += LANES) mix<T, ROWS, 1>(mixture, row, values, d, head_dim);
}

template <class T, int ROWS>
inline void take_rows(const Queries<T>& q, int row, int rows, const KeyBlock<T>& keys, const T* const values[KEYS],
                      const int64_t* positions, int64_t first_key, int64_t window, float scale, int64_t head_dim,
                      Mixture& mixture) {
    if (rows == ROWS)
        return take_block<T, ROWS>(q, row, keys, values, positions, first_key, window, scale, head_dim, mixture);
    if constexpr (ROWS > 1)
        take_rows<T, ROWS - 1>(q, row, rows, keys, values, positions, first_key, window, scale, head_dim, mixture);
}

// What one thread works in.
template <class T>
struct AttentionWork {
    Queries<T> queries;
    KeyBlock<T> keys;
    Mixture mixture;
    alignas(64) T nothing[MAX_HEAD_DIM] = {};  // stands where there is no key
    alignas(64) T made[2][KEYS][MAX_HEAD_DIM];  // keys and values of a block, where they are int8 in memory
};

// Tokens of a span and one KV head. q, out: [tokens, heads, head_dim].
template <class T>
inline void attend(const KvPages<T>& kv, const BatchView& batch, Span span, int64_t kv_head, int64_t layer, const T* q,
                   T* out, int64_t num_heads) {
    static thread_local AttentionWork<T> work;
    const int64_t group = num_heads / kv.kv_heads, dim = kv.head_dim;
    const int64_t* pages = batch.pages + batch.tables[span.first];
    const float scale = 1.0f / std::sqrt(float(dim));
    const int64_t all_rows = (span.last - span.first) * group;
    for (int64_t begin = 0; begin < all_rows; begin += MAX_ROWS) {
        const int rows = int(std::min<int64_t>(MAX_ROWS, all_rows - begin));
        int64_t positions[MAX_ROWS], offsets[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            const int64_t token = span.first + (begin + r) / group;
            positions[r] = batch.positions[token];
            offsets[r] = (token * num_heads + kv_head * group + (begin + r) % group) * dim;
            work.queries.set(r, q + offsets[r], dim);
        }
        work.mixture.clear(rows, ceil_div(dim, LANES) * LANES);
        const int64_t last = positions[rows - 1];
        const int64_t least = batch.window ? std::max<int64_t>(0, positions[0] + 1 - batch.window) : 0;
        for (int64_t key = least / KEYS * KEYS; key <= last; key += KEYS) {
            const T *keys[KEYS], *values[KEYS];
            for (int j = 0; j < KEYS; j++) {
                const int64_t at = key + j;
                const bool is_there = at >= least && at <= last;
                const int64_t page = is_there ? pages[at / kv.page_size] : 0, slot = at % kv.page_size;
                keys[j] = is_there ? kv.get(kv.key(page, slot, kv_head, layer), work.made[0][j]) : work.nothing;
                values[j] = is_there ? kv.get(kv.value(page, slot, kv_head, layer), work.made[1][j]) : work.nothing;
            }
            work.keys.fill(keys, dim);
            for (int r = 0; r < rows; r += ROWS_AT_ONCE)
                take_rows<T, ROWS_AT_ONCE>(work.queries, r, std::min(ROWS_AT_ONCE, rows - r), work.keys, values,
                                           positions, key, batch.window, scale, dim, work.mixture);
        }
        for (int r = 0; r < rows; r++)
            for (int64_t d = 0; d < dim; d += LANES)
                store_at(out + offsets[r], load(work.mixture.sums[r] + d) / all(work.mixture.total[r]), d, dim);
    }
}

// All tokens of a batch, whose keys and values are in their slots.
template <class T>
inline void attend_all(const KvPages<T>& kv, const BatchView& batch, int64_t layer, const T* q, T* out,
                       int64_t num_heads, int threads) {
    const int64_t group = num_heads / kv.kv_heads, most = std::max<int64_t>(1, MAX_ROWS / group);
    static thread_local std::vector<Span> spans;
    spans.clear();
    for (int64_t first = 0; first < batch.num_tokens; first = spans.back().last)
        spans.push_back(span_at(batch, first, most));
    const Span* found = spans.data();
    const int64_t units = int64_t(spans.size()) * kv.kv_heads;
    Pool::instance().run(threads, units, [&](int64_t i) {
        const int64_t unit = units - 1 - i;  // the last tokens of a prompt see most
        attend(kv, batch, found[unit / kv.kv_heads], unit % kv.kv_heads, layer, q, out, num_heads);
    });
}

}  // namespace tandem
