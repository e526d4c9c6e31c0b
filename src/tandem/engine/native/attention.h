// Attention read in place from the pages of the KV memory.
//
// Tokens of one request that stand together, and the query heads that look at one KV head, are the rows of a unit of
// work. Keys come in blocks, of 16, 32 or 64, whose first position is a multiple of that; a row takes them in order of
// positions with a running maximum, and a block that it does not see leaves it as it is. So the bits of a row depend on its own
// keys only, where they are finite: not on the rows beside it, the cut of the prompt, or which pages hold it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "ahead.h"
#include "few_rows.h"
#include "kv_pages.h"
#include "mixture.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"

namespace tandem {

// Rows that are fetched into the second cache while a block is computed, a few lines at a time (see `ahead.h`): as many keys
// and values as a block has.
template <class T>
class RowsAhead {
  public:
    // Those from `at` on; before this there are none.
    void begin(const KvPages<T>& kv, const SeenKeys& seen, int64_t at) {
        rows_.emplace(kv, seen, at);
        left_ = KEYS_OF<ShareOf<T>>;
    }

    void read() {
        if (!any()) return;
        for (int64_t i = at_; i < at_ + STEP; i += LINE_BYTES) {
            _mm_prefetch(rows_->key() + i, _MM_HINT_T1);
            _mm_prefetch(rows_->value() + i, _MM_HINT_T1);
        }
        if ((at_ += STEP) < rows_->size()) return;
        at_ = 0;
        left_--;
        rows_->next();
    }

    void read_all() {
        while (any()) read();
    }

  private:
    static constexpr int64_t STEP = 2 * LINE_BYTES;

    bool any() const { return left_ > 0 && rows_->has_more(); }

    std::optional<KeyRows<T>> rows_;
    int64_t at_ = 0;  // bytes of a row
    int left_ = 0;
};

// Sixteen keys, turned: unit u of all stands together. A unit is 32 bits: one fp32, or two bf16.
template <class T>
struct TurnedKeys {
    static constexpr int PER_UNIT = 4 / sizeof(T);
    alignas(64) uint32_t units[MAX_HEAD_DIM / PER_UNIT][LANES];

    void fill(const T* const keys[LANES], int64_t head_dim) {
        constexpr int64_t STEP = LANES * PER_UNIT;
        const uint32_t* from[LANES];
        int64_t d = 0;
        for (; d + STEP <= head_dim; d += STEP) {
            for (int j = 0; j < LANES; j++) from[j] = (const uint32_t*)(keys[j] + d);
            transpose(from, units[d / PER_UNIT]);
        }
        if (d == head_dim) return;
        alignas(64) T ends[LANES][STEP] = {};
        for (int j = 0; j < LANES; j++) {
            std::memcpy(ends[j], keys[j] + d, (head_dim - d) * sizeof(T));
            from[j] = (const uint32_t*)ends[j];
        }
        transpose(from, units[d / PER_UNIT]);
    }
};

// Keys and values of a block, as its products want them. Share: the type in which values are weighted
template <class T, class Share>
struct KeyBlock {
    TurnedKeys<T> keys[1];
    const T* values[LANES];

    void fill_keys(const T* const* rows, int64_t head_dim, RowsAhead<T>&) { keys[0].fill(rows, head_dim); }

    void fill_values(const T* const* rows, int64_t, RowsAhead<T>& ahead) {
        std::copy(rows, rows + LANES, values);
        ahead.read_all();
    }
};

#if defined(__AVX512BF16__)

// Of two keys that follow each other, their values stand together.
template <>
struct KeyBlock<bf16, bf16> {
    static constexpr int PARTS = PARTS_OF<bf16>, PAIRS = PARTS * LANES / 2;
    TurnedKeys<bf16> keys[PARTS];
    alignas(64) uint32_t values[MAX_HEAD_DIM / LANES][PAIRS][LANES];

    void fill_keys(const bf16* const* rows, int64_t head_dim, RowsAhead<bf16>& ahead) {
        for (int part = 0; part < PARTS; part++) {
            keys[part].fill(rows + part * LANES, head_dim);
            ahead.read();
        }
    }

    void fill_values(const bf16* const* rows, int64_t head_dim, RowsAhead<bf16>& ahead) {
        for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
            const __mmask32 there = __mmask32((uint64_t(1) << std::min<int64_t>(2 * LANES, head_dim - d)) - 1);
            for (int j = 0; j < PAIRS; j++) {
                const __m512i first = _mm512_maskz_loadu_epi16(there, rows[2 * j] + d);
                const __m512i second = _mm512_maskz_loadu_epi16(there, rows[2 * j + 1] + d);
                for (int half = 0; half < 2; half++) {
                    const __m512i place = _mm512_loadu_si512(PLACES[half].data());
                    _mm512_store_si512(values[d / LANES + half][j], _mm512_permutex2var_epi16(first, place, second));
                }
                ahead.read();
            }
        }
        ahead.read_all();
    }

  private:
    static constexpr auto PLACES = [] {
        std::array<std::array<uint16_t, 2 * LANES>, 2> found{};
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 2 * LANES; i++) found[half][i] = uint16_t(i % 2 * 2 * LANES + half * LANES + i / 2);
        return found;
    }();
};

#endif

template <class T>
using BlockOf = KeyBlock<T, ShareOf<T>>;

// Queries of the rows, as the scores want them: padded with zeros to whole units, or tiles. Rows lie next to each other: at a
// distance of MAX_HEAD_DIM they would take the same places of the first cache.
template <class T>
struct Queries {
    static constexpr int PER_UNIT = TurnedKeys<T>::PER_UNIT;
    static constexpr int TOGETHER = HAS_TILES<T> ? LANES : 1;  // units
    using Value = ShareOf<T>;
    alignas(64) Value values[MAX_ROWS * MAX_HEAD_DIM];
    int64_t num_units;

    const Value* at(int row, int64_t unit) const { return values + (row * num_units + unit) * PER_UNIT; }
    float value(int row, int64_t d) const { return to_float(at(row, 0)[d]); }
    uint32_t unit(int row, int64_t u) const {
        uint32_t both;
        std::memcpy(&both, at(row, u), sizeof both);
        return both;
    }

    void set(int row, const T* query, int64_t head_dim) {
        num_units = ceil_div(head_dim, PER_UNIT * TOGETHER) * TOGETHER;
        Value* to = values + row * num_units * PER_UNIT;
        std::fill(to, to + num_units * PER_UNIT, Value{});
        for (int64_t d = 0; d < head_dim; d += LANES) store_at(to, load_at(query, d, head_dim), d, head_dim);
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

// Products of ROWS queries, from `row` on, with the keys of a block. Of sixteen keys even and odd units have sums of their
// own.
template <int ROWS>
inline void score(const Queries<float>& q, int row, const BlockOf<float>& block, F16 (*scores)[1]) {
    const TurnedKeys<float>& keys = block.keys[0];
    F16 even[ROWS], odd[ROWS];
    for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zeros();
    int64_t u = 0;
    for (; u + 2 <= q.num_units; u += 2) {
        const F16 first = load((const float*)keys.units[u]), second = load((const float*)keys.units[u + 1]);
        for (int r = 0; r < ROWS; r++) {
            even[r] = fma(all(q.value(row + r, u)), first, even[r]);
            odd[r] = fma(all(q.value(row + r, u + 1)), second, odd[r]);
        }
    }
    if (u < q.num_units)
        for (int r = 0; r < ROWS; r++)
            even[r] = fma(all(q.value(row + r, u)), load((const float*)keys.units[u]), even[r]);
    for (int r = 0; r < ROWS; r++) scores[r][0] = even[r] + odd[r];
}

#if defined(__AMX_BF16__)

// Of a tile of rows: what is computed of those that are not there, nobody reads.
template <int ROWS>
inline void score(const Queries<bf16>& q, int row, const BlockOf<bf16>& block, F16 (*scores)[4]) {
    static_assert(ROWS == TILE_ROWS);
    const int64_t row_bytes = q.num_units * sizeof(uint32_t);
    written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t u = 0; u < q.num_units; u += LANES) {
        _tile_loadd(4, q.at(row, u), row_bytes);
        _tile_loadd(5, block.keys[0].units[u], LINE_BYTES);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, block.keys[1].units[u], LINE_BYTES);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, block.keys[2].units[u], LINE_BYTES);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, block.keys[3].units[u], LINE_BYTES);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores[0], sizeof scores[0]);
    _tile_stored(1, scores[0] + 1, sizeof scores[0]);
    _tile_stored(2, scores[0] + 2, sizeof scores[0]);
    _tile_stored(3, scores[0] + 3, sizeof scores[0]);
}

#elif defined(__AVX512BF16__)

template <int ROWS>
inline void score(const Queries<bf16>& q, int row, const BlockOf<bf16>& block, F16 (*scores)[2]) {
    F16 sums[ROWS][2];
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = zeros();
    for (int64_t u = 0; u < q.num_units; u++) {
        const auto first = in_register((__m512bh)_mm512_load_si512(block.keys[0].units[u]));
        const auto second = in_register((__m512bh)_mm512_load_si512(block.keys[1].units[u]));
        for (int r = 0; r < ROWS; r++) {
            const auto query = in_register((__m512bh)_mm512_set1_epi32(int(q.unit(row + r, u))));
            sums[r][0] = {_mm512_dpbf16_ps(sums[r][0].v, first, query)};
            sums[r][1] = {_mm512_dpbf16_ps(sums[r][1].v, second, query)};
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < 2; p++) scores[r][p] = sums[r][p];
}

#else

template <int ROWS>
inline void score(const Queries<bf16>& q, int row, const BlockOf<bf16>& block, F16 (*scores)[1]) {
    const TurnedKeys<bf16>& keys = block.keys[0];
    F16 even[ROWS], odd[ROWS];
    for (int r = 0; r < ROWS; r++) even[r] = odd[r] = zeros();
    for (int64_t u = 0; u < q.num_units; u++) {
        const F16 first = low_half(keys.units[u]), second = high_half(keys.units[u]);
        for (int r = 0; r < ROWS; r++) {
            even[r] = fma(all(q.value(row + r, 2 * u)), first, even[r]);
            odd[r] = fma(all(q.value(row + r, 2 * u + 1)), second, odd[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) scores[r][0] = even[r] + odd[r];
}

#endif

// sums += shares * values, for ROWS rows from `row` on and 16 * PARTS elements from d on
template <int ROWS, int PARTS, class T>
inline void mix_part(Mixture<float>& mixture, int row, const KeyBlock<T, float>& block, int64_t d, int64_t head_dim) {
    F16 acc[ROWS][PARTS];
    mixture.template load_sums<ROWS, PARTS>(row, d, acc);
    for (int j = 0; j < Mixture<float>::KEYS; j++) {
        F16 value[PARTS];
        for (int p = 0; p < PARTS; p++) value[p] = load_at(block.values[j], d + p * LANES, head_dim);
        for (int r = 0; r < ROWS; r++) {
            const F16 share = all(mixture.shares[row + r][j]);
            for (int p = 0; p < PARTS; p++) acc[r][p] = fma(share, value[p], acc[r][p]);
        }
    }
    mixture.template store_sums<ROWS, PARTS>(row, d, acc);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// The same, two keys at a time
template <int ROWS, int PARTS>
inline void mix_part(Mixture<bf16>& mixture, int row, const KeyBlock<bf16, bf16>& block, int64_t d, int64_t) {
    F16 acc[ROWS][PARTS];
    mixture.template load_sums<ROWS, PARTS>(row, d, acc);
    for (int j = 0; j < block.PAIRS; j++) {
        __m512bh pairs[PARTS];
        for (int p = 0; p < PARTS; p++) pairs[p] = (__m512bh)_mm512_load_si512(block.values[d / LANES + p][j]);
        for (int r = 0; r < ROWS; r++) {
            uint32_t two;
            std::memcpy(&two, mixture.shares[row + r] + 2 * j, sizeof two);
            const __m512bh share = (__m512bh)_mm512_set1_epi32(int(two));
            for (int p = 0; p < PARTS; p++) acc[r][p] = {_mm512_dpbf16_ps(acc[r][p].v, share, pairs[p])};
        }
    }
    mixture.template store_sums<ROWS, PARTS>(row, d, acc);
}

#endif

template <int ROWS, class T, class Share>
inline void mix(Mixture<Share>& mixture, int row, const KeyBlock<T, Share>& block, int64_t head_dim) {
    int64_t d = 0;
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES) mix_part<ROWS, 2>(mixture, row, block, d, head_dim);
    for (; d < head_dim; d += LANES) mix_part<ROWS, 1>(mixture, row, block, d, head_dim);
}

#if defined(__AMX_BF16__)

template <int ROWS>
inline void mix(Mixture<bf16>& mixture, int row, const KeyBlock<bf16, bf16>& block, int64_t) {
    static_assert(ROWS == TILE_ROWS);
    const int64_t row_bytes = mixture.width * sizeof(float);
    constexpr int64_t SHARES_BYTES = sizeof mixture.shares[0];
    written();
    _tile_loadd(6, mixture.shares[row], SHARES_BYTES);
    _tile_loadd(7, mixture.shares[row] + 2 * LANES, SHARES_BYTES);
    int64_t d = 0;
    for (; d + 2 * LANES <= mixture.width; d += 2 * LANES) {
        const auto &first = block.values[d / LANES], &second = block.values[d / LANES + 1];
        float* to = mixture.row(row) + d;
        _tile_loadd(0, to, row_bytes);
        _tile_loadd(2, first, LINE_BYTES);
        _tile_dpbf16ps(0, 6, 2);
        _tile_loadd(1, to + LANES, row_bytes);
        _tile_loadd(3, second, LINE_BYTES);
        _tile_dpbf16ps(1, 6, 3);
        _tile_loadd(4, first + LANES, LINE_BYTES);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(5, second + LANES, LINE_BYTES);
        _tile_dpbf16ps(1, 7, 5);
        _tile_stored(0, to, row_bytes);
        _tile_stored(1, to + LANES, row_bytes);
    }
    if (d == mixture.width) return;
    const auto& values = block.values[d / LANES];
    _tile_loadd(0, mixture.row(row) + d, row_bytes);
    _tile_loadd(2, values, LINE_BYTES);
    _tile_loadd(4, values + LANES, LINE_BYTES);
    _tile_dpbf16ps(0, 6, 2);
    _tile_dpbf16ps(0, 7, 4);
    _tile_stored(0, mixture.row(row) + d, row_bytes);
}

#endif

// rows: ROWS, or fewer of a tile
template <class T, int ROWS>
inline void take_scores(const F16 (*scores)[PARTS_OF<ShareOf<T>>], int row, int rows, const BlockOf<T>& block,
                        const int64_t* positions, int64_t first_key, int64_t window, float scale, int64_t head_dim,
                        Mixture<ShareOf<T>>& mixture) {
    if (weigh_rows(mixture, row, rows, scores, positions, first_key, window, scale))
        mix<ROWS>(mixture, row, block, head_dim);
}

template <class T, int ROWS>
inline void take_block(const Queries<T>& q, int row, int rows, const BlockOf<T>& block, const int64_t* positions,
                       int64_t first_key, int64_t window, float scale, int64_t head_dim,
                       Mixture<ShareOf<T>>& mixture) {
    alignas(64) F16 scores[ROWS][PARTS_OF<ShareOf<T>>];
    score<ROWS>(q, row, block, scores);
    take_scores<T, ROWS>(scores, row, rows, block, positions, first_key, window, scale, head_dim, mixture);
}

template <class T, int ROWS>
inline void take_rows(const Queries<T>& q, int row, int rows, const BlockOf<T>& block, const int64_t* positions,
                      int64_t first_key, int64_t window, float scale, int64_t head_dim,
                      Mixture<ShareOf<T>>& mixture) {
    if constexpr (ROWS > 1 && !HAS_TILES<T>)
        if (rows < ROWS)
            return take_rows<T, ROWS - 1>(q, row, rows, block, positions, first_key, window, scale, head_dim, mixture);
    take_block<T, ROWS>(q, row, rows, block, positions, first_key, window, scale, head_dim, mixture);
}

// Units of few rows, by tiles; of types that have none there are no such units.
template <class T>
struct OneTile {
    static bool fits(int, const KvPages<T>&) { return false; }
    template <class... Given>
    void set(const Given&...) {}
    template <class... Given>
    void multiply(const Given&...) {}
    template <class... Given>
    void take(const Given&...) {}
};

#if defined(__AMX_BF16__)

// To turn keys would take longer than their products with one tile of rows. So there keys are the left operand, where they
// stand, and the queries, turned once, the right one: the same sums.
template <>
class OneTile<bf16> {
  public:
    static constexpr int PARTS = PARTS_OF<bf16>, KEYS = KEYS_OF<bf16>;
    static constexpr int64_t WIDTH = 2 * LANES;  // of a tile, in values

    // Sixteen keys of a block have to stand one after the other, in whole tiles.
    static bool fits(int rows, const KvPages<bf16>& kv) {
        return rows <= TILE_ROWS && !kv.is_int8 && kv.page_size % LANES == 0 && kv.head_dim % WIDTH == 0;
    }

    // rows: queries, zeros where there is none
    void set(const bf16* const rows[LANES], int64_t head_dim) { queries_.fill(rows, head_dim); }

    // keys: of a block, `nothing` where there is none. What stands where there is none may be anything: nobody reads its
    // products.
    void multiply(const bf16* const keys[KEYS], const bf16* nothing, int64_t head_dim, RowsAhead<bf16>& ahead) {
        struct {
            const bf16* first;
            int64_t distance;  // bytes
        } at[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const bf16* const* rows = keys + part * LANES;
            const auto found = std::find_if(rows, rows + LANES, [&](auto key) { return key != nothing; });
            const bool any = found != rows + LANES;
            at[part].first = any ? *found - (found - rows) * head_dim : nothing;
            at[part].distance = any ? head_dim * sizeof(bf16) : 0;
        }
        written();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < head_dim; d += WIDTH) {
            _tile_loadd(4, queries_.units[d / 2], LINE_BYTES);
            _tile_loadd(5, at[0].first + d, at[0].distance);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, at[1].first + d, at[1].distance);
            _tile_dpbf16ps(1, 6, 4);
            ahead.read();
            _tile_loadd(7, at[2].first + d, at[2].distance);
            _tile_dpbf16ps(2, 7, 4);
            _tile_loadd(5, at[3].first + d, at[3].distance);
            _tile_dpbf16ps(3, 5, 4);
            ahead.read();
        }
        _tile_stored(0, products_[0], LINE_BYTES);
        _tile_stored(1, products_[LANES], LINE_BYTES);
        _tile_stored(2, products_[2 * LANES], LINE_BYTES);
        _tile_stored(3, products_[3 * LANES], LINE_BYTES);
        written();
    }

    // The block whose keys were multiplied
    void take(int rows, const BlockOf<bf16>& block, const int64_t* positions, int64_t first_key, int64_t window,
              float scale, int64_t head_dim, Mixture<bf16>& mixture) {
        alignas(64) F16 scores[TILE_ROWS][PARTS];
        for (int row = 0; row < rows; row += 4)
            for (int part = 0; part < PARTS; part++) turn_four(row, part, scores);
        take_scores<bf16, TILE_ROWS>(scores, 0, rows, block, positions, first_key, window, scale, head_dim, mixture);
    }

  private:
    // The scores of four rows with sixteen keys
    void turn_four(int row, int part, F16 (*to)[PARTS]) const {
        __m512 keys[4];  // key 4 * j + i, row + r: in place 4 * j + r
        for (int i = 0; i < 4; i++) {
            auto rows = [&](int j) { return _mm_load_ps(products_[part * LANES + 4 * j + i] + row); };
            keys[i] = _mm512_castps128_ps512(rows(0));
            keys[i] = _mm512_mask_broadcast_f32x4(keys[i], 0x00f0, rows(1));
            keys[i] = _mm512_mask_broadcast_f32x4(keys[i], 0x0f00, rows(2));
            keys[i] = _mm512_mask_broadcast_f32x4(keys[i], 0xf000, rows(3));
        }
        const __m512 low[2] = {_mm512_unpacklo_ps(keys[0], keys[1]), _mm512_unpacklo_ps(keys[2], keys[3])};
        const __m512 high[2] = {_mm512_unpackhi_ps(keys[0], keys[1]), _mm512_unpackhi_ps(keys[2], keys[3])};
        to[row][part] = {_mm512_shuffle_ps(low[0], low[1], 0x44)};
        to[row + 1][part] = {_mm512_shuffle_ps(low[0], low[1], 0xee)};
        to[row + 2][part] = {_mm512_shuffle_ps(high[0], high[1], 0x44)};
        to[row + 3][part] = {_mm512_shuffle_ps(high[0], high[1], 0xee)};
    }

    TurnedKeys<bf16> queries_;
    alignas(64) float products_[KEYS][LANES];  // [key][row]
};

#endif

// What one thread works in.
template <class T>
struct AttentionWork {
    Queries<T> queries;
    BlockOf<T> block;
    Mixture<ShareOf<T>> mixture;
    alignas(64) T nothing[MAX_HEAD_DIM] = {};  // stands where there is no key
    alignas(64) T made[2][KEYS_OF<ShareOf<T>>][MAX_HEAD_DIM];  // keys and values of a block, where they are int8 in memory
    OneTile<T> one_tile;
    FewRows<T> few;
};

// All blocks of some rows, one after the other. next, mixture: as in `FewRows`
template <class T>
inline void take_blocks(AttentionWork<T>& work, const KvPages<T>& kv, const SeenKeys& seen,
                        const std::optional<SeenKeys>& next, int rows, const T* const* queries,
                        const int64_t* positions, int64_t window, float scale) {
    constexpr int KEYS = KEYS_OF<ShareOf<T>>;
    const int64_t dim = kv.head_dim;
    const bool is_one_tile = OneTile<T>::fits(rows, kv);
    if (is_one_tile) {
        const T* all_of_tile[LANES];
        for (int r = 0; r < LANES; r++) all_of_tile[r] = r < rows ? queries[r] : work.nothing;
        work.one_tile.set(all_of_tile, dim);
    } else {
        for (int r = 0; r < rows; r++) work.queries.set(r, queries[r], dim);
    }
    KeyRows<T> now(kv, seen, seen.least);
    for (int64_t key = seen.least / KEYS * KEYS; key <= seen.last; key += KEYS) {
        RowsAhead<T> ahead;
        if (key + KEYS <= seen.last)
            ahead.begin(kv, seen, key + KEYS);
        else if (next)
            ahead.begin(kv, *next, next->least);
        const T *keys[KEYS], *values[KEYS];
        for (int j = 0; j < KEYS; j++) {
            const bool is_there = now.is_at(key + j);
            keys[j] = is_there ? kv.get(now.key(), work.made[0][j]) : work.nothing;
            values[j] = is_there ? kv.get(now.value(), work.made[1][j]) : work.nothing;
            if (is_there) now.next();
        }
        if (is_one_tile)
            work.one_tile.multiply(keys, work.nothing, dim, ahead);
        else
            work.block.fill_keys(keys, dim, ahead);
        work.block.fill_values(values, dim, ahead);
        if (is_one_tile) {
            work.one_tile.take(rows, work.block, positions, key, window, scale, dim, work.mixture);
            continue;
        }
        constexpr int TOGETHER = HAS_TILES<T> ? TILE_ROWS : ROWS_AT_ONCE;
        for (int r = 0; r < rows; r += TOGETHER)
            take_rows<T, TOGETHER>(work.queries, r, std::min(TOGETHER, rows - r), work.block, positions, key, window,
                                   scale, dim, work.mixture);
    }
}

// Tokens of a span and one KV head. q, out: [tokens, heads, head_dim]. next: what this thread most likely reads then
template <class T>
inline void attend(AttentionWork<T>& work, const KvPages<T>& kv, const BatchView& batch, Span span, int64_t kv_head,
                   int64_t layer, const T* q, T* out, int64_t num_heads, const std::optional<SeenKeys>& next) {
    const int64_t group = num_heads / kv.kv_heads, dim = kv.head_dim;
    const float scale = Mixture<ShareOf<T>>::UNIT / std::sqrt(float(dim));
    const int64_t all_rows = (span.last - span.first) * group;
    for (int64_t begin = 0; begin < all_rows; begin += MAX_ROWS) {
        const int rows = int(std::min<int64_t>(MAX_ROWS, all_rows - begin));
        int64_t positions[MAX_ROWS], offsets[MAX_ROWS];
        const T* queries[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            const int64_t token = span.first + (begin + r) / group;
            positions[r] = batch.positions[token];
            offsets[r] = (token * num_heads + kv_head * group + (begin + r) % group) * dim;
            queries[r] = q + offsets[r];
        }
        const Span tokens{span.first + begin / group, span.first + (begin + rows - 1) / group + 1};
        const SeenKeys seen = seen_by(batch, tokens, kv_head, layer);
        work.mixture.clear(rows, dim);
        if (FewRows<T>::fits(rows, kv)) {
            for (int r = 0; r < rows; r++) work.few.set(r, queries[r], dim);
            work.few.attend(rows, kv, seen, next, positions, batch.window, scale, work.mixture);
        } else {
            take_blocks(work, kv, seen, next, rows, queries, positions, batch.window, scale);
        }
        for (int r = 0; r < rows; r++) {
            const F16 total = all(sum(load(work.mixture.totals[r])));
            for (int64_t d = 0; d < dim; d += LANES)
                store_at(out + offsets[r], load(work.mixture.row(r) + d) / total, d, dim);
        }
    }
}

// Where it is, once: of what is a thread's own, the compiler asks for that in every loop.
template <class T>
inline T& known(T& own) {
    T* at = &own;
    asm("" : "+r"(at));
    return *at;
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
        const int64_t then = unit - threads;
        std::optional<SeenKeys> next;
        if (then >= 0) next = seen_by(batch, found[then / kv.kv_heads], then % kv.kv_heads, layer);
        static thread_local AttentionWork<T> work;
        [[maybe_unused]] const TileRegisters<T> registers;
        attend(known(work), kv, batch, found[unit / kv.kv_heads], unit % kv.kv_heads, layer, q, out, num_heads, next);
    });
}

}  // namespace tandem
